//! Causal (or tree-masked) attention of ragged rows over pages, read in place.
//!
//! A task is one row, one KV head and a tile of its query tokens; all query heads of the KV head share the keys it
//! reads. Keys go by in blocks with a running maximum and sum (online softmax: Milakov and Gimelshein, 2018,
//! arXiv:1805.02867; tiling as in `FlashAttention`, Dao et al., 2022, arXiv:2205.14135). Sums are in float32.

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use crate::avx2::{self, Load8};
use crate::pages::{Element, LayerPages};
use crate::simd::has_avx2;

/// Keys of one block: their scores stay in registers and the first cache.
pub(crate) const KEYS: usize = 16;
/// Query tokens of one tile.
const TILE: usize = 16;

/// What pages may hold.
#[cfg(target_arch = "x86_64")]
pub trait Stored: Element + Load8 {}
#[cfg(target_arch = "x86_64")]
impl<E: Element + Load8> Stored for E {}
/// What pages may hold.
#[cfg(not(target_arch = "x86_64"))]
pub trait Stored: Element {}
#[cfg(not(target_arch = "x86_64"))]
impl<E: Element> Stored for E {}

/// One step's rows: what `AttentionMetadata` says on the Python side.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// [rows + 1] packed token range of each row.
    pub query_start: &'a [i32],
    /// [rows] context length with this step's tokens.
    pub seq_lens: &'a [i32],
    /// [rows, `pages_per_row`]
    pub block_tables: &'a [i32],
    pub pages_per_row: usize,
    /// [tokens]: bit j says that own query token j of the row is visible. `None`: causal.
    pub ancestors: Option<&'a [i64]>,
    /// [tokens] positions, for the window of a tree's tokens. Empty: index in the context.
    pub positions: &'a [i32],
}

/// How scores become weights.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    pub scale: f32,
    /// A token sees positions above its own minus this.
    pub window: Option<i32>,
    pub softcap: Option<f32>,
    /// [heads] logits that take part in the sum only.
    pub sinks: Option<&'a [f32]>,
}

/// A writable slice that several tasks fill at disjoint places.
#[derive(Clone, Copy)]
struct Shared(*mut f32);
// SAFETY: each task writes only the outputs of its own tokens and heads (see `forward`).
unsafe impl Send for Shared {}
unsafe impl Sync for Shared {}

/// Attention of `query` [tokens, heads, `head_dim`] into `out` (same shape).
///
/// # Errors
/// A message when sizes do not fit together or a block table names a page that is not there; `out` is untouched then.
pub fn forward<E: Stored>(
    query: &[f32],
    heads: usize,
    storage: &[E],
    pages: &LayerPages,
    rows: &Rows<'_>,
    options: &Options<'_>,
    out: &mut [f32],
) -> Result<(), String> {
    check(query, heads, storage.len(), pages, rows, options, out)?;
    let vectors = has_avx2();
    let mut tasks: Vec<(usize, usize)> = Vec::new();
    for (row, range) in rows.query_start.windows(2).enumerate() {
        tasks.extend((range[0] as usize..range[1] as usize).step_by(TILE).map(|start| (row, start)));
    }
    let group = heads / pages.kv_heads;
    let out = Shared(out.as_mut_ptr());
    let run = |&(row, start): &(usize, usize), kv_head: usize| {
        let task = Task { query, heads, group, storage, pages, rows, options, row, start, kv_head };
        task.dispatch(vectors, out);
    };
    let work: usize = rows.seq_lens.iter().map(|&n| n as usize).sum::<usize>() * pages.kv_heads;
    // With one thread a pool would only add a change of threads to every call.
    let alone = rayon::current_num_threads() < 2 || tasks.len() * pages.kv_heads < 2;
    if alone || work * pages.head_dim < 1 << 14 {
        for task in &tasks {
            (0..pages.kv_heads).for_each(|h| run(task, h));
        }
    } else {
        tasks.par_iter().for_each(|task| (0..pages.kv_heads).into_par_iter().for_each(|h| run(task, h)));
    }
    Ok(())
}

