//! Tasks of attention with few (token, head) pairs, as decoding and verifying make them, in bfloat16 with AMX. There
//! memory is the limit: a block of 64 keys comes slower than it is computed. So whatever is done with a block asks, as it
//! goes, for lines of the keys 64 places further on (of the next task's where this one's end), at the rate at which it uses
//! up its own. A phase that asks for nothing is time lost; what is asked for in a burst finds no place to wait in.
//!
//! Owns the order of the work and what is asked for. Sums are formed as in `attention_groups`, to the last bit.

use std::arch::x86_64::*;
use std::cell::RefCell;

use crate::attention::Shared;
use crate::attention_amx::{Tiles, dampen, pack};
use crate::attention_avx512::{LANES, Line, cap_scores, weigh_half};
use crate::attention_blocks::{BLOCK, TILE};
use crate::attention_groups::{Group, finish};
use crate::attention_task::Task;
use crate::tiles::{Configuration, ROW, configure, load, multiply, release, store, zero};

/// Keys of a tile of weights.
const WIDE: usize = 2 * TILE;

/// Whether this is the way: few pairs, and tiles of keys that do not go over the end of a page.
pub fn fits(task: &Task<'_, u16>) -> bool {
    (task.end - task.start) * task.group <= LANES && task.pages.block_size.is_multiple_of(TILE)
}

/// Sixteen keys and their values, of all KV heads of a task.
#[derive(Clone, Copy)]
struct Rows {
    keys: *const u16,
    values: *const u16,
    /// Bytes from one to the next.
    stride: usize,
}

impl Rows {
    /// Those at `at` of the task's row, where they stand in their page.
    #[inline]
    fn of(task: &Task<'_, u16>, at: usize) -> Self {
        let (pages, stride) = (task.pages, task.pages.token_stride());
        let page = task.rows.block_tables[task.row * task.rows.pages_per_row + at / pages.block_size] as usize;
        let base = page * pages.page_stride + at % pages.block_size * stride + task.kv_head * pages.head_dim;
        let keys = task.storage[base + pages.key_offset..].as_ptr();
        let values = task.storage[base + pages.value_offset..].as_ptr();
        Self { keys, values, stride: stride * size_of::<u16>() }
    }

    /// A copy in `to` of those in `seen`, among zeros: what else stands in the page is not the row's, and must reach no sum.
    #[target_feature(enable = "avx512f")]
    unsafe fn only(self, at: usize, seen: (usize, usize), width: usize, to: *mut u16) -> Self {
        for (from, to) in [(self.keys, to), (self.values, to.wrapping_add(TILE * width))] {
            for i in 0..TILE {
                let there = seen.0 <= at + i && at + i < seen.1;
                for d in (0..width).step_by(32) {
                    // SAFETY: rows of `width` numbers, a multiple of 32, and room for twice `TILE` of them.
                    unsafe {
                        let from = from.wrapping_byte_add(i * self.stride).wrapping_add(d);
                        let line = if there { _mm512_loadu_si512(from.cast()) } else { _mm512_setzero_si512() };
                        _mm512_storeu_si512(to.add(i * width + d).cast(), line);
                    }
                }
            }
        }
        Self { keys: to, values: to.wrapping_add(TILE * width), stride: width * size_of::<u16>() }
    }
}

/// What to ask for next: the rows that follow, in this task and then in the next.
struct Walk<'a> {
    task: &'a Task<'a, u16>,
    at: usize,
    last: usize,
    after: Option<&'a Task<'a, u16>>,
}

impl Iterator for Walk<'_> {
    type Item = Rows;

    fn next(&mut self) -> Option<Rows> {
        while self.at >= self.last {
            self.task = self.after.take()?;
            (self.at, self.last) = self.task.keys();
            self.at -= self.at % TILE;
        }
        let rows = Rows::of(self.task, self.at);
        self.at += TILE;
        Some(rows)
    }
}

/// Asks for the memory of up to four tiles of rows, a line of each at a time, keys before values.
struct Ahead {
    now: [*const u8; BLOCK / TILE],
    values: [*const u8; BLOCK / TILE],
    /// Of each tile: where the next line is; lines left of its row; rows left.
    offset: usize,
    line: usize,
    row: usize,
    lines: usize,
    /// Bytes between the end of a row and the next.
    gap: usize,
    /// Lines of each tile for one that is asked for, since a short block must ask for as much.
    times: usize,
}

