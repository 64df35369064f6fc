//! Memory for activations: begins at a cache line (a tile's rows would lie in two lines each), on huge pages where there is
//! much of it, and zeros at first. What it held is gone when it grows.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};

const LINE: usize = 64;
const HUGE: usize = 2 << 20;

pub(crate) struct Room<T> {
    at: *mut T,
    len: usize,
    layout: Layout,
}

// SAFETY: plain memory that it owns.
unsafe impl<T: Send> Send for Room<T> {}
unsafe impl<T: Sync> Sync for Room<T> {}

/// Numbers that are zero when their bits are.
pub(crate) trait Zero: Copy {}
impl Zero for f32 {}
impl Zero for u16 {}
impl Zero for i8 {}

impl<T: Zero> Room<T> {
    pub(crate) const fn new() -> Self {
        Self { at: std::ptr::dangling_mut(), len: 0, layout: Layout::new::<()>() }
    }

    /// Make it hold at least `len` numbers.
    pub(crate) fn fit(&mut self, len: usize) {
        if len <= self.len {
            return;
        }
        let align = if len * size_of::<T>() < HUGE / 2 { LINE } else { HUGE };
        let layout =
            Layout::array::<T>(len).and_then(|l| l.align_to(align)).expect("a size that memory has").pad_to_align();
        *self = Self::new();
        // SAFETY: the size is not zero; the memory is ours and of this size.
        unsafe {
            let at = alloc(layout);
            if at.is_null() {
                handle_alloc_error(layout);
            }
            // NOTE: before anything is written: a page that was touched stays small.
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            if align == HUGE {
                crate::simd::want_huge_pages(at, layout.size());
            }
            at.write_bytes(0, layout.size());
            *self = Self { at: at.cast(), len, layout };
        }
    }
}

impl<T> Drop for Room<T> {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.at.cast(), self.layout) }
        }
    }
}

impl<T> Deref for Room<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as long as it says, and written.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

impl<T> DerefMut for Room<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_zeroed_and_aligned() {
        let mut room = Room::<u16>::new();
        assert!(room.is_empty());
        for len in [1, 100, 90, 3_000_000] {
            room.fit(len);
            assert!(room.len() >= len && room.as_ptr().addr().is_multiple_of(LINE));
            if room.len() == len {
                assert!(room.iter().all(|&v| v == 0));
            }
            room.fill(7);
        }
    }
}
