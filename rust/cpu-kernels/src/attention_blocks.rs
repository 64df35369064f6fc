//! Where the keys and values of a block stand: pointers into pages, and asking for their memory ahead of time.

use std::arch::x86_64::*;

use crate::attention::Stored;
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
    /// Bytes from a key to the next in each tile of sixteen that stand at even distances, else 0.
    pub strides: [usize; BLOCK / TILE],
}

/// Keys of a tile.
pub const TILE: usize = 16;

impl<E: Stored> Block<E> {
    /// Of nothing but zeros, a row of all of a task's KV heads.
    pub fn new(zero: *const E) -> Self {
        Self { keys: [zero; BLOCK], values: [zero; BLOCK], count: 0, strides: [0; BLOCK / TILE] }
    }

    /// The block at `at` of the task's first KV head, of which the keys in `seen` are real.
    #[inline]
    pub(crate) fn find(&mut self, task: &Task<'_, E>, at: usize, seen: (usize, usize), zero: *const E) {
        self.count = BLOCK.min(seen.1 - at);
        let (mut j, count) = (seen.0.saturating_sub(at), self.count);
        for hidden in [0..j, count..BLOCK] {
            self.keys[hidden.clone()].fill(zero);
            self.values[hidden].fill(zero);
        }
        let stride = task.pages.token_stride();
        self.strides.fill(0);
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
            for tile in j.div_ceil(TILE)..(j + run) / TILE {
                self.strides[tile] = stride * size_of::<E>();
            }
            j += run;
        }
    }

    /// The same block of the KV head that stands `numbers` further.
    #[inline]
    pub fn beside(&self, numbers: usize) -> Self {
        let moved = |rows: &[*const E; BLOCK]| std::array::from_fn(|j| rows[j].wrapping_add(numbers));
        Self { keys: moved(&self.keys), values: moved(&self.values), ..*self }
    }
}

/// Asks for the memory of a block while another is being worked on, some lines at a time: the processor itself guesses no
/// further than the end of a page, and takes no more requests at once than it has places for (a burst of them would wait
/// for memory as loads do). Its tiles take turns, which memory answers a quarter faster than one after the other.
pub struct Ahead<E> {
    block: *const Block<E>,
    tiles: usize,
    /// The line that is next, of a row's `lines`; that row within its tile, keys before values; the tile.
    line: usize,
    row: usize,
    tile: usize,
    lines: usize,
    /// Lines of each step.
    each: usize,
}

impl<E> Ahead<E> {
    /// Of `numbers` numbers of each key and value of `block`, which must stay where it is, in so many steps; of nothing where
    /// there is no block.
    pub fn new(block: Option<&Block<E>>, numbers: usize, steps: usize) -> Self {
        let tiles = block.map_or(0, |b| b.count.div_ceil(TILE));
        let lines = (numbers * size_of::<E>()).div_ceil(64);
        let each = (2 * TILE * tiles * lines).div_ceil(steps.max(1));
        let row = if block.is_some() { 0 } else { 2 * TILE };
        let block = block.map_or(std::ptr::null(), std::ptr::from_ref);
        Self { block, tiles, line: 0, row, tile: 0, lines, each }
    }

    /// Ask for the next lines.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn step(&mut self) {
        for _ in 0..self.each {
            if self.row == 2 * TILE {
                return;
            }
            // SAFETY: there is a block where there are rows; `tile` is below its tiles, and rows within theirs.
            let row = unsafe {
                let block = &*self.block;
                let rows = if self.row < TILE { &block.keys } else { &block.values };
                *rows.get_unchecked(self.tile * TILE + self.row % TILE)
            };
            _mm_prefetch::<_MM_HINT_T1>(row.cast::<i8>().wrapping_add(64 * self.line));
            self.tile += 1;
            if self.tile == self.tiles {
                self.tile = 0;
                self.line += 1;
                if self.line == self.lines {
                    self.line = 0;
                    self.row += 1;
                }
            }
        }
    }
}
