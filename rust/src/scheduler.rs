//! One device's scheduler: apply the last step's result, decide the next step, fill its arrays, in one call. This file
//! holds the state, the order of events and what callers may do between steps; each part has a file of its own below
//! `scheduler/`. Knows nothing of tensors, sampling or files.

mod admit;
mod apply;
mod draft;
mod integrity;
mod preempt;
mod probe;
mod requests;
mod reserve;

pub use requests::{FinishedRow, Request};

use std::collections::HashSet;

use crate::block_pool::{BlockPool, Tenant};
use crate::config::Config;
use crate::error::{Result, ensure};
use crate::layout::{Capacity, Layout, StepArrays};
use crate::prefix::{BuildKeyHasher, PageHash};
use crate::queue::WaitingQueue;
use crate::sequence::{FinishReason, Handle, RowError};
use crate::slab::Slab;
use crate::speculation::{AcceptanceLine, Method, ShardTable, Speculation};
use crate::step::{StepInfo, StepKind, StepPlan, StepResult};
use crate::stop::TokenBytes;
use crate::worth::Asked;

/// State of one device's scheduler.
pub struct Scheduler {
    config: Config,
    max_num_seqs: usize,
    pool: BlockPool,
    rows: Slab,
    queue: WaitingQueue,
    /// Rows that hold a slot, in the order they got it. Steps keep this order.
    running: Vec<Handle>,
    /// Running rows that are in prefill.
    num_prefilling: usize,
    finished: Vec<Handle>,
    shards: ShardTable,
    shadow_k: usize,
    /// Rounds of fewer drafts than in force are scored too.
    score_fewer: bool,
    /// Modes were set, and draft pages are not yet given back for it.
    modes_changed: bool,
    /// What is asked of a row's own drafts.
    asked: Asked,
    token_bytes: Option<TokenBytes>,
    plan: StepPlan,
    /// Whether the plan's result is still to come.
    outstanding: bool,
    last_step_id: i64,
    decode_steps: u64,
    last_residency: u64,
    last_seniority: u64,
    num_preempted: usize,
    num_draft_dropped: usize,
    /// Pages being computed by rows in prefill, by content.
    pending: HashSet<PageHash, BuildKeyHasher>,
    wanted_drafts: Vec<usize>,
    order: Vec<Handle>,
}

impl Scheduler {
    /// A scheduler without rows.
    ///
    /// # Errors
    /// `Error::Argument` naming the option that is out of range.
    pub fn new(config: Config) -> Result<Self> {
        let config = config.validate()?;
        Ok(Self {
            max_num_seqs: config.max_num_seqs,
            pool: BlockPool::new(config.num_pages),
            rows: Slab::default(),
            queue: WaitingQueue::new(config.block_size),
            running: Vec::new(),
            num_prefilling: 0,
            finished: Vec::new(),
            shards: ShardTable::default(),
            shadow_k: 0,
            score_fewer: false,
            modes_changed: false,
            asked: Asked::default(),
            token_bytes: None,
            plan: StepPlan::default(),
            outstanding: false,
            last_step_id: 0,
            decode_steps: 0,
            last_residency: 0,
            last_seniority: 0,
            num_preempted: 0,
            num_draft_dropped: 0,
            pending: HashSet::default(),
            wanted_drafts: Vec::new(),
            order: Vec::new(),
            config,
        })
    }

