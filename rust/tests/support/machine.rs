//! A device in miniature: memory of KV entries a slot, a target and a draft model that read it only through the step's
//! arrays, and checks that every entry a model reads is the one it should be.
#![allow(dead_code)]

use std::collections::HashMap;

use specbatch_core::config::Config;
use specbatch_core::scheduler::{FinishedRow, Request, Scheduler};
use specbatch_core::sequence::Handle;
use specbatch_core::step::StepInfo;
use specbatch_core::stop::{StopConditions, TokenBytes};

use crate::model::{Context, EMPTY, Model, Spec, bytes_of, extend};
use crate::support::{Arrays, Outcome, Shape};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Target,
    Draft,
}

/// One page of memory: entries of one model. The other model's first write destroys them.
#[derive(Clone, Debug)]
struct Page {
    owner: Owner,
    entries: HashMap<usize, Context>,
}

#[derive(Clone, Debug)]
struct Row {
    spec: Spec,
    tokens: Vec<i32>,
    preempted: u32,
}

pub struct Machine {
    pub scheduler: Scheduler,
    pub arrays: Arrays,
    pub model: Model,
    pub config: Config,
    pub outcome: Outcome,
    pub info: StepInfo,
    pub finished: Vec<(Spec, FinishedRow)>,
    pub events: usize,
    pages: Vec<Page>,
    rows: HashMap<Handle, Row>,
    /// Rows of the last step and the tokens found for them.
    given: Vec<(Handle, Vec<i32>)>,
}

/// One array of a model's side of the step.
struct Side<'a> {
    owner: Owner,
    block_size: usize,
    table: &'a [i32],
}

impl Machine {
    pub fn new(config: &Config, model: Model) -> Self {
        let mut scheduler = Scheduler::new(config.clone()).expect("a valid configuration");
        let config = scheduler.config().clone();
        let mut values = Vec::new();
        let mut offsets = vec![0];
        for token in 0..model.vocabulary {
            values.extend(bytes_of(token));
            offsets.push(values.len() as i64);
        }
        scheduler.set_token_bytes(TokenBytes::new(values, offsets).expect("good offsets"));
        let tokens = config.max_num_batched_tokens.max(config.max_num_seqs * 3);
        let shape = Shape {
            rows: config.max_num_seqs + 1,
            tokens,
            logits: config.max_num_seqs * 4,
            width: config.target_pages(config.max_model_len) + 1,
            draft_width: config.draft_pages(config.draft_max_model_len).max(1),
        };
        let page = Page { owner: Owner::Target, entries: HashMap::new() };
        Self {
            scheduler,
            arrays: Arrays::new(shape),
            model,
            pages: vec![page; config.num_pages],
            config,
            outcome: Outcome::default(),
            info: StepInfo::default(),
            finished: Vec::new(),
            events: 0,
            rows: HashMap::new(),
            given: Vec::new(),
        }
    }

    pub fn add(&mut self, specs: &[Spec]) -> Vec<Handle> {
        let requests = specs.iter().map(|spec| Request {
            request_id: spec.request_id,
            shard: spec.shard,
            prompt: spec.prompt.as_slice().into(),
            max_tokens: spec.max_tokens,
            may_draft: spec.may_draft,
            stop: StopConditions::new(
                spec.min_tokens,
                spec.ignore_eos,
                spec.stop_tokens.as_slice().into(),
                spec.stop_strings.iter().map(|stop| stop.as_slice().into()).collect(),
            ),
        });
        let handles = self.scheduler.add_requests(requests.collect()).expect("good requests");
        for (&handle, spec) in handles.iter().zip(specs) {
            let row = Row { spec: spec.clone(), tokens: spec.prompt.clone(), preempted: 0 };
            assert!(self.rows.insert(handle, row).is_none(), "handle {handle} was given twice");
        }
        handles
    }

