//! Products in vector registers: a few rows times a few panels at a time, sums in float32 kept in registers over all of k.
//! One generic body; an instruction set brings its step (`Lanes`) and one function compiled for it.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::epilogue::finish;
use crate::int8::dequantise;
use crate::packed::{COLUMNS, GROUP, Line};
use crate::product::{Block, Product, Rows};

/// Panels that go to the epilogue together: a whole strip of them stays in the second cache while all rows pass.
const STRIP: usize = 4;
const MOST_ROWS: usize = 12;

/// Rows of activations and panels of one call.
#[derive(Clone, Copy)]
pub(crate) struct Strip<X> {
    x: *const X,
    x_stride: usize,
    line: *const Line,
    steps: usize,
    panels: usize,
    /// [rows, STRIP * COLUMNS]
    out: *mut f32,
}

/// One instruction set's way to multiply one line of panels.
pub(crate) trait Lanes {
    /// A number of the activations.
    type X: Copy;
    /// Sixteen sums.
    type Sums: Copy;
    /// k of one line.
    const STEP: usize;
    /// The sums are int32 in a float32's bits (of x + 128 where `UNSIGNED`).
    const INT8: bool = false;
    const UNSIGNED: bool = false;
    /// Row counts that `strip` takes, the largest first; the last is 1.
    const ROWS: [usize; 5];

    unsafe fn zero() -> Self::Sums;
    /// Add one line: `sums[r][p] += x[r, k..k + STEP] * line[p]`, k in order.
    unsafe fn step<const R: usize, const P: usize>(
        sums: &mut [[Self::Sums; P]; R],
        x: *const Self::X,
        stride: usize,
        line: *const Line,
    );
    unsafe fn store(sums: Self::Sums, at: *mut f32);
    /// All panels of a strip for one of `ROWS`.
    unsafe fn strip(rows: usize, strip: Strip<Self::X>);
}

/// # Safety
/// Inlined into a function with the instructions of `L`; the strip's pointers are valid.
#[inline(always)]
pub(crate) unsafe fn group<L: Lanes, const R: usize, const P: usize>(strip: Strip<L::X>) {
    let mut panel = 0;
    // SAFETY: the caller's.
    unsafe {
        while panel + P <= strip.panels {
            micro::<L, R, P>(&strip, panel);
            panel += P;
        }
        while panel < strip.panels {
            micro::<L, R, 1>(&strip, panel);
            panel += 1;
        }
    }
}

#[inline(always)]
unsafe fn micro<L: Lanes, const R: usize, const P: usize>(strip: &Strip<L::X>, panel: usize) {
    // SAFETY: the caller's.
    unsafe {
        let line = strip.line.add(panel / GROUP * strip.steps * GROUP + panel % GROUP);
        let mut sums = [[L::zero(); P]; R];
        for k in 0..strip.steps {
            L::step(&mut sums, strip.x.add(k * L::STEP), strip.x_stride, line.add(k * GROUP));
        }
        for (row, sums) in sums.iter().enumerate() {
            for (p, sums) in sums.iter().enumerate() {
                L::store(*sums, strip.out.add((row * STRIP + panel + p) * COLUMNS));
            }
        }
    }
}

/// # Safety
/// As `Product::run`; inlined into a function with the instructions of `L`.
#[inline(always)]
pub(crate) unsafe fn run<L: Lanes>(product: &Product<'_>, x: *const L::X, x_stride: usize, block: Block) {
    let steps = product.weight.steps();
    let mut scratch = [0.0f32; MOST_ROWS * STRIP * COLUMNS];
    let end = block.panel + block.panels;
    for panel in (block.panel..end).step_by(STRIP) {
        let panels = STRIP.min(end - panel);
        let mut row = block.row;
        while row < block.row + block.rows {
            let left = block.row + block.rows - row;
            let rows = L::ROWS.into_iter().find(|&r| r <= left).unwrap_or(1);
            // SAFETY: the block is within the product.
            unsafe {
                L::strip(
                    rows,
                    Strip {
                        x: x.add(row * x_stride),
                        x_stride,
                        line: product.weight.panel(panel),
                        steps,
                        panels,
                        out: scratch.as_mut_ptr(),
                    },
                );
                let tile = product.tile(row, rows, panel, panels);
                if L::INT8 {
                    dequantise(product, tile, &mut scratch, STRIP * COLUMNS, L::UNSIGNED);
                }
                finish(product, tile, &scratch, STRIP * COLUMNS);
            }
            row += rows;
        }
    }
}

/// The two k of a bfloat16 line's column.
#[inline(always)]
fn halves(both: u32) -> [f32; 2] {
    [f32::from_bits(both << 16), f32::from_bits(both & 0xFFFF_0000)]
}

struct Plain;
struct PlainWiden;

