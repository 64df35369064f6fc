//! What attention does with 512-bit vectors in either dtype: sixteen (token, head) pairs stand in the sixteen lanes, a
//! line of scores is one key's, so a maximum or a sum over keys needs no sum across lanes, and no lane ever looks at
//! another: a query's arithmetic is the same in any company. Knows no pages and no tasks.

use std::arch::x86_64::*;

/// (token, head) pairs of one group.
pub const LANES: usize = 16;

/// Sixteen numbers, one a lane.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line(pub [f32; LANES]);

/// Where the running maximum begins: below any score, and finite, so that differences are no NaN.
const LOWEST: f32 = -1e30;

/// The running softmax of a group: maxima in units of log2, and sums of weights.
pub struct Running {
    pub maximum: __m512,
    pub sum: __m512,
}

impl Running {
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn new() -> Self {
        Running { maximum: _mm512_set1_ps(LOWEST), sum: _mm512_setzero_ps() }
    }
}

/// 2^x for x <= 0, to 2e-7 of the result; exactly 1 at 0, exactly 0 below -125, NaN at NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn exp2(x: __m512) -> __m512 {
    // A result below the normal numbers would cost a hundred cycles of microcode, and hidden keys are all that small.
    let counts = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-125.0)); // a NaN counts
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm512_sub_ps(x, n);
    // Minimax on [-1/2, 1/2] with the constant term held at 1.
    let mut p = _mm512_set1_ps(EXP2[0]);
    for c in &EXP2[1..] {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(*c));
    }
    _mm512_maskz_scalef_ps(counts, p, n)
}

#[allow(clippy::approx_constant)] // a minimax coefficient, near ln 2 and not it
const EXP2: [f32; 6] = [0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0];

/// As `epilogue::halves`. NOTE: the processor's own conversion makes zeros of what is below the normal numbers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn halves(values: __m512) -> __m256i {
    let bits = _mm512_castps_si512(values);
    let high = _mm512_srli_epi32::<16>(bits);
    let even = _mm512_and_si512(high, _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), even);
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(rounded), nan, quiet))
}

/// tanh, to 2e-7.
#[inline]
#[target_feature(enable = "avx512f")]
fn tanh(x: __m512) -> __m512 {
    // 1 - 2 / (1 + e^2|x|), in e^-2|x|, which cannot overflow; the sign is put back at the end.
    let sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MIN));
    let e = exp2(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0 * std::f32::consts::LOG2_E)));
    let one = _mm512_set1_ps(1.0);
    let t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(t), sign))
}

/// Replace scores by cap * tanh(score * scale / cap) in units of log2.
///
/// # Safety
/// AVX-512; `scores` holds `n` lines.
#[target_feature(enable = "avx512f")]
pub unsafe fn cap_scores(scores: *mut Line, n: usize, scale: f32, cap: f32) {
    let (inner, outer) = (_mm512_set1_ps(scale / cap), _mm512_set1_ps(cap * std::f32::consts::LOG2_E));
    for j in 0..n {
        // SAFETY: the caller's.
        unsafe {
            let at = scores.add(j).cast::<f32>();
            _mm512_store_ps(at, _mm512_mul_ps(outer, tanh(_mm512_mul_ps(_mm512_load_ps(at), inner))));
        }
    }
}

/// A block's effect on its group: by what each lane's earlier weights must be multiplied (exactly 1 where the maximum
/// stayed), and which lanes' maxima grew.
pub type Shrink = (__m512, __mmask16);

/// Bring the maxima up to date with `n` lines of raw scores, which count `factor` times; `n` is a multiple of 4.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn rise(scores: *const Line, n: usize, factor: __m512, running: &mut Running) -> Shrink {
    let mut tops = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
    for j in (0..n).step_by(4) {
        for (i, top) in tops.iter_mut().enumerate() {
            // SAFETY: the caller's. In this order a NaN is passed over.
            *top = unsafe { _mm512_max_ps(_mm512_load_ps(scores.add(j + i).cast()), *top) };
        }
    }
    let top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    let maximum = _mm512_max_ps(_mm512_mul_ps(top, factor), running.maximum);
    let grew = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(maximum, running.maximum);
    let shrink = exp2(_mm512_sub_ps(running.maximum, maximum));
    running.maximum = maximum;
    (shrink, grew)
}

/// Turn `n` lines of raw scores into weights 2^(`factor` * score - maximum) in place; `n` is a multiple of 4.
///
/// # Safety
/// AVX-512; `scores` holds `n` lines; `factor` > 0.
#[target_feature(enable = "avx512f")]
pub unsafe fn weigh(scores: *mut Line, n: usize, factor: f32, running: &mut Running) -> Shrink {
    let factor = _mm512_set1_ps(factor);
    // SAFETY: lines below `n` only.
    unsafe {
        let shrink = rise(scores, n, factor, running);
        let mut sums = [_mm512_setzero_ps(); 2];
        for j in (0..n).step_by(2) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = scores.add(j + i).cast::<f32>();
                let w = exp2(_mm512_fmsub_ps(_mm512_load_ps(at), factor, running.maximum));
                *sum = _mm512_add_ps(*sum, w);
                _mm512_store_ps(at, w);
            }
        }
        running.sum = _mm512_fmadd_ps(running.sum, shrink.0, _mm512_add_ps(sums[0], sums[1]));
        shrink
    }
}

