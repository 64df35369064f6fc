//! What each shard does (method and k) and what came of it: acceptance counts a shard, method and draft position.
//! Knows nothing of rows.

use std::collections::HashMap;

use crate::error::{Result, ensure};
use crate::fewer::REAL;
use crate::shadow::Round;

/// How drafts are proposed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum Method {
    /// Not at all.
    #[default]
    None = 0,
    /// Looked up in the row's own tokens.
    Ngram = 1,
    /// By the caller's draft model, whose KV lives in the draft tenant.
    Draft = 2,
    /// By the caller, without KV of its own.
    External = 3,
    /// Counts only: n-gram proposals scored against tokens committed anyway.
    NgramShadow = 4,
}

const NUM_METHODS: usize = 5;
const METHODS: [Method; NUM_METHODS] =
    [Method::None, Method::Ngram, Method::Draft, Method::External, Method::NgramShadow];

/// A shard's choice; `k` is 0 exactly when the method is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Speculation {
    /// How.
    pub method: Method,
    /// How many drafts a row and step, at most.
    pub k: usize,
}

impl Speculation {
    /// From the caller's numbers.
    ///
    /// # Errors
    /// `Error::Argument` for an unknown method, a k past `max_k`, or a draft model without draft tenant.
    pub fn new(method: i32, k: i64, max_k: usize, has_draft_tenant: bool) -> Result<Self> {
        let method = match method {
            0 => Method::None,
            1 => Method::Ngram,
            2 => Method::Draft,
            3 => Method::External,
            _ => {
                ensure(false, || {
                    format!("method: expected METHOD_NONE, NGRAM, DRAFT or EXTERNAL (0..=3), got {method}")
                })?;
                Method::None
            }
        };
        ensure((0..=max_k as i64).contains(&k), || {
            format!("k: expected 0..={max_k} (max_speculative_tokens), got {k}")
        })?;
        ensure(method != Method::Draft || has_draft_tenant, || {
            "method: METHOD_DRAFT needs a scheduler with draft_block_size of at least 1, got 0".into()
        })?;
        Ok(if k == 0 || method == Method::None { Self::default() } else { Self { method, k: k as usize } })
    }
}

/// Counts of one shard and method since they were last taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceptanceLine {
    /// The caller's shard number.
    pub shard: i32,
    /// Of proposing.
    pub method: Method,
    /// Row-steps in which a proposal was asked for.
    pub rounds: i64,
    /// Row-steps in which there was one.
    pub proposed: i64,
    /// Row-steps that reached draft position j: j drafts before it were accepted.
    pub offered: Vec<i64>,
    /// Row-steps that accepted the draft at position j.
    pub accepted: Vec<i64>,
    /// Tokens those row-steps committed.
    pub committed: i64,
    /// Drafts a round, of a shadow and of rounds within real ones; 0 for real rounds, whose k is what the shard was told.
    pub k: usize,
}

impl AcceptanceLine {
    /// Counts of weights in units of `unit`, to the nearest.
    fn divided(mut self, unit: i64) -> Self {
        let divide = |value: &mut i64| *value = (*value + unit / 2) / unit;
        [&mut self.rounds, &mut self.proposed, &mut self.committed].into_iter().for_each(divide);
        self.offered.iter_mut().chain(&mut self.accepted).for_each(divide);
        self
    }
}

/// Rounds of one shard and method.
#[derive(Clone, Debug, Default)]
struct Tally {
    rounds: i64,
    proposed: i64,
    committed: i64,
    /// Rounds by drafts accepted, and by whether the next one was rejected (or never offered).
    outcomes: Vec<[i64; 2]>,
}

/// Rounds of the shadow scorer in one shard, by number of drafts.
#[derive(Clone, Debug, Default)]
pub struct ShadowTallies {
    by_k: Vec<Tally>,
    /// Rounds without a proposal that every number of drafts up to the index had at once.
    unmatched: Vec<i64>,
}

