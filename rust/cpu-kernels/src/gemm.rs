//! y = x W^T with W packed in panels of 16 output columns. AVX2 + FMA.
use std::arch::x86_64::*;

pub const NR: usize = 16;
const MC: usize = 240;
const KC: usize = 288;

pub trait Element: Copy + Send + Sync + 'static {
    /// Load 8 elements as f32.
    unsafe fn load8(p: *const Self) -> __m256;
    fn from_f32(v: f32) -> Self;
    const EXPAND: bool;
}
impl Element for f32 {
    #[inline(always)]
    unsafe fn load8(p: *const f32) -> __m256 { unsafe { _mm256_loadu_ps(p) } }
    fn from_f32(v: f32) -> f32 { v }
    const EXPAND: bool = false;
}
#[derive(Clone, Copy)]
pub struct Bf16(pub u16);
impl Element for Bf16 {
    #[inline(always)]
    unsafe fn load8(p: *const Bf16) -> __m256 {
        unsafe {
            let v = _mm_loadu_si128(p.cast());
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16))
        }
    }
    fn from_f32(v: f32) -> Bf16 { Bf16((v.to_bits() >> 16) as u16) }
    const EXPAND: bool = true;
}

pub struct Packed<E> { pub n: usize, pub k: usize, pub data: Vec<E> }

impl<E: Element> Packed<E> {
    pub fn new(w: &[f32], n: usize, k: usize) -> Self {
        let panels = n.div_ceil(NR);
        let mut data = vec![E::from_f32(0.0); panels * NR * k];
        for p in 0..panels {
            for kk in 0..k {
                for j in 0..NR {
                    let col = p * NR + j;
                    if col < n { data[(p * k + kk) * NR + j] = E::from_f32(w[col * k + kk]); }
                }
            }
        }
        Packed { n, k, data }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn kernel<E: Element, const MR: usize>(x: *const f32, ldx: usize, b: *const E, kc: usize, y: *mut f32, ldy: usize, first: bool, ncols: usize) {
    unsafe {
        let mut c = [[_mm256_setzero_ps(); 2]; MR];
        for k in 0..kc {
            let b0 = E::load8(b.add(k * NR));
            let b1 = E::load8(b.add(k * NR + 8));
            for i in 0..MR {
                let a = _mm256_broadcast_ss(&*x.add(i * ldx + k));
                c[i][0] = _mm256_fmadd_ps(a, b0, c[i][0]);
                c[i][1] = _mm256_fmadd_ps(a, b1, c[i][1]);
            }
        }
        if ncols == NR {
            for i in 0..MR {
                let p = y.add(i * ldy);
                if first {
                    _mm256_storeu_ps(p, c[i][0]);
                    _mm256_storeu_ps(p.add(8), c[i][1]);
                } else {
                    _mm256_storeu_ps(p, _mm256_add_ps(c[i][0], _mm256_loadu_ps(p)));
                    _mm256_storeu_ps(p.add(8), _mm256_add_ps(c[i][1], _mm256_loadu_ps(p.add(8))));
                }
            }
        } else {
            for i in 0..MR {
                let mut t = [0f32; NR];
                _mm256_storeu_ps(t.as_mut_ptr(), c[i][0]);
                _mm256_storeu_ps(t.as_mut_ptr().add(8), c[i][1]);
                for j in 0..ncols {
                    let p = y.add(i * ldy + j);
                    *p = if first { t[j] } else { *p + t[j] };
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn expand<E: Element>(b: *const E, n: usize, out: *mut f32) {
    unsafe { for i in (0..n).step_by(8) { _mm256_storeu_ps(out.add(i), E::load8(b.add(i))); } }
}

/// One thread's share: rows [0, t) x panels [p0, p1).
unsafe fn block<E: Element>(x: *const f32, ldx: usize, t: usize, w: &Packed<E>, p0: usize, p1: usize, y: *mut f32, ldy: usize) {
    unsafe {
        let mut scratch = [0f32; KC * NR];
        let mut t0 = 0;
        while t0 < t {
            let tc = (t - t0).min(MC);
            let mut k0 = 0;
            while k0 < w.k {
                let kc = (w.k - k0).min(KC);
                for p in p0..p1 {
                    let b = w.data.as_ptr().add((p * w.k + k0) * NR);
                    let ncols = (w.n - p * NR).min(NR);
                    let yp = y.add(t0 * ldy + p * NR);
                    let xp = x.add(t0 * ldx + k0);
                    macro_rules! tiles { ($ty:ty, $b:expr) => {{
                        let mut i = 0;
                        while i + 6 <= tc { kernel::<$ty, 6>(xp.add(i * ldx), ldx, $b, kc, yp.add(i * ldy), ldy, k0 == 0, ncols); i += 6; }
                        let (xr, yr) = (xp.add(i * ldx), yp.add(i * ldy));
                        match tc - i {
                            1 => kernel::<$ty, 1>(xr, ldx, $b, kc, yr, ldy, k0 == 0, ncols),
                            2 => kernel::<$ty, 2>(xr, ldx, $b, kc, yr, ldy, k0 == 0, ncols),
                            3 => kernel::<$ty, 3>(xr, ldx, $b, kc, yr, ldy, k0 == 0, ncols),
                            4 => kernel::<$ty, 4>(xr, ldx, $b, kc, yr, ldy, k0 == 0, ncols),
                            5 => kernel::<$ty, 5>(xr, ldx, $b, kc, yr, ldy, k0 == 0, ncols),
                            _ => {}
                        }
                    }}}
                    if E::EXPAND && tc > 6 {
                        expand(b, kc * NR, scratch.as_mut_ptr());
                        tiles!(f32, scratch.as_ptr());
                    } else {
                        tiles!(E, b);
                    }
                }
                k0 += kc;
            }
            t0 += tc;
        }
    }
}

#[derive(Clone, Copy)]
struct Ptr<T>(T);
unsafe impl<T> Send for Ptr<T> {}
unsafe impl<T> Sync for Ptr<T> {}

pub fn gemm<E: Element>(x: &[f32], t: usize, w: &Packed<E>, y: &mut [f32], threads: usize) {
    let panels = w.n.div_ceil(NR);
    let (xp, yp) = (Ptr(x.as_ptr()), Ptr(y.as_mut_ptr()));
    let run = move |i: usize| {
        let (xp, yp) = (xp, yp);
        let (p0, p1) = (panels * i / threads, panels * (i + 1) / threads);
        unsafe { block(xp.0, w.k, t, w, p0, p1, yp.0, w.n) }
    };
    if threads == 1 { run(0) } else {
        rayon::scope(|s| { for i in 1..threads { s.spawn(move |_| run(i)); } run(0); });
    }
}