impl Ahead {
    /// For as many tiles as the block that is being worked on has.
    #[inline]
    fn new(walk: &mut Walk<'_>, tiles: usize, width: usize, zero: *const u16) -> Self {
        let lines = width * size_of::<u16>() / 64;
        let (mut now, mut values) = ([zero.cast::<u8>(); BLOCK / TILE], [zero.cast::<u8>(); BLOCK / TILE]);
        let (mut gap, mut row) = (0, 0);
        for i in 0..tiles {
            let Some(rows) = walk.next() else { break };
            (now[i], values[i]) = (rows.keys.cast(), rows.values.cast());
            (gap, row) = (rows.stride - 64 * lines, 2 * TILE);
        }
        Self { now, values, offset: 0, line: lines, row, lines, gap, times: if tiles > 2 { 1 } else { 2 } }
    }

    /// Ask for the next `n` lines of each tile.
    #[inline]
    fn ask(&mut self, n: usize) {
        for _ in 0..n * self.times {
            if self.row == 0 {
                return;
            }
            for base in self.now {
                // SAFETY: a prefetch may name any address.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(base.wrapping_add(self.offset).cast()) };
            }
            self.offset += 64;
            self.line -= 1;
            if self.line == 0 {
                self.line = self.lines;
                self.offset += self.gap;
                self.row -= 1;
                if self.row == TILE {
                    (self.now, self.offset) = (self.values, 0);
                }
            }
        }
    }

