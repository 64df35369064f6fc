//! What a layer does to each token by itself between the products: norms, rotary angles, storing keys and values.
//! Plain loops compiled for AVX-512 and AVX2; one token's numbers never depend on another's.

use crate::decoder::{Angles, Layer, Shape};
use crate::int8::quantise;
use crate::pages::{Element, LayerPages};
use crate::simd::{has_avx2, has_avx512};
use crate::team::Team;

/// Where a token's activations go.
#[derive(Clone, Copy)]
pub enum Sink {
    F32 {
        at: *mut f32,
        stride: usize,
    },
    Bf16 {
        at: *mut u16,
        stride: usize,
    },
    /// Rounded to int8 with a scale a token.
    Int8 {
        at: *mut i8,
        stride: usize,
        scales: *mut f32,
    },
}

// SAFETY: tokens are rows of their own, and each is written by one chunk.
unsafe impl Send for Sink {}
unsafe impl Sync for Sink {}

impl Sink {
    /// # Safety
    /// The token's row is there, of at least `values` numbers, and nobody else touches it.
    #[inline(always)]
    unsafe fn put(self, token: usize, values: impl Iterator<Item = f32> + Clone, count: usize) {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::F32 { at, stride } => {
                    let row = std::slice::from_raw_parts_mut(at.add(token * stride), count);
                    row.iter_mut().zip(values).for_each(|(o, v)| *o = v);
                }
                Self::Bf16 { at, stride } => {
                    let row = std::slice::from_raw_parts_mut(at.add(token * stride), count);
                    row.iter_mut().zip(values).for_each(|(o, v)| *o = u16::from_f32(v));
                }
                Self::Int8 { at, stride, scales } => {
                    let row = std::slice::from_raw_parts_mut(at.add(token * stride), count);
                    *scales.add(token) = quantise(values, row);
                }
            }
        }
    }
}

/// Which angles each token has.
#[derive(Clone, Copy)]
pub struct Rotary<'a> {
    pub angles: &'a Angles,
    pub positions: &'a [i32],
}

/// Run `work(first, end)` over the tokens on the team, or at once when they are few.
fn tokens(team: &Team, count: usize, numbers_a_token: usize, work: &(dyn Fn(usize, usize) + Sync)) {
    let least = (8192 / numbers_a_token.max(1)).max(1);
    let size = count.div_ceil(team.size() * 3).max(least);
    team.run(count.div_ceil(size), &|chunk| work(chunk * size, ((chunk + 1) * size).min(count)));
}

/// Call a body compiled for the best vectors of this processor.
macro_rules! vectorised {
    ($name:ident, ($($argument:ident: $type:ty),*), $(<$E:ident: $bound:path>,)? $body:path) => {
        #[inline]
        #[allow(clippy::too_many_arguments)]
        unsafe fn $name$(<$E: $bound>)?($($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
                unsafe fn wide$(<$E: $bound>)?($($argument: $type),*) {
                    // SAFETY: the caller's.
                    unsafe { $body($($argument),*) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn narrow$(<$E: $bound>)?($($argument: $type),*) {
                    // SAFETY: the caller's.
                    unsafe { $body($($argument),*) }
                }
                // SAFETY: the instructions are there, the rest is the caller's.
                unsafe {
                    if has_avx512() {
                        return wide($($argument),*);
                    }
                    if has_avx2() {
                        return narrow($($argument),*);
                    }
                }
            }
            // SAFETY: the caller's.
            unsafe { $body($($argument),*) }
        }
    };
}

/// Sum of squares, in sixteen lanes whatever the vectors.
#[inline(always)]
fn square_sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let chunks = values.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += v * v;
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane += v * v;
    }
    lanes.iter().sum()
}

#[inline(always)]
fn factor(values: &[f32], eps: f32) -> f32 {
    1.0 / (square_sum(values) / values.len() as f32 + eps).sqrt()
}

#[inline(always)]
unsafe fn norm_body(from: &[f32], weight: &[f32], eps: f32, first: usize, end: usize, to: Sink) {
    let size = weight.len();
    for token in first..end {
        let row = &from[token * size..][..size];
        let factor = factor(row, eps);
        // SAFETY: the caller's.
        unsafe { to.put(token, row.iter().zip(weight).map(|(v, w)| v * factor * w), size) };
    }
}
vectorised!(norm_tokens, (from: &[f32], weight: &[f32], eps: f32, first: usize, end: usize, to: Sink), norm_body);