fn check(
    query: &[f32],
    heads: usize,
    storage: usize,
    pages: &LayerPages,
    rows: &Rows<'_>,
    options: &Options<'_>,
    out: &[f32],
) -> Result<(), String> {
    let count = rows.seq_lens.len();
    let tokens = rows.query_start.last().copied().unwrap_or(0);
    let need = |ok: bool, message: String| if ok { Ok(()) } else { Err(message) };
    need(
        pages.kv_heads > 0 && heads.is_multiple_of(pages.kv_heads),
        format!("{heads} heads over {} KV heads", pages.kv_heads),
    )?;
    need(
        rows.query_start.len() == count + 1,
        format!("query_start holds {}, not {}", rows.query_start.len(), count + 1),
    )?;
    need(rows.block_tables.len() == count * rows.pages_per_row, "block_tables and seq_lens do not fit".into())?;
    need(
        rows.query_start[0] == 0 && rows.query_start.windows(2).all(|w| w[0] <= w[1]),
        "query_start must not fall".into(),
    )?;
    let size = tokens as usize * heads * pages.head_dim;
    need(query.len() >= size && out.len() >= size, format!("query and out need {size} numbers"))?;
    need(options.sinks.is_none_or(|s| s.len() == heads), "sinks: one a head".into())?;
    need(rows.ancestors.is_none_or(|a| a.len() >= tokens as usize), "ancestors: one a token".into())?;
    need(rows.positions.is_empty() || rows.positions.len() >= tokens as usize, "positions: one a token".into())?;
    let limit = pages.pages_within(storage);
    for (row, &len) in rows.seq_lens.iter().enumerate() {
        let queries = rows.query_start[row + 1] - rows.query_start[row];
        if queries == 0 {
            continue;
        }
        need(len >= queries, format!("row {row} has {queries} query tokens and a context of {len}"))?;
        let used = (len as usize).div_ceil(pages.block_size);
        need(
            used <= rows.pages_per_row,
            format!("row {row} needs {used} pages, the table has {}", rows.pages_per_row),
        )?;
        let table = &rows.block_tables[row * rows.pages_per_row..][..used];
        let bad = table.iter().find(|&&p| p < 0 || p as usize >= limit);
        need(bad.is_none(), format!("row {row} names page {}, there are {limit}", bad.copied().unwrap_or(0)))?;
    }
    Ok(())
}

struct Task<'a, E> {
    query: &'a [f32],
    heads: usize,
    group: usize,
    storage: &'a [E],
    pages: &'a LayerPages,
    rows: &'a Rows<'a>,
    options: &'a Options<'a>,
    row: usize,
    /// First packed token of the tile.
    start: usize,
    kv_head: usize,
}

