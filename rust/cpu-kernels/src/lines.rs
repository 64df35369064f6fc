//! Memory for packed weights: cache lines handed out of large blocks on huge pages. Weights are read from front to back
//! once a step, and with small pages the prefetchers stop every 4 kB.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use crate::packed::Line;

/// A huge page, and how many a block has at least.
const HUGE: usize = 2 << 20;
const BLOCK_BYTES: usize = 16 * HUGE;

struct Block {
    at: *mut Line,
    layout: Layout,
}

// SAFETY: a block is plain memory; who may write where is the business of `Lines`.
unsafe impl Send for Block {}
unsafe impl Sync for Block {}

impl Block {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.next_multiple_of(HUGE), HUGE).expect("less than the address space");
        // SAFETY: the size is not zero.
        #[allow(clippy::cast_ptr_alignment)] // to two megabytes
        let at = unsafe { alloc_zeroed(layout) }.cast::<Line>();
        if at.is_null() {
            handle_alloc_error(layout);
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        crate::simd::want_huge_pages(at.cast(), layout.size());
        Self { at, layout }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.at.cast(), self.layout) }
    }
}

/// Lines of one matrix. The block that they lie in lives as long as any of its matrices.
pub struct Lines {
    block: Arc<Block>,
    start: usize,
    len: usize,
}

impl Lines {
    /// Zeroed lines.
    #[must_use]
    pub fn zeros(len: usize) -> Self {
        /// The block that is being filled, and how many of its lines are taken.
        static OPEN: Mutex<Option<(Arc<Block>, usize)>> = Mutex::new(None);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody else has a closed model's block: take a fresh one rather than keep that one alive.
        let fits = open.as_ref().is_some_and(|(block, used)| {
            Arc::strong_count(block) > 1 && (used + len) * size_of::<Line>() <= block.layout.size()
        });
        if !fits {
            *open = Some((Arc::new(Block::new(BLOCK_BYTES.max(len * size_of::<Line>()))), 0));
        }
        let (block, used) = open.as_mut().expect("just made");
        let lines = Self { block: Arc::clone(block), start: *used, len };
        *used += len;
        lines
    }

    pub fn as_mut_slice(&mut self) -> &mut [Line] {
        // SAFETY: `zeros` gives each line to one `Lines` only.
        unsafe { std::slice::from_raw_parts_mut(self.block.at.add(self.start), self.len) }
    }
}

impl Deref for Lines {
    type Target = [Line];

    fn deref(&self) -> &[Line] {
        // SAFETY: as above; the memory lives as long as the block.
        unsafe { std::slice::from_raw_parts(self.block.at.add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_do_not_overlap_and_come_zeroed() {
        let mut all: Vec<Lines> = [1, 100, 40_000, 600_000, 7].into_iter().map(Lines::zeros).collect();
        for (i, lines) in all.iter_mut().enumerate() {
            assert!(lines.iter().all(|l| l.0 == [0; 16]));
            lines.as_mut_slice().fill(Line([i as u32; 16]));
        }
        for (i, lines) in all.iter().enumerate() {
            assert!(lines.iter().all(|l| l.0 == [i as u32; 16]));
        }
    }

    #[test]
    fn dropped_matrices_leave_nothing_behind_for_later_ones() {
        for _ in 0..3 {
            let mut lines = Lines::zeros(1000);
            assert!(lines.iter().all(|l| l.0 == [0; 16]));
            lines.as_mut_slice().fill(Line([9; 16]));
        }
    }
}
