//! exp for softmax: as a plain loop that becomes vectors.

use crate::simd::multiply_add;

/// exp(x) for x <= 0 (or tiny positive rounding), relative error below 3e-7; 0 below -87.
///
/// Cephes' reduction and polynomial (Moshier): x = n ln 2 + r with |r| <= ln 2 / 2, exp(r) by a polynomial, 2^n by the exponent.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    let clamped = x.max(-87.0);
    let n = (clamped * std::f32::consts::LOG2_E).round_ties_even();
    let r = multiply_add::<FMA>(n, -0.693_359_4, clamped);
    let r = multiply_add::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 5.000_000_1e-1] {
        p = multiply_add::<FMA>(p, r, c);
    }
    let p = multiply_add::<FMA>(p * r, r, r + 1.0);
    let scaled = p * f32::from_bits((((n as i32) + 127) << 23) as u32);
    if x < -87.0 { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn close_to_the_library_and_zero_far_down() {
        for i in 0..100_000 {
            let x = -(i as f32) * 1e-3;
            let (got, want) = (f64::from(exp::<false>(x)), f64::from(x).exp());
            assert!((got - want).abs() <= 3e-7 * want + 1e-37, "exp({x}) = {got}, not {want}");
        }
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp::<true>(0.0), 1.0);
    }
}
