//! The result of a step: checked as a whole, then applied. Verified tokens are committed in order up to the one that
//! ends the row, and everything the row reports is cut at the same place.

use super::Scheduler;
use crate::error::{Result, ensure};
use crate::ngram::NgramIndex;
use crate::sequence::{FinishReason, Handle, RowError, SequenceStatus};
use crate::shadow::Round;
use crate::speculation::Method;
use crate::step::{RowPlan, StepKind, StepResult};
use crate::stop::StopMatch;

impl Scheduler {
    /// Whether a row of the outstanding step still is what it was when the step was planned.
    pub(super) fn is_current(&self, row: &RowPlan) -> bool {
        self.rows.get(row.handle).is_some_and(|sequence| sequence.residency == row.residency)
    }

    pub(super) fn not_outstanding(&self, step_id: i64) -> String {
        if self.outstanding {
            format!("step_id: expected {} (the outstanding step), got {step_id}", self.last_step_id)
        } else {
            format!("step_id: no step is outstanding (the last was {}), got {step_id}", self.last_step_id)
        }
    }

    /// Checks a result against the outstanding step. Values of rows that were preempted or aborted meanwhile do not
    /// matter.
    pub(super) fn check_result(&self, step_id: i64, result: &StepResult<'_>) -> Result<()> {
        let num_rows = result.num_sampled.len();
        ensure(result.num_draft.len() == num_rows, || {
            format!("num_draft: expected shape [{num_rows}] (as num_sampled), got [{}]", result.num_draft.len())
        })?;
        ensure(result.token_ids.len() == num_rows * result.width, || {
            format!("token_ids: expected {num_rows} rows (as num_sampled), got {} ids", result.token_ids.len())
        })?;
        if !self.outstanding {
            let known = step_id == 0 || step_id == self.last_step_id;
            ensure(known && num_rows == 0, || {
                format!("{}; num_sampled: expected shape [0], got [{num_rows}]", self.not_outstanding(step_id))
            })?;
            return Ok(());
        }
        ensure(step_id == self.last_step_id, || self.not_outstanding(step_id))?;
        let expected = if self.plan.kind == StepKind::DraftPrefill { 0 } else { self.plan.rows.len() };
        let nothing_sampled = num_rows == 0 && !self.plan.rows.iter().any(|row| row.wants_logits);
        ensure(num_rows == expected || nothing_sampled, || {
            format!("num_sampled: expected shape [{expected}] (rows of step {step_id}), got [{num_rows}]")
        })?;
        for i in 0..num_rows {
            if self.is_current(&self.plan.rows[i]) {
                self.check_row(i, result)?;
            }
        }
        Ok(())
    }

    fn check_row(&self, i: usize, result: &StepResult<'_>) -> Result<()> {
        let row = &self.plan.rows[i];
        let (sampled, draft) = (result.num_sampled[i], result.num_draft[i]);
        let reserved = row.drafts as i32;
        ensure((0..=reserved).contains(&draft), || {
            format!("num_draft[{i}]: expected 0..={reserved} (drafts reserved for the row), got {draft}")
        })?;
        let (low, high) = if row.wants_logits { (1, draft + 1) } else { (0, 0) };
        ensure((low..=high).contains(&sampled), || {
            let what = if row.wants_logits { "accepted drafts + 1" } else { "no logits asked for" };
            format!("num_sampled[{i}]: expected {low}..={high} ({what}), got {sampled}")
        })?;
        let sampled = sampled as usize;
        ensure(sampled <= result.width, || {
            format!("token_ids: expected at least {sampled} columns (num_sampled[{i}]), got {}", result.width)
        })?;
        let tokens = &result.token_ids[i * result.width..][..sampled];
        let bad = tokens.iter().position(|&token| token < 0);
        ensure(bad.is_none(), || {
            let column = bad.unwrap_or(0);
            format!("token_ids[{i}, {column}]: expected an id of at least 0, got {}", tokens[column])
        })
    }

    /// Applies a checked result.
    pub(super) fn apply(&mut self, result: &StepResult<'_>) {
        if !self.outstanding {
            return;
        }
        self.outstanding = false;
        let rows = std::mem::take(&mut self.plan.rows);
        let finished_before = self.finished.len();
        for (i, row) in rows.iter().enumerate() {
            if !self.is_current(row) {
                continue;
            }
            match self.plan.kind {
                StepKind::DraftPrefill => {
                    let draft = &mut self.rows[row.handle].draft;
                    if !draft.pages.is_empty() {
                        draft.computed = row.draft_start + row.draft_len;
                    }
                }
                _ if result.num_sampled.is_empty() => self.apply_prefill(row, &[]),
                kind => {
                    let tokens = &result.token_ids[i * result.width..][..result.num_sampled[i] as usize];
                    if kind == StepKind::Decode {
                        self.apply_decode(row, tokens, result.num_draft[i] as usize);
                    } else {
                        self.apply_prefill(row, tokens);
                    }
                }
            }
        }
        self.plan.rows = rows;
        if self.finished.len() > finished_before {
            let rows = &self.rows;
            self.running.retain(|&handle| rows[handle].is_running());
        }
    }

