//! Prefill steps: chunks of rows that are under way, then rows from the waiting queue while there is room.

use super::Scheduler;
use crate::layout::Capacity;
use crate::sequence::{Handle, SequenceStatus};
use crate::speculation::Method;
use crate::step::RowPlan;

/// Waiting rows looked at in one step. Rows passed over wait for a prefix that is being computed.
const LOOK_AHEAD: usize = 256;

/// What became of a waiting row.
enum Admission {
    Admitted,
    /// Its next prefix page is being computed in this step; one step later it can be shared. It will then need this
    /// many pages.
    Deferred {
        pages: usize,
    },
    NoRoom,
}

impl Scheduler {
    /// Plans a prefill step; leaves the plan empty when no row has anything to prefill.
    pub(super) fn plan_prefill(&mut self, capacity: &Capacity) {
        let mut budget = self.config.max_num_batched_tokens.min(capacity.tokens);
        self.pending.clear();
        if self.num_prefilling > 0 {
            for i in 0..self.running.len() {
                let handle = self.running[i];
                if self.rows[handle].status == SequenceStatus::Prefilling {
                    self.note_pending(handle);
                    budget -= self.plan_chunk(handle, budget);
                }
            }
        }
        self.admit(budget);
    }

    fn admit(&mut self, mut budget: usize) {
        if budget == 0 || self.queue.is_empty() || self.running.len() >= self.max_num_seqs {
            return;
        }
        // Draft pages that running rows are about to ask for, and pages of rows that were passed over.
        let mut spoken_for: usize = self.running.iter().map(|&handle| self.owed_draft_pages(handle)).sum();
        let candidates: Vec<Handle> = self.queue.iter().take(LOOK_AHEAD).collect();
        for handle in candidates {
            if budget == 0 || self.running.len() >= self.max_num_seqs {
                return;
            }
            match self.try_admit(handle, self.watermark() + spoken_for) {
                Admission::Admitted => {
                    spoken_for += self.owed_draft_pages(handle);
                    self.note_pending(handle);
                    budget -= self.plan_chunk(handle, budget);
                }
                Admission::Deferred { pages } => spoken_for += pages,
                Admission::NoRoom => return,
            }
        }
    }

    /// Adds the row's next chunk to the plan; returns its length.
    fn plan_chunk(&mut self, handle: Handle, budget: usize) -> usize {
        let sequence = &self.rows[handle];
        let left = sequence.num_committed() - sequence.num_computed;
        let len = left.min(budget);
        if len > 0 {
            self.plan.rows.push(RowPlan {
                handle,
                residency: sequence.residency,
                start: sequence.num_computed,
                len,
                wants_logits: len == left,
                ..RowPlan::default()
            });
        }
        len
    }

    /// Remembers the full pages this row will have computed, so that others wait for them rather than compute them too.
    fn note_pending(&mut self, handle: Handle) {
        if self.config.prefix_cache {
            let sequence = &mut self.rows[handle];
            let first = sequence.num_computed / self.config.block_size;
            let full = sequence.num_committed() / self.config.block_size;
            let names = sequence.page_hashes(full, self.config.block_size);
            self.pending.extend(&names[first..]);
        }
    }

    /// Pages that an admission or a catch-up leaves to the next tokens of running rows, so that it is not undone by a
    /// preemption at once. None when no row runs.
    pub(super) fn watermark(&self) -> usize {
        if self.running.is_empty() { 0 } else { self.running.len().div_ceil(8).max(self.config.num_pages / 100).max(1) }
    }

    fn try_admit(&mut self, handle: Handle, spare: usize) -> Admission {
        let alone = self.running.is_empty();
        let block_size = self.config.block_size;
        let sequence = &mut self.rows[handle];
        sequence.activate();
        let committed = sequence.num_committed();
        // At least one token must be computed, for its logits.
        let shareable = if self.config.prefix_cache { (committed - 1) / block_size } else { 0 };
        let total = self.config.target_pages(committed);
        let names = sequence.page_hashes(shareable, block_size);
        let mut cached = 0;
        let mut unowned = 0;
        while let Some(page) = names.get(cached).and_then(|&name| self.pool.lookup(name)) {
            cached += 1;
            unowned += usize::from(self.pool.is_unowned(page));
        }
        if names.get(cached).is_some_and(|name| self.pending.contains(name)) {
            return Admission::Deferred { pages: total - cached };
        }
        let own_draft = if alone { 0 } else { self.future_draft_pages(handle) };
        if total - cached + unowned + own_draft + spare > self.pool.available() {
            return Admission::NoRoom;
        }
        let sequence = &mut self.rows[handle];
        for page in 0..cached {
            let name = sequence.page_hashes(shareable, block_size)[page];
            if let Some(page) = self.pool.lookup(name) {
                self.pool.acquire(page);
                sequence.pages.push(page);
            }
        }
        let extended = self.pool.extend(&mut sequence.pages, total, crate::block_pool::Tenant::Target);
        debug_assert!(extended.is_some(), "room was checked");
        self.queue.remove(handle, sequence.seniority);
        if sequence.seniority == 0 {
            self.last_seniority += 1;
            sequence.seniority = self.last_seniority;
            sequence.counters.cached = (cached * block_size) as u32;
        }
        self.last_residency += 1;
        sequence.residency = self.last_residency;
        sequence.status = SequenceStatus::Prefilling;
        self.num_prefilling += 1;
        sequence.num_computed = cached * block_size;
        sequence.num_published = cached;
        self.running.push(handle);
        Admission::Admitted
    }

    /// Draft pages a row that is to be admitted will want.
    fn future_draft_pages(&self, handle: Handle) -> usize {
        let sequence = &self.rows[handle];
        let speculation = self.shards.get(sequence.shard);
        let context = sequence.num_committed() + speculation.k;
        let drafts = speculation.method == Method::Draft
            && sequence.may_draft
            && sequence.draft.resume_at <= self.decode_steps
            && context <= self.config.draft_max_model_len;
        if drafts { self.config.draft_pages(context) } else { 0 }
    }

    /// Draft pages a running row will want and does not have yet.
    fn owed_draft_pages(&self, handle: Handle) -> usize {
        self.future_draft_pages(handle).saturating_sub(self.rows[handle].draft.pages.len())
    }
}