    /// Handles not taken yet.
    pub fn live(&self) -> Vec<Handle> {
        let mut handles: Vec<Handle> = self.rows.keys().copied().collect();
        handles.sort_unstable();
        handles
    }

    /// Gives the last result, takes the next step, runs both models on it.
    pub fn step(&mut self) -> Result<StepInfo, String> {
        let before: HashMap<i64, usize> =
            self.rows.values().map(|row| (row.spec.request_id, row.tokens.len())).collect();
        let outcome = std::mem::take(&mut self.outcome);
        let info = self
            .arrays
            .step(&mut self.scheduler, self.info.step_id, &outcome.view())
            .map_err(|error| error.to_string())?;
        self.scheduler.check_integrity().map_err(|error| error.to_string())?;
        self.note_tokens(&before)?;
        self.info = info;
        self.events += 1;
        for row in self.scheduler.take_finished() {
            let Some(known) = self.rows.remove(&row.handle) else {
                return Err(format!("row {} finished but is not known", row.handle));
            };
            self.finished.push((known.spec, row));
        }
        self.check_padding()?;
        self.outcome = self.forward()?;
        Ok(info)
    }

    pub fn abort_step(&mut self) {
        self.scheduler.abort_step(self.info.step_id).expect("the last step");
        self.outcome = Outcome::default();
        self.given.clear();
    }

    /// Every row holds either what it held, or that and what was found for it, and only the latter if nothing happened
    /// to it in between.
    fn note_tokens(&mut self, before: &HashMap<i64, usize>) -> Result<(), String> {
        let given = std::mem::take(&mut self.given);
        for (&handle, row) in &mut self.rows {
            let Some(sequence) = self.scheduler.rows().get(handle) else {
                return Err(format!("row {handle} has vanished"));
            };
            if sequence.num_committed() == 0 {
                continue;
            }
            let old = before[&row.spec.request_id];
            let new = &sequence.tokens[old..];
            let found = given.iter().find(|(other, _)| *other == handle).map_or(&[][..], |(_, found)| found);
            let untouched = sequence.counters.preempted == row.preempted && sequence.finish.is_none();
            if sequence.tokens[..old] != row.tokens || !found.starts_with(new) || (untouched && new.len() < found.len())
            {
                return Err(format!("row {handle}: {found:?} became {new:?} (untouched: {untouched})"));
            }
            row.tokens.extend_from_slice(new);
            row.preempted = sequence.counters.preempted;
        }
        Ok(())
    }

    fn check_padding(&self) -> Result<(), String> {
        let info = &self.info;
        let arrays = &self.arrays;
        let shape = arrays.shape;
        for (name, array) in arrays.all() {
            let padding = if name.ends_with("slot_mapping") || name == "seq_index" { -1 } else { 0 };
            let used = match name {
                "query_start_loc" | "logits_start_loc" | "draft_query_start_loc" => {
                    let last = match name {
                        "query_start_loc" => info.num_tokens,
                        "logits_start_loc" => info.num_logits,
                        _ => info.draft_num_tokens,
                    };
                    if array[info.num_rows..].iter().any(|&start| start != last as i32) || array[0] != 0 {
                        return Err(format!("{name}: {array:?} does not end in {last}"));
                    }
                    continue;
                }
                "input_ids" | "positions" | "slot_mapping" => info.num_tokens,
                "draft_input_ids" | "draft_positions" | "draft_slot_mapping" => info.draft_num_tokens,
                "logits_indices" => info.num_logits,
                "block_tables" => info.num_rows * shape.width,
                "draft_block_tables" => info.num_rows * shape.draft_width,
                _ => info.num_rows,
            };
            if array[used..].iter().any(|&value| value != padding) {
                return Err(format!("{name}: expected {padding} past {used}, got {:?}", &array[used..]));
            }
        }
        Ok(())
    }

