//! A sequence: one row's committed tokens, its block tables, its counts. Knows nothing of other rows; the scheduler
//! keeps pages and queues in step with it.

use std::sync::Arc;

use crate::block_pool::PageId;
use crate::fewer::FewerDrafts;
use crate::ngram::NgramIndex;
use crate::prefix::{PageHash, ROOT, chain};
use crate::shadow::Shadow;
use crate::stop::{StopConditions, StopMatch, TokenBytes, is_any};
use crate::worth::DraftWorth;

/// A row's number: stable until it is taken, reused afterwards.
pub type Handle = u32;

/// Where a row stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceStatus {
    /// In the waiting queue; owns no page.
    Waiting,
    /// Running, with committed tokens (its last included) still to compute.
    Prefilling,
    /// Running; all but its last committed token are computed.
    Decoding,
    /// Ended; owns no page.
    Finished,
}

/// How a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FinishReason {
    /// EOS, a stop token or a stop string.
    Stop = 1,
    /// `max_tokens` or `max_model_len`.
    Length = 2,
    /// See the row's [`RowError`].
    Error = 3,
    /// The caller aborted it.
    Aborted = 4,
}

/// Why a row ended with [`FinishReason::Error`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum RowError {
    /// It did not.
    #[default]
    None = 0,
    /// The prompt leaves no room in `max_model_len`.
    PromptTooLong = 1,
    /// The row alone needs more pages than the pool has.
    TooFewPages = 2,
    /// No token at all.
    EmptyPrompt = 3,
}

/// What a row reports when it ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Prompt tokens the prefix cache saved at first admission.
    pub cached: u32,
    /// Decode steps the row took part in.
    pub steps: u32,
    /// Drafts verified.
    pub drafted: u32,
    /// Drafts committed.
    pub accepted: u32,
    /// Drafts dropped unverified.
    pub wasted: u32,
    /// Times the row was preempted.
    pub preempted: u32,
}

/// The draft model's share of a row. It can be dropped at any time and caught up later.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub struct DraftState {
    /// Draft block table; empty when the row does not draft.
    pub pages: Vec<PageId>,
    /// Committed tokens the draft model has seen.
    pub computed: usize,
    /// Names this life of the table; 0 while it is empty.
    pub residency: u64,
    /// The row does not draft before this decode step.
    pub resume_at: u64,
    /// Times the table was taken back for want of pages.
    pub drops: u32,
    /// Whether drafting pays for this row.
    pub worth: DraftWorth,
}

/// One row. What a decode step looks at comes first: two cache lines, and a third where it drafts.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub struct Sequence {
    /// Names this stay among the running rows; 0 while not running. A step's late result carries it.
    pub residency: u64,
    /// Committed tokens: prompt, then output.
    pub tokens: Vec<i32>,
    /// Target block table.
    pub pages: Vec<PageId>,
    /// Index into the shard table.
    pub shard: u32,
    /// Where it stands.
    pub status: SequenceStatus,
    /// False: always autoregressive.
    pub may_draft: bool,
    /// Tokens of the prompt.
    pub num_prompt: usize,
    /// Most output tokens.
    pub max_tokens: usize,
    /// Committed tokens whose target KV is in the pages.
    pub num_computed: usize,
    /// Drafts of the outstanding step.
    pub in_flight: usize,
    /// Stop conditions, if it has some of its own.
    pub stop: Option<Box<StopConditions>>,
    /// What it reports.
    pub counters: Counters,
    /// The draft model's share.
    pub draft: DraftState,
    /// Index of its own n-grams, made when first needed.
    pub ngram: Option<Box<NgramIndex>>,
    /// Open round of the shadow scorer.
    pub shadow: Option<Box<Shadow>>,
    /// Rounds of fewer drafts than in force, counted.
    pub fewer: Option<Box<FewerDrafts>>,
    /// Pages from the front that were offered to the prefix cache.
    pub num_published: usize,
    page_hashes: Vec<PageHash>,
    /// The prompt, shared with the waiting queue; moved into `tokens` when admission is first tried.
    prompt: Option<Arc<[i32]>>,
    /// The caller's name for it.
    pub request_id: i64,
    /// Order of first admission, from 1; 0 before.
    pub seniority: u64,
    /// How it ended.
    pub finish: Option<FinishReason>,
    /// Why, if by an error.
    pub error: RowError,
    /// The token that ended it.
    pub stop_token: Option<i32>,
    /// Bytes of text before the stop string.
    pub text_cut: Option<usize>,
}

impl Sequence {
    /// A waiting row.
    #[must_use]
    pub fn new(request_id: i64, shard: u32, prompt: Arc<[i32]>, max_tokens: usize) -> Self {
        Self {
            request_id,
            shard,
            status: SequenceStatus::Waiting,
            num_prompt: prompt.len(),
            prompt: Some(prompt),
            tokens: Vec::new(),
            max_tokens,
            may_draft: true,
            stop: None,
            num_computed: 0,
            pages: Vec::new(),
            num_published: 0,
            page_hashes: Vec::new(),
            draft: DraftState::default(),
            residency: 0,
            seniority: 0,
            in_flight: 0,
            ngram: None,
            shadow: None,
            fewer: None,
            finish: None,
            error: RowError::None,
            stop_token: None,
            text_cut: None,
            counters: Counters::default(),
        }
    }

