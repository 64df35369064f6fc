//! The sizes a scheduler is made with. They never change, except the number of rows that may run.

use crate::error::{Result, ensure};

/// Sizes and limits of one device's scheduler.
#[derive(Clone, Debug)]
pub struct Config {
    /// Pages in the pool, the null page (0) included.
    pub num_pages: usize,
    /// Target tokens a page holds.
    pub block_size: usize,
    /// Draft tokens the same bytes hold; 0: no draft tenant.
    pub draft_block_size: usize,
    /// Rows running at once.
    pub max_num_seqs: usize,
    /// Token budget of a prefill or draft prefill step.
    pub max_num_batched_tokens: usize,
    /// Longest context of a row, its output included.
    pub max_model_len: usize,
    /// The draft model's longest context; 0: as the target.
    pub draft_max_model_len: usize,
    /// Largest k.
    pub max_speculative_tokens: usize,
    /// Ids that end a row unless it ignores them.
    pub eos_token_ids: Vec<i32>,
    /// Whether full pages are shared between rows with the same prefix.
    pub prefix_cache: bool,
    /// Shortest and longest n-gram looked up.
    pub ngram_min: usize,
    /// See `ngram_min`.
    pub ngram_max: usize,
}

impl Config {
    /// A configuration with the defaults of the Python constructor.
    #[must_use]
    pub fn new(num_pages: usize, block_size: usize, max_num_seqs: usize, max_model_len: usize) -> Self {
        Self {
            num_pages,
            block_size,
            draft_block_size: 0,
            max_num_seqs,
            max_num_batched_tokens: max_model_len.max(max_num_seqs),
            max_model_len,
            draft_max_model_len: 0,
            max_speculative_tokens: 8,
            eos_token_ids: Vec::new(),
            prefix_cache: true,
            ngram_min: 2,
            ngram_max: 4,
        }
    }

    /// Checks every size and fills in the draft's context limit.
    ///
    /// # Errors
    /// `Error::Argument` naming the option, what is allowed and what was given.
    pub fn validate(mut self) -> Result<Self> {
        const LIMIT: usize = i32::MAX as usize;
        let at_least = |name: &str, value: usize, low: usize, high: usize| {
            ensure((low..=high).contains(&value), || format!("{name}: expected {low}..={high}, got {value}"))
        };
        at_least("num_pages", self.num_pages, 2, LIMIT)?;
        at_least("block_size", self.block_size, 1, LIMIT)?;
        at_least("draft_block_size", self.draft_block_size, 0, LIMIT)?;
        at_least("max_num_seqs", self.max_num_seqs, 1, 1 << 20)?;
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 28)?;
        at_least("max_model_len", self.max_model_len, 2, 1 << 28)?;
        at_least("draft_max_model_len", self.draft_max_model_len, 0, 1 << 28)?;
        at_least("max_speculative_tokens", self.max_speculative_tokens, 0, 1 << 10)?;
        at_least("ngram_min", self.ngram_min, 1, 64)?;
        at_least("ngram_max", self.ngram_max, self.ngram_min, 64)?;
        let widest = self.block_size.max(self.draft_block_size);
        ensure(self.num_pages.checked_mul(widest).is_some_and(|slots| slots <= LIMIT), || {
            format!("num_pages: {} pages of {widest} tokens exceed the {LIMIT} slots an int32 can name", self.num_pages)
        })?;
        if let Some(&id) = self.eos_token_ids.iter().find(|&&id| id < 0) {
            ensure(false, || format!("eos_token_ids: expected ids of at least 0, got {id}"))?;
        }
        if self.draft_max_model_len == 0 {
            self.draft_max_model_len = self.max_model_len;
        }
        Ok(self)
    }

    /// Pages that rows can own.
    #[must_use]
    pub fn usable_pages(&self) -> usize {
        self.num_pages - 1
    }

    /// Target pages that hold `tokens` tokens.
    #[must_use]
    pub fn target_pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Draft pages that hold `tokens` tokens.
    #[must_use]
    pub fn draft_pages(&self, tokens: usize) -> usize {
        if self.draft_block_size == 0 { 0 } else { tokens.div_ceil(self.draft_block_size) }
    }
}