/// As `weigh`, rounded to bfloat16 and written to `weights` as tiles of [16 lanes, 32 keys]; `n` is a multiple of 32. `tick`
/// is called every four keys.
///
/// # Safety
/// AVX-512 with bfloat16; `scores` holds `n` lines, `weights` half as many; `factor` > 0.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn weigh_half(
    scores: *const Line,
    n: usize,
    factor: f32,
    running: &mut Running,
    weights: *mut Line,
    mut tick: impl FnMut(),
) -> Shrink {
    let factor = _mm512_set1_ps(factor);
    // SAFETY: lines below `n` only; the transmuted are 64 bytes without invalid patterns.
    unsafe {
        let shrink = rise(scores, n, factor, running);
        let ones = std::mem::transmute::<[u16; 32], __m512bh>([0x3F80; 32]);
        let mut sums = [_mm512_setzero_ps(); 2];
        for tile in 0..n / 32 {
            let mut pairs = [_mm512_setzero_si512(); 16];
            for (i, two) in pairs.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                tick();
                for (k, (pair, sum)) in two.iter_mut().zip(&mut sums).enumerate() {
                    let at = scores.add(32 * tile + 4 * i + 2 * k).cast::<f32>();
                    let even = exp2(_mm512_fmsub_ps(_mm512_load_ps(at), factor, running.maximum));
                    let odd = exp2(_mm512_fmsub_ps(_mm512_load_ps(at.add(LANES)), factor, running.maximum));
                    let both = rounded_pair(even, odd);
                    // The sum is of the rounded weights, which are what the values are multiplied by.
                    *sum = _mm512_dpbf16_ps(*sum, both, ones);
                    *pair = std::mem::transmute::<__m512bh, __m512i>(both);
                }
            }
            transpose(&mut pairs);
            for (i, pair) in pairs.iter().enumerate() {
                _mm512_store_si512(weights.add(16 * tile + i).cast(), *pair);
            }
        }
        running.sum = _mm512_fmadd_ps(running.sum, shrink.0, _mm512_add_ps(sums[0], sums[1]));
        shrink
    }
}

/// Two lines as bfloat16, those of one lane side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn rounded_pair(even: __m512, odd: __m512) -> __m512bh {
    let apart = _mm512_cvtne2ps_pbh(odd, even);
    // SAFETY: both are 64 bytes without invalid patterns.
    unsafe {
        let order = std::mem::transmute::<[u16; 32], __m512i>(std::array::from_fn(|i| (i / 2 + i % 2 * 16) as u16));
        std::mem::transmute(_mm512_permutexvar_epi16(order, std::mem::transmute::<__m512bh, __m512i>(apart)))
    }
}

/// Rows become columns, in units of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transpose(r: &mut [__m512i; 16]) {
    let mut t = *r;
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    // Lane L of u[4 i + c]: column 4 L + c of rows 4 i to 4 i + 3.
    let mut u = t;
    for i in 0..4 {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for c in 0..4 {
        let even = [_mm512_shuffle_i32x4::<0x88>(u[c], u[4 + c]), _mm512_shuffle_i32x4::<0x88>(u[8 + c], u[12 + c])];
        let odd = [_mm512_shuffle_i32x4::<0xDD>(u[c], u[4 + c]), _mm512_shuffle_i32x4::<0xDD>(u[8 + c], u[12 + c])];
        r[c] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        r[8 + c] = _mm512_shuffle_i32x4::<0xDD>(even[0], even[1]);
        r[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        r[12 + c] = _mm512_shuffle_i32x4::<0xDD>(odd[0], odd[1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::has_avx512;

    fn each(f: impl Fn(__m512) -> __m512, x: f32) -> f32 {
        // SAFETY: the callers checked.
        unsafe { std::mem::transmute::<__m512, [f32; 16]>(f(std::mem::transmute::<[f32; 16], __m512>([x; 16])))[7] }
    }

    #[test]
    fn powers_are_right_and_exact_where_they_must_be() {
        if !has_avx512() {
            return;
        }
        let exp2 = |x| each(|v| unsafe { exp2(v) }, x);
        assert_eq!(exp2(0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp2(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp2(-1e30).to_bits(), 0);
        assert!(exp2(f32::NAN).is_nan());
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -125.0 * i as f32 / 200_000.0;
            let want = f64::from(x).exp2();
            worst = worst.max((f64::from(exp2(x)) - want).abs() / want);
        }
        assert!(worst < 2.5e-7, "{worst:e}");
    }

    #[test]
    fn tanh_is_right() {
        if !has_avx512() {
            return;
        }
        let tanh = |x| each(|v| unsafe { tanh(v) }, x);
        for i in -4000..4000 {
            let x = i as f32 / 300.0;
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 3e-7, "{x}");
        }
        assert_eq!((tanh(f32::INFINITY), tanh(-1e9)), (1.0, -1.0));
    }
}
