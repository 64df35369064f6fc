//! Attention's products in bfloat16 with AMX: tiles of 16 rows of 64 bytes, sums in float32.
//!
//! Scores are keys * queries^T: a tile's rows are sixteen keys where they stand in their page, and the queries are
//! packed once a task. Weights come as tiles of [16 lanes, 32 keys], and values are interleaved by pairs of keys, as
//! the second operand must be.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::attention::Shared;
use crate::attention_avx512::{LANES, Line, Running, Shrink, transpose, weigh_half};
use crate::attention_blocks::{Ahead, BLOCK, Block, TILE as TALL};
use crate::attention_few;
use crate::attention_groups::{self, Kernel};
use crate::attention_task::Task;
use crate::tiles::{Configuration, ROW, configure, load, multiply, release, store, zero};

/// The kernel; head sizes are multiples of 32.
pub struct Tiles;

/// Keys that one tile of weights holds; of scores a tile has `TALL`.
const WIDE: usize = 32;
static WHOLE: Configuration = Configuration::new([16; 8]);

impl Kernel<u16> for Tiles {
    const STEP: usize = WIDE;

    /// Of keys those that had to be copied together, and interleaved values.
    fn lines(dim: usize) -> [usize; 3] {
        [dim / 2, BLOCK * dim / 32, BLOCK * dim / 32]
    }

    fn steps(dim: usize) -> (usize, usize) {
        (BLOCK / 2, BLOCK / TALL * dim / 32 + BLOCK / WIDE * dim / LANES)
    }

    unsafe fn run(task: &Task<'_, u16>, after: Option<&Task<'_, u16>>, out: Shared) {
        // SAFETY: the caller's.
        unsafe {
            if attention_few::fits(task) {
                return attention_few::run(task, after, out);
            }
            attention_groups::run::<u16, Self>(task, after, out);
        }
    }

    unsafe fn begin() {
        // SAFETY: the caller has AMX.
        unsafe { configure(&WHOLE) };
    }

    unsafe fn end() {
        // SAFETY: as above.
        unsafe { release() };
    }

    unsafe fn pack(queries: &[*const f32; LANES], dim: usize, packed: *mut Line) {
        // SAFETY: the caller's, here and below.
        unsafe { pack(queries, dim, packed) }
    }

    unsafe fn take_keys(block: &mut Block<u16>, dim: usize, keys: *mut Line) {
        unsafe { together(block, dim, keys.cast()) }
    }

    unsafe fn take_values(block: &Block<u16>, dim: usize, values: *mut Line, ahead: &mut Ahead<u16>) {
        unsafe { interleave(block, dim, values, ahead) }
    }

    unsafe fn scores(
        packed: *const Line,
        blocks: &[Block<u16>],
        dim: usize,
        _keys: *const Line,
        out: *mut Line,
        ahead: &mut Ahead<u16>,
    ) {
        unsafe { scores(packed, blocks, dim, out, ahead) }
    }

    unsafe fn weigh(scores: *mut Line, n: usize, factor: f32, running: &mut Running) -> Shrink {
        unsafe { weigh_half(scores, n, factor, running, scores.add(BLOCK), || ()) }
    }

    unsafe fn absorb(
        scores: *const Line,
        block: &Block<u16>,
        dim: usize,
        values: *const Line,
        shrink: Shrink,
        lanes: Range<usize>,
        sums: *mut Line,
        ahead: &mut Ahead<u16>,
    ) {
        unsafe {
            if shrink.1 != 0 {
                dampen(sums, dim, shrink.0, &lanes);
            }
            absorb(scores.add(BLOCK), values, block.count.div_ceil(WIDE), dim / LANES, sums, ahead);
        }
    }

    unsafe fn give(sums: *const Line, lane: usize, dim: usize, factor: f32, out: *mut f32) {
        unsafe { give(sums, lane, dim, factor, out) }
    }
}

/// Sixteen queries as tiles of [16 pairs of numbers, lanes, 2].
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn pack(queries: &[*const f32; LANES], dim: usize, packed: *mut Line) {
    for d in (0..dim).step_by(32) {
        // SAFETY: the caller's; the transmuted are 64 bytes without invalid patterns.
        unsafe {
            let mut square = queries.map(|q| {
                let halves = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(q.add(d + 16)), _mm512_loadu_ps(q.add(d)));
                std::mem::transmute::<__m512bh, __m512i>(halves)
            });
            transpose(&mut square);
            for (i, pair) in square.iter().enumerate() {
                _mm512_store_si512(packed.add(d / 2 + i).cast(), *pair);
            }
        }
    }
}

/// Values as tiles of [16 pairs of keys, 16 numbers, 2]. Of each 32 numbers one tile has the numbers 8 i to 8 i + 3,
/// the next the numbers 8 i + 4 to 8 i + 7, as unpacking gives them; `give` puts them in order.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave(block: &Block<u16>, dim: usize, to: *mut Line, ahead: &mut Ahead<u16>) {
    let tiles = dim / LANES;
    for pair in 0..block.count.div_ceil(WIDE) * (WIDE / 2) {
        let (a, b) = (block.values[2 * pair], block.values[2 * pair + 1]);
        ahead.step();
        // SAFETY: the caller's.
        unsafe {
            let to = to.add(pair / 16 * tiles * 16 + pair % 16);
            for x in 0..tiles / 2 {
                let (a, b) = (_mm512_loadu_si512(a.add(32 * x).cast()), _mm512_loadu_si512(b.add(32 * x).cast()));
                _mm512_store_si512(to.add(32 * x).cast(), _mm512_unpacklo_epi16(a, b));
                _mm512_store_si512(to.add(32 * x + 16).cast(), _mm512_unpackhi_epi16(a, b));
            }
        }
    }
}

