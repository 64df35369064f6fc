//! Which vector instructions this processor has, and how a generic body is compiled for each.
//!
//! Bodies are plain loops over small arrays, marked `#[inline(always)]` and instantiated inside functions that carry
//! `#[target_feature]`: the compiler turns the loops into vectors of that width. There is one source to test.

/// Instruction sets a body is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What every processor of the architecture has.
    Baseline,
    /// 256-bit vectors with fused multiply-add (x86-64-v3).
    Avx2,
    /// 512-bit vectors (x86-64-v4).
    Avx512,
}

impl Level {
    /// The widest this processor runs.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512vl") {
                return Self::Avx512;
            }
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Baseline
    }
}

/// `a * b + c`, in one rounding where the body was compiled for it (a call of the maths library elsewhere is avoided).
#[inline(always)]
#[must_use]
pub fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}