    /// Runs the models on the arrays.
    pub fn forward(&mut self) -> Result<Outcome, String> {
        let mut outcome = Outcome { width: self.config.max_speculative_tokens + 1, ..Outcome::default() };
        for i in 0..self.info.num_rows {
            let handle = self.arrays.seq_index[i] as Handle;
            let tokens =
                self.rows.get(&handle).ok_or(format!("row {handle} is in the step but not known"))?.tokens.clone();
            let drafts = self.draft(i, &tokens)?;
            if self.info.kind == 3 {
                continue;
            }
            let (found, num_draft) = self.verify(i, &tokens, drafts)?;
            outcome.num_sampled.push(found.len() as i32);
            outcome.num_draft.push(num_draft as i32);
            let mut line = found.clone();
            line.resize(outcome.width, -7);
            outcome.token_ids.extend(line);
            self.given.push((handle, found));
        }
        Ok(outcome)
    }

    /// The draft model's part: its first pass over unseen tokens, then one pass a draft. The drafts it would propose.
    fn draft(&mut self, i: usize, tokens: &[i32]) -> Result<Option<Vec<i32>>, String> {
        let arrays = &self.arrays;
        let (from, to) = (arrays.draft_query_start_loc[i] as usize, arrays.draft_query_start_loc[i + 1] as usize);
        let k = arrays.num_draft_tokens[i] as usize;
        let table = arrays.draft_block_tables[i * arrays.shape.draft_width..][..arrays.shape.draft_width].to_vec();
        if from == to {
            if table.iter().any(|&page| page != 0) || arrays.draft_seq_lens[i] != 0 {
                return Err(format!("row {i} does not draft but has a draft table"));
            }
            return Ok(None);
        }
        let side = Side { owner: Owner::Draft, block_size: self.config.draft_block_size, table: &table };
        let seq_len = arrays.draft_seq_lens[i] as usize;
        let start = seq_len - (to - from);
        let ids = arrays.draft_input_ids[from..to].to_vec();
        let positions = arrays.draft_positions[from..to].to_vec();
        let slots = arrays.draft_slot_mapping[from..to].to_vec();
        if self.info.kind == 2 && seq_len != tokens.len() {
            return Err(format!("row {i} drafts after {seq_len} of {} tokens", tokens.len()));
        }
        let mut all = tokens[..seq_len].to_vec();
        self.compute(&side, &all, start, &ids, &positions, &slots)?;
        let mut context = self.read(&side, &all)?;
        let mut drafts = Vec::new();
        if self.info.kind == 2 {
            for j in 0..k {
                let token = self.model.draft(context, &all);
                drafts.push(token);
                all.push(token);
                if j + 1 < k {
                    let position = all.len() - 1;
                    let slot = side.slot(position)?;
                    self.compute(&side, &all, position, &[token], &[position as i32], &[slot as i32])?;
                    context = self.read(&side, &all)?;
                }
            }
        }
        Ok(Some(drafts))
    }

