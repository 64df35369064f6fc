//! One task of attention: which keys its queries see, and the way of computing it that needs no more than AVX2.
//!
//! Keys go by in blocks with a running maximum and sum (online softmax: Milakov and Gimelshein, 2018,
//! arXiv:1805.02867; tiling as in `FlashAttention`, Dao et al., 2022, arXiv:2205.14135). Sums are in float32.

use crate::attention::{Options, Rows, Shared, Stored};
#[cfg(target_arch = "x86_64")]
use crate::attention_f32::Floats;
use crate::pages::{Element, LayerPages};
use crate::simd::{amx_ready, has_avx2, has_avx512};
#[cfg(target_arch = "x86_64")]
use crate::{attention_groups, attention_groups::Kernel, avx2};

/// Keys of one block: their scores stay in registers and the first cache.
pub(crate) const KEYS: usize = 16;

/// Ways to compute a task, slower first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Path {
    Plain,
    Avx2,
    Avx512,
    /// AMX tiles: bfloat16 pages only; queries and weights are rounded to bfloat16 too.
    Amx,
}

impl Path {
    /// The fastest that this processor has for pages of `E` and heads of this size.
    #[must_use]
    pub fn best<E: Stored>(head_dim: usize) -> Self {
        let has = if amx_ready() {
            Path::Amx
        } else if has_avx512() {
            Path::Avx512
        } else if has_avx2() {
            Path::Avx2
        } else {
            Path::Plain
        };
        has.fitting::<E>(head_dim)
    }

    /// This one, or the next below that takes such pages and heads.
    pub(crate) fn fitting<E: Stored>(self, head_dim: usize) -> Self {
        let fits = |path| match path {
            Path::Plain => true,
            Path::Avx2 => head_dim.is_multiple_of(8),
            Path::Avx512 => head_dim.is_multiple_of(16),
            Path::Amx => E::HALF && head_dim.is_multiple_of(32),
        };
        let below = [Path::Amx, Path::Avx512, Path::Avx2].into_iter().filter(|p| *p <= self);
        below.into_iter().find(|p| fits(*p)).unwrap_or(Path::Plain)
    }
}

/// One row, a tile of its query tokens, and some neighbouring KV heads. The sizes have been checked (`attention::check`).
pub struct Task<'a, E> {
    pub query: &'a [f32],
    pub heads: usize,
    pub group: usize,
    pub storage: &'a [E],
    pub pages: &'a LayerPages,
    pub rows: &'a Rows<'a>,
    pub options: &'a Options<'a>,
    pub row: usize,
    /// Packed tokens of the tile: `start..end`.
    pub start: usize,
    pub end: usize,
    /// The first KV head, and how many there are.
    pub kv_head: usize,
    pub span: usize,
}

