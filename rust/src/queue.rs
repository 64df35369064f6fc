//! The waiting queue and its admission order. Preempted rows come first, oldest first; then fresh rows in order of
//! arrival, except that a row whose first page equals that of a row still waiting is served with it, and such rows
//! stand in token order, so that the longest common prefixes are neighbours. Knows nothing of pages or budgets.
//!
//! Nobody starves: only rows of the same window (a shard's next [`WINDOW`] arrivals) change places.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::prefix::{BuildKeyHasher, PageHash, ROOT, chain};
use crate::sequence::Handle;

/// How many arrivals may be reordered among themselves.
pub const WINDOW: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ticket {
    window: u64,
    /// Arrival of the first row of the group.
    group: u64,
    prompt: Arc<[i32]>,
    arrival: u64,
}

#[derive(Clone, Debug)]
struct Group {
    window: u64,
    arrival: u64,
    members: usize,
}

/// Rows that wait. Every operation takes logarithmic time.
#[derive(Clone, Debug)]
pub struct WaitingQueue {
    page_len: usize,
    preempted: BTreeSet<(u64, Handle)>,
    fresh: BTreeMap<Ticket, Handle>,
    tickets: HashMap<Handle, Ticket>,
    groups: HashMap<PageHash, Group, BuildKeyHasher>,
    arrivals: u64,
    window: u64,
    window_left: usize,
    window_shard: Option<u32>,
}

impl WaitingQueue {
    /// An empty queue; rows are grouped by their first `page_len` tokens.
    #[must_use]
    pub fn new(page_len: usize) -> Self {
        Self {
            page_len,
            preempted: BTreeSet::new(),
            fresh: BTreeMap::new(),
            tickets: HashMap::new(),
            groups: HashMap::default(),
            arrivals: 0,
            window: 0,
            window_left: 0,
            window_shard: None,
        }
    }

    /// Rows that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.preempted.len() + self.fresh.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Queues a fresh row.
    pub fn push(&mut self, handle: Handle, shard: u32, prompt: Arc<[i32]>) {
        if self.window_left == 0 || self.window_shard != Some(shard) {
            self.window += 1;
            self.window_left = WINDOW;
            self.window_shard = Some(shard);
        }
        self.window_left -= 1;
        let arrival = self.arrivals;
        self.arrivals += 1;
        let mut group = arrival;
        if let Some(name) = self.first_page(&prompt) {
            let entry = self.groups.entry(name).or_insert(Group { window: self.window, arrival, members: 0 });
            if entry.window != self.window {
                *entry = Group { window: self.window, arrival, members: 0 };
            }
            entry.members += 1;
            group = entry.arrival;
        }
        let ticket = Ticket { window: self.window, group, prompt, arrival };
        self.tickets.insert(handle, ticket.clone());
        self.fresh.insert(ticket, handle);
    }

    /// Puts a preempted row in front. `seniority`: the order in which rows first ran.
    pub fn push_preempted(&mut self, handle: Handle, seniority: u64) {
        self.preempted.insert((seniority, handle));
    }

    /// Waiting rows in admission order.
    pub fn iter(&self) -> impl Iterator<Item = Handle> + '_ {
        self.preempted.iter().map(|&(_, handle)| handle).chain(self.fresh.values().copied())
    }

    /// Takes a row out. `seniority` as given to [`Self::push_preempted`], if it was.
    pub fn remove(&mut self, handle: Handle, seniority: u64) -> bool {
        if let Some(ticket) = self.tickets.remove(&handle) {
            if let Some(name) = self.first_page(&ticket.prompt)
                && let Some(group) = self.groups.get_mut(&name)
                && group.window == ticket.window
            {
                group.members -= 1;
                if group.members == 0 {
                    self.groups.remove(&name);
                }
            }
            return self.fresh.remove(&ticket).is_some();
        }
        self.preempted.remove(&(seniority, handle))
    }

    fn first_page(&self, prompt: &[i32]) -> Option<PageHash> {
        prompt.get(..self.page_len).map(|page| chain(ROOT, page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: &WaitingQueue) -> Vec<Handle> {
        queue.iter().collect()
    }

    #[test]
    fn arrival_order_with_common_prefixes_together() {
        let mut queue = WaitingQueue::new(2);
        queue.push(0, 0, [1, 1, 5].into());
        queue.push(1, 0, [2, 2, 9].into());
        queue.push(2, 0, [1, 1, 4, 8].into());
        queue.push(3, 0, [7].into());
        queue.push(4, 0, [2, 2, 9].into());
        queue.push(5, 0, [1, 1, 5, 0].into());
        assert_eq!(order(&queue), [2, 0, 5, 1, 4, 3]);
        queue.push_preempted(9, 3);
        queue.push_preempted(8, 1);
        assert_eq!(order(&queue), [8, 9, 2, 0, 5, 1, 4, 3]);
        assert!(queue.remove(0, 0) && queue.remove(9, 3) && queue.remove(1, 0));
        assert!(!queue.remove(0, 0) && !queue.remove(9, 1));
        assert_eq!(order(&queue), [8, 2, 5, 4, 3]);
    }

    #[test]
    fn a_favoured_prefix_overtakes_only_inside_its_window() {
        let mut queue = WaitingQueue::new(1);
        queue.push(0, 0, [1].into());
        queue.push(1, 0, [2].into());
        for handle in 2..2 * WINDOW as u32 {
            queue.push(handle, 0, [1, handle as i32].into());
        }
        let overtakers = queue.iter().position(|handle| handle == 1).unwrap();
        assert!(overtakers < WINDOW, "{overtakers} rows went first");
        queue.push(u32::MAX, 1, [1].into());
        assert_eq!(queue.iter().last(), Some(u32::MAX), "another shard comes later");
    }
}
