//! A task of attention in groups of sixteen (token, head) pairs: keys go by in blocks that begin at multiples of 64 of
//! the context, and every group of the task takes its turn at a block while the block is in the caches. Where a task
//! has several KV heads and few pairs of each, as when decoding, a group holds pairs of several KV heads: of one's keys
//! the others' lanes get products with zero, which change no bit as long as keys are finite (an infinite one makes all
//! heads of its row NaN, not its own only).
//!
//! Owns the order of the work and the scratch memory; the products are a `Kernel`'s: `attention_f32`, `attention_amx`.
//! The running maximum and sum are those of `attention_task`.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use crate::attention::{MOST_ROUNDED, Shared, Stored};
use crate::attention_avx512::{LANES, Line, Running, Shrink, cap_scores, halves};
use crate::attention_blocks::{Ahead, BLOCK, Block};
use crate::attention_sight::Sight;
use crate::attention_task::Task;

/// The two products of attention, for one dtype of pages and one set of instructions.
///
/// All methods need those instructions and the sizes that they state; `dim` is the head size.
pub trait Kernel<E> {
    /// Lines of scores are computed in multiples of this, a divisor of `BLOCK` and a multiple of 4.
    const STEP: usize;
    /// Lines of packed queries of one group, and of what is made of a block's keys and of its values.
    fn lines(dim: usize) -> [usize; 3];
    /// Steps of `Ahead` in a whole block: those of `take_values`, and those of `scores` and `absorb`, both of one KV head.
    fn steps(dim: usize) -> (usize, usize);
    /// A whole task, as `run` or in a way of its own; safe where `run` is.
    unsafe fn run(task: &Task<'_, E>, after: Option<&Task<'_, E>>, out: Shared)
    where
        Self: Sized,
        E: Stored,
    {
        // SAFETY: the caller's.
        unsafe { run::<E, Self>(task, after, out) }
    }
    /// Before a task, and after it.
    unsafe fn begin();
    unsafe fn end();
    /// Queries into `packed`, of each lane `dim` numbers.
    unsafe fn pack(queries: &[*const f32; LANES], dim: usize, packed: *mut Line);
    /// What is done with a block once for all groups of a KV head.
    unsafe fn take_keys(block: &mut Block<E>, dim: usize, keys: *mut Line);
    unsafe fn take_values(block: &Block<E>, dim: usize, values: *mut Line, ahead: &mut Ahead<E>);
    /// `n` lines of raw scores, `n` being a block's count rounded up to `STEP`; those past the count may be anything. Of
    /// several KV heads the sum: their packed queries and what was made of their blocks stand one after the other.
    unsafe fn scores(
        packed: *const Line,
        blocks: &[Block<E>],
        dim: usize,
        keys: *const Line,
        scores: *mut Line,
        ahead: &mut Ahead<E>,
    );
    /// Weights from scores, in place or wherever this kernel's `absorb` looks for them: in the `BLOCK` lines after.
    unsafe fn weigh(scores: *mut Line, n: usize, factor: f32, running: &mut Running) -> Shrink;
    /// `sums` = `sums` * shrink + weights * values, for these lanes at least: `dim` lines in this kernel's order.
    #[allow(clippy::too_many_arguments)]
    unsafe fn absorb(
        scores: *const Line,
        block: &Block<E>,
        dim: usize,
        values: *const Line,
        shrink: Shrink,
        lanes: Range<usize>,
        sums: *mut Line,
        ahead: &mut Ahead<E>,
    );
    /// The `dim` numbers of a lane, times `factor`, into `out`.
    unsafe fn give(sums: *const Line, lane: usize, dim: usize, factor: f32, out: *mut f32);
}

/// Sixteen lanes of queries, and how far they are.
pub(crate) struct Group {
    /// The first of its KV heads, counted from the task's first, and how many there are.
    pub head: usize,
    pub heads: usize,
    /// Of each of them these (token, head) pairs, one lane each.
    pub pairs: Range<usize>,
    /// Its queries and sums of its first KV head stand here, those of the others behind.
    place: usize,
    pub sight: Sight,
    pub running: Running,
}

