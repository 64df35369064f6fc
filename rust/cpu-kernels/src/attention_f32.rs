//! Attention's products in float32 with AVX-512, over pages of either dtype: sixteen queries in the lanes for the
//! scores, sixteen numbers of a value in the lanes for the sums.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::attention_avx512::{self, LANES, Line, Running, Shrink, transpose};
use crate::attention_blocks::{Ahead, BLOCK, Block};
use crate::attention_groups::Kernel;

/// The kernel; head sizes are multiples of 16.
pub struct Floats;

/// How stored numbers become rows of float32.
pub trait Source: Sized {
    /// Whether rows must be copied.
    const COPIED: bool;
    /// Copy rows of a block to `to`, if they must be.
    ///
    /// # Safety
    /// AVX-512; rows hold `dim` numbers, a multiple of 16; `to` holds the copies.
    unsafe fn take(rows: &[*const Self], dim: usize, to: *mut Line);
    /// Where the rows are now, `copies` being where they went.
    fn rows(stored: &[*const Self; BLOCK], dim: usize, copies: *const Line) -> [*const f32; BLOCK];
}

impl Source for f32 {
    const COPIED: bool = false;

    unsafe fn take(_rows: &[*const f32], _dim: usize, _to: *mut Line) {}

    #[inline(always)]
    fn rows(stored: &[*const f32; BLOCK], _dim: usize, _copies: *const Line) -> [*const f32; BLOCK] {
        *stored
    }
}

impl Source for u16 {
    const COPIED: bool = true;

    unsafe fn take(rows: &[*const u16], dim: usize, to: *mut Line) {
        // SAFETY: the caller's.
        unsafe { widen(rows, dim, to) };
    }

    #[inline(always)]
    fn rows(_stored: &[*const u16; BLOCK], dim: usize, copies: *const Line) -> [*const f32; BLOCK] {
        std::array::from_fn(|j| copies.wrapping_add(j * dim / LANES).cast())
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn widen(rows: &[*const u16], dim: usize, to: *mut Line) {
    for (j, row) in rows.iter().enumerate() {
        for d in (0..dim).step_by(LANES) {
            // SAFETY: the caller's.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(row.add(d).cast()));
                _mm512_store_si512(to.add((j * dim + d) / LANES).cast(), _mm512_slli_epi32::<16>(wide));
            }
        }
    }
}

/// Sixteen queries as [`dim`, lanes].
#[target_feature(enable = "avx512f")]
unsafe fn pack(queries: &[*const f32; LANES], dim: usize, packed: *mut Line) {
    for d in (0..dim).step_by(LANES) {
        // SAFETY: `dim` is a multiple of 16.
        unsafe {
            let mut square = queries.map(|q| _mm512_loadu_si512(q.add(d).cast()));
            transpose(&mut square);
            for (i, column) in square.iter().enumerate() {
                _mm512_store_si512(packed.add(d + i).cast(), *column);
            }
        }
    }
}

/// Eight keys at a time, each a line of scores: sums run over the head's numbers in their order. `begun`: they go on
/// from what stands there.
#[target_feature(enable = "avx512f")]
unsafe fn scores<E>(
    packed: *const Line,
    keys: &[*const f32; BLOCK],
    n: usize,
    dim: usize,
    begun: bool,
    scores: *mut Line,
    ahead: &mut Ahead<E>,
) {
    for j in (0..n).step_by(8) {
        let key: [*const f32; 8] = std::array::from_fn(|i| keys[j + i]);
        let mut acc = [_mm512_setzero_ps(); 8];
        // SAFETY: keys have `dim` numbers, `packed` as many lines.
        unsafe {
            if begun {
                acc = std::array::from_fn(|i| _mm512_load_ps(scores.add(j + i).cast()));
            }
            for d in 0..dim {
                if d % 16 == 0 {
                    ahead.step();
                }
                let q = _mm512_load_ps(packed.add(d).cast());
                for (acc, key) in acc.iter_mut().zip(key) {
                    *acc = _mm512_fmadd_ps(_mm512_set1_ps(*key.add(d)), q, *acc);
                }
            }
            for (i, acc) in acc.iter().enumerate() {
                _mm512_store_ps(scores.add(j + i).cast(), *acc);
            }
        }
    }
}

/// `Q` lanes by `D` lines of the output, over `n` keys.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn corner<const Q: usize, const D: usize>(
    weights: *const f32,
    values: &[*const f32],
    column: usize,
    shrink: &[f32],
    sums: *mut f32,
    dim: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); D]; Q];
        for (q, row) in acc.iter_mut().enumerate() {
            let shrink = _mm512_set1_ps(shrink[q]);
            for (d, acc) in row.iter_mut().enumerate() {
                *acc = _mm512_mul_ps(shrink, _mm512_load_ps(sums.add(q * dim + column + d * LANES)));
            }
        }
        for (j, value) in values.iter().enumerate() {
            let v: [__m512; D] = std::array::from_fn(|d| _mm512_loadu_ps(value.add(column + d * LANES)));
            for (q, row) in acc.iter_mut().enumerate() {
                let w = _mm512_set1_ps(*weights.add(j * LANES + q));
                for (acc, v) in row.iter_mut().zip(v) {
                    *acc = _mm512_fmadd_ps(w, v, *acc);
                }
            }
        }
        for (q, row) in acc.iter().enumerate() {
            for (d, acc) in row.iter().enumerate() {
                _mm512_store_ps(sums.add(q * dim + column + d * LANES), *acc);
            }
        }
    }
}

