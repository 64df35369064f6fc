//! Decode steps: every running row gets a slot for its last committed token, then drafts as far as room goes. When
//! pages run out, draft tables go first, then drafts, then the youngest row.

use super::Scheduler;
use crate::block_pool::Tenant;
use crate::layout::Capacity;
use crate::ngram::NgramIndex;
use crate::sequence::{FinishReason, Handle, RowError};
use crate::speculation::Method;
use crate::step::RowPlan;

impl Scheduler {
    /// Plans a decode step; leaves the plan empty when no row is left to run.
    pub(super) fn plan_decode(&mut self, method: Method, capacity: &Capacity) {
        self.decode_steps += 1;
        let mut order = std::mem::take(&mut self.order);
        order.clone_from(&self.running);
        for &handle in &order {
            // Making room for a row before it may have preempted this one.
            if self.rows[handle].is_running() {
                self.release_useless_draft(handle);
                self.reserve_last_token(handle);
            }
        }
        self.order = order;
        self.limit_drafts(method, capacity);
        self.plan.method = method;
        for i in 0..self.running.len() {
            let row = self.plan_row(self.running[i], method, self.wanted_drafts[i]);
            self.plan.rows.push(row);
        }
    }

    /// Gives the row a slot for its last committed token: from the pool, from the draft table that gains least, from
    /// the youngest row (maybe itself). The only row that still does not fit ends with an error.
    fn reserve_last_token(&mut self, handle: Handle) {
        loop {
            let sequence = &mut self.rows[handle];
            if sequence.pages.len() * self.config.block_size >= sequence.num_committed() {
                return;
            }
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
                return;
            }
            let Some(youngest) = self.youngest() else { return };
            self.preempt_row(youngest);
            if youngest == handle {
                return;
            }
        }
    }

    /// Sets `wanted_drafts`: what each row may draft, cut from the top so that the step's arrays can hold all.
    fn limit_drafts(&mut self, method: Method, capacity: &Capacity) {
        let mut wanted = std::mem::take(&mut self.wanted_drafts);
        wanted.clear();
        wanted.extend(self.running.iter().map(|&handle| match method {
            Method::None => 0,
            _ => self.draft_limit(&self.rows[handle], method),
        }));
        let room = capacity.tokens.min(capacity.logits) - self.running.len();
        let mut most = wanted.iter().copied().max().unwrap_or(0);
        while wanted.iter().map(|&k| k.min(most)).sum::<usize>() > room {
            most -= 1;
        }
        for k in &mut wanted {
            *k = (*k).min(most);
        }
        self.wanted_drafts = wanted;
    }

    /// Plans one row with up to `k` drafts.
    fn plan_row(&mut self, handle: Handle, method: Method, k: usize) -> RowPlan {
        let proposal_start = self.plan.proposals.len();
        let mut drafts = match method {
            _ if k == 0 => 0,
            Method::Ngram => self.propose_ngram(handle, k),
            Method::Draft => self.reserve_draft(handle, k),
            _ => k,
        };
        let mut asked = drafts > 0 || (method == Method::Ngram && k > 0);
        if drafts > 0 {
            drafts = drafts.min(self.reserve_target(handle, drafts));
            asked = drafts > 0;
            if method == Method::Ngram {
                self.plan.proposals.truncate(proposal_start + drafts);
            }
        }
        let sequence = &mut self.rows[handle];
        sequence.in_flight = drafts;
        let draft_len = if method == Method::Draft && drafts > 0 { sequence.draft_gap() } else { 0 };
        RowPlan {
            handle,
            residency: sequence.residency,
            start: sequence.num_committed() - 1,
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
