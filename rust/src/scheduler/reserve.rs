//! Decode steps: every running row gets a slot for its last committed token, then drafts as far as room goes. When
//! pages run out, draft tables go first, then drafts, then the youngest row.

use std::hint::black_box;

use super::Scheduler;
use crate::block_pool::Tenant;
use crate::layout::Capacity;
use crate::ngram::NgramIndex;
use crate::sequence::{FinishReason, Handle, RowError, Sequence};
use crate::speculation::Method;
use crate::step::RowPlan;

impl Scheduler {
    /// Plans a decode step; leaves the plan empty when no row is left to run.
    pub(super) fn plan_decode(&mut self, method: Method, capacity: &Capacity) {
        self.decode_steps += 1;
        let mut order = std::mem::take(&mut self.order);
        order.clone_from(&self.running);
        for &handle in &order {
            let sequence = &self.rows[handle];
            let committed = sequence.num_committed();
            let has_slot = sequence.pages.len() * self.config.block_size >= committed;
            if committed > self.config.draft_max_model_len && !sequence.draft.pages.is_empty() {
                self.release_draft(handle);
            }
            if !has_slot {
                self.reserve_last_token(handle);
            }
        }
        self.order = order;
        let most = self.most_drafts(method, capacity);
        self.plan.method = method;
        if method == Method::Ngram {
            let touch = |sequence: &Sequence| sequence.ngram.as_ref().map_or(0, |index| index.touch(&sequence.tokens));
            black_box(self.running.iter().fold(0, |all, &handle| all ^ touch(&self.rows[handle])));
        }
        for i in 0..self.running.len() {
            let row = self.plan_row(self.running[i], method, most);
            self.plan.rows.push(row);
        }
    }

    /// Gives the row a slot for its last committed token: from the pool, from the draft table that gains least, from
    /// the youngest row (maybe itself). The only row that still does not fit ends with an error.
    fn reserve_last_token(&mut self, handle: Handle) {
        // Making room for a row before it may have preempted this one.
        while self.rows[handle].is_running() {
            let sequence = &mut self.rows[handle];
            let pages = self.config.target_pages(sequence.num_committed());
            if self.pool.extend(&mut sequence.pages, pages, Tenant::Target).is_some() {
                return;
            }
            if self.drop_cheapest_draft() {
                continue;
            }
            if self.running.len() == 1 {
                self.finish(handle, FinishReason::Error, RowError::TooFewPages);
                self.running.clear();
            } else if let Some(youngest) = self.youngest() {
                self.preempt_row(youngest);
            }
        }
    }

    /// Largest k for which the step's arrays can hold the drafts of all rows.
    fn most_drafts(&mut self, method: Method, capacity: &Capacity) -> usize {
        let mut most = self.config.max_speculative_tokens;
        let room = capacity.tokens.min(capacity.logits) - self.running.len();
        if method == Method::None || self.running.len() * most <= room {
            return most;
        }
        let mut wanted = std::mem::take(&mut self.wanted_drafts);
        wanted.clear();
        wanted.extend(self.running.iter().map(|&handle| self.draft_limit(&self.rows[handle], method)));
        while wanted.iter().map(|&k| k.min(most)).sum::<usize>() > room {
            most -= 1;
        }
        self.wanted_drafts = wanted;
        most
    }

    /// Plans one row with up to `most` drafts.
    #[inline]
    fn plan_row(&mut self, handle: Handle, method: Method, most: usize) -> RowPlan {
        let sequence = &self.rows[handle];
        let slots = sequence.pages.len() * self.config.block_size;
        let start = sequence.num_committed() - 1;
        let k = if method == Method::None { 0 } else { self.draft_limit(sequence, method).min(most) };
        let proposal_start = self.plan.proposals.len();
        let mut drafts = match method {
            _ if k == 0 => 0,
            Method::Ngram => self.propose_ngram(handle, k),
            Method::Draft => self.reserve_draft(handle, k),
            _ => k,
        };
        let mut asked = drafts > 0 || (method == Method::Ngram && k > 0);
        if drafts > 0 && slots <= start + drafts {
            drafts = drafts.min(self.reserve_target(handle, drafts));
            asked = drafts > 0;
            self.plan.proposals.truncate(proposal_start + drafts);
        }
        let sequence = &mut self.rows[handle];
        sequence.in_flight = drafts;
        let draft_len = if method == Method::Draft && drafts > 0 { sequence.draft_gap() } else { 0 };
        RowPlan {
            handle,
            residency: sequence.residency,
            start,
            len: 1 + drafts,
            drafts,
            asked,
            wants_logits: true,
            draft_start: if draft_len > 0 { sequence.draft.computed } else { 0 },
            draft_len,
            proposal_start,
        }
    }

    /// Lengthens the row's table for up to `drafts` drafts, as far as the pool goes; returns how many have a slot.
    fn reserve_target(&mut self, handle: Handle, drafts: usize) -> usize {
        let sequence = &mut self.rows[handle];
        let committed = sequence.num_committed();
        let slots = sequence.pages.len() * self.config.block_size;
        if slots >= committed + drafts {
            return drafts;
        }
        let missing = self.config.target_pages(committed + drafts - slots).min(self.pool.available());
        let pages = sequence.pages.len() + missing;
        let extended = self.pool.extend(&mut sequence.pages, pages, Tenant::Target);
        debug_assert!(extended.is_some(), "no more than what is available was asked for");
        pages * self.config.block_size - committed
    }

    fn propose_ngram(&mut self, handle: Handle, k: usize) -> usize {
        let sequence = &mut self.rows[handle];
        let (shortest, longest) = (self.config.ngram_min, self.config.ngram_max);
        let index = sequence.ngram.get_or_insert_with(|| Box::new(NgramIndex::new(shortest, longest)));
        index.propose(&sequence.tokens, k, &mut self.plan.proposals)
    }
}