    /// The target's part: the tokens it commits and how many drafts it was given.
    fn verify(&mut self, i: usize, tokens: &[i32], drafts: Option<Vec<i32>>) -> Result<(Vec<i32>, usize), String> {
        let arrays = &self.arrays;
        let (from, to) = (arrays.query_start_loc[i] as usize, arrays.query_start_loc[i + 1] as usize);
        let seq_len = arrays.seq_lens[i] as usize;
        let start = seq_len - (to - from);
        let reserved = arrays.num_draft_tokens[i] as usize;
        let committed = to - from - reserved;
        let mut ids = arrays.input_ids[from..to].to_vec();
        let outside = self.info.method == 3;
        if let Some(drafts) = drafts {
            ids[committed..].copy_from_slice(&drafts);
        } else if outside {
            let mut all = tokens.to_vec();
            for id in &mut ids[committed..] {
                let context = all.iter().fold(EMPTY, |context, &token| extend(context, token));
                *id = self.model.draft(context, &all);
                all.push(*id);
            }
        } else if self.info.method == 2 && reserved > 0 {
            return Err(format!("row {i} has {reserved} drafts reserved but nothing to draft from"));
        }
        let mut all = tokens[..(start + committed).min(tokens.len())].to_vec();
        all.extend_from_slice(&ids[committed..]);
        let logits = arrays.logits_start_loc[i] as usize..arrays.logits_start_loc[i + 1] as usize;
        let wanted = arrays.logits_indices[logits].to_vec();
        let expected: Vec<i32> = match (self.info.kind, seq_len < tokens.len()) {
            (1, true) => vec![],
            (1, false) => vec![to as i32 - 1],
            _ => (from as i32..to as i32).collect(),
        };
        if wanted != expected || all.len() != seq_len || (self.info.kind == 2 && start + 1 != tokens.len()) {
            return Err(format!("row {i}: {seq_len} tokens from {start} of {}, logits of {wanted:?}", tokens.len()));
        }
        let table = arrays.block_tables[i * arrays.shape.width..][..arrays.shape.width].to_vec();
        let side = Side { owner: Owner::Target, block_size: self.config.block_size, table: &table };
        let positions = arrays.positions[from..to].to_vec();
        let slots = arrays.slot_mapping[from..to].to_vec();
        self.compute(&side, &all, start, &ids, &positions, &slots)?;
        self.read(&side, &all)?;
        let mut found = Vec::new();
        if !wanted.is_empty() {
            let mut context = all[..seq_len - reserved].iter().fold(EMPTY, |context, &token| extend(context, token));
            for j in 0..=reserved {
                let token = self.model.next(context, &all[..seq_len - reserved + j]);
                found.push(token);
                if all.get(seq_len - reserved + j) != Some(&token) {
                    break;
                }
                context = extend(context, token);
            }
        }
        Ok((found, reserved))
    }

    /// Writes the entries of `all[start..]` through the slots given.
    fn compute(
        &mut self,
        side: &Side<'_>,
        all: &[i32],
        start: usize,
        ids: &[i32],
        positions: &[i32],
        slots: &[i32],
    ) -> Result<(), String> {
        let mut context = all[..start].iter().fold(EMPTY, |context, &token| extend(context, token));
        for (j, &token) in all[start..].iter().enumerate() {
            context = extend(context, token);
            let slot = side.slot(start + j)?;
            if ids[j] != token || positions[j] as usize != start + j || slots[j] as usize != slot {
                let (id, at, place) = (ids[j], positions[j], slots[j]);
                return Err(format!(
                    "{:?}: token {token} at {} in slot {slot} came as {id} at {at} in {place}",
                    side.owner,
                    start + j
                ));
            }
            let page = &mut self.pages[slot / side.block_size];
            if page.owner != side.owner {
                *page = Page { owner: side.owner, entries: HashMap::new() };
            }
            page.entries.insert(slot % side.block_size, context);
        }
        Ok(())
    }

    /// Reads the entries of all of a row's tokens; the context they add up to.
    fn read(&self, side: &Side<'_>, all: &[i32]) -> Result<Context, String> {
        let mut context = EMPTY;
        for (position, &token) in all.iter().enumerate() {
            context = extend(context, token);
            let slot = side.slot(position)?;
            let page = &self.pages[slot / side.block_size];
            if page.owner != side.owner || page.entries.get(&(slot % side.block_size)) != Some(&context) {
                return Err(format!("{:?}: slot {slot} does not hold token {position} of {}", side.owner, all.len()));
            }
        }
        Ok(context)
    }
}

impl Side<'_> {
    fn slot(&self, position: usize) -> Result<usize, String> {
        match self.table.get(position / self.block_size) {
            Some(&page) if page > 0 => Ok(page as usize * self.block_size + position % self.block_size),
            other => Err(format!("{:?}: no page for position {position}: {other:?}", self.owner)),
        }
    }
}
