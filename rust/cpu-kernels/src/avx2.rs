//! The inner loops of attention with 256-bit vectors, written out: left to the compiler they came out mostly scalar
//! (4,000 cycles a query and block of keys where these take a few hundred).

use std::arch::x86_64::*;

use crate::attention_task::KEYS;

/// Eight stored numbers as float32.
pub trait Load8: Copy {
    /// # Safety
    /// `at` must point to eight readable elements, and the processor must have AVX2.
    unsafe fn load8(at: *const Self) -> __m256;
}

impl Load8 for f32 {
    #[inline(always)]
    unsafe fn load8(at: *const f32) -> __m256 {
        // SAFETY: the caller's.
        unsafe { _mm256_loadu_ps(at) }
    }
}

impl Load8 for u16 {
    #[inline(always)]
    unsafe fn load8(at: *const u16) -> __m256 {
        // SAFETY: the caller's.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())), 16)) }
    }
}

/// `scores[j]` = query . key j for `count` keys, `stride` elements apart; `query.len()` must be a multiple of 8.
///
/// # Safety
/// AVX2 and FMA; `keys` holds `(count - 1) * stride + query.len()` elements.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub unsafe fn dots<E: Load8>(query: &[f32], keys: &[E], stride: usize, count: usize, scores: &mut [f32; KEYS]) {
    let (q, k, dim) = (query.as_ptr(), keys.as_ptr(), query.len());
    let mut j = 0;
    // SAFETY: every address is within the slices by the function's contract.
    unsafe {
        while j + 4 <= count {
            let row = [k.add(j * stride), k.add((j + 1) * stride), k.add((j + 2) * stride), k.add((j + 3) * stride)];
            let mut acc = [_mm256_setzero_ps(); 4];
            let mut d = 0;
            while d < dim {
                let x = _mm256_loadu_ps(q.add(d));
                acc[0] = _mm256_fmadd_ps(x, E::load8(row[0].add(d)), acc[0]);
                acc[1] = _mm256_fmadd_ps(x, E::load8(row[1].add(d)), acc[1]);
                acc[2] = _mm256_fmadd_ps(x, E::load8(row[2].add(d)), acc[2]);
                acc[3] = _mm256_fmadd_ps(x, E::load8(row[3].add(d)), acc[3]);
                d += 8;
            }
            _mm_storeu_ps(scores.as_mut_ptr().add(j), sums_of_four(acc));
            j += 4;
        }
        // The last few are added up in the same order: a key's score must not depend on how many keys follow it.
        let mut acc = [_mm256_setzero_ps(); 4];
        for (i, acc) in acc[..count - j].iter_mut().enumerate() {
            let row = k.add((j + i) * stride);
            let mut d = 0;
            while d < dim {
                *acc = _mm256_fmadd_ps(_mm256_loadu_ps(q.add(d)), E::load8(row.add(d)), *acc);
                d += 8;
            }
        }
        if j < count {
            _mm_storeu_ps(scores.as_mut_ptr().add(j), sums_of_four(acc));
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn sums_of_four(acc: [__m256; 4]) -> __m128 {
    let pairs = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
    _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn sum(v: __m256) -> f32 {
    let half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn largest(v: __m256) -> f32 {
    let half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)))
}

/// e^x, eight at a time; 0 below -87. Polynomial and constants of Cephes' expf (Moshier).
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp(x: __m256) -> __m256 {
    let floor = _mm256_set1_ps(-87.0);
    let clamped = _mm256_max_ps(floor, x); // in this order a NaN stays
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        clamped,
        _mm256_set1_ps(std::f32::consts::LOG2_E),
    ));
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693_359_4), clamped);
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.121_944_4e-4), r);
    let mut p = _mm256_set1_ps(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 5.000_000_1e-1] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    let p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, _mm256_add_ps(r, _mm256_set1_ps(1.0)));
    let power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    let result = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    _mm256_and_ps(result, _mm256_cmp_ps::<_CMP_NLT_UQ>(x, floor))
}

/// Add a block of `count` keys to a query's running softmax; `acc.len()` must be a multiple of 8.
///
/// # Safety
/// AVX2 and FMA; `values` holds `(count - 1) * stride + acc.len()` elements.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub unsafe fn absorb<E: Load8>(
    scores: &mut [f32; KEYS],
    count: usize,
    values: &[E],
    stride: usize,
    acc: &mut [f32],
    maximum: &mut f32,
    total: &mut f32,
) {
    scores[count..].fill(f32::NEG_INFINITY);
    // SAFETY: every address is within the slices by the function's contract.
    unsafe {
        let s = [_mm256_loadu_ps(scores.as_ptr()), _mm256_loadu_ps(scores.as_ptr().add(8))];
        let top = largest(_mm256_max_ps(s[0], s[1])).max(*maximum);
        if top == f32::NEG_INFINITY {
            return; // everything so far is masked
        }
        let (a, dim) = (acc.as_mut_ptr(), acc.len());
        if top > *maximum {
            let shrink = exp(_mm256_set1_ps(*maximum - top));
            *total *= _mm256_cvtss_f32(shrink);
            let mut d = 0;
            while d < dim {
                _mm256_storeu_ps(a.add(d), _mm256_mul_ps(_mm256_loadu_ps(a.add(d)), shrink));
                d += 8;
            }
            *maximum = top;
        }
        let shift = _mm256_set1_ps(top);
        let w = [exp(_mm256_sub_ps(s[0], shift)), exp(_mm256_sub_ps(s[1], shift))];
        *total += sum(_mm256_add_ps(w[0], w[1]));
        let mut weights = [0.0f32; KEYS];
        _mm256_storeu_ps(weights.as_mut_ptr(), w[0]);
        _mm256_storeu_ps(weights.as_mut_ptr().add(8), w[1]);
        let v = values.as_ptr();
        let mut d = 0;
        // Lanes of the output stay in registers over all keys of the block.
        while d + 64 <= dim {
            accumulate::<E, 8>(&weights[..count], v.add(d), stride, a.add(d));
            d += 64;
        }
        while d + 32 <= dim {
            accumulate::<E, 4>(&weights[..count], v.add(d), stride, a.add(d));
            d += 32;
        }
        while d < dim {
            accumulate::<E, 1>(&weights[..count], v.add(d), stride, a.add(d));
            d += 8;
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn accumulate<E: Load8, const N: usize>(weights: &[f32], values: *const E, stride: usize, acc: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let mut lanes = [_mm256_setzero_ps(); N];
        for (i, lane) in lanes.iter_mut().enumerate() {
            *lane = _mm256_loadu_ps(acc.add(8 * i));
        }
        for (j, w) in weights.iter().enumerate() {
            let w = _mm256_set1_ps(*w);
            let row = values.add(j * stride);
            for (i, lane) in lanes.iter_mut().enumerate() {
                *lane = _mm256_fmadd_ps(w, E::load8(row.add(8 * i)), *lane);
            }
        }
        for (i, lane) in lanes.iter().enumerate() {
            _mm256_storeu_ps(acc.add(8 * i), *lane);
        }
    }
}