macro_rules! plain_lanes {
    ($name:ident, $step:literal, |$sums:ident, $x:ident, $line:ident| $body:expr) => {
        impl Lanes for $name {
            type X = f32;
            type Sums = [f32; COLUMNS];
            const STEP: usize = $step;
            const ROWS: [usize; 5] = [4, 4, 2, 1, 1];

            #[inline(always)]
            unsafe fn zero() -> Self::Sums {
                [0.0; COLUMNS]
            }
            #[inline(always)]
            unsafe fn step<const R: usize, const P: usize>(
                sums: &mut [[Self::Sums; P]; R],
                x: *const f32,
                stride: usize,
                line: *const Line,
            ) {
                // SAFETY: the caller's.
                unsafe {
                    for p in 0..P {
                        let $line = &(*line.add(p)).0;
                        for (r, row) in sums.iter_mut().enumerate() {
                            let $x = x.add(r * stride);
                            let $sums = &mut row[p];
                            $body
                        }
                    }
                }
            }
            #[inline(always)]
            unsafe fn store(sums: Self::Sums, at: *mut f32) {
                // SAFETY: the caller's.
                unsafe { at.cast::<[f32; COLUMNS]>().write_unaligned(sums) }
            }
            #[inline(always)]
            unsafe fn strip(rows: usize, strip: Strip<f32>) {
                // SAFETY: the caller's.
                unsafe {
                    match rows {
                        4 => group::<Self, 4, 1>(strip),
                        2 => group::<Self, 2, 1>(strip),
                        _ => group::<Self, 1, 1>(strip),
                    }
                }
            }
        }
    };
}

plain_lanes!(Plain, 1, |sums, x, line| {
    let x = *x;
    for (s, w) in sums.iter_mut().zip(line) {
        *s += x * f32::from_bits(*w);
    }
});
plain_lanes!(PlainWiden, 2, |sums, x, line| {
    let (even, odd) = (*x, *x.add(1));
    for (s, w) in sums.iter_mut().zip(line) {
        let [a, b] = halves(*w);
        *s += even * a;
        *s += odd * b;
    }
});