/// Sums stand as [lanes, `dim`].
#[target_feature(enable = "avx512f")]
unsafe fn absorb(
    weights: *const f32,
    values: &[*const f32],
    dim: usize,
    shrink: __m512,
    lanes: Range<usize>,
    sums: *mut f32,
) {
    let mut factors = Line([0.0; LANES]);
    // SAFETY: the caller's; corners stay within `lanes` and `dim`.
    unsafe {
        _mm512_store_ps(factors.0.as_mut_ptr(), shrink);
        let mut column = 0;
        while column < dim {
            let wide = if dim - column >= 4 * LANES { 4 } else { 1 };
            let mut q = lanes.start;
            while q < lanes.end {
                let (w, f, s) = (weights.add(q), &factors.0[q..], sums.add(q * dim));
                q += match (lanes.end - q, wide) {
                    (1, 4) => (corner::<1, 4>(w, values, column, f, s, dim), 1).1,
                    (2, 4) => (corner::<2, 4>(w, values, column, f, s, dim), 2).1,
                    (3, 4) => (corner::<3, 4>(w, values, column, f, s, dim), 3).1,
                    (_, 4) => (corner::<4, 4>(w, values, column, f, s, dim), 4).1,
                    (1..=3, _) => (corner::<1, 1>(w, values, column, f, s, dim), 1).1,
                    _ => (corner::<4, 1>(w, values, column, f, s, dim), 4).1,
                };
            }
            column += wide * LANES;
        }
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn give(sums: *const f32, dim: usize, factor: f32, out: *mut f32) {
    for d in (0..dim).step_by(LANES) {
        // SAFETY: the caller's.
        unsafe { _mm512_storeu_ps(out.add(d), _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_load_ps(sums.add(d)))) };
    }
}

impl<E: Source> Kernel<E> for Floats {
    const STEP: usize = 8;

    fn lines(dim: usize) -> [usize; 3] {
        let copies = usize::from(E::COPIED) * BLOCK * dim / LANES;
        [dim, copies, copies]
    }

    fn steps(dim: usize) -> (usize, usize) {
        (0, BLOCK / 8 * dim / 16)
    }

    unsafe fn begin() {}

    unsafe fn end() {}

    unsafe fn pack(queries: &[*const f32; LANES], dim: usize, packed: *mut Line) {
        // SAFETY: the caller's, here and below.
        unsafe { pack(queries, dim, packed) }
    }

    unsafe fn take_keys(block: &mut Block<E>, dim: usize, keys: *mut Line) {
        unsafe { E::take(&block.keys[..block.count.next_multiple_of(8)], dim, keys) }
    }

    unsafe fn take_values(block: &Block<E>, dim: usize, values: *mut Line, _ahead: &mut Ahead<E>) {
        unsafe { E::take(&block.values[..block.count], dim, values) }
    }

    unsafe fn scores(
        packed: *const Line,
        blocks: &[Block<E>],
        dim: usize,
        keys: *const Line,
        out: *mut Line,
        ahead: &mut Ahead<E>,
    ) {
        let [query_lines, key_lines, _] = <Self as Kernel<E>>::lines(dim);
        for (h, block) in blocks.iter().enumerate() {
            let keys = E::rows(&block.keys, dim, keys.wrapping_add(h * key_lines));
            let n = block.count.next_multiple_of(<Self as Kernel<E>>::STEP);
            unsafe { scores(packed.add(h * query_lines), &keys, n, dim, h > 0, out, ahead) }
        }
    }

    unsafe fn weigh(scores: *mut Line, n: usize, factor: f32, running: &mut Running) -> Shrink {
        unsafe { attention_avx512::weigh(scores, n, factor, running) }
    }

    unsafe fn absorb(
        scores: *const Line,
        block: &Block<E>,
        dim: usize,
        values: *const Line,
        shrink: Shrink,
        lanes: Range<usize>,
        sums: *mut Line,
        _ahead: &mut Ahead<E>,
    ) {
        unsafe {
            let values = E::rows(&block.values, dim, values);
            absorb(scores.cast(), &values[..block.count], dim, shrink.0, lanes, sums.cast());
        }
    }

    unsafe fn give(sums: *const Line, lane: usize, dim: usize, factor: f32, out: *mut f32) {
        unsafe { give(sums.cast::<f32>().add(lane * dim), dim, factor, out) }
    }
}