#[derive(Clone, Debug)]
struct Shard {
    id: i32,
    speculation: Speculation,
    tallies: [Option<Box<Tally>>; NUM_METHODS],
    shadows: Option<Box<ShadowTallies>>,
    fewer: Option<Box<ShadowTallies>>,
}

/// All shards seen.
#[derive(Clone, Debug, Default)]
pub struct ShardTable {
    default: Speculation,
    shards: Vec<Shard>,
    by_id: HashMap<i32, u32>,
    /// Some shard has another method than the default.
    mixed: bool,
    touched: Vec<u32>,
}

impl ShardTable {
    /// Index of a shard, made on first sight.
    pub fn intern(&mut self, id: i32) -> u32 {
        let next = self.shards.len() as u32;
        let index = *self.by_id.entry(id).or_insert(next);
        if index == next {
            self.shards.push(Shard {
                id,
                speculation: self.default,
                tallies: Default::default(),
                shadows: None,
                fewer: None,
            });
        }
        index
    }

    /// The caller's number of a shard.
    #[must_use]
    pub fn id(&self, shard: u32) -> i32 {
        self.shards[shard as usize].id
    }

    /// What a shard does.
    #[must_use]
    pub fn get(&self, shard: u32) -> Speculation {
        self.shards[shard as usize].speculation
    }

    /// Changes one shard, or (None) all and those to come.
    pub fn set(&mut self, shard: Option<i32>, speculation: Speculation) {
        if let Some(id) = shard {
            let index = self.intern(id);
            self.shards[index as usize].speculation = speculation;
        } else {
            self.default = speculation;
            for shard in &mut self.shards {
                shard.speculation = speculation;
            }
        }
        self.note_mixed();
    }

    /// The method of all shards, if they have one in common.
    #[must_use]
    pub fn only_method(&self) -> Option<Method> {
        (!self.mixed).then_some(self.default.method)
    }

    fn note_mixed(&mut self) {
        self.mixed = self.shards.iter().any(|shard| shard.speculation.method != self.default.method);
    }

    /// Books a row-step. `round.proposed` drafts (at most `positions`) stood for verification, of which
    /// `round.accepted` were committed.
    #[inline(always)]
    #[allow(clippy::inline_always)] // in the loop over rows, where a call costs as much as the work
    pub fn record(&mut self, shard: u32, method: Method, round: Round, positions: usize) {
        if self.shards[shard as usize].tallies[method as usize].is_none() {
            self.open(shard, method, positions);
        }
        if let Some(tally) = &mut self.shards[shard as usize].tallies[method as usize] {
            tally.record(round);
        }
    }

    /// Starts to count what a shard's method brings.
    #[cold]
    fn open(&mut self, shard: u32, method: Method, positions: usize) {
        let Shard { tallies, shadows, .. } = &mut self.shards[shard as usize];
        if shadows.is_none() && tallies.iter().all(Option::is_none) {
            self.touched.push(shard);
        }
        let outcomes = vec![[0; 2]; positions + 1];
        tallies[method as usize] = Some(Box::new(Tally { outcomes, ..Tally::default() }));
    }

    /// Where the shadow scorer's rounds of a shard are booked, each of at most `positions` drafts.
    pub fn shadows(&mut self, shard: u32, positions: usize) -> &mut ShadowTallies {
        let Shard { tallies, shadows, .. } = &mut self.shards[shard as usize];
        if shadows.is_none() && tallies.iter().all(Option::is_none) {
            self.touched.push(shard);
        }
        shadows.get_or_insert_with(|| Box::new(ShadowTallies::new(positions)))
    }

    /// Where rounds of fewer drafts than a shard's real ones are booked.
    pub fn fewer(&mut self, shard: u32, positions: usize) -> &mut ShadowTallies {
        // Never the first of a shard to be touched: a real round was recorded before.
        self.shards[shard as usize].fewer.get_or_insert_with(|| Box::new(ShadowTallies::new(positions)))
    }

