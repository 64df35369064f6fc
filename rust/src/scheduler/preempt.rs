//! Taking pages back: from a row's surplus, from its draft model, from the whole row.

use super::Scheduler;
use crate::sequence::{Handle, Sequence, SequenceStatus};

/// Decode steps a row waits before it drafts again, when its draft pages were taken; doubles each time.
const FIRST_BACK_OFF: u64 = 16;
const LONGEST_BACK_OFF: u64 = 1024;

impl Scheduler {
    /// Puts a running row back to the front of the queue. Its committed tokens stay, and so do its full pages as long
    /// as the prefix cache can keep them; drafts of an outstanding step are wasted. False when it is not running.
    pub fn preempt(&mut self, handle: Handle) -> bool {
        let running = self.rows.get(handle).is_some_and(Sequence::is_running);
        if running {
            self.preempt_row(handle);
        }
        running
    }

    pub(super) fn preempt_row(&mut self, handle: Handle) {
        self.publish(handle);
        self.release_all(handle);
        let sequence = &mut self.rows[handle];
        sequence.status = SequenceStatus::Waiting;
        sequence.counters.preempted += 1;
        self.num_preempted += 1;
        self.queue.push_preempted(handle, sequence.seniority);
        self.running.retain(|&other| other != handle);
    }

    /// Gives every page of a row back and ends its stay, so that no late result can land.
    pub(super) fn release_all(&mut self, handle: Handle) {
        self.release_draft(handle);
        let sequence = &mut self.rows[handle];
        self.num_prefilling -= usize::from(sequence.status == SequenceStatus::Prefilling);
        self.pool.truncate(&mut sequence.pages, 0);
        sequence.num_computed = 0;
        sequence.num_published = 0;
        sequence.residency = 0;
        sequence.counters.wasted += std::mem::take(&mut sequence.in_flight) as u32;
    }

    /// Gives a row's draft pages back; returns how many.
    pub(super) fn release_draft(&mut self, handle: Handle) -> usize {
        let draft = &mut self.rows[handle].draft;
        draft.computed = 0;
        draft.residency = 0;
        self.pool.truncate(&mut draft.pages, 0)
    }

    /// Gives back draft pages of one row or of all; returns how many pages. Rows that still use the draft model catch
    /// up before they draft again.
    pub fn drop_draft(&mut self, handle: Option<Handle>) -> usize {
        match handle {
            Some(handle) if self.rows.get(handle).is_some() => self.release_draft(handle),
            Some(_) => 0,
            None => (0..self.running.len()).map(|i| self.release_draft(self.running[i])).sum(),
        }
    }

    /// Takes the draft pages of the row that gains least from drafting. False when no row has any.
    pub(super) fn drop_cheapest_draft(&mut self) -> bool {
        let drafting = self.running.iter().copied().filter(|&handle| !self.rows[handle].draft.pages.is_empty());
        let cheapest = drafting.min_by(|&a, &b| {
            let key = |handle: Handle| {
                let sequence = &self.rows[handle];
                (sequence.draft.resume_at <= self.decode_steps, sequence.acceptance())
            };
            let (a, b) = (key(a), key(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        });
        if let Some(handle) = cheapest {
            self.release_draft(handle);
            self.back_off(handle);
            self.num_draft_dropped += 1;
        }
        cheapest.is_some()
    }

    /// Keeps a row from drafting for a while, longer each time, so that pages do not go back and forth.
    pub(super) fn back_off(&mut self, handle: Handle) {
        let draft = &mut self.rows[handle].draft;
        let wait = (FIRST_BACK_OFF << draft.drops.min(16)).min(LONGEST_BACK_OFF);
        draft.resume_at = draft.resume_at.max(self.decode_steps + wait);
        draft.drops += 1;
    }

    /// Gives back pages past the committed tokens: what rejected drafts had reserved.
    pub(super) fn trim(&mut self, handle: Handle) {
        let sequence = &mut self.rows[handle];
        let committed = sequence.num_committed();
        if (sequence.pages.len() - 1) * self.config.block_size >= committed {
            self.pool.truncate(&mut sequence.pages, self.config.target_pages(committed));
        }
        if !sequence.draft.pages.is_empty() {
            let keep = self.config.draft_pages(sequence.draft.computed);
            self.pool.truncate(&mut sequence.draft.pages, keep);
        }
    }
}
