//! Products of int8 in vector registers, four k a step: the same loops as `lanes.rs`, sums in int32. Integer sums do not
//! depend on their order, so all of these and AMX give the same bits.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use crate::lanes::{Lanes, Strip, group, run};
use crate::packed::{COLUMNS, Line};
use crate::product::{Block, Product, Rows};

struct Plain;

impl Lanes for Plain {
    type X = i8;
    type Sums = [i32; COLUMNS];
    const STEP: usize = 4;
    const INT8: bool = true;
    const ROWS: [usize; 5] = [4, 4, 2, 1, 1];

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        [0; COLUMNS]
    }

    #[inline(always)]
    unsafe fn step<const R: usize, const P: usize>(
        sums: &mut [[Self::Sums; P]; R],
        x: *const i8,
        stride: usize,
        line: *const Line,
    ) {
        for p in 0..P {
            // SAFETY: the caller's.
            let weights = unsafe { &(*line.add(p)).0 };
            for (r, row) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's.
                let x = unsafe { x.add(r * stride).cast::<[i8; 4]>().read() };
                for (sum, four) in row[p].iter_mut().zip(weights) {
                    for (x, w) in x.iter().zip(four.to_le_bytes()) {
                        *sum += i32::from(*x) * i32::from(w as i8);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store(sums: Self::Sums, at: *mut f32) {
        // SAFETY: the caller's.
        unsafe { at.cast::<[i32; COLUMNS]>().write_unaligned(sums) }
    }

    #[inline(always)]
    unsafe fn strip(rows: usize, strip: Strip<i8>) {
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

/// VNNI multiplies unsigned by signed: activations are taken as x + 128, and their offset leaves with the scales.
#[cfg(target_arch = "x86_64")]
struct Vnni;

#[cfg(target_arch = "x86_64")]
impl Lanes for Vnni {
    type X = i8;
    type Sums = __m512i;
    const STEP: usize = 4;
    const INT8: bool = true;
    const UNSIGNED: bool = true;
    const ROWS: [usize; 5] = [12, 8, 4, 2, 1];

    #[inline(always)]
    unsafe fn zero() -> __m512i {
        // SAFETY: the caller's.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn step<const R: usize, const P: usize>(
        sums: &mut [[__m512i; P]; R],
        x: *const i8,
        stride: usize,
        line: *const Line,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut w = [_mm512_setzero_si512(); P];
            for (p, w) in w.iter_mut().enumerate() {
                *w = _mm512_load_si512(line.add(p).cast());
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_epi32(x.add(r * stride).cast::<i32>().read_unaligned());
                let x = _mm512_xor_si512(x, _mm512_set1_epi8(-128));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = _mm512_dpbusd_epi32(*sum, x, w);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store(sums: __m512i, at: *mut f32) {
        // SAFETY: the caller's.
        unsafe { _mm512_storeu_si512(at.cast(), sums) }
    }

    #[inline(always)]
    unsafe fn strip(rows: usize, strip: Strip<i8>) {
        // SAFETY: the caller's.
        unsafe {
            match rows {
                12 => group::<Self, 12, 2>(strip),
                8 => group::<Self, 8, 2>(strip),
                4 => group::<Self, 4, 4>(strip),
                2 => group::<Self, 2, 4>(strip),
                _ => group::<Self, 1, 4>(strip),
            }
        }
    }
}

/// |x| times w with the sign of x: pairs of products stay within 2 * 127 * 127, so the 16-bit sums do not saturate.
#[cfg(target_arch = "x86_64")]
struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    type X = i8;
    type Sums = [__m256i; 2];
    const STEP: usize = 4;
    const INT8: bool = true;
    const ROWS: [usize; 5] = [4, 4, 2, 1, 1];

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        // SAFETY: the caller's.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    unsafe fn step<const R: usize, const P: usize>(
        sums: &mut [[Self::Sums; P]; R],
        x: *const i8,
        stride: usize,
        line: *const Line,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            for p in 0..P {
                let line: *const __m256i = line.add(p).cast();
                let w = [_mm256_load_si256(line), _mm256_load_si256(line.add(1))];
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_epi32(x.add(r * stride).cast::<i32>().read_unaligned());
                    let size = _mm256_abs_epi8(x);
                    for (sum, w) in sums[p].iter_mut().zip(w) {
                        let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w, x));
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store(sums: Self::Sums, at: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            _mm256_storeu_si256(at.cast(), sums[0]);
            _mm256_storeu_si256(at.add(8).cast(), sums[1]);
        }
    }

    #[inline(always)]
    unsafe fn strip(rows: usize, strip: Strip<i8>) {
        // SAFETY: the caller's.
        unsafe {
            match rows {
                4 => group::<Self, 4, 1>(strip),
                2 => group::<Self, 2, 2>(strip),
                _ => group::<Self, 1, 4>(strip),
            }
        }
    }
}

macro_rules! entry {
    ($(#[$attribute:meta])* $name:ident, $lanes:ty) => {
        /// # Safety
        /// As `Product::run`, with the instructions of this function's attribute.
        $(#[$attribute])*
        pub(crate) unsafe fn $name(product: &Product<'_>, block: Block) {
            let Rows::Int8 { at, stride, .. } = product.input else { unreachable!("activations of another dtype") };
            // SAFETY: the caller's.
            unsafe { run::<$lanes>(product, at, stride, block) }
        }
    };
}

entry!(plain, Plain);
#[cfg(target_arch = "x86_64")]
entry!(
    #[target_feature(enable = "avx2,fma")]
    avx2,
    Avx2
);
#[cfg(target_arch = "x86_64")]
entry!(
    #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    avx512,
    Vnni
);
