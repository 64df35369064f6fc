//! Memory for packed weights: cache lines handed out of large blocks on huge pages. Weights are read from front to back
//! once a step, and with small pages the prefetchers stop every 4 kB.

use std::alloc::{Layout, alloc, dealloc};
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};

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
    fn new(bytes: usize) -> Result<Self, String> {
        let refused = || format!("no memory for {bytes} bytes of packed weights");
        let layout = Layout::from_size_align(bytes.next_multiple_of(HUGE), HUGE).map_err(|_| refused())?;
        // SAFETY: the size is not zero.
        #[allow(clippy::cast_ptr_alignment)] // to two megabytes
        let at = unsafe { alloc(layout) }.cast::<Line>();
        if at.is_null() {
            return Err(refused());
        }
        // NOTE: before anything is written: a page that was touched stays small.
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        crate::simd::want_huge_pages(at.cast(), layout.size());
        // SAFETY: the memory is ours and of this size.
        unsafe { at.cast::<u8>().write_bytes(0, layout.size()) };
        Ok(Self { at, layout })
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
    ///
    /// # Errors
    /// A message when there is no memory for them.
    pub fn zeros(len: usize) -> Result<Self, String> {
        /// The block that is being filled, while any of its matrices lives, and how many of its lines are taken.
        static OPEN: Mutex<(Weak<Block>, usize)> = Mutex::new((Weak::new(), 0));
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |block: &Arc<Block>| (open.1 + len) * size_of::<Line>() <= block.layout.size();
        let block = if let Some(block) = open.0.upgrade().filter(fits) {
            block
        } else {
            let block = Arc::new(Block::new(BLOCK_BYTES.max(len * size_of::<Line>()))?);
            *open = (Arc::downgrade(&block), 0);
            block
        };
        let start = open.1;
        open.1 += len;
        Ok(Self { block, start, len })
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
        let mut all: Vec<Lines> = [1, 100, 40_000, 600_000, 7].into_iter().map(|n| Lines::zeros(n).unwrap()).collect();
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
            let mut lines = Lines::zeros(1000).unwrap();
            assert!(lines.iter().all(|l| l.0 == [0; 16]));
            lines.as_mut_slice().fill(Line([9; 16]));
        }
    }
}