    /// Ask for what is left.
    fn end(&mut self) {
        while self.row > 0 {
            self.ask(1);
        }
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// The whole task; `after` is what this thread does next, as far as one can tell.
///
/// # Safety
/// AMX and AVX-512 with bfloat16; `head_dim` is a multiple of 32; `fits`; `Shared` as for `Task::run`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub unsafe fn run(task: &Task<'_, u16>, after: Option<&Task<'_, u16>>, out: Shared) {
    let dim = task.pages.head_dim;
    let pairs = (task.end - task.start) * task.group;
    let share = (LANES / pairs).clamp(1, task.span);
    let width = task.span * dim;
    let (row_lines, of_values) = (width / 32, BLOCK * dim / 32);
    let needed = width / 2 + width + 2 * BLOCK + 2 * of_values + 4 * TILE * row_lines + row_lines;
    SCRATCH.with_borrow_mut(|lines| {
        lines.resize(needed.max(lines.len()), Line([0.0; LANES]));
        // SAFETY: the parts add up to `needed`; pointers into pages are of keys that `check` proved to be there.
        unsafe {
            let queries = lines.as_mut_ptr();
            let all_sums = queries.add(width / 2);
            let scores = all_sums.add(width);
            let values = scores.add(2 * BLOCK);
            let copies = values.add(2 * of_values);
            let nothing = copies.add(4 * TILE * row_lines);
            nothing.write_bytes(0, row_lines);
            let zero = nothing.cast_const().cast::<u16>();
            all_sums.write_bytes(0, width);
            let mut groups = Group::all(task, share);
            for group in &groups {
                for h in 0..group.heads {
                    let mut rows = [nothing.cast_const().cast::<f32>(); LANES];
                    for (lane, pair) in group.lanes(h).zip(group.pairs.clone()) {
                        rows[lane] = task.query.as_ptr().add(task.offset(group.head + h, pair));
                    }
                    pack(&rows, dim, queries.add((group.head + h) * dim / 2));
                }
            }
            configure(&Configuration::new([pairs, pairs, pairs, pairs, TILE, TILE, TILE, TILE]));
            let seen = task.keys();
            let mut at = seen.0 - seen.0 % BLOCK;
            let mut walk = Walk { task, at: at + BLOCK, last: seen.1, after };
            while at < seen.1 {
                let count = BLOCK.min(seen.1 - at);
                let tiles = count.div_ceil(TILE);
                let mut ahead = Ahead::new(&mut walk, tiles, width, zero);
                let mut block = [Rows { keys: zero, values: zero, stride: 0 }; BLOCK / TILE];
                for (i, rows) in block[..tiles].iter_mut().enumerate() {
                    let at = at + i * TILE;
                    if at + TILE > seen.0 {
                        *rows = Rows::of(task, at);
                        if at < seen.0 || at + TILE > seen.1 {
                            // The first or the last.
                            let place = copies.add(if at < seen.0 { 0 } else { 2 * TILE * row_lines });
                            *rows = rows.only(at, seen, width, place.cast());
                        }
                    }
                }
                let n = count.next_multiple_of(WIDE);
                for group in &mut groups {
                    if group.sight.nothing(at) {
                        continue; // would change no bit
                    }
                    let heads = group.head..group.head + group.heads;
                    let queries = queries.add(group.head * dim / 2);
                    multiply_keys(queries, &block[..tiles], heads.clone(), dim, scores, &mut ahead);
                    let mut factor = task.options.scale * std::f32::consts::LOG2_E;
                    if let Some(cap) = task.options.softcap {
                        cap_scores(scores, n, task.options.scale, cap);
                        factor = 1.0;
                    }
                    if group.sight.partly(at, n, seen, task) {
                        group.sight.hide(at, n, seen, task, scores);
                    }
                    let lines = (group.heads * dim).div_ceil(64);
                    let weights = scores.add(BLOCK);
                    let shrink = weigh_half(scores, n, factor, &mut group.running, weights, || ahead.ask(lines));
                    // The next head's values are interleaved while this one's are multiplied.
                    let place = |head: usize| values.add(head % 2 * of_values);
                    interleave(&block[..n / TILE], heads.start, dim, place(heads.start), &mut ahead);
                    for head in heads.clone() {
                        if head + 1 < heads.end {
                            interleave(&block[..n / TILE], head + 1, dim, place(head + 1), &mut ahead);
                        }
                        let (own, sums) = (group.lanes(head - heads.start), all_sums.add(head * dim));
                        let of_head = sums.add(own.start);
                        let weights = weights.add(own.start);
                        if shrink.1 != 0 {
                            dampen(sums, dim, shrink.0, &own);
                        }
                        absorb(weights, place(head), n / WIDE, dim / LANES, of_head, &mut ahead);
                    }
                }
                ahead.end();
                at += BLOCK;
            }
            release();
            for group in &groups {
                for h in 0..group.heads {
                    let sums = all_sums.add((group.head + h) * dim);
                    finish::<u16, Tiles>(task, group, h, sums, out);
                }
            }
        }
    });
}

/// Scores of up to four tiles, [16 keys, 16 lanes] each, summed over these KV heads of the task.
#[target_feature(enable = "avx512f")]
unsafe fn multiply_keys(
    packed: *const Line,
    block: &[Rows],
    heads: std::ops::Range<usize>,
    dim: usize,
    out: *mut Line,
    ahead: &mut Ahead,
) {
    for (i, two) in block.chunks(2).enumerate() {
        // SAFETY: rows of all heads' numbers, packed queries of as many, room for an even number of tiles.
        unsafe {
            zero!(4);
            zero!(5);
            for d in (0..heads.len() * dim).step_by(32) {
                let from = heads.start * dim + d;
                load!(6, packed.add(d / 2), ROW);
                load!("t1", 7, two[0].keys.add(from), two[0].stride);
                multiply!(4, 7, 6);
                if let Some(second) = two.get(1) {
                    load!("t1", 7, second.keys.add(from), second.stride);
                    multiply!(5, 7, 6);
                }
                ahead.ask(3);
            }
            store!(4, out.add(i * WIDE));
            store!(5, out.add(i * WIDE + TILE));
        }
    }
}

/// A head's values as tiles of [16 pairs of keys, 16 numbers, 2], in the order that `attention_amx::interleave` gives them.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave(block: &[Rows], head: usize, dim: usize, to: *mut Line, ahead: &mut Ahead) {
    for (i, rows) in block.iter().enumerate() {
        // SAFETY: rows of all heads' numbers, and room for all tiles.
        unsafe {
            let to = to.add(i / 2 * (dim / LANES) * TILE + i % 2 * (TILE / 2));
            for pair in 0..TILE / 2 {
                let a = rows.values.byte_add(2 * pair * rows.stride).add(head * dim);
                let b = a.byte_add(rows.stride);
                let to = to.add(pair);
                for x in 0..dim / 32 {
                    let (a, b) = (_mm512_loadu_si512(a.add(32 * x).cast()), _mm512_loadu_si512(b.add(32 * x).cast()));
                    _mm512_store_si512(to.add(32 * x).cast(), _mm512_unpacklo_epi16(a, b));
                    _mm512_store_si512(to.add(32 * x + 16).cast(), _mm512_unpackhi_epi16(a, b));
                }
                ahead.ask(dim.div_ceil(64));
            }
        }
    }
}

/// `sums`, `columns` tiles of [lanes, 16 numbers] that stand as those of sixteen lanes do, += `depth` tiles of weights * values.
unsafe fn absorb(
    weights: *const Line,
    values: *const Line,
    depth: usize,
    columns: usize,
    sums: *mut Line,
    ahead: &mut Ahead,
) {
    // SAFETY: the caller's; an even number of columns.
    unsafe {
        for column in (0..columns).step_by(2) {
            let sums = sums.add(column * LANES);
            load!(0, sums, ROW);
            load!(1, sums.add(LANES), ROW);
            for k in 0..depth {
                let values = values.add((k * columns + column) * TILE);
                load!(2, weights.add(k * LANES), ROW);
                load!(6, values, ROW);
                multiply!(0, 2, 6);
                load!(7, values.add(TILE), ROW);
                multiply!(1, 2, 7);
                ahead.ask(1);
            }
            store!(0, sums);
            store!(1, sums.add(LANES));
        }
    }
}
