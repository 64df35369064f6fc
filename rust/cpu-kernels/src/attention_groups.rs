//! A task of attention in groups of sixteen (token, head) pairs: keys go by in blocks that begin at multiples of 64 of
//! the context, and every group of the tile takes its turn at a block while the block is in the first cache.
//!
//! Owns the order of the work, the masks and the scratch memory; the products are a `Kernel`'s: `attention_f32`,
//! `attention_amx`. The running maximum and sum are those of `attention_task`.

use std::arch::x86_64::*;
use std::cell::RefCell;

use crate::attention::{Shared, Stored};
use crate::attention_avx512::{LANES, Line, Running, Shrink, cap_scores};
use crate::attention_task::Task;

/// Keys of a block.
pub const BLOCK: usize = 64;

/// Where a block's keys and values are; those that no query of the tile sees are a row of zeros, so that whatever
/// stands in memory that is not the row's reaches no sum.
#[derive(Clone, Copy)]
pub struct Block<E> {
    pub keys: [*const E; BLOCK],
    pub values: [*const E; BLOCK],
    /// Keys up to the last that any query sees.
    pub count: usize,
}

/// The two products of attention, for one dtype of pages and one set of instructions.
///
/// All methods need those instructions and the sizes that they state; `dim` is the head size.
pub trait Kernel<E> {
    /// Lines of scores are computed in multiples of this, a divisor of `BLOCK` and a multiple of 4.
    const STEP: usize;
    /// Lines of packed queries of one group, and of what is made of a block for all groups.
    fn lines(dim: usize) -> (usize, usize);
    /// Before a task, and after it.
    unsafe fn begin();
    unsafe fn end();
    /// Queries into `packed`, of each lane `dim` numbers.
    unsafe fn pack(queries: &[*const f32; LANES], dim: usize, packed: *mut Line);
    /// What is done with a block once for all groups.
    unsafe fn take(block: &mut Block<E>, dim: usize, shared: *mut Line);
    /// `n` lines of raw scores, `n` being `block.count` rounded up to `STEP`; those past the count may be anything.
    unsafe fn scores(packed: *const Line, block: &Block<E>, dim: usize, shared: *const Line, scores: *mut Line);
    /// Weights from scores, in place or wherever this kernel's `absorb` looks for them: in the `BLOCK` lines after.
    unsafe fn weigh(scores: *mut Line, n: usize, factor: f32, running: &mut Running) -> Shrink;
    /// `sums` = `sums` * shrink + weights * values, for the first `lanes` lanes: `dim` lines in this kernel's order.
    #[allow(clippy::too_many_arguments)]
    unsafe fn absorb(
        scores: *const Line,
        block: &Block<E>,
        dim: usize,
        shared: *const Line,
        shrink: Shrink,
        lanes: usize,
        sums: *mut Line,
    );
    /// The `dim` numbers of a lane, times `factor`, into `out`.
    unsafe fn give(sums: *const Line, lane: usize, dim: usize, factor: f32, out: *mut f32);
}

