//! Teacher-forced probes: between two steps the draft model reads what a few autoregressive rows have produced, to see how
//! much of it it would have proposed. Rows, queues and the outstanding step stay as they are; only pages are lent.

use super::Scheduler;
use crate::error::{Result, ensure};
use crate::layout::{Layout, StepArrays};
use crate::sequence::{Handle, SequenceStatus};
use crate::speculation::Method;
use crate::step::{RowPlan, StepInfo, StepKind, StepPlan};

/// Output tokens a row must have: its last one is not read, and one alone says little.
const LEAST_OUTPUT: usize = 4;

impl Scheduler {
    /// Lends draft pages to up to `most` decoding rows that have none and fills `arrays` with all but the last of their
    /// committed tokens, as a step of kind `DraftPrefill` would; spread over the rows that could be taken, and no more
    /// tokens than a prefill step has. Rows of shards in draft mode are left out. No row: nothing was lent.
    ///
    /// [`Scheduler::drop_draft`] of each row gives the pages back; it must come before the next step.
    ///
    /// # Errors
    /// `Error::Argument` for arrays too small, or a scheduler without draft tenant.
    pub fn lend_draft(&mut self, most: usize, arrays: &mut StepArrays<'_>, layout: &mut Layout) -> Result<StepInfo> {
        ensure(self.config.draft_block_size > 0, || {
            "lend_draft: needs a scheduler with draft_block_size of at least 1, got 0".into()
        })?;
        let capacity = arrays.capacity();
        capacity.check(&self.config, self.max_num_seqs)?;
        self.settle_modes();
        let candidates: Vec<Handle> = self.running.iter().copied().filter(|&handle| self.may_lend(handle)).collect();
        let mut budget = self.config.max_num_batched_tokens.min(capacity.tokens);
        let mut plan = StepPlan { kind: StepKind::DraftPrefill, method: Method::Draft, ..StepPlan::default() };
        // No more rows than fit, or those that do would all be from the front: the ones that run longest.
        let tokens: usize = candidates.iter().map(|&handle| self.rows[handle].num_committed()).sum();
        let fit = (budget * candidates.len()).checked_div(tokens).unwrap_or(0).max(1);
        let rows = most.min(candidates.len()).min(fit);
        for i in 0..rows {
            // One of each stretch, anywhere in it: rows that come in a pattern must not all be of one kind.
            let (from, to) = (i * candidates.len() / rows, (i + 1) * candidates.len() / rows);
            let handle = candidates[from + scatter(self.last_step_id as u64, i as u64) as usize % (to - from)];
            let sequence = &self.rows[handle];
            let (residency, len) = (sequence.residency, sequence.num_committed() - 1);
            // The pages are back before anyone else may ask for one, so none is kept spare.
            if len > budget || !self.extend_draft(handle, len, 0) {
                continue;
            }
            budget -= len;
            plan.rows.push(RowPlan { handle, residency, draft_len: len, ..RowPlan::default() });
        }
        let sizes = layout.fill(&plan, &self.rows, &self.config, arrays);
        Ok(StepInfo { num_running: self.running.len(), num_waiting: self.queue.len(), ..sizes })
    }

    fn may_lend(&self, handle: Handle) -> bool {
        let sequence = &self.rows[handle];
        sequence.status == SequenceStatus::Decoding
            && sequence.may_draft
            && sequence.draft.pages.is_empty()
            && sequence.num_output() >= LEAST_OUTPUT
            && sequence.num_committed() <= self.config.draft_max_model_len
            && self.shards.get(sequence.shard).method != Method::Draft
    }
}

/// A number without pattern (the finaliser of `SplitMix64`).
fn scatter(step: u64, index: u64) -> u32 {
    let mut value = (step << 20).wrapping_add(index).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (value >> 32) as u32
}