/// RMS norm (Zhang and Sennrich, 2019, arXiv:1910.07467) of each token's numbers.
pub fn norm(team: &Team, from: &[f32], weight: &[f32], eps: f32, count: usize, to: Sink) {
    assert!(from.len() >= count * weight.len(), "too few tokens");
    // SAFETY: the sink was made for `count` tokens of this size; chunks are disjoint.
    tokens(team, count, weight.len(), &|a, b| unsafe { norm_tokens(from, weight, eps, a, b, to) });
}

/// As `norm`, of the tokens of `from` alone, on the calling thread; `to` begins with the first of them.
pub fn norm_here(from: &[f32], weight: &[f32], eps: f32, to: Sink) {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if let Sink::Bf16 { at, stride } = to
        && has_avx512()
        && weight.len().is_multiple_of(16)
    {
        // SAFETY: the sink was made for so many tokens of this size.
        return unsafe { crate::norm_avx512::norm(from, weight, eps, at, stride) };
    }
    // SAFETY: the sink was made for so many tokens of this size.
    unsafe { norm_tokens(from, weight, eps, 0, from.len() / weight.len(), to) };
}

#[inline(always)]
unsafe fn convert_body(from: &[f32], width: usize, first: usize, end: usize, to: Sink) {
    for token in first..end {
        // SAFETY: the caller's.
        unsafe { to.put(token, from[token * width..][..width].iter().copied(), width) };
    }
}
vectorised!(convert_tokens, (from: &[f32], width: usize, first: usize, end: usize, to: Sink), convert_body);

/// Each token's numbers as a product takes them.
pub fn convert(team: &Team, from: &[f32], width: usize, count: usize, to: Sink) {
    // SAFETY: as in `norm`.
    tokens(team, count, width, &|a, b| unsafe { convert_tokens(from, width, a, b, to) });
}

/// As `convert`, of the tokens of `from` alone, on the calling thread; `to` begins with the first of them.
pub fn convert_here(from: &[f32], width: usize, to: Sink) {
    // SAFETY: as in `norm_here`.
    unsafe { convert_tokens(from, width, 0, from.len() / width, to) };
}

/// What becomes of a layer's query, key and value projections.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    pub shape: &'a Shape,
    pub layer: &'a Layer,
    pub rotary: Rotary<'a>,
    pub eps: f32,
}

/// Pointers that chunks share.
#[derive(Clone, Copy)]
struct Target<E> {
    query: *mut f32,
    storage: *mut E,
}
// SAFETY: chunks write their own tokens' queries and slots.
unsafe impl<E> Send for Target<E> {}
unsafe impl<E> Sync for Target<E> {}

impl Heads<'_> {
    /// Norm and rotate queries into `query` [tokens, heads, `head_dim`]; keys and values to their slots.
    ///
    /// # Safety
    /// Slots are distinct and within the pages.
    pub unsafe fn rotate<E: Element>(
        &self,
        team: &Team,
        qkv: &[f32],
        query: &mut [f32],
        slots: &[i32],
        storage: &mut [E],
        pages: &LayerPages,
    ) {
        let target = Target { query: query.as_mut_ptr(), storage: storage.as_mut_ptr() };
        let all = qkv.len() / slots.len().max(1);
        // SAFETY: the caller's; tokens of chunks are disjoint.
        tokens(team, slots.len(), all, &|a, b| unsafe {
            heads_tokens(self, &qkv[a * all..b * all], all, a, b, slots, pages, target);
        });
    }

    /// As `rotate`, of the tokens of `qkv` alone, the first of which is token `first`, on the calling thread.
    ///
    /// # Safety
    /// As `rotate`; `query` and `storage` as its slices, of which others write other tokens' places meanwhile.
    pub unsafe fn rotate_here<E: Element>(
        &self,
        qkv: &[f32],
        first: usize,
        query: *mut f32,
        slots: &[i32],
        storage: *mut E,
        pages: &LayerPages,
    ) {
        let dim = self.shape.head_dim;
        let all = (self.shape.heads + 2 * self.shape.kv_heads) * dim;
        let target = Target { query, storage };
        // SAFETY: the caller's.
        unsafe { heads_tokens(self, qkv, all, first, first + qkv.len() / all, slots, pages, target) };
    }
}

