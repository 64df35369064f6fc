//! Products in AMX tiles, by one thread: the rows stay in the second cache while the weights go past them
//! once, a group of panels after the other. What is done with a tile of sums is done between the steps of the next tile,
//! which the matrix unit computes meanwhile; the next group of panels is asked for ahead of time.
//! Every sum is formed as in `amx.rs`, so both give the same bits.

use std::arch::asm;
use std::arch::x86_64::*;

use crate::amx::{CONFIG, LINE_STRIDE};
use crate::amx_best::Largest;
use crate::attention_avx512::halves;
use crate::epilogue::{Tile, finish};
use crate::int8::dequantise;
use crate::packed::{COLUMNS, GROUP, Line, Number};
use crate::product::{Activation, Output, Product, Rows};

/// Rows and columns of a tile of sums: four of the processor's tiles.
pub(crate) const SIDE: usize = 32;
/// Panels of it.
const PAIR: usize = SIDE / COLUMNS;

#[repr(C, align(64))]
struct Sums([f32; SIDE * SIDE]);

/// Where one step's numbers are.
struct Place {
    upper: *const u8,
    lower: *const u8,
    stride: usize,
    weights: *const Line,
}

/// A dtype's instruction.
trait Dot {
    /// Sums of 32 rows by 2 panels += one step of k.
    unsafe fn step(place: &Place);
}

macro_rules! dot {
    ($name:ident, $instruction:literal) => {
        struct $name;

        impl Dot for $name {
            #[inline(always)]
            unsafe fn step(place: &Place) {
                // SAFETY: the caller's.
                unsafe {
                    asm!(
                        "tileloadd tmm4, [{x} + {xs}]",
                        "tileloaddt1 tmm6, [{w} + {ws}]",
                        concat!($instruction, " tmm0, tmm4, tmm6"),
                        "tileloaddt1 tmm7, [{w} + {ws} + 64]",
                        concat!($instruction, " tmm1, tmm4, tmm7"),
                        "tileloadd tmm5, [{y} + {xs}]",
                        concat!($instruction, " tmm2, tmm5, tmm6"),
                        concat!($instruction, " tmm3, tmm5, tmm7"),
                        x = in(reg) place.upper, y = in(reg) place.lower, xs = in(reg) place.stride,
                        w = in(reg) place.weights, ws = in(reg) LINE_STRIDE,
                        options(nostack, readonly, preserves_flags),
                    );
                }
            }
        }
    };
}

dot!(Half, "tdpbf16ps");
dot!(Int8, "tdpbssd");

/// As `rows`, of all groups of a product of bfloat16 whose output is `end`; columns are whole tiles of `end`.
///
/// # Safety
/// As `rows`; what `end` asks for.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn rows_to<T: End>(product: &Product<'_>, end: &T) {
    let Rows::Bf16 { at, stride } = product.input else { unreachable!("it takes bfloat16") };
    assert!(product.weight.columns.is_multiple_of(T::TILES * SIDE), "whole tiles");
    let mut groups = 0..product.weight.num_panels().div_ceil(GROUP);
    // SAFETY: the caller's.
    unsafe { run::<Half, T>(product, at.cast(), 2 * stride, &mut || groups.next(), end) }
}

/// Which group of panels comes next; asked one ahead of the work.
pub(crate) type Next<'a> = &'a mut dyn FnMut() -> Option<usize>;

/// All rows of the groups of panels that `next` gives. The output is not `Ranges`, nor `Best` of int8 or with a bias.
///
/// # Safety
/// As `Product::run`; the process may use AMX.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn rows(product: &Product<'_>, next: Next<'_>) {
    // SAFETY: the caller's.
    unsafe {
        match product.input {
            Rows::Bf16 { at, stride } => match (product.output, &product.weight.bias) {
                (Output::Store { .. }, None) => run::<Half, _>(product, at.cast(), 2 * stride, next, &Store),
                (Output::Add { .. }, None) => run::<Half, _>(product, at.cast(), 2 * stride, next, &Add),
                (Output::Best { .. }, None) => run::<Half, _>(product, at.cast(), 2 * stride, next, &Largest),
                (Output::GatedHalf { activation: Activation::Silu, .. }, None) => {
                    run::<Half, _>(product, at.cast(), 2 * stride, next, &Silu);
                }
                _ => run::<Half, _>(product, at.cast(), 2 * stride, next, &Any),
            },
            Rows::Int8 { at, stride, .. } => run::<Int8, _>(product, at.cast(), stride, next, &Any),
            Rows::F32 { .. } => unreachable!("it takes bfloat16 or int8"),
        }
    }
}