    /// Makes `tokens` valid for a row that never ran.
    pub fn activate(&mut self) {
        if let Some(prompt) = self.prompt.take() {
            self.tokens = prompt.to_vec();
        }
    }

    /// Frees what a finished row no longer needs.
    pub fn deactivate(&mut self) {
        self.activate();
        self.page_hashes = Vec::new();
        self.ngram = None;
        self.shadow = None;
        self.fewer = None;
    }

    /// Committed tokens.
    #[must_use]
    pub fn num_committed(&self) -> usize {
        self.tokens.len()
    }

    /// Output tokens so far.
    #[must_use]
    pub fn num_output(&self) -> usize {
        self.tokens.len().saturating_sub(self.num_prompt)
    }

    /// Output tokens.
    #[must_use]
    pub fn output(&self) -> &[i32] {
        self.tokens.get(self.num_prompt..).unwrap_or(&[])
    }

    /// Appends the first `count` of `found` up to the one that ends the row; returns how many, and whether the row ends.
    /// What `found` holds past them does not matter.
    #[inline]
    pub fn commit(
        &mut self,
        found: &[i32],
        count: usize,
        max_model_len: usize,
        eos: &[i32],
        bytes: Option<&TokenBytes>,
    ) -> (usize, Option<FinishReason>) {
        let before = self.tokens.len();
        let num_output = before - self.num_prompt;
        let room = (self.max_tokens - num_output).min(max_model_len - before);
        let count = count.min(room);
        let stop = self.stop.as_deref();
        if stop.is_some_and(StopConditions::has_strings) {
            return self.commit_text(&found[..count], room, eos, bytes);
        }
        // Counts cannot be predicted, `found` is equally long in all rows: looking at all of it, and copying it, is
        // quicker than up to the count.
        let ends = |&token: &i32| stop.map_or_else(|| is_any(token, eos), |stop| stop.is_stop_token(token, eos));
        if found.iter().any(ends) {
            let first = stop.map_or(0, |stop| stop.min_tokens.saturating_sub(num_output + 1));
            if let Some(at) = found[..count].iter().skip(first).position(ends) {
                let end = first + at;
                self.tokens.extend_from_slice(&found[..=end]);
                self.stop_token = Some(found[end]);
                return (end + 1, Some(FinishReason::Stop));
            }
        }
        self.tokens.extend_from_slice(found);
        self.tokens.truncate(before + count);
        (count, (count == room).then_some(FinishReason::Length))
    }

    /// As [`Self::commit`], of a row with stop strings and room for `room` tokens.
    fn commit_text(
        &mut self,
        tokens: &[i32],
        room: usize,
        eos: &[i32],
        bytes: Option<&TokenBytes>,
    ) -> (usize, Option<FinishReason>) {
        let num_output = self.num_output();
        let stop = self.stop.as_mut().and_then(|stop| stop.scan(tokens, num_output, eos, bytes));
        let count = stop.map_or(tokens.len(), |(count, _)| count);
        self.tokens.extend_from_slice(&tokens[..count]);
        let Some((_, stop)) = stop else {
            return (count, (count == room).then_some(FinishReason::Length));
        };
        match stop {
            StopMatch::Token(token) => self.stop_token = Some(token),
            StopMatch::Text(cut) => self.text_cut = Some(cut),
        }
        (count, Some(FinishReason::Stop))
    }

    /// Whether it holds a row slot.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.status, SequenceStatus::Prefilling | SequenceStatus::Decoding)
    }

    /// Whether it may hold more pages than its tokens need.
    #[inline]
    #[must_use]
    pub fn has_surplus(&self, block_size: usize, draft_tenant: bool) -> bool {
        let surplus = self.pages.len() * block_size >= self.tokens.len() + block_size;
        surplus || (draft_tenant && !self.draft.pages.is_empty())
    }

    /// Committed tokens the draft model has not seen.
    #[must_use]
    pub fn draft_gap(&self) -> usize {
        self.tokens.len() - self.draft.computed
    }

    /// Names of the first `count` full pages.
    pub fn page_hashes(&mut self, count: usize, block_size: usize) -> &[PageHash] {
        for page in self.page_hashes.len()..count {
            let parent = self.page_hashes.last().copied().unwrap_or(ROOT);
            let tokens = &self.tokens[page * block_size..(page + 1) * block_size];
            self.page_hashes.push(chain(parent, tokens));
        }
        &self.page_hashes[..count]
    }

    /// Accepted share of its drafts, with one success and one failure lent to every row.
    #[must_use]
    pub fn acceptance(&self) -> f64 {
        f64::from(self.counters.accepted + 1) / f64::from(self.counters.drafted + 2)
    }
}