/// What each lane of a group may see.
struct Sight {
    /// Last context index (causal), or the own tokens as bits (tree: low and high half).
    last: __m512i,
    own: [__m512i; 2],
    /// Positions above this only.
    above: __m512i,
    /// The least `last`, and the greatest `above`, of all lanes; and the greatest `last`.
    all_to: i32,
    all_above: i32,
    any_to: i32,
}

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// The whole task.
///
/// # Safety
/// AVX-512 (F, BW, DQ, VL) and what `K` needs; `head_dim` is what `K` takes; `Shared` as for `Task::run`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn run<E: Stored, K: Kernel<E>>(task: &Task<'_, E>, out: Shared) {
    let dim = task.pages.head_dim;
    let pairs = (task.end - task.start) * task.group;
    let groups = pairs.div_ceil(LANES);
    let (query_lines, shared_lines) = K::lines(dim);
    let zeros = dim.div_ceil(LANES);
    let needed = groups * (query_lines + dim) + 2 * BLOCK + shared_lines + zeros;
    SCRATCH.with_borrow_mut(|lines| {
        lines.resize(needed.max(lines.len()), Line([0.0; LANES]));
        let queries = lines.as_mut_ptr();
        // SAFETY: the parts add up to `needed`; pointers into pages are of keys that `check` proved to be there.
        unsafe {
            let sums = queries.add(groups * query_lines);
            let scores = sums.add(groups * dim);
            let shared = scores.add(2 * BLOCK);
            let zero = shared.add(shared_lines);
            zero.write_bytes(0, zeros);
            sums.write_bytes(0, groups * dim);
            K::begin();
            let mut all: Vec<(Sight, Running)> = Vec::with_capacity(groups);
            for g in 0..groups {
                let mut rows = [zero.cast_const().cast::<f32>(); LANES];
                for (lane, row) in rows.iter_mut().enumerate().take(pairs - g * LANES) {
                    *row = task.query.as_ptr().add(task.offset(g * LANES + lane));
                }
                K::pack(&rows, dim, queries.add(g * query_lines));
                all.push((Sight::new(task, g * LANES, pairs), Running::new()));
            }
            let (first, last) = task.keys();
            let begin = first - first % BLOCK;
            let mut at = begin;
            let zero = zero.cast_const().cast();
            let mut blocks = [Block { keys: [zero; BLOCK], values: [zero; BLOCK], count: 0 }; 2];
            let [mut block, mut next] = blocks.each_mut();
            block.find(task, at, (first, last), zero);
            while at < last {
                if at + BLOCK < last {
                    next.find(task, at + BLOCK, (first, last), zero);
                    next.fetch(dim);
                } else if task.kv_head + 1 < task.pages.kv_heads {
                    // Most likely this thread's next task, and what lies beside this one's keys.
                    let beside = Task { kv_head: task.kv_head + 1, ..*task };
                    next.find(&beside, begin, (first, last), zero);
                    next.fetch(dim);
                }
                K::take(block, dim, shared);
                let n = block.count.next_multiple_of(K::STEP);
                for (g, (sight, running)) in all.iter_mut().enumerate() {
                    if sight.nothing(at) {
                        continue; // would change no bit
                    }
                    K::scores(queries.add(g * query_lines), block, dim, shared, scores);
                    let mut factor = task.options.scale * std::f32::consts::LOG2_E;
                    if let Some(cap) = task.options.softcap {
                        cap_scores(scores, n, task.options.scale, cap);
                        factor = 1.0;
                    }
                    if sight.partly(at, n, (first, last), task) {
                        sight.hide(at, n, (first, last), task, scores);
                    }
                    let shrink = K::weigh(scores, n, factor, running);
                    let lanes = LANES.min(pairs - g * LANES);
                    K::absorb(scores, block, dim, shared, shrink, lanes, sums.add(g * dim));
                }
                std::mem::swap(&mut block, &mut next);
                at += BLOCK;
            }
            K::end();
            for (g, (_, running)) in all.iter().enumerate() {
                let (mut maximum, mut sum) = (Line([0.0; LANES]), Line([0.0; LANES]));
                _mm512_store_ps(maximum.0.as_mut_ptr(), running.maximum);
                _mm512_store_ps(sum.0.as_mut_ptr(), running.sum);
                for lane in 0..LANES.min(pairs - g * LANES) {
                    let pair = g * LANES + lane;
                    let mut total = sum.0[lane];
                    if let Some(sinks) = task.options.sinks {
                        let sink = sinks[task.head(pair)] * std::f32::consts::LOG2_E;
                        total += (sink - maximum.0[lane]).exp2(); // of either sign: a sink may be above every score
                    }
                    let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
                    K::give(sums.add(g * dim), lane, dim, factor, out.0.add(task.offset(pair)));
                }
            }
        }
    });
}

impl<E: Stored> Block<E> {
    /// The block at `at`, of which the keys in `seen` are real.
    #[inline]
    fn find(&mut self, task: &Task<'_, E>, at: usize, seen: (usize, usize), zero: *const E) {
        self.count = BLOCK.min(seen.1 - at);
        let (mut j, count) = (seen.0.saturating_sub(at), self.count);
        for hidden in [0..j, count..BLOCK] {
            self.keys[hidden.clone()].fill(zero);
            self.values[hidden].fill(zero);
        }
        let stride = task.pages.token_stride();
        let table = &task.rows.block_tables[task.row * task.rows.pages_per_row..];
        while j < count {
            let (page, offset) = ((at + j) / task.pages.block_size, (at + j) % task.pages.block_size);
            let run = (task.pages.block_size - offset).min(count - j);
            let base =
                table[page] as usize * task.pages.page_stride + offset * stride + task.kv_head * task.pages.head_dim;
            let keys = task.storage[base + task.pages.key_offset..].as_ptr();
            let values = task.storage[base + task.pages.value_offset..].as_ptr();
            for i in 0..run {
                // Within the page, which lies within the storage.
                self.keys[j + i] = keys.wrapping_add(i * stride);
                self.values[j + i] = values.wrapping_add(i * stride);
            }
            j += run;
        }
    }
}

