//! The result of a step: checked as a whole, then applied. Verified tokens are committed in order up to the one that
//! ends the row, and everything the row reports is cut at the same place.

use super::Scheduler;
use crate::error::{Error, Result, ensure};
use crate::ngram::NgramIndex;
use crate::sequence::{Handle, RowError, SequenceStatus};
use crate::shadow::{Ended, Round};
use crate::speculation::Method;
use crate::step::{RowPlan, StepKind, StepResult};

/// Steps without drafts for which a row keeps its draft table.
const SHORT_REST: u64 = 32;

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
            return ensure(known && num_rows == 0, || {
                format!("{}; num_sampled: expected shape [0], got [{num_rows}]", self.not_outstanding(step_id))
            });
        }
        ensure(step_id == self.last_step_id, || self.not_outstanding(step_id))?;
        let expected = if self.plan.kind == StepKind::DraftPrefill { 0 } else { self.plan.rows.len() };
        let nothing_sampled = num_rows == 0 && !self.plan.rows.iter().any(|row| row.wants_logits);
        ensure(num_rows == expected || nothing_sampled, || {
            format!("num_sampled: expected shape [{expected}] (rows of step {step_id}), got [{num_rows}]")
        })?;
        // Mostly no id is negative, not even in the padding, and one look at all of them is quicker than one a row.
        let any_negative = result.token_ids.iter().fold(0, |all, &token| all | token) < 0;
        for (i, row) in self.plan.rows[..num_rows].iter().enumerate() {
            let fits = fits(row, i, result) && !(any_negative && tokens_of(i, result).iter().any(|&token| token < 0));
            if !fits && self.is_current(row) {
                return Err(Error::Argument(misfit(row, i, result)));
            }
        }
        Ok(())
    }

    /// Applies a checked result.
    pub(super) fn apply(&mut self, result: &StepResult<'_>) {
        if !self.outstanding {
            return;
        }
        self.outstanding = false;
        let rows = std::mem::take(&mut self.plan.rows);
        let finished_before = self.finished.len();
        let kind = self.plan.kind;
        for (i, row) in rows.iter().enumerate() {
            if !self.is_current(row) {
                continue;
            }
            if kind == StepKind::Decode {
                self.apply_decode(row, found_for(i, result), result.num_draft[i] as usize);
            } else if kind == StepKind::DraftPrefill {
                let draft = &mut self.rows[row.handle].draft;
                if !draft.pages.is_empty() {
                    draft.computed = row.draft_start + row.draft_len;
                }
            } else {
                let given = i < result.num_sampled.len();
                self.apply_prefill(row, if given { found_for(i, result) } else { (&[], 0) });
            }
        }
        self.plan.rows = rows;
        if self.finished.len() > finished_before {
            let rows = &self.rows;
            self.running.retain(|&handle| rows[handle].is_running());
        }
    }

    fn apply_prefill(&mut self, row: &RowPlan, (found, count): (&[i32], usize)) {
        let sequence = &mut self.rows[row.handle];
        sequence.num_computed = row.start + row.len;
        if row.wants_logits {
            sequence.status = SequenceStatus::Decoding;
            self.num_prefilling -= 1;
        }
        self.publish(row.handle);
        let sequence = &mut self.rows[row.handle];
        let before = sequence.num_committed();
        let (eos, bytes) = (&self.config.eos_token_ids, self.token_bytes.as_ref());
        let (_, finish) = sequence.commit(found, count, self.config.max_model_len, eos, bytes);
        if self.shadow_k > 0 {
            self.observe(row, before);
        }
        match finish {
            Some(reason) => self.finish(row.handle, reason, RowError::None),
            None => self.trim(row.handle),
        }
    }

    #[inline]
    fn apply_decode(&mut self, row: &RowPlan, (found, count): (&[i32], usize), num_draft: usize) {
        let sequence = &mut self.rows[row.handle];
        let before = sequence.num_committed();
        let (eos, bytes) = (&self.config.eos_token_ids, self.token_bytes.as_ref());
        let (committed, finish) = sequence.commit(found, count, self.config.max_model_len, eos, bytes);
        let accepted = committed.min(count - 1);
        sequence.in_flight = 0;
        sequence.counters.steps += 1;
        sequence.counters.drafted += num_draft as u32;
        sequence.counters.accepted += accepted as u32;
        // KV is right for the token before the drafts and for accepted drafts; what follows is overwritten.
        let known = row.start + 1 + accepted;
        sequence.num_computed = known;
        if row.draft_len > 0 && num_draft > 0 && !sequence.draft.pages.is_empty() {
            // The draft model never reads its own last draft.
            sequence.draft.computed = known.min(row.start + num_draft);
        }
        let surplus = sequence.has_surplus(self.config.block_size, self.config.draft_block_size > 0);
        if row.asked {
            let round = Round { proposed: num_draft, accepted, committed };
            self.shards.record(sequence.shard, self.plan.method, round, self.config.max_speculative_tokens);
            if self.score_fewer && self.plan.method != Method::Ngram {
                let k = self.shards.get(sequence.shard).k;
                let tallies = self.shards.fewer(sequence.shard, self.config.max_speculative_tokens);
                let fewer = sequence.fewer.get_or_insert_default();
                fewer.observe(round, k, |k, round, weight| tallies.weigh(k, round, weight));
            }
        }
        if self.shadow_k > 0 {
            self.observe(row, before);
        }
        if row.asked && self.asked.least > 0.0 && self.plan.method == Method::Draft && finish.is_none() {
            let rest = self.rows[row.handle].draft.worth.observe(num_draft, accepted, self.asked);
            if rest > 0 {
                // A short rest leaves a short gap to catch up; after a long one the pages are worth more to others.
                if rest > SHORT_REST {
                    self.release_draft(row.handle);
                }
                self.rows[row.handle].draft.resume_at = self.decode_steps + rest;
            }
        }
        match finish {
            Some(reason) => self.finish(row.handle, reason, RowError::None),
            None if surplus => self.trim(row.handle),
            None => {}
        }
    }

    /// Shows the shadow scorer what a row committed after its first `before` tokens, whatever brought them: rows whose
    /// n-gram proposals are verified are scored too, for the numbers of drafts that they do not use.
    fn observe(&mut self, row: &RowPlan, before: usize) {
        let sequence = &mut self.rows[row.handle];
        let (shortest, longest) = (self.config.ngram_min, self.config.ngram_max);
        let index = sequence.ngram.get_or_insert_with(|| Box::new(NgramIndex::new(shortest, longest)));
        let shadow = sequence.shadow.get_or_insert_default();
        let shadows = self.shards.shadows(sequence.shard, self.config.max_speculative_tokens);
        for at in before..sequence.tokens.len() {
            let (known, next) = (&sequence.tokens[..at], sequence.tokens[at]);
            if let Ended::Unmatched =
                shadow.observe(index, known, next, self.shadow_k, |k, round| shadows.record(k, round))
            {
                shadows.record_unmatched(self.shadow_k);
            }
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

/// Tokens found for row `i`.
#[inline]
fn tokens_of<'a>(i: usize, result: &StepResult<'a>) -> &'a [i32] {
    &result.token_ids[i * result.width..][..result.num_sampled[i] as usize]
}