    /// Takes the counts, shards in the order they were touched, methods in numerical order, then shadows and rounds of
    /// fewer drafts by k.
    pub fn take(&mut self) -> Vec<AcceptanceLine> {
        let mut lines = Vec::new();
        for shard in self.touched.drain(..) {
            let shard = &mut self.shards[shard as usize];
            for (method, tally) in METHODS.into_iter().zip(&mut shard.tallies) {
                lines.extend(tally.take().map(|tally| tally.line(shard.id, method, 0)));
            }
            if let Some(shadows) = shard.shadows.take() {
                shadows.lines(shard.id, Method::NgramShadow, 1, &mut lines);
            }
            if let Some(fewer) = shard.fewer.take() {
                let method = shard.speculation.method;
                if matches!(method, Method::Draft | Method::External) {
                    fewer.lines(shard.id, method, REAL, &mut lines);
                }
            }
        }
        lines
    }
}

impl ShadowTallies {
    fn new(positions: usize) -> Self {
        let tally = Tally { outcomes: vec![[0; 2]; positions + 1], ..Tally::default() };
        Self { by_k: vec![tally; positions], unmatched: vec![0; positions + 1] }
    }

    /// Books a round of at most `k` drafts.
    #[inline]
    pub fn record(&mut self, k: usize, round: Round) {
        self.by_k[k - 1].record(round);
    }

    /// Books a round of at most `k` drafts that weighs so much.
    #[inline]
    pub fn weigh(&mut self, k: usize, round: Round, weight: i64) {
        self.by_k[k - 1].weigh(round, weight);
    }

    /// Books a round without a proposal for every number of drafts up to `most`.
    #[inline]
    pub fn record_unmatched(&mut self, most: usize) {
        self.unmatched[most] += 1;
    }

    /// A line for each number of drafts that had a round.
    fn lines(self, shard: i32, method: Method, unit: i64, lines: &mut Vec<AcceptanceLine>) {
        let mut unmatched = 0;
        let mut found = Vec::new();
        for (index, mut tally) in self.by_k.into_iter().enumerate().rev() {
            let k = index + 1;
            unmatched += self.unmatched[k];
            tally.rounds += unmatched;
            tally.committed += unmatched;
            tally.outcomes[0][0] += unmatched;
            if tally.rounds > 0 {
                found.push(tally.line(shard, method, k).divided(unit));
            }
        }
        lines.extend(found.into_iter().rev());
    }
}

impl Tally {
    #[inline]
    fn record(&mut self, round: Round) {
        self.weigh(round, 1);
    }

    #[inline]
    fn weigh(&mut self, round: Round, weight: i64) {
        self.rounds += weight;
        self.proposed += i64::from(round.proposed > 0) * weight;
        self.committed += round.committed as i64 * weight;
        // A row that ended inside the accepted run was not offered the next position.
        // Both as numbers: a branch on either could not be predicted.
        let rejected = usize::from(round.committed > round.accepted) & usize::from(round.accepted < round.proposed);
        self.outcomes[round.accepted][rejected] += weight;
    }

    /// Counts by position: a round that accepted a drafts was offered a positions, and one more when it rejected one.
    fn line(&self, shard: i32, method: Method, k: usize) -> AcceptanceLine {
        let positions = self.outcomes.len() - 1;
        let from = |first: usize| self.outcomes[first..].iter().map(|[ended, rejected]| ended + rejected).sum::<i64>();
        let accepted: Vec<i64> = (0..positions).map(|j| from(j + 1)).collect();
        let offered = accepted.iter().zip(&self.outcomes).map(|(accepted, outcome)| accepted + outcome[1]).collect();
        let Self { rounds, proposed, committed, .. } = *self;
        AcceptanceLine { shard, method, rounds, proposed, offered, accepted, committed, k }
    }
}