/// The lines of a group of panels, to ask for some at a time: in four streams, which memory answers faster than one.
struct Ahead {
    at: *const Line,
    /// Of each stream, and of those left.
    lines: usize,
    stream: usize,
    left: usize,
}

impl Ahead {
    fn new(product: &Product<'_>, group: Option<usize>) -> Self {
        let lines = product.weight.steps();
        let at = group.map_or(std::ptr::null(), |group| product.weight.panel(group * GROUP));
        Self { at, lines, stream: 0, left: if group.is_some() { lines * GROUP } else { 0 } }
    }

    #[inline(always)]
    fn step(&mut self, count: usize) {
        let count = count.min(self.left);
        self.left -= count;
        for _ in 0..count {
            // SAFETY: a prefetch may name any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.wrapping_add(self.stream * self.lines).cast()) };
            self.stream += 1;
            if self.stream == GROUP {
                (self.stream, self.at) = (0, self.at.wrapping_add(1));
            }
        }
    }
}

/// What becomes of whole tiles of sums.
pub(crate) trait End {
    /// Tiles that stand side by side and are handed over together: one or two.
    const TILES: usize;
    /// Whether tiles at the end, which lack columns, are given to it too.
    const SOME_COLUMNS: bool = false;
    /// Of `count` rows from the tile's `first` on; the sums are `TILES` of [32, 32].
    unsafe fn give(&self, product: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize);
}

/// As `finish` says.
struct Any;
/// The same for what a decoder's layers do, in intrinsics: it has to fit between the steps of the next tile.
struct Store;
struct Add;
struct Silu;

impl End for Any {
    const TILES: usize = 1;

    unsafe fn give(&self, product: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize) {
        // SAFETY: the caller's.
        unsafe { any(product, tile, sums, first, count) }
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn any(product: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize) {
    let some = Tile { row: tile.row + first, rows: count, ..tile };
    // SAFETY: the caller's.
    unsafe {
        let sums = std::slice::from_raw_parts_mut(sums.add(first * SIDE), count * SIDE);
        if product.weight.number() == Number::Int8 {
            dequantise(product, some, sums, SIDE, false);
        }
        finish(product, some, sums, SIDE);
    }
}

impl End for Store {
    const TILES: usize = 1;

    #[inline(always)]
    unsafe fn give(&self, product: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize) {
        let Output::Store { at, stride } = product.output else { unreachable!() };
        for row in first..first + count {
            // SAFETY: the caller's.
            unsafe {
                let (from, out) = (sums.add(row * SIDE), at.add((tile.row + row) * stride + tile.column));
                for half in [0, COLUMNS] {
                    _mm512_storeu_ps(out.add(half), _mm512_load_ps(from.add(half)));
                }
            }
        }
    }
}

impl End for Add {
    const TILES: usize = 1;

    #[inline(always)]
    unsafe fn give(&self, product: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize) {
        let Output::Add { at, stride } = product.output else { unreachable!() };
        for row in first..first + count {
            // SAFETY: the caller's.
            unsafe {
                let (from, out) = (sums.add(row * SIDE), at.add((tile.row + row) * stride + tile.column));
                for half in [0, COLUMNS] {
                    let sum = _mm512_add_ps(_mm512_loadu_ps(out.add(half)), _mm512_load_ps(from.add(half)));
                    _mm512_storeu_ps(out.add(half), sum);
                }
            }
        }
    }
}

impl End for Silu {
    const TILES: usize = 1;

    #[inline(always)]
    unsafe fn give(&self, product: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize) {
        let Output::GatedHalf { at, stride, .. } = product.output else { unreachable!() };
        for row in first..first + count {
            // SAFETY: the caller's.
            unsafe {
                let from = sums.add(row * SIDE);
                let gated = silu(_mm512_load_ps(from), _mm512_load_ps(from.add(COLUMNS)));
                let out = at.add((tile.row + row) * stride + tile.column / 2);
                _mm256_storeu_si256(out.cast(), halves(gated));
            }
        }
    }
}

/// `silu(gate) * up`, the operations of `epilogue.rs` one by one.
#[inline]
#[target_feature(enable = "avx512f")]
fn silu(gate: __m512, up: __m512) -> __m512 {
    let all = |v: f32| _mm512_set1_ps(v);
    let x = _mm512_sub_ps(_mm512_setzero_ps(), gate);
    // In this order a NaN stays.
    let x = _mm512_min_ps(all(88.0), _mm512_max_ps(all(-87.0), x));
    let shifted = _mm512_add_ps(_mm512_mul_ps(x, all(std::f32::consts::LOG2_E)), all(12_582_912.0));
    let n = _mm512_sub_ps(shifted, all(12_582_912.0));
    let r = _mm512_fmadd_ps(n, all(-0.693_359_4), x);
    let r = _mm512_fmadd_ps(n, all(2.121_944_4e-4), r);
    let mut p = all(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = _mm512_fmadd_ps(p, r, all(c));
    }
    let p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, all(1.0)));
    let power = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4B40_0000 - 127));
    let e = _mm512_mul_ps(p, _mm512_castsi512_ps(_mm512_slli_epi32::<23>(power)));
    _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(all(1.0), e)), up)
}