#[cfg(target_arch = "x86_64")]
macro_rules! vector_lanes {
    ($name:ident, $x:ty, $sums:ty, $step:literal, $rows:expr, [$($r:literal x $p:literal),+], $one:literal,
     zero: $zero:expr, store: |$value:ident, $at:ident| $store:expr,
     step: |$acc:ident, $act:ident, $stride:ident, $line:ident, $R:ident, $P:ident| $body:block) => {
        struct $name;
        impl Lanes for $name {
            type X = $x;
            type Sums = $sums;
            const STEP: usize = $step;
            const ROWS: [usize; 5] = $rows;

            #[inline(always)]
            unsafe fn zero() -> Self::Sums {
                // SAFETY: the caller's.
                unsafe { $zero }
            }
            #[inline(always)]
            unsafe fn step<const $R: usize, const $P: usize>(
                $acc: &mut [[Self::Sums; $P]; $R],
                $act: *const $x,
                $stride: usize,
                $line: *const Line,
            ) {
                // SAFETY: the caller's.
                unsafe { $body }
            }
            #[inline(always)]
            unsafe fn store($value: Self::Sums, $at: *mut f32) {
                // SAFETY: the caller's.
                unsafe { $store }
            }
            #[inline(always)]
            unsafe fn strip(rows: usize, strip: Strip<$x>) {
                // SAFETY: the caller's.
                unsafe {
                    match rows {
                        $($r => group::<Self, $r, $p>(strip),)+
                        _ => group::<Self, 1, $one>(strip),
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vector_lanes!(Avx512, f32, __m512, 1, [12, 8, 4, 2, 1], [12 x 2, 8 x 2, 4 x 4, 2 x 4], 4,
zero: _mm512_setzero_ps(), store: |value, at| _mm512_storeu_ps(at, value),
step: |acc, x, stride, line, R, P| {
    let mut w = [_mm512_setzero_ps(); P];
    for (p, w) in w.iter_mut().enumerate() {
        *w = _mm512_load_ps(line.add(p).cast());
    }
    for (r, acc) in acc.iter_mut().enumerate() {
        let x = _mm512_set1_ps(*x.add(r * stride));
        for (acc, w) in acc.iter_mut().zip(w) {
            *acc = _mm512_fmadd_ps(x, w, *acc);
        }
    }
});

#[cfg(target_arch = "x86_64")]
vector_lanes!(Avx512Widen, f32, __m512, 2, [12, 8, 4, 2, 1], [12 x 2, 8 x 2, 4 x 4, 2 x 4], 4,
zero: _mm512_setzero_ps(), store: |value, at| _mm512_storeu_ps(at, value),
step: |acc, x, stride, line, R, P| {
    let mut w = [_mm512_setzero_ps(); P];
    for (p, w) in w.iter_mut().enumerate() {
        let both = _mm512_load_si512(line.add(p).cast());
        *w = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    }
    for (r, acc) in acc.iter_mut().enumerate() {
        let x = _mm512_set1_ps(*x.add(r * stride));
        for (acc, w) in acc.iter_mut().zip(w) {
            *acc = _mm512_fmadd_ps(x, w, *acc);
        }
    }
    for (p, w) in w.iter_mut().enumerate() {
        let both = _mm512_load_si512(line.add(p).cast());
        *w = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xFFFF_0000_u32 as i32)));
    }
    for (r, acc) in acc.iter_mut().enumerate() {
        let x = _mm512_set1_ps(*x.add(r * stride + 1));
        for (acc, w) in acc.iter_mut().zip(w) {
            *acc = _mm512_fmadd_ps(x, w, *acc);
        }
    }
});

#[cfg(target_arch = "x86_64")]
vector_lanes!(Avx512Bf16, u16, __m512, 2, [12, 8, 4, 2, 1], [12 x 2, 8 x 2, 4 x 4, 2 x 4], 4,
zero: _mm512_setzero_ps(), store: |value, at| _mm512_storeu_ps(at, value),
step: |acc, x, stride, line, R, P| {
    let mut w = [_mm512_setzero_si512(); P];
    for (p, w) in w.iter_mut().enumerate() {
        *w = _mm512_load_si512(line.add(p).cast());
    }
    for (r, acc) in acc.iter_mut().enumerate() {
        let x = _mm512_set1_epi32(x.add(r * stride).cast::<i32>().read_unaligned());
        for (acc, w) in acc.iter_mut().zip(w) {
            // SAFETY: both are 512 bits of bfloat16.
            let (x, w) = (std::mem::transmute::<__m512i, __m512bh>(x), std::mem::transmute::<__m512i, __m512bh>(w));
            *acc = _mm512_dpbf16_ps(*acc, x, w);
        }
    }
});

#[cfg(target_arch = "x86_64")]
vector_lanes!(Avx2, f32, [__m256; 2], 1, [6, 4, 2, 1, 1], [6 x 1, 4 x 1, 2 x 2], 4,
zero: [_mm256_setzero_ps(); 2],
store: |value, at| { _mm256_storeu_ps(at, value[0]); _mm256_storeu_ps(at.add(8), value[1]) },
step: |acc, x, stride, line, R, P| {
    for p in 0..P {
        let w: *const f32 = line.add(p).cast();
        let w = [_mm256_load_ps(w), _mm256_load_ps(w.add(8))];
        for (r, acc) in acc.iter_mut().enumerate() {
            let x = _mm256_broadcast_ss(&*x.add(r * stride));
            acc[p][0] = _mm256_fmadd_ps(x, w[0], acc[p][0]);
            acc[p][1] = _mm256_fmadd_ps(x, w[1], acc[p][1]);
        }
    }
});

#[cfg(target_arch = "x86_64")]
vector_lanes!(Avx2Widen, f32, [__m256; 2], 2, [6, 4, 2, 1, 1], [6 x 1, 4 x 1, 2 x 2], 4,
zero: [_mm256_setzero_ps(); 2],
store: |value, at| { _mm256_storeu_ps(at, value[0]); _mm256_storeu_ps(at.add(8), value[1]) },
step: |acc, x, stride, line, R, P| {
    for p in 0..P {
        let line: *const __m256i = line.add(p).cast();
        let both = [_mm256_load_si256(line), _mm256_load_si256(line.add(1))];
        let w = both.map(|b| _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)));
        for (r, acc) in acc.iter_mut().enumerate() {
            let x = _mm256_broadcast_ss(&*x.add(r * stride));
            acc[p][0] = _mm256_fmadd_ps(x, w[0], acc[p][0]);
            acc[p][1] = _mm256_fmadd_ps(x, w[1], acc[p][1]);
        }
        let high = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
        let w = both.map(|b| _mm256_castsi256_ps(_mm256_and_si256(b, high)));
        for (r, acc) in acc.iter_mut().enumerate() {
            let x = _mm256_broadcast_ss(&*x.add(r * stride + 1));
            acc[p][0] = _mm256_fmadd_ps(x, w[0], acc[p][0]);
            acc[p][1] = _mm256_fmadd_ps(x, w[1], acc[p][1]);
        }
    }
});

macro_rules! entry {
    ($(#[$attribute:meta])* $name:ident, $lanes:ty, $rows:ident) => {
        /// # Safety
        /// As `Product::run`, with the instructions of this function's attribute.
        $(#[$attribute])*
        pub(crate) unsafe fn $name(product: &Product<'_>, block: Block) {
            let Rows::$rows { at, stride } = product.input else { unreachable!("activations of the other dtype") };
            // SAFETY: the caller's.
            unsafe { run::<$lanes>(product, at, stride, block) }
        }
    };
}

entry!(plain, Plain, F32);
entry!(plain_widen, PlainWiden, F32);
#[cfg(target_arch = "x86_64")]
entry!(
    #[target_feature(enable = "avx2,fma")]
    avx2,
    Avx2,
    F32
);
#[cfg(target_arch = "x86_64")]
entry!(
    #[target_feature(enable = "avx2,fma")]
    avx2_widen,
    Avx2Widen,
    F32
);
#[cfg(target_arch = "x86_64")]
entry!(
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
    avx512,
    Avx512,
    F32
);
#[cfg(target_arch = "x86_64")]
entry!(
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
    avx512_widen,
    Avx512Widen,
    F32
);
#[cfg(target_arch = "x86_64")]
entry!(
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
    avx512_bf16,
    Avx512Bf16,
    Bf16
);
