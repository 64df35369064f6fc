//! RMS norm into bfloat16 in 512-bit vectors, some tokens side by side: a token's sum waits for each of its additions. The
//! operations are those of `token_ops.rs` one by one.

use std::arch::x86_64::*;

use crate::attention_avx512::halves;

/// Tokens side by side.
const SOME: usize = 4;
const LANES: usize = 16;

/// Norm of the tokens of `from`, whose size is a multiple of 16; the first one's numbers go to `to`, `stride` to the next.
///
/// # Safety
/// AVX-512 (F, BW, DQ, VL); `to` is valid for so many tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn norm(from: &[f32], weight: &[f32], eps: f32, to: *mut u16, stride: usize) {
    let size = weight.len();
    assert!(size.is_multiple_of(LANES), "whole vectors");
    for (at, tokens) in from.chunks(SOME * size).enumerate() {
        let count = tokens.len() / size;
        // SAFETY: `count` tokens of `size` numbers, also of the target.
        unsafe {
            let mut sums = [_mm512_setzero_ps(); SOME];
            let row = |i: usize| tokens.as_ptr().add(i.min(count - 1) * size);
            let rows = [row(0), row(1), row(2), row(3)];
            for k in (0..size).step_by(LANES) {
                for (sum, row) in sums.iter_mut().zip(rows) {
                    let v = _mm512_loadu_ps(row.add(k));
                    *sum = _mm512_add_ps(*sum, _mm512_mul_ps(v, v));
                }
            }
            let factors = sums.map(|sum| {
                let lanes = std::mem::transmute::<__m512, [f32; LANES]>(sum);
                _mm512_set1_ps(1.0 / (lanes.iter().sum::<f32>() / size as f32 + eps).sqrt())
            });
            for k in (0..size).step_by(LANES) {
                let w = _mm512_loadu_ps(weight.as_ptr().add(k));
                for i in 0..count {
                    let v = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(rows[i].add(k)), factors[i]), w);
                    _mm256_storeu_si256(to.add((at * SOME + i) * stride + k).cast(), halves(v));
                }
            }
        }
    }
}