impl Group {
    /// All groups of a task, `share` KV heads in each as long as there are so many.
    #[target_feature(enable = "avx512f")]
    pub fn all<E: Stored>(task: &Task<'_, E>, share: usize) -> Vec<Self> {
        let pairs = (task.end - task.start) * task.group;
        let mut groups = Vec::with_capacity(pairs.div_ceil(LANES) * task.span.div_ceil(share));
        let mut place = 0;
        for head in (0..task.span).step_by(share) {
            let heads = share.min(task.span - head);
            for start in (0..pairs).step_by(LANES) {
                let pairs = start..pairs.min(start + LANES);
                // Lanes without a query do as the last pair does.
                let of_lanes = std::array::from_fn(|lane| {
                    if lane < heads * pairs.len() { start + lane % pairs.len() } else { pairs.end - 1 }
                });
                let (sight, running) = (Sight::new(task, &of_lanes), Running::new());
                groups.push(Self { head, heads, pairs, place, sight, running });
                place += heads;
            }
        }
        groups
    }

    /// The lanes of its `h`th KV head.
    pub fn lanes(&self, h: usize) -> Range<usize> {
        h * self.pairs.len()..(h + 1) * self.pairs.len()
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// The whole task; `after` is what this thread does next, as far as one can tell.
///
/// # Safety
/// AVX-512 (F, BW, DQ, VL) and what `K` needs; `head_dim` is what `K` takes; `Shared` as for `Task::run`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn run<E: Stored, K: Kernel<E>>(task: &Task<'_, E>, after: Option<&Task<'_, E>>, out: Shared) {
    let dim = task.pages.head_dim;
    let pairs = (task.end - task.start) * task.group;
    // KV heads that share a group, and groups of each such set.
    let share = (LANES / pairs).clamp(1, task.span);
    let each = pairs.div_ceil(LANES);
    let [query_lines, key_lines, value_lines] = K::lines(dim);
    let zeros = (task.span * dim).div_ceil(LANES);
    let needed = each * task.span * (query_lines + dim) + 2 * BLOCK + share * key_lines + value_lines + zeros;
    SCRATCH.with_borrow_mut(|lines| {
        lines.resize(needed.max(lines.len()), Line([0.0; LANES]));
        let queries = lines.as_mut_ptr();
        // SAFETY: the parts add up to `needed`; pointers into pages are of keys that `check` proved to be there.
        unsafe {
            let all_sums = queries.add(each * task.span * query_lines);
            let scores = all_sums.add(each * task.span * dim);
            let keys = scores.add(2 * BLOCK);
            let values = keys.add(share * key_lines);
            let zero = values.add(value_lines);
            zero.write_bytes(0, zeros);
            all_sums.write_bytes(0, each * task.span * dim);
            let zero = zero.cast_const();
            K::begin();
            let mut groups = Group::all(task, share);
            for group in &groups {
                for h in 0..group.heads {
                    let mut rows = [zero.cast::<f32>(); LANES];
                    for (lane, pair) in group.lanes(h).zip(group.pairs.clone()) {
                        rows[lane] = task.query.as_ptr().add(task.offset(group.head + h, pair));
                    }
                    K::pack(&rows, dim, queries.add((group.place + h) * query_lines));
                }
            }
            let (first, last) = task.keys();
            let mut at = first - first % BLOCK;
            let mut base = [Block::new(zero.cast()); 2];
            let [mut now, mut next] = base.each_mut();
            let mut blocks = vec![*now; share];
            now.find(task, at, (first, last), zero.cast());
            let steps = task.span * (K::steps(dim).0 + each * K::steps(dim).1);
            while at < last {
                let mut ahead = Ahead::new(None, 0, 0);
                if at + BLOCK < last {
                    next.find(task, at + BLOCK, (first, last), zero.cast());
                    ahead = Ahead::new(Some(next), task.span * dim, steps);
                } else if let Some(after) = after {
                    let (first, last) = after.keys();
                    next.find(after, first - first % BLOCK, (first, last), zero.cast());
                    ahead = Ahead::new(Some(next), after.span * dim, steps);
                }
                for set in groups.chunks_exact_mut(each) {
                    let (head, heads) = (set[0].head, set[0].heads);
                    for (h, block) in blocks[..heads].iter_mut().enumerate() {
                        *block = now.beside((head + h) * dim);
                        K::take_keys(block, dim, keys.add(h * key_lines));
                    }
                    if heads == 1 {
                        K::take_values(&blocks[0], dim, values, &mut ahead); // for all groups
                    }
                    for group in set.iter_mut() {
                        if group.sight.nothing(at) {
                            continue; // would change no bit
                        }
                        let queries = queries.add(group.place * query_lines);
                        K::scores(queries, &blocks[..heads], dim, keys, scores, &mut ahead);
                        let n = now.count.next_multiple_of(K::STEP);
                        let mut factor = task.options.scale * std::f32::consts::LOG2_E;
                        if let Some(cap) = task.options.softcap {
                            cap_scores(scores, n, task.options.scale, cap);
                            factor = 1.0;
                        }
                        if group.sight.partly(at, n, (first, last), task) {
                            group.sight.hide(at, n, (first, last), task, scores);
                        }
                        let shrink = K::weigh(scores, n, factor, &mut group.running);
                        for (h, block) in blocks[..heads].iter().enumerate() {
                            let sums = all_sums.add((group.place + h) * dim);
                            if heads > 1 {
                                K::take_values(block, dim, values, &mut ahead);
                            }
                            K::absorb(scores, block, dim, values, shrink, group.lanes(h), sums, &mut ahead);
                        }
                    }
                }
                std::mem::swap(&mut now, &mut next);
                at += BLOCK;
            }
            K::end();
            for group in &groups {
                for h in 0..group.heads {
                    let sums = all_sums.add((group.place + h) * dim);
                    finish::<E, K>(task, group, h, sums, out);
                }
            }
        }
    });
}

/// Write what a group has of its `h`th KV head.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn finish<E: Stored, K: Kernel<E>>(
    task: &Task<'_, E>,
    group: &Group,
    h: usize,
    sums: *const Line,
    out: Shared,
) {
    let (mut maximum, mut sum) = (Line([0.0; LANES]), Line([0.0; LANES]));
    // SAFETY: the caller's.
    unsafe {
        _mm512_store_ps(maximum.0.as_mut_ptr(), group.running.maximum);
        _mm512_store_ps(sum.0.as_mut_ptr(), group.running.sum);
        for (lane, pair) in group.lanes(h).zip(group.pairs.clone()) {
            let mut total = sum.0[lane];
            if let Some(sinks) = task.options.sinks {
                let sink = sinks[task.head(group.head + h, pair)] * std::f32::consts::LOG2_E;
                total += (sink - maximum.0[lane]).exp2(); // of either sign: a sink may be above every score
            }
            let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
            let dim = task.pages.head_dim;
            if out.half.is_null() {
                K::give(sums, lane, dim, factor, out.at.add(task.offset(group.head + h, pair)));
                continue;
            }
            let mut numbers = [Line([0.0; LANES]); MOST_ROUNDED / LANES];
            K::give(sums, lane, dim, factor, numbers.as_mut_ptr().cast());
            let to = out.half.add(task.token(pair) * out.stride + task.head(group.head + h, pair) * dim);
            for (i, line) in numbers[..dim / LANES].iter().enumerate() {
                _mm256_storeu_si256(to.add(i * LANES).cast(), halves(_mm512_load_ps(line.0.as_ptr())));
            }
        }
    }
}