    /// Applies the result of step `step_id`, schedules the next step and fills `arrays`. `layout` remembers what
    /// earlier steps left in these arrays.
    ///
    /// # Errors
    /// `Error::Argument` for a step that is not outstanding, a result that does not fit it, or arrays too small;
    /// nothing has changed then.
    pub fn step(
        &mut self,
        step_id: i64,
        result: &StepResult<'_>,
        arrays: &mut StepArrays<'_>,
        layout: &mut Layout,
    ) -> Result<StepInfo> {
        let capacity = arrays.capacity();
        capacity.check(&self.config, self.max_num_seqs)?;
        self.check_result(step_id, result)?;
        self.settle_modes();
        self.apply(result);
        self.schedule(&capacity);
        self.last_step_id += 1;
        self.outstanding = self.plan.kind != StepKind::Idle;
        let sizes = layout.fill(&self.plan, &self.rows, &self.config, arrays);
        Ok(StepInfo {
            step_id: self.last_step_id,
            num_running: self.running.len(),
            num_waiting: self.queue.len(),
            num_finished: self.finished.len(),
            num_preempted: std::mem::take(&mut self.num_preempted),
            num_draft_dropped: std::mem::take(&mut self.num_draft_dropped),
            free_pages: self.pool.num_free(),
            cached_pages: self.pool.num_cached(),
            target_pages: self.pool.owned(Tenant::Target),
            draft_pages: self.pool.owned(Tenant::Draft),
            ..sizes
        })
    }

    /// Plans the next step. Prefill comes first, then what the draft model must catch up on, then decode.
    fn schedule(&mut self, capacity: &Capacity) {
        loop {
            self.plan.clear();
            self.plan_prefill(capacity);
            if !self.plan.rows.is_empty() {
                self.plan.kind = StepKind::Prefill;
                return;
            }
            if self.running.is_empty() {
                // Every page is free, and still the first row in the queue does not fit.
                let Some(handle) = self.queue.iter().next() else {
                    return;
                };
                self.end_waiting(handle, FinishReason::Error, RowError::TooFewPages);
                continue;
            }
            let method = self.step_method();
            if method == Method::Draft {
                self.plan_draft_prefill(capacity);
                if !self.plan.rows.is_empty() {
                    self.plan.kind = StepKind::DraftPrefill;
                    self.plan.method = Method::Draft;
                    return;
                }
            }
            self.plan_decode(method, capacity);
            if !self.plan.rows.is_empty() {
                self.plan.kind = StepKind::Decode;
                return;
            }
        }
    }

    /// Forgets the outstanding step: its reservations go back, nothing is committed, its drafts count as wasted.
    /// Nothing happens when the last step was idle or is forgotten already.
    ///
    /// # Errors
    /// `Error::Argument` when `step_id` is not the last step.
    pub fn abort_step(&mut self, step_id: i64) -> Result<()> {
        ensure(step_id == self.last_step_id, || self.not_outstanding(step_id))?;
        if !self.outstanding {
            return Ok(());
        }
        for i in 0..self.plan.rows.len() {
            let row = self.plan.rows[i];
            if self.is_current(&row) {
                let sequence = &mut self.rows[row.handle];
                sequence.counters.wasted += std::mem::take(&mut sequence.in_flight) as u32;
                self.trim(row.handle);
            }
        }
        self.outstanding = false;
        self.plan.clear();
        Ok(())
    }

    /// What rows of a shard (None: of all, and of shards to come) do from the next step on. Rows that leave the draft
    /// model give their draft pages back.
    ///
    /// # Errors
    /// `Error::Argument` as [`Speculation::new`].
    pub fn set_speculation(&mut self, method: i32, k: i64, shard: Option<i32>) -> Result<()> {
        let has_draft_tenant = self.config.draft_block_size > 0;
        let speculation = Speculation::new(method, k, self.config.max_speculative_tokens, has_draft_tenant)?;
        self.shards.set(shard, speculation);
        self.modes_changed = true;
        Ok(())
    }

    /// Gives back draft pages of rows whose shard has left draft mode. Once the modes are what they are to be: they are set
    /// for all and then one by one, and a shard that leaves draft mode only between two of those calls keeps its pages.
    fn settle_modes(&mut self) {
        if !std::mem::take(&mut self.modes_changed) {
            return;
        }
        for i in 0..self.running.len() {
            let handle = self.running[i];
            if self.shards.get(self.rows[handle].shard).method != Method::Draft {
                self.release_draft(handle);
            }
        }
    }