/// Row `i`'s part of the ids, and how many of them were found.
#[inline]
fn found_for<'a>(i: usize, result: &StepResult<'a>) -> (&'a [i32], usize) {
    (&result.token_ids[i * result.width..][..result.width], result.num_sampled[i] as usize)
}

/// How many tokens may have been found for a row, given how many drafts were verified.
#[inline]
fn bounds(row: &RowPlan, draft: i32) -> (i32, i32) {
    if row.wants_logits { (1, draft.saturating_add(1)) } else { (0, 0) }
}

/// Whether the numbers of row `i`'s part of a result are what its plan allows.
#[inline]
fn fits(row: &RowPlan, i: usize, result: &StepResult<'_>) -> bool {
    let (sampled, draft) = (result.num_sampled[i], result.num_draft[i]);
    let (low, high) = bounds(row, draft);
    (0..=row.drafts as i32).contains(&draft) && (low..=high).contains(&sampled) && sampled as usize <= result.width
}

/// Why row `i` does not fit.
#[cold]
fn misfit(row: &RowPlan, i: usize, result: &StepResult<'_>) -> String {
    let (sampled, draft, reserved) = (result.num_sampled[i], result.num_draft[i], row.drafts);
    let (low, high) = bounds(row, draft);
    if !(0..=reserved as i32).contains(&draft) {
        format!("num_draft[{i}]: expected 0..={reserved} (drafts reserved for the row), got {draft}")
    } else if !(low..=high).contains(&sampled) {
        let what = if row.wants_logits { "accepted drafts + 1" } else { "no logits asked for" };
        format!("num_sampled[{i}]: expected {low}..={high} ({what}), got {sampled}")
    } else if sampled as usize > result.width {
        format!("token_ids: expected at least {sampled} columns (num_sampled[{i}]), got {}", result.width)
    } else {
        let tokens = tokens_of(i, result);
        let column = tokens.iter().position(|&token| token < 0).unwrap_or(0);
        format!("token_ids[{i}, {column}]: expected an id of at least 0, got {}", tokens[column])
    }
}