/// Copy the sixteen keys of each tile that do not stand at even distances: a tile over two pages, and the last.
#[target_feature(enable = "avx512f")]
unsafe fn together(block: &mut Block<u16>, dim: usize, copies: *mut u16) {
    for (tile, keys) in block.keys.chunks_exact_mut(TALL).enumerate().take(block.count.div_ceil(TALL)) {
        if block.strides[tile] > 0 {
            continue;
        }
        block.strides[tile] = 2 * dim;
        for (i, key) in keys.iter_mut().enumerate() {
            // SAFETY: the caller's: rows of `dim` numbers, room for `BLOCK` of them.
            unsafe {
                let copy = copies.add((tile * TALL + i) * dim);
                for d in (0..dim).step_by(32) {
                    _mm512_storeu_si512(copy.add(d).cast(), _mm512_loadu_si512(key.add(d).cast()));
                }
                *key = copy;
            }
        }
    }
}

/// Up to four tiles of [16 keys, 16 lanes], summed over KV heads.
unsafe fn scores(packed: *const Line, blocks: &[Block<u16>], dim: usize, out: *mut Line, ahead: &mut Ahead<u16>) {
    let tiles = blocks[0].count.div_ceil(TALL);
    // SAFETY: tiles below `tiles`, whose keys stand at even distances after `together`.
    unsafe {
        zero!(0);
        zero!(1);
        zero!(2);
        zero!(3);
        for (h, block) in blocks.iter().enumerate() {
            let key = |tile: usize| block.keys[tile * TALL];
            let stride = |tile: usize| block.strides[tile];
            let packed = packed.add(h * dim / 2);
            for d in (0..dim).step_by(32) {
                load!(4, packed.add(d / 2), ROW);
                load!(5, key(0).add(d), stride(0));
                multiply!(0, 5, 4);
                ahead.step();
                if tiles > 1 {
                    load!(6, key(1).add(d), stride(1));
                    multiply!(1, 6, 4);
                    ahead.step();
                }
                if tiles > 2 {
                    load!(5, key(2).add(d), stride(2));
                    multiply!(2, 5, 4);
                    ahead.step();
                }
                if tiles > 3 {
                    load!(6, key(3).add(d), stride(3));
                    multiply!(3, 6, 4);
                    ahead.step();
                }
            }
        }
        store!(0, out);
        store!(1, out.add(TALL));
        if tiles > 2 {
            store!(2, out.add(2 * TALL));
            store!(3, out.add(3 * TALL));
        }
    }
}

/// Multiply what stands in the sums by what the maxima's growth asks for.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn dampen(sums: *mut Line, dim: usize, shrink: __m512, lanes: &Range<usize>) {
    let mut factors = Line([0.0; LANES]);
    // SAFETY: `sums` holds `dim` lines.
    unsafe {
        _mm512_store_ps(factors.0.as_mut_ptr(), shrink);
        for tile in 0..dim / LANES {
            for lane in lanes.clone() {
                let at = sums.add(tile * LANES + lane).cast::<f32>();
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factors.0[lane])));
            }
        }
    }
}

/// `sums`, `columns` tiles of [16 lanes, 16 numbers], += `depth` tiles of weights * values.
unsafe fn absorb(
    weights: *const Line,
    values: *const Line,
    depth: usize,
    columns: usize,
    sums: *mut Line,
    ahead: &mut Ahead<u16>,
) {
    // SAFETY: the caller's; four columns at a time, or the last two.
    unsafe {
        for column in (0..columns).step_by(4) {
            let four = columns - column >= 4;
            let sums = sums.add(column * 16);
            load!(0, sums, ROW);
            load!(1, sums.add(16), ROW);
            if four {
                load!(2, sums.add(32), ROW);
                load!(3, sums.add(48), ROW);
            }
            for k in 0..depth {
                let values = values.add((k * columns + column) * 16);
                load!(4, weights.add(k * 16), ROW);
                load!(5, values, ROW);
                multiply!(0, 4, 5);
                ahead.step();
                load!(6, values.add(16), ROW);
                multiply!(1, 4, 6);
                ahead.step();
                if four {
                    load!(5, values.add(32), ROW);
                    multiply!(2, 4, 5);
                    ahead.step();
                    load!(6, values.add(48), ROW);
                    multiply!(3, 4, 6);
                    ahead.step();
                }
            }
            store!(0, sums);
            store!(1, sums.add(16));
            if four {
                store!(2, sums.add(32));
                store!(3, sums.add(48));
            }
        }
    }
}

/// Where each of 32 numbers stands in the two lines that `interleave` spread it over.
const ORDER: [[i32; LANES]; 2] = {
    let mut order = [[0; LANES]; 2];
    let mut i = 0;
    while i < 32 {
        order[i / 16][i % 16] = (i / 8 * 4 + i % 4 + if i % 8 < 4 { 0 } else { 16 }) as i32;
        i += 1;
    }
    order
};

/// One lane's numbers in their order.
#[target_feature(enable = "avx512f")]
unsafe fn give(sums: *const Line, lane: usize, dim: usize, factor: f32, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let orders = [0, 1].map(|half: usize| _mm512_loadu_si512(ORDER[half].as_ptr().cast()));
        let factor = _mm512_set1_ps(factor);
        for d in (0..dim).step_by(32) {
            let at = |tile: usize| _mm512_load_ps(sums.add((d / LANES + tile) * LANES + lane).cast());
            for (half, order) in orders.iter().enumerate() {
                let mixed = _mm512_permutex2var_ps(at(0), *order, at(1));
                _mm512_storeu_ps(out.add(d + half * LANES), _mm512_mul_ps(mixed, factor));
            }
        }
    }
}
