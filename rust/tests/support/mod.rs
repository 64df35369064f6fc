//! Arrays of a step that own their memory, for tests and benches.
#![allow(dead_code)] // each test binary uses its part

use specbatch_core::error::Result;
use specbatch_core::layout::{Layout, StepArrays};
use specbatch_core::scheduler::Scheduler;
use specbatch_core::step::{StepInfo, StepResult};

/// R, T, L, P, Pd.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub rows: usize,
    pub tokens: usize,
    pub logits: usize,
    pub width: usize,
    pub draft_width: usize,
}

pub struct Arrays {
    pub shape: Shape,
    pub seq_index: Vec<i32>,
    pub query_start_loc: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub num_draft_tokens: Vec<i32>,
    pub input_ids: Vec<i32>,
    pub positions: Vec<i32>,
    pub slot_mapping: Vec<i32>,
    pub block_tables: Vec<i32>,
    pub logits_start_loc: Vec<i32>,
    pub logits_indices: Vec<i32>,
    pub draft_query_start_loc: Vec<i32>,
    pub draft_seq_lens: Vec<i32>,
    pub draft_input_ids: Vec<i32>,
    pub draft_positions: Vec<i32>,
    pub draft_slot_mapping: Vec<i32>,
    pub draft_block_tables: Vec<i32>,
    layout: Layout,
}

impl Arrays {
    pub fn new(shape: Shape) -> Self {
        let garbage = |len| vec![0x5a5a; len];
        let Shape { rows, tokens, logits, width, draft_width } = shape;
        let mut arrays = Self {
            shape,
            seq_index: garbage(rows),
            query_start_loc: garbage(rows + 1),
            seq_lens: garbage(rows),
            num_draft_tokens: garbage(rows),
            input_ids: garbage(tokens),
            positions: garbage(tokens),
            slot_mapping: garbage(tokens),
            block_tables: garbage(rows * width),
            logits_start_loc: garbage(rows + 1),
            logits_indices: garbage(logits),
            draft_query_start_loc: garbage(rows + 1),
            draft_seq_lens: garbage(rows),
            draft_input_ids: garbage(tokens),
            draft_positions: garbage(tokens),
            draft_slot_mapping: garbage(tokens),
            draft_block_tables: garbage(rows * draft_width),
            layout: Layout::default(),
        };
        let mut layout = Layout::default();
        layout.reset(&mut arrays.view());
        arrays.layout = layout;
        arrays
    }

    pub fn view(&mut self) -> StepArrays<'_> {
        StepArrays {
            seq_index: &mut self.seq_index,
            query_start_loc: &mut self.query_start_loc,
            seq_lens: &mut self.seq_lens,
            num_draft_tokens: &mut self.num_draft_tokens,
            input_ids: &mut self.input_ids,
            positions: &mut self.positions,
            slot_mapping: &mut self.slot_mapping,
            block_tables: &mut self.block_tables,
            logits_start_loc: &mut self.logits_start_loc,
            logits_indices: &mut self.logits_indices,
            draft_query_start_loc: &mut self.draft_query_start_loc,
            draft_seq_lens: &mut self.draft_seq_lens,
            draft_input_ids: &mut self.draft_input_ids,
            draft_positions: &mut self.draft_positions,
            draft_slot_mapping: &mut self.draft_slot_mapping,
            draft_block_tables: &mut self.draft_block_tables,
        }
    }

    pub fn step(&mut self, scheduler: &mut Scheduler, step_id: i64, result: &StepResult<'_>) -> Result<StepInfo> {
        let mut layout = std::mem::take(&mut self.layout);
        let info = scheduler.step(step_id, result, &mut self.view(), &mut layout);
        self.layout = layout;
        info
    }

    /// Every array, in a fixed order.
    pub fn all(&self) -> [(&'static str, &[i32]); 16] {
        [
            ("seq_index", &self.seq_index),
            ("query_start_loc", &self.query_start_loc),
            ("seq_lens", &self.seq_lens),
            ("num_draft_tokens", &self.num_draft_tokens),
            ("input_ids", &self.input_ids),
            ("positions", &self.positions),
            ("slot_mapping", &self.slot_mapping),
            ("block_tables", &self.block_tables),
            ("logits_start_loc", &self.logits_start_loc),
            ("logits_indices", &self.logits_indices),
            ("draft_query_start_loc", &self.draft_query_start_loc),
            ("draft_seq_lens", &self.draft_seq_lens),
            ("draft_input_ids", &self.draft_input_ids),
            ("draft_positions", &self.draft_positions),
            ("draft_slot_mapping", &self.draft_slot_mapping),
            ("draft_block_tables", &self.draft_block_tables),
        ]
    }
}

/// Owned result of a step.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub token_ids: Vec<i32>,
    pub width: usize,
    pub num_sampled: Vec<i32>,
    pub num_draft: Vec<i32>,
}

impl Outcome {
    pub fn view(&self) -> StepResult<'_> {
        StepResult {
            token_ids: &self.token_ids,
            width: self.width,
            num_sampled: &self.num_sampled,
            num_draft: &self.num_draft,
        }
    }
}
