//! The draft tenant: how many drafts a row may have, the pages its draft model needs, and the catch-up steps that close
//! gaps in what the draft model has seen.

use super::Scheduler;
use crate::block_pool::Tenant;
use crate::layout::Capacity;
use crate::sequence::{Handle, Sequence};
use crate::speculation::Method;
use crate::step::RowPlan;

/// Largest gap that the decode step's own first draft pass closes: the last token, and after full acceptance the draft
/// before it, which the draft model proposed but never read.
pub(super) const FED_GAP: usize = 2;

impl Scheduler {
    /// The one method of the next decode step: that of most rows (the first by number, if equal). Rows of another
    /// method, which only meet while two shards overlap, run autoregressively in it.
    pub(super) fn step_method(&self) -> Method {
        if let Some(method) = self.shards.only_method() {
            let any = method != Method::None && self.running.iter().any(|&handle| self.rows[handle].may_draft);
            return if any { method } else { Method::None };
        }
        let mut votes = [0usize; 4];
        let mut last = (u32::MAX, Method::None);
        for &handle in &self.running {
            let sequence = &self.rows[handle];
            if sequence.shard != last.0 {
                last = (sequence.shard, self.shards.get(sequence.shard).method);
            }
            votes[last.1 as usize] += usize::from(sequence.may_draft);
        }
        let most = votes[1..].iter().copied().max().unwrap_or(0);
        match votes[1..].iter().position(|&count| count == most) {
            _ if most == 0 => Method::None,
            Some(0) => Method::Ngram,
            Some(1) => Method::Draft,
            _ => Method::External,
        }
    }

    /// Drafts a decoding row may have in a step of `method`: k, less what its limits leave no room for.
    #[inline]
    pub(super) fn draft_limit(&self, sequence: &Sequence, method: Method) -> usize {
        let speculation = self.shards.get(sequence.shard);
        if speculation.method != method || !sequence.may_draft {
            return 0;
        }
        let committed = sequence.num_committed();
        let tokens_left = sequence.max_tokens - sequence.num_output();
        let context_left = self.config.max_model_len - committed;
        let k = speculation.k.min(tokens_left - 1).min(context_left - 1);
        if method != Method::Draft {
            return k;
        }
        if sequence.draft.resume_at > self.decode_steps {
            return 0;
        }
        // The draft model reads the committed tokens and all but the last of its own drafts.
        k.min((self.config.draft_max_model_len + 1).saturating_sub(committed))
    }

    /// Plans a step in which the draft model reads committed tokens only, for all rows with a gap too large for the
    /// decode step; leaves the plan empty when there is none. One token is left for the decode step to feed.
    pub(super) fn plan_draft_prefill(&mut self, capacity: &Capacity) {
        let mut budget = self.config.max_num_batched_tokens.min(capacity.tokens);
        for i in 0..self.running.len() {
            let handle = self.running[i];
            let sequence = &self.rows[handle];
            if budget == 0 {
                return;
            }
            if sequence.draft_gap() <= FED_GAP || self.draft_limit(sequence, Method::Draft) == 0 {
                continue;
            }
            let until = sequence.num_committed() - 1;
            if !self.extend_draft(handle, until, self.watermark()) {
                self.back_off(handle);
                continue;
            }
            let sequence = &self.rows[handle];
            let len = budget.min(until - sequence.draft.computed);
            budget -= len;
            self.plan.rows.push(RowPlan {
                handle,
                residency: sequence.residency,
                draft_start: sequence.draft.computed,
                draft_len: len,
                ..RowPlan::default()
            });
        }
    }

    /// Makes room for `k` drafts in the draft table of a row that is caught up; returns how many there is room for. A
    /// row without room for one does not draft for a while.
    pub(super) fn reserve_draft(&mut self, handle: Handle, k: usize) -> usize {
        let committed = self.rows[handle].num_committed();
        if self.rows[handle].draft_gap() > FED_GAP {
            return 0;
        }
        if self.extend_draft(handle, committed + k - 1, 0) {
            return k;
        }
        let room = self.rows[handle].draft.pages.len() * self.config.draft_block_size;
        let k = k.min((room + 1).saturating_sub(committed));
        if k == 0 {
            self.back_off(handle);
        }
        k
    }

    /// Lengthens a row's draft table to hold `tokens` tokens and leaves `spare` pages in the pool. False: no room.
    pub(super) fn extend_draft(&mut self, handle: Handle, tokens: usize, spare: usize) -> bool {
        let pages = self.config.draft_pages(tokens);
        let draft = &mut self.rows[handle].draft;
        let missing = pages.saturating_sub(draft.pages.len());
        if missing == 0 {
            return true;
        }
        if missing + spare > self.pool.available() {
            return false;
        }
        if draft.pages.is_empty() {
            self.last_residency += 1;
            draft.residency = self.last_residency;
        }
        self.pool.extend(&mut draft.pages, pages, Tenant::Draft).is_some()
    }
}