impl<E: Stored> Task<'_, E> {
    /// `after`: what this thread does next, as far as one can tell.
    pub fn run(&self, path: Path, after: Option<&Self>, out: Shared) {
        match path {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Path::best` found the instructions, here and below.
            Path::Avx512 => unsafe { attention_groups::run::<E, Floats>(self, after, out) },
            #[cfg(target_arch = "x86_64")]
            Path::Amx => unsafe { E::Matrix::run(self, after, out) },
            _ => {
                for head in 0..self.span {
                    let one = Task { kv_head: self.kv_head + head, span: 1, ..*self };
                    match path {
                        #[cfg(target_arch = "x86_64")]
                        // SAFETY: as above.
                        Path::Avx2 => unsafe { one.avx2(out) },
                        _ => one.by_query::<false>(out),
                    }
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(&self, out: Shared) {
        self.by_query::<true>(out);
    }

    /// The token of a (token, head) pair of the tile and a KV head: heads of a token are neighbours.
    pub fn token(&self, pair: usize) -> usize {
        self.start + pair / self.group
    }

    /// The query head of a pair of the task's `kv`th KV head.
    pub fn head(&self, kv: usize, pair: usize) -> usize {
        (self.kv_head + kv) * self.group + pair % self.group
    }

    /// Where a pair's numbers begin in the query and in the output.
    pub fn offset(&self, kv: usize, pair: usize) -> usize {
        (self.token(pair) * self.heads + self.head(kv, pair)) * self.pages.head_dim
    }

    /// A token's place in its row.
    pub fn index(&self, token: usize) -> usize {
        self.context() + token - self.row_start()
    }

    fn row_start(&self) -> usize {
        self.rows.query_start[self.row] as usize
    }

    /// Tokens of the row before this step's.
    pub fn context(&self) -> usize {
        let queries = self.rows.query_start[self.row + 1] - self.rows.query_start[self.row];
        (self.rows.seq_lens[self.row] - queries) as usize
    }

    /// The keys that any query of the tile may see: outside of this range nothing is read.
    pub fn keys(&self) -> (usize, usize) {
        if self.rows.ancestors.is_some() {
            return (0, self.rows.seq_lens[self.row] as usize); // a tree may look at its own row's tokens
        }
        let first = self.options.window.map_or(0, |w| (self.index(self.start) + 1).saturating_sub(w as usize));
        (first, self.index(self.end))
    }

    /// The task, of one KV head, a query at a time; `AVX2` only where the caller was compiled for it and the head size is a multiple of 8.
    #[inline(always)]
    fn by_query<const AVX2: bool>(&self, out: Shared) {
        let dim = self.pages.head_dim;
        let queries = (self.end - self.start) * self.group;
        let mut acc = vec![0.0f32; queries * dim];
        let mut maximum = vec![f32::NEG_INFINITY; queries];
        let mut sum = vec![0.0f32; queries];
        let (first, last) = self.keys();
        let block = self.pages.block_size;
        let table = &self.rows.block_tables[self.row * self.rows.pages_per_row..];
        let stride = self.pages.token_stride();
        // Blocks begin at fixed places of a page, wherever the first visible key is: a query's sums are formed in the
        // same order whatever else is in its tile.
        let mut at = first - first % block % KEYS;
        let mut scores = [0.0f32; KEYS];
        while at < last {
            let (page, offset) = (table[at / block] as usize, at % block);
            let count = KEYS.min(block - offset).min(last - at);
            let base = page * self.pages.page_stride + offset * stride + self.kv_head * dim;
            let keys = &self.storage[base + self.pages.key_offset..][..(count - 1) * stride + dim];
            let values = &self.storage[base + self.pages.value_offset..][..(count - 1) * stride + dim];
            for q in 0..queries {
                let token = self.token(q);
                if self.rows.ancestors.is_none() && at > self.index(token) {
                    continue;
                }
                let query = &self.query[self.offset(0, q)..][..dim];
                let target = &mut acc[q * dim..][..dim];
                #[cfg(target_arch = "x86_64")]
                if AVX2 {
                    // SAFETY: `Path::best` proved the instructions and the size; the slices end with the last key.
                    unsafe { avx2::dots(query, keys, stride, count, &mut scores) };
                    self.shape_scores(&mut scores[..count], token, at);
                    // SAFETY: as above.
                    unsafe { avx2::absorb(&mut scores, count, values, stride, target, &mut maximum[q], &mut sum[q]) };
                    continue;
                }
                dots(query, keys, stride, &mut scores[..count]);
                self.shape_scores(&mut scores[..count], token, at);
                absorb(&scores[..count], values, stride, target, &mut maximum[q], &mut sum[q]);
            }
            at += count;
        }
        for q in 0..queries {
            let mut total = sum[q];
            if let Some(sinks) = self.options.sinks {
                total += (sinks[self.head(0, q)] - maximum[q]).exp(); // of either sign: a sink may be above every score
            }
            let factor = if total > 0.0 { 1.0 / total } else { 0.0 };
            // SAFETY: tokens of a tile and heads of a KV head belong to this task alone; `check` proved the length.
            let target = unsafe { std::slice::from_raw_parts_mut(out.at.add(self.offset(0, q)), dim) };
            for (o, a) in target.iter_mut().zip(&acc[q * dim..][..dim]) {
                *o = a * factor;
            }
        }
    }

    /// Scale, softcap and mask in place; `at` is the context index of the first key.
    #[inline(always)]
    fn shape_scores(&self, scores: &mut [f32], token: usize, at: usize) {
        for s in scores.iter_mut() {
            *s *= self.options.scale;
        }
        if let Some(cap) = self.options.softcap {
            for s in scores.iter_mut() {
                *s = cap * (*s / cap).tanh();
            }
        }
        let (context, index) = (self.context(), self.index(token));
        if let Some(ancestors) = self.rows.ancestors {
            let bits = ancestors[token];
            for (j, s) in scores.iter_mut().enumerate() {
                let key = at + j;
                let own = key.wrapping_sub(context);
                let hidden = key >= context && (own >= 64 || bits >> own & 1 == 0);
                let far = self.options.window.is_some_and(|w| self.position(key) <= self.position_of(token, index) - w);
                if hidden || far {
                    *s = f32::NEG_INFINITY;
                }
            }
            return;
        }
        if at + scores.len() > index + 1 {
            for (j, s) in scores.iter_mut().enumerate() {
                if at + j > index {
                    *s = f32::NEG_INFINITY;
                }
            }
        }
        if let Some(window) = self.options.window {
            for (j, s) in scores.iter_mut().enumerate() {
                if (at + j) as i64 <= index as i64 - i64::from(window) {
                    *s = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// Position of a key: committed tokens stand at their index, a tree's own tokens where `positions` says.
    pub fn position(&self, key: usize) -> i32 {
        match key.checked_sub(self.context()) {
            None => key as i32,
            Some(own) => self.position_of(self.row_start() + own, key),
        }
    }

    pub fn position_of(&self, token: usize, index: usize) -> i32 {
        self.rows.positions.get(token).copied().unwrap_or(index as i32)
    }
}

/// `scores[j]` = query . key j: the plain form, for other processors and head sizes.
fn dots<E: Element>(query: &[f32], keys: &[E], stride: usize, scores: &mut [f32]) {
    for (j, score) in scores.iter_mut().enumerate() {
        let key = &keys[j * stride..][..query.len()];
        *score = query.iter().zip(key).map(|(q, k)| q * k.to_f32()).sum();
    }
}

/// Add a block of keys to a query's running softmax: the plain form.
fn absorb<E: Element>(scores: &[f32], values: &[E], stride: usize, acc: &mut [f32], maximum: &mut f32, sum: &mut f32) {
    let top = scores.iter().fold(*maximum, |a, &b| a.max(b));
    if top == f32::NEG_INFINITY {
        return; // everything so far is masked
    }
    if top > *maximum {
        let shrink = (*maximum - top).exp();
        *sum *= shrink;
        for a in acc.iter_mut() {
            *a *= shrink;
        }
        *maximum = top;
    }
    for (j, score) in scores.iter().enumerate() {
        let weight = (score - top).exp();
        *sum += weight;
        for (a, v) in acc.iter_mut().zip(&values[j * stride..]) {
            *a += weight * v.to_f32();
        }
    }
}