impl<E: Stored> Task<'_, E> {
    fn dispatch(&self, vectors: bool, out: Shared) {
        #[cfg(target_arch = "x86_64")]
        if vectors && self.pages.head_dim.is_multiple_of(8) {
            // SAFETY: `simd::has_avx2` found the instructions.
            return unsafe { self.avx2(out) };
        }
        let _ = vectors;
        self.run::<false>(out);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(&self, out: Shared) {
        self.run::<true>(out);
    }

    /// The task itself; `AVX2` only where the caller was compiled for it and the head size is a multiple of 8.
    #[inline(always)]
    fn run<const AVX2: bool>(&self, out: Shared) {
        let dim = self.pages.head_dim;
        let row_start = self.rows.query_start[self.row] as usize;
        let row_end = self.rows.query_start[self.row + 1] as usize;
        let end = (self.start + TILE).min(row_end);
        let context = self.rows.seq_lens[self.row] as usize - (row_end - row_start); // before this step's tokens
        let queries = (end - self.start) * self.group;
        let mut acc = vec![0.0f32; queries * dim];
        let mut maximum = vec![f32::NEG_INFINITY; queries];
        let mut sum = vec![0.0f32; queries];
        // Past the tile's last token nothing is visible; a tree may only look at its own row's tokens.
        let last =
            if self.rows.ancestors.is_some() { context + row_end - row_start } else { context + end - row_start };
        let first = match self.options.window {
            Some(window) if self.rows.ancestors.is_none() => {
                (context + self.start - row_start + 1).saturating_sub(window as usize)
            }
            _ => 0,
        };
        let block = self.pages.block_size;
        let table = &self.rows.block_tables[self.row * self.rows.pages_per_row..];
        let stride = self.pages.token_stride();
        let mut at = first;
        let mut scores = [0.0f32; KEYS];
        while at < last {
            let (page, offset) = (table[at / block] as usize, at % block);
            let count = KEYS.min(block - offset).min(last - at);
            let base = page * self.pages.page_stride + offset * stride + self.kv_head * dim;
            let keys = &self.storage[base + self.pages.key_offset..][..(count - 1) * stride + dim];
            let values = &self.storage[base + self.pages.value_offset..][..(count - 1) * stride + dim];
            for q in 0..queries {
                let token = self.start + q / self.group;
                let index = context + token - row_start;
                if self.rows.ancestors.is_none() && at > index {
                    continue;
                }
                let head = self.kv_head * self.group + q % self.group;
                let query = &self.query[(token * self.heads + head) * dim..][..dim];
                let target = &mut acc[q * dim..][..dim];
                #[cfg(target_arch = "x86_64")]
                if AVX2 {
                    // SAFETY: `dispatch` proved the instructions and the size; the slices end with the last key.
                    unsafe { avx2::dots(query, keys, stride, count, &mut scores) };
                    self.shape_scores(&mut scores[..count], token, row_start, context, at);
                    // SAFETY: as above.
                    unsafe { avx2::absorb(&mut scores, count, values, stride, target, &mut maximum[q], &mut sum[q]) };
                    continue;
                }
                dots(query, keys, stride, &mut scores[..count]);
                self.shape_scores(&mut scores[..count], token, row_start, context, at);
                absorb(&scores[..count], values, stride, target, &mut maximum[q], &mut sum[q]);
            }
            at += count;
        }
        for q in 0..queries {
            let (token, head) = (self.start + q / self.group, self.kv_head * self.group + q % self.group);
            let mut total = sum[q];
            if let Some(sinks) = self.options.sinks {
                total += (sinks[head] - maximum[q]).exp(); // of either sign: a sink may be above every score
            }
            let factor = if total > 0.0 { 1.0 / total } else { 0.0 };
            // SAFETY: tokens of a tile and heads of a KV head belong to this task alone; `check` proved the length.
            let target = unsafe { std::slice::from_raw_parts_mut(out.0.add((token * self.heads + head) * dim), dim) };
            for (o, a) in target.iter_mut().zip(&acc[q * dim..][..dim]) {
                *o = a * factor;
            }
        }
    }

    /// Scale, softcap and mask in place; `at` is the context index of the first key.
    #[inline(always)]
    fn shape_scores(&self, scores: &mut [f32], token: usize, row_start: usize, context: usize, at: usize) {
        for s in scores.iter_mut() {
            *s *= self.options.scale;
        }
        if let Some(cap) = self.options.softcap {
            for s in scores.iter_mut() {
                *s = cap * (*s / cap).tanh();
            }
        }
        let index = context + token - row_start;
        if let Some(ancestors) = self.rows.ancestors {
            let bits = ancestors[token];
            for (j, s) in scores.iter_mut().enumerate() {
                let key = at + j;
                let own = key.wrapping_sub(context);
                let hidden = key >= context && (own >= 64 || bits >> own & 1 == 0);
                let far = self
                    .options
                    .window
                    .is_some_and(|w| self.position(row_start, context, key) <= self.position_of(token, index) - w);
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
    fn position(&self, row_start: usize, context: usize, key: usize) -> i32 {
        if key < context { key as i32 } else { self.position_of(row_start + key - context, key) }
    }

    fn position_of(&self, token: usize, index: usize) -> i32 {
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