vectorised!(
    heads_tokens,
    (heads: &Heads<'_>, qkv: &[f32], all: usize, first: usize, end: usize, slots: &[i32], pages: &LayerPages,
     target: Target<E>),
    <E: Element>,
    heads_body
);

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn heads_body<E: Element>(
    heads: &Heads<'_>,
    qkv: &[f32],
    all: usize,
    first: usize,
    end: usize,
    slots: &[i32],
    pages: &LayerPages,
    target: Target<E>,
) {
    let dim = heads.shape.head_dim;
    let width = heads.shape.heads * dim;
    let kv_width = heads.shape.kv_heads * dim;
    for token in first..end {
        let row = &qkv[(token - first) * all..][..all];
        let angles = heads.rotary.angles;
        let at = angles.dim * heads.rotary.positions[token] as usize;
        let (cos, sin) = (&angles.cos[at..][..angles.dim], &angles.sin[at..][..angles.dim]);
        // SAFETY: the caller's.
        unsafe {
            let query = std::slice::from_raw_parts_mut(target.query.add(token * width), width);
            for (from, to) in row[..width].chunks_exact(dim).zip(query.chunks_exact_mut(dim)) {
                turn(from, heads.layer.query_norm.as_deref(), heads.eps, cos, sin, to);
            }
            let slot = slots[token];
            if slot < 0 {
                continue;
            }
            let slot = slot as usize;
            let at = slot / pages.block_size * pages.page_stride + slot % pages.block_size * kv_width;
            let keys = std::slice::from_raw_parts_mut(target.storage.add(at + pages.key_offset), kv_width);
            for (from, to) in row[width..][..kv_width].chunks_exact(dim).zip(keys.chunks_exact_mut(dim)) {
                turn(from, heads.layer.key_norm.as_deref(), heads.eps, cos, sin, to);
            }
            let values = std::slice::from_raw_parts_mut(target.storage.add(at + pages.value_offset), kv_width);
            values.iter_mut().zip(&row[width + kv_width..]).for_each(|(o, v)| *o = E::from_f32(*v));
        }
    }
}

/// One head: norm, if it has one, then x cos + (x with its halves swapped, the first negated) sin on the rotary part
/// (Su et al., 2021, arXiv:2104.09864, in the halves form that checkpoints of transformers have).
#[inline(always)]
fn turn<E: Element>(from: &[f32], weight: Option<&[f32]>, eps: f32, cos: &[f32], sin: &[f32], to: &mut [E]) {
    match weight {
        None => rotate(from, cos, sin, to),
        Some(weight) => {
            let mut normed = [0.0f32; MAX_HEAD];
            let normed = &mut normed[..from.len()];
            let factor = factor(from, eps);
            for ((n, v), w) in normed.iter_mut().zip(from).zip(weight) {
                *n = v * factor * w;
            }
            rotate(normed, cos, sin, to);
        }
    }
}

#[inline(always)]
fn rotate<E: Element>(from: &[f32], cos: &[f32], sin: &[f32], to: &mut [E]) {
    let half = cos.len() / 2;
    let (low, high) = (&from[..half], &from[half..2 * half]);
    let (to, rest) = to.split_at_mut(2 * half);
    let (to_low, to_high) = to.split_at_mut(half);
    for ((((to, a), b), c), s) in to_low.iter_mut().zip(low).zip(high).zip(&cos[..half]).zip(&sin[..half]) {
        *to = E::from_f32(a * c - b * s);
    }
    for ((((to, a), b), c), s) in to_high.iter_mut().zip(high).zip(low).zip(&cos[half..]).zip(&sin[half..]) {
        *to = E::from_f32(a * c + b * s);
    }
    for (to, v) in rest.iter_mut().zip(&from[2 * half..]) {
        *to = E::from_f32(*v);
    }
}

/// The largest head size that is normed.
pub const MAX_HEAD: usize = 512;