    /// Scores n-gram rounds of 1, 2 ... `k` drafts against what rows commit, in any mode; 0: off.
    ///
    /// # Errors
    /// `Error::Argument` when k exceeds `max_speculative_tokens`.
    pub fn set_shadow_ngram(&mut self, k: i64) -> Result<()> {
        let most = self.config.max_speculative_tokens;
        ensure((0..=most as i64).contains(&k), || format!("k: expected 0..={most} (max_speculative_tokens), got {k}"))?;
        self.shadow_k = k as usize;
        if k == 0 {
            self.rows.iter_mut().for_each(|sequence| sequence.shadow = None);
        }
        Ok(())
    }

    /// Scores, within the rounds that rows really have, those of fewer drafts (of a draft model or the caller's; n-gram rounds
    /// have `set_shadow_ngram`).
    pub fn set_score_fewer(&mut self, on: bool) {
        self.score_fewer = on;
        if !on {
            self.rows.iter_mut().for_each(|sequence| sequence.fewer = None);
        }
    }

    /// From which chance of being accepted a draft of a draft model pays (`least`, 0: no matter), that chance over all rows
    /// (`usual`) and the number of a row's own drafts that weigh as much (`weight`). A row whose drafts are accepted less
    /// often rests from them for a while, and after a long rest gives its draft pages back.
    ///
    /// # Errors
    /// `Error::Argument` for chances outside 0..1 (`usual` may be 1) or a negative weight.
    pub fn set_least_acceptance(&mut self, least: f64, usual: f64, weight: f64) -> Result<()> {
        ensure((0.0..1.0).contains(&least), || format!("least: expected at least 0 and below 1, got {least}"))?;
        ensure((0.0..=1.0).contains(&usual), || format!("usual: expected at least 0 and at most 1, got {usual}"))?;
        ensure(weight >= 0.0 && weight.is_finite(), || format!("weight: expected at least 0, got {weight}"))?;
        self.asked = Asked { least: least as f32, usual: usual as f32, weight: weight as f32 };
        Ok(())
    }

    /// Changes how many rows may run; the youngest surplus rows are preempted.
    ///
    /// # Errors
    /// `Error::Argument` when `n` is 0 or absurd.
    pub fn set_max_num_seqs(&mut self, n: i64) -> Result<()> {
        ensure((1..=1 << 20).contains(&n), || format!("n: expected 1..={}, got {n}", 1 << 20))?;
        self.max_num_seqs = n as usize;
        while self.running.len() > self.max_num_seqs {
            let Some(youngest) = self.youngest() else { break };
            self.preempt_row(youngest);
        }
        Ok(())
    }

    /// Takes the acceptance counts.
    pub fn take_acceptance(&mut self) -> Vec<AcceptanceLine> {
        self.shards.take()
    }

    /// Forgets all shared prefixes; returns how many pages became free.
    pub fn clear_prefix_cache(&mut self) -> usize {
        self.pool.clear_cache()
    }

    /// Bytes of every vocabulary entry, for stop strings and text.
    pub fn set_token_bytes(&mut self, bytes: TokenBytes) {
        self.token_bytes = Some(bytes);
    }

    /// Sizes and limits, as completed by [`Config::validate`].
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Rows that may run at once.
    #[must_use]
    pub fn max_num_seqs(&self) -> usize {
        self.max_num_seqs
    }

    /// Rows in the waiting queue.
    #[must_use]
    pub fn num_waiting(&self) -> usize {
        self.queue.len()
    }

    /// Rows that hold a slot.
    #[must_use]
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// The pages.
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The plan of the last step.
    #[must_use]
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// All rows, waiting, running and finished.
    #[must_use]
    pub fn rows(&self) -> &Slab {
        &self.rows
    }

    fn youngest(&self) -> Option<Handle> {
        self.running.iter().copied().max_by_key(|&handle| self.rows[handle].seniority)
    }
}

impl StepArrays<'_> {
    /// What the arrays can hold.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        let rows = self.seq_index.len();
        Capacity {
            rows,
            tokens: self.input_ids.len(),
            logits: self.logits_indices.len(),
            table_width: self.block_tables.len() / rows.max(1),
            draft_table_width: self.draft_block_tables.len() / rows.max(1),
        }
    }
}
