//! The doors of the scheduler: requests in, finished rows out.

use std::sync::Arc;

use super::Scheduler;
use crate::error::{Result, ensure};
use crate::sequence::{Counters, FinishReason, Handle, RowError, Sequence, SequenceStatus};
use crate::stop::StopConditions;

/// A row as given.
#[derive(Clone, Debug)]
pub struct Request {
    /// The caller's name for it.
    pub request_id: i64,
    /// The caller's shard number.
    pub shard: i32,
    /// Prompt tokens.
    pub prompt: Arc<[i32]>,
    /// Most output tokens.
    pub max_tokens: usize,
    /// False: always autoregressive.
    pub may_draft: bool,
    /// When it ends.
    pub stop: StopConditions,
}

impl Request {
    /// A request without stop conditions of its own.
    #[must_use]
    pub fn new(request_id: i64, prompt: &[i32], max_tokens: usize) -> Self {
        let stop = StopConditions::default();
        Self { request_id, shard: 0, prompt: prompt.into(), max_tokens, may_draft: true, stop }
    }

    fn check(&self, has_token_bytes: bool) -> Result<()> {
        let id = self.request_id;
        ensure(self.max_tokens >= 1, || format!("max_tokens: expected at least 1, got 0 (request {id})"))?;
        let token = self.prompt.iter().chain(&self.stop.tokens).find(|&&token| token < 0);
        ensure(token.is_none(), || format!("prompt_values: expected ids of at least 0, got {token:?} (request {id})"))?;
        ensure(self.stop.strings.iter().all(|stop| !stop.is_empty()), || {
            format!("stop_string_values: expected non-empty stop strings (request {id})")
        })?;
        ensure(self.stop.strings.is_empty() || has_token_bytes, || {
            format!("stop_string_values: stop strings need set_token_bytes first (request {id})")
        })
    }
}

/// A finished row as handed out.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // documented where Python reads them, in specbatch/_core.pyi
pub struct FinishedRow {
    pub handle: Handle,
    pub request_id: i64,
    pub shard: i32,
    pub reason: FinishReason,
    pub error: RowError,
    pub stop_token: Option<i32>,
    pub num_prompt: usize,
    pub counters: Counters,
    pub tokens: Vec<i32>,
    pub text: Vec<u8>,
}

impl Scheduler {
    /// Queues requests and returns their handles. A row that can never run is finished at once.
    ///
    /// # Errors
    /// `Error::Argument` naming the first request that is malformed; nothing has changed then.
    pub fn add_requests(&mut self, requests: Vec<Request>) -> Result<Vec<Handle>> {
        for request in &requests {
            request.check(self.token_bytes.is_some())?;
        }
        Ok(requests.into_iter().map(|request| self.add(request)).collect())
    }

    fn add(&mut self, request: Request) -> Handle {
        let shard = self.shards.intern(request.shard);
        let prompt = request.prompt;
        let mut sequence = Sequence::new(request.request_id, shard, prompt.clone(), request.max_tokens);
        sequence.may_draft = request.may_draft;
        sequence.stop = request.stop.is_any().then(|| Box::new(request.stop));
        let handle = self.rows.insert(sequence);
        let error = if prompt.is_empty() {
            RowError::EmptyPrompt
        } else if prompt.len() >= self.config.max_model_len {
            RowError::PromptTooLong
        } else if self.config.target_pages(prompt.len()) > self.config.usable_pages() {
            RowError::TooFewPages
        } else {
            self.queue.push(handle, shard, prompt);
            return handle;
        };
        self.finish(handle, FinishReason::Error, error);
        handle
    }

    /// Finishes a waiting or running row. False when it is neither.
    pub fn abort(&mut self, handle: Handle) -> bool {
        match self.rows.get(handle).map(|sequence| sequence.status) {
            Some(SequenceStatus::Waiting) => self.end_waiting(handle, FinishReason::Aborted, RowError::None),
            Some(SequenceStatus::Prefilling | SequenceStatus::Decoding) => {
                self.finish(handle, FinishReason::Aborted, RowError::None);
                self.running.retain(|&other| other != handle);
            }
            _ => return false,
        }
        true
    }

    /// Finishes a row that waits.
    pub(super) fn end_waiting(&mut self, handle: Handle, reason: FinishReason, error: RowError) {
        self.queue.remove(handle, self.rows[handle].seniority);
        self.finish(handle, reason, error);
    }

    /// Marks a row finished and gives its pages back. The caller takes it out of `running`.
    pub(super) fn finish(&mut self, handle: Handle, reason: FinishReason, error: RowError) {
        self.release_all(handle);
        let sequence = &mut self.rows[handle];
        sequence.status = SequenceStatus::Finished;
        sequence.finish = Some(reason);
        sequence.error = error;
        if let Some(shadow) = &mut sequence.shadow {
            let shadows = self.shards.shadows(sequence.shard, self.config.max_speculative_tokens);
            shadow.close(|k, round| shadows.record(k, round));
        }
        sequence.deactivate();
        self.finished.push(handle);
    }

    /// Hands out finished rows in the order they ended; their handles may be reused from now on.
    pub fn take_finished(&mut self) -> Vec<FinishedRow> {
        let handles = std::mem::take(&mut self.finished);
        handles.into_iter().filter_map(|handle| self.take(handle)).collect()
    }

    fn take(&mut self, handle: Handle) -> Option<FinishedRow> {
        let sequence = *self.rows.remove(handle)?;
        let mut spoken = sequence.output();
        if sequence.stop_token.is_some() {
            spoken = &spoken[..spoken.len() - 1];
        }
        let mut text = Vec::new();
        if let Some(bytes) = &self.token_bytes {
            for &token in spoken {
                text.extend_from_slice(bytes.get(token));
            }
        }
        text.truncate(sequence.text_cut.unwrap_or(text.len()));
        let mut tokens = sequence.tokens;
        tokens.drain(..sequence.num_prompt);
        Some(FinishedRow {
            handle,
            request_id: sequence.request_id,
            shard: self.shards.id(sequence.shard),
            reason: sequence.finish?,
            error: sequence.error,
            stop_token: sequence.stop_token,
            num_prompt: sequence.num_prompt,
            counters: sequence.counters,
            tokens,
            text,
        })
    }

    /// Rows that wait, run, or wait to be taken.
    #[must_use]
    pub fn num_unfinished(&self) -> usize {
        self.queue.len() + self.running.len()
    }
}