#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn run<D: Dot, T: End>(product: &Product<'_>, x: *const u8, stride: usize, next: Next<'_>, end: &T) {
    let weight = product.weight;
    let (lines, panels, rows) = (weight.steps(), weight.num_panels(), product.rows);
    let steps = lines / 16;
    let mut sums = [const { Sums([0.0; SIDE * SIDE]) }; 4];
    // Rows of the last tile that are handed over at each step of the next; lines that are asked for at each step.
    let each = SIDE.div_ceil(steps * T::TILES);
    let tiles = rows.div_ceil(SIDE);
    let asked = (lines * GROUP).div_ceil(steps * tiles * GROUP / PAIR);
    // SAFETY: the caller's; rows are readable in whole tiles, panels are whole groups.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
        let (mut now, mut last) = (sums[0].0.as_mut_ptr(), sums[T::TILES].0.as_mut_ptr());
        let mut pending = Tile { row: 0, rows: 0, column: 0, columns: T::TILES * SIDE };
        let mut group = next();
        Ahead::new(product, group).step(lines * GROUP);
        while let Some(strip) = group.map(|g| g * GROUP) {
            group = next();
            let mut ahead = Ahead::new(product, group);
            for row in (0..rows).step_by(SIDE) {
                for panel in (strip..panels.min(strip + GROUP)).step_by(T::TILES * PAIR) {
                    let tile = product.tile(row, SIDE.min(rows - row), panel, T::TILES * PAIR);
                    let mut given = 0;
                    for at in 0..T::TILES {
                        let (upper, weights) = (x.add(row * stride), weight.panel(panel + at * PAIR));
                        let mut place = Place { upper, lower: upper.add(16 * stride), stride, weights };
                        asm!(
                            "tilezero tmm0",
                            "tilezero tmm1",
                            "tilezero tmm2",
                            "tilezero tmm3",
                            options(nostack, nomem)
                        );
                        for _ in 0..steps {
                            D::step(&place);
                            place.upper = place.upper.wrapping_add(64);
                            place.lower = place.lower.wrapping_add(64);
                            place.weights = place.weights.wrapping_add(16 * GROUP);
                            ahead.step(asked);
                            give(end, product, pending, last, given, each);
                            given += each;
                        }
                        let out = now.add(at * SIDE * SIDE);
                        asm!(
                            "tilestored [{out} + {os}], tmm0",
                            "tilestored [{out} + {os} + 64], tmm1",
                            "tilestored [{low} + {os}], tmm2",
                            "tilestored [{low} + {os} + 64], tmm3",
                            out = in(reg) out, low = in(reg) out.add(16 * SIDE), os = in(reg) SIDE * 4,
                            options(nostack, preserves_flags),
                        );
                    }
                    pending = tile;
                    std::mem::swap(&mut now, &mut last);
                }
            }
        }
        asm!("tilerelease", options(nostack, nomem));
        give(end, product, pending, last, 0, SIDE);
    }
}

/// Hand over `count` rows of a tile of sums from its `first` on.
#[inline(always)]
unsafe fn give<T: End>(end: &T, product: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize) {
    if first >= tile.rows {
        return;
    }
    let count = count.min(tile.rows - first);
    // SAFETY: the caller's.
    unsafe {
        if T::SOME_COLUMNS || tile.columns == T::TILES * SIDE {
            end.give(product, tile, sums, first, count);
        } else {
            any(product, tile, sums, first, count);
        }
    }
}
