//! What passes between the parts of one step: the result that comes in, the plan in between, the summary that goes
//! out.

use crate::sequence::Handle;
use crate::speculation::Method;

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum StepKind {
    /// Nothing can run.
    #[default]
    Idle = 0,
    /// Chunks of prompts, or of preempted rows being recomputed.
    Prefill = 1,
    /// A committed token a row, plus its drafts to verify.
    Decode = 2,
    /// Only the draft model runs, to close gaps in its KV.
    DraftPrefill = 3,
}

/// What the caller found: tokens sampled for the rows of the outstanding step, in their order.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepResult<'a> {
    /// `[rows, width]`, row-major.
    pub token_ids: &'a [i32],
    /// Columns of `token_ids`.
    pub width: usize,
    /// Valid tokens of each row: accepted drafts + 1.
    pub num_sampled: &'a [i32],
    /// Drafts really proposed to and verified for each row.
    pub num_draft: &'a [i32],
}

/// One row of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowPlan {
    /// Which row.
    pub handle: Handle,
    /// Its stay among the running rows; another one when the result arrives means the result is late.
    pub residency: u64,
    /// First target position of this step.
    pub start: usize,
    /// Target tokens of this step, drafts included.
    pub len: usize,
    /// Drafts reserved (n-gram: proposed).
    pub drafts: usize,
    /// Whether a proposal was asked for, found or not.
    pub asked: bool,
    /// Logits wanted of the last token (prefill) or of all (decode).
    pub wants_logits: bool,
    /// First committed token the draft model has not seen.
    pub draft_start: usize,
    /// Committed tokens fed to the draft model.
    pub draft_len: usize,
    /// Start of its n-gram proposal in [`StepPlan::proposals`].
    pub proposal_start: usize,
}

/// A step as scheduled.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// What it computes.
    pub kind: StepKind,
    /// How its drafts are proposed, if there are any.
    pub method: Method,
    /// Its rows.
    pub rows: Vec<RowPlan>,
    /// N-gram proposals of all rows.
    pub proposals: Vec<i32>,
}

impl StepPlan {
    /// Empties the plan, keeping its memory.
    pub fn clear(&mut self) {
        self.kind = StepKind::Idle;
        self.method = Method::None;
        self.rows.clear();
        self.proposals.clear();
    }
}

/// Summary of a step: plain integers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are documented where Python reads them, in specbatch/_core.pyi
pub struct StepInfo {
    pub step_id: i64,
    pub kind: i32,
    pub method: i32,
    pub num_rows: usize,
    pub num_tokens: usize,
    pub num_logits: usize,
    pub max_query_len: usize,
    pub max_seq_len: usize,
    pub total_seq_len: usize,
    pub num_draft_tokens: usize,
    pub max_draft_tokens: usize,
    pub draft_num_tokens: usize,
    pub draft_max_query_len: usize,
    pub draft_max_seq_len: usize,
    pub num_running: usize,
    pub num_waiting: usize,
    pub num_finished: usize,
    pub num_preempted: usize,
    pub num_draft_dropped: usize,
    pub free_pages: usize,
    pub cached_pages: usize,
    pub target_pages: usize,
    pub draft_pages: usize,
}