    fn apply_prefill(&mut self, row: &RowPlan, tokens: &[i32]) {
        let sequence = &mut self.rows[row.handle];
        sequence.num_computed = row.start + row.len;
        if row.wants_logits {
            sequence.status = SequenceStatus::Decoding;
        }
        self.publish(row.handle);
        let (_, finish) = self.commit(row, tokens);
        self.settle(row.handle, finish);
    }

    fn apply_decode(&mut self, row: &RowPlan, tokens: &[i32], num_draft: usize) {
        let before = row.start + 1;
        let (committed, finish) = self.commit(row, tokens);
        let accepted = committed.min(tokens.len() - 1);
        let sequence = &mut self.rows[row.handle];
        sequence.in_flight = 0;
        sequence.counters.steps += 1;
        sequence.counters.drafted += num_draft as u32;
        sequence.counters.accepted += accepted as u32;
        // KV is right for the token before the drafts and for accepted drafts; what follows is overwritten.
        sequence.num_computed = before + accepted;
        if row.draft_len > 0 && num_draft > 0 && !sequence.draft.pages.is_empty() {
            // The draft model never reads its own last draft.
            sequence.draft.computed = before + accepted.min(num_draft - 1);
        }
        if row.asked {
            let round = Round { proposed: num_draft, accepted, committed };
            self.shards.record(sequence.shard, self.plan.method, round, self.config.max_speculative_tokens);
        }
        self.settle(row.handle, finish);
    }

    /// Appends tokens up to the one that ends the row; returns how many, and whether the row ends.
    fn commit(&mut self, row: &RowPlan, tokens: &[i32]) -> (usize, Option<FinishReason>) {
        let sequence = &mut self.rows[row.handle];
        let num_output = sequence.num_output();
        let room = (sequence.max_tokens - num_output).min(self.config.max_model_len - sequence.num_committed());
        let tokens = &tokens[..tokens.len().min(room)];
        let stop = sequence.stop.scan(tokens, num_output, &self.config.eos_token_ids, self.token_bytes.as_ref());
        let count = stop.map_or(tokens.len(), |(count, _)| count);
        let counted_anyway = row.asked && self.plan.method == Method::Ngram;
        if self.shadow_k > 0 && !counted_anyway {
            self.observe(row.handle, &tokens[..count]);
        } else {
            sequence.shadow = None;
            sequence.tokens.extend_from_slice(&tokens[..count]);
        }
        let sequence = &mut self.rows[row.handle];
        let finish = match stop {
            Some((_, StopMatch::Token(token))) => {
                sequence.stop_token = Some(token);
                Some(FinishReason::Stop)
            }
            Some((_, StopMatch::Text(cut))) => {
                sequence.text_cut = Some(cut);
                Some(FinishReason::Stop)
            }
            None if count == room => Some(FinishReason::Length),
            None => None,
        };
        (count, finish)
    }

    /// Appends tokens, each seen by the shadow scorer first.
    fn observe(&mut self, handle: Handle, tokens: &[i32]) {
        let sequence = &mut self.rows[handle];
        let (shortest, longest) = (self.config.ngram_min, self.config.ngram_max);
        let index = sequence.ngram.get_or_insert_with(|| Box::new(NgramIndex::new(shortest, longest)));
        let shadow = sequence.shadow.get_or_insert_default();
        for &token in tokens {
            if let Some(round) = shadow.observe(index, &sequence.tokens, token, self.shadow_k) {
                self.shards.record_shadow(sequence.shard, round, self.config.max_speculative_tokens);
            }
            sequence.tokens.push(token);
        }
    }

    /// Ends the row, or gives back what its rejected drafts had reserved.
    fn settle(&mut self, handle: Handle, finish: Option<FinishReason>) {
        match finish {
            Some(reason) => self.finish(handle, reason, RowError::None),
            None => self.trim(handle),
        }
    }

    /// Offers pages full of computed, committed tokens to the prefix cache: a prompt's as soon as they are there,
    /// those of the output only when the row is preempted and will want them back.
    pub(super) fn publish(&mut self, handle: Handle) {
        let sequence = &mut self.rows[handle];
        let full = sequence.num_computed / self.config.block_size;
        if !self.config.prefix_cache || full <= sequence.num_published {
            return;
        }
        let first = sequence.num_published;
        sequence.num_published = full;
        for page in first..full {
            let name = sequence.page_hashes(full, self.config.block_size)[page];
            self.pool.publish(sequence.pages[page], name);
        }
    }
}
