//! The slab that gives rows their handles. Knows nothing of what a row is doing.

use crate::sequence::{Handle, Sequence};

/// All rows by handle.
#[derive(Clone, Debug, Default)]
pub struct Slab {
    slots: Vec<Option<Box<Sequence>>>,
    vacant: Vec<Handle>,
}

impl Slab {
    /// Stores a row.
    pub fn insert(&mut self, sequence: Sequence) -> Handle {
        let boxed = Some(Box::new(sequence));
        if let Some(handle) = self.vacant.pop() {
            self.slots[handle as usize] = boxed;
            handle
        } else {
            self.slots.push(boxed);
            (self.slots.len() - 1) as Handle
        }
    }

    /// Takes a row out; its handle may be given to another from now on.
    pub fn remove(&mut self, handle: Handle) -> Option<Box<Sequence>> {
        let sequence = self.slots.get_mut(handle as usize)?.take()?;
        self.vacant.push(handle);
        Some(sequence)
    }

    /// The row, if the handle is in use.
    #[must_use]
    pub fn get(&self, handle: Handle) -> Option<&Sequence> {
        self.slots.get(handle as usize)?.as_deref()
    }

    /// Rows in handle order, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.slots.iter_mut().filter_map(|slot| slot.as_deref_mut())
    }

    /// Rows in handle order.
    pub fn iter(&self) -> impl Iterator<Item = (Handle, &Sequence)> {
        self.slots.iter().enumerate().filter_map(|(i, slot)| slot.as_deref().map(|s| (i as Handle, s)))
    }
}

impl std::ops::Index<Handle> for Slab {
    type Output = Sequence;

    fn index(&self, handle: Handle) -> &Sequence {
        self.slots[handle as usize].as_deref().expect("a handle in a queue or a plan names a row")
    }
}

impl std::ops::IndexMut<Handle> for Slab {
    fn index_mut(&mut self, handle: Handle) -> &mut Sequence {
        self.slots[handle as usize].as_deref_mut().expect("a handle in a queue or a plan names a row")
    }
}