impl<E> Block<E> {
    /// Ask for the block's memory while another is being worked on: the processor itself guesses no further than the
    /// end of a page.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn fetch(&self, dim: usize) {
        for row in self.keys[..self.count].iter().chain(&self.values[..self.count]) {
            for line in (0..dim * size_of::<E>()).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(row.cast::<i8>().wrapping_add(line));
            }
        }
    }
}

impl Sight {
    #[target_feature(enable = "avx512f")]
    fn new<E: Stored>(task: &Task<'_, E>, first_pair: usize, pairs: usize) -> Self {
        let (mut last, mut low, mut high, mut above) = ([0i32; LANES], [0i32; LANES], [0i32; LANES], [0i32; LANES]);
        for lane in 0..LANES {
            // Lanes without a query do as the last one does.
            let token = task.token((first_pair + lane).min(pairs - 1));
            let index = task.index(token);
            last[lane] = index as i32;
            let mut position = index as i32;
            if let Some(ancestors) = task.rows.ancestors {
                (low[lane], high[lane]) = (ancestors[token] as i32, (ancestors[token] >> 32) as i32);
                position = task.position_of(token, index);
            }
            above[lane] = task.options.window.map_or(i32::MIN, |w| position.saturating_sub(w));
        }
        let load = |v: &[i32; LANES]| unsafe { _mm512_loadu_si512(v.as_ptr().cast()) };
        Sight {
            last: load(&last),
            own: [load(&low), load(&high)],
            above: load(&above),
            all_to: *last.iter().min().unwrap_or(&0),
            all_above: *above.iter().max().unwrap_or(&0),
            any_to: if task.rows.ancestors.is_some() { i32::MAX } else { *last.iter().max().unwrap_or(&0) },
        }
    }

    /// Whether no lane sees any of the block.
    fn nothing(&self, at: usize) -> bool {
        at as i64 > i64::from(self.any_to)
    }

    /// Whether some lane does not see some key of `at..at + n`.
    fn partly<E: Stored>(&self, at: usize, n: usize, seen: (usize, usize), task: &Task<'_, E>) -> bool {
        let to = if task.rows.ancestors.is_some() { task.context() as i64 - 1 } else { i64::from(self.all_to) };
        at < seen.0 || at + n > seen.1 || (at + n) as i64 - 1 > to || at as i64 <= i64::from(self.all_above)
    }

    /// Put scores of what a lane does not see to minus infinity.
    #[target_feature(enable = "avx512f")]
    unsafe fn hide<E: Stored>(&self, at: usize, n: usize, seen: (usize, usize), task: &Task<'_, E>, scores: *mut Line) {
        let context = task.context();
        for j in 0..n {
            let key = at + j;
            let visible = if key < seen.0 || key >= seen.1 {
                0
            } else if task.rows.ancestors.is_none() {
                let key = _mm512_set1_epi32(key as i32);
                _mm512_cmple_epi32_mask(key, self.last) & _mm512_cmpgt_epi32_mask(key, self.above)
            } else {
                let own = match key.checked_sub(context) {
                    None => !0,
                    Some(own) if own < 64 => {
                        _mm512_test_epi32_mask(self.own[own / 32], _mm512_set1_epi32(1 << (own % 32)))
                    }
                    Some(_) => 0,
                };
                own & _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(task.position(key)), self.above)
            };
            // SAFETY: `scores` holds `n` lines.
            unsafe {
                let at = scores.add(j).cast::<f32>();
                _mm512_store_ps(at, _mm512_mask_mov_ps(_mm512_set1_ps(f32::NEG_INFINITY), visible, _mm512_load_ps(at)));
            }
        }
    }
}
