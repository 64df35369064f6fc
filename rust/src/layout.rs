//! Fills the step's arrays from its plan, in place. Writes only what changes: block tables keep the pages of committed
//! tokens from step to step, and only what the previous step used is cleaned. Knows nothing of how the plan came about.

use crate::block_pool::PageId;
use crate::config::Config;
use crate::error::{Result, ensure};
use crate::sequence::Slab;
use crate::step::{StepInfo, StepKind, StepPlan};

/// The caller's arrays. R rows, T tokens, L logits; block tables are `[R, P]` and `[R, Pd]`, row-major.
#[allow(missing_docs)] // documented where Python makes them, in specbatch/_core.pyi
pub struct StepArrays<'a> {
    pub seq_index: &'a mut [i32],
    pub query_start_loc: &'a mut [i32],
    pub seq_lens: &'a mut [i32],
    pub num_draft_tokens: &'a mut [i32],
    pub input_ids: &'a mut [i32],
    pub positions: &'a mut [i32],
    pub slot_mapping: &'a mut [i32],
    pub block_tables: &'a mut [i32],
    pub logits_start_loc: &'a mut [i32],
    pub logits_indices: &'a mut [i32],
    pub draft_query_start_loc: &'a mut [i32],
    pub draft_seq_lens: &'a mut [i32],
    pub draft_input_ids: &'a mut [i32],
    pub draft_positions: &'a mut [i32],
    pub draft_slot_mapping: &'a mut [i32],
    pub draft_block_tables: &'a mut [i32],
}

/// What the arrays can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// R.
    pub rows: usize,
    /// T.
    pub tokens: usize,
    /// L.
    pub logits: usize,
    /// P.
    pub table_width: usize,
    /// Pd.
    pub draft_table_width: usize,
}

impl Capacity {
    /// Checks that every step of a scheduler fits.
    ///
    /// # Errors
    /// `Error::Argument` naming the array, the size needed and the size given.
    pub fn check(&self, config: &Config, max_num_seqs: usize) -> Result<()> {
        let at_least = |array: &str, dimension: &str, actual: usize, needed: usize, why: &str| {
            ensure(actual >= needed, || format!("{array}: expected {dimension} >= {needed} ({why}), got {actual}"))
        };
        let pages = config.target_pages(config.max_model_len);
        let draft_pages = config.draft_pages(config.draft_max_model_len.min(config.max_model_len));
        at_least("seq_index", "R", self.rows, max_num_seqs, "max_num_seqs")?;
        at_least("input_ids", "T", self.tokens, max_num_seqs, "max_num_seqs")?;
        at_least("input_ids", "T", self.tokens, config.max_num_batched_tokens, "max_num_batched_tokens")?;
        at_least("logits_indices", "L", self.logits, max_num_seqs, "max_num_seqs")?;
        at_least("block_tables", "P", self.table_width, pages, "pages of max_model_len")?;
        at_least("draft_block_tables", "Pd", self.draft_table_width, draft_pages, "pages of draft_max_model_len")
    }
}

/// What a row of a block table array holds now.
#[derive(Clone, Copy, Debug, Default)]
struct TableRow {
    /// Residency of the table written here; 0: none.
    residency: u64,
    /// Leading pages that cannot have changed since: they held committed tokens.
    stable: usize,
    written: usize,
}

/// Memory of what the previous step left in one set of arrays.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    tables: Vec<TableRow>,
    draft_tables: Vec<TableRow>,
    rows: usize,
    tokens: usize,
    logits: usize,
    draft_tokens: usize,
}

impl Layout {
    /// Turns fresh arrays into padding.
    pub fn reset(&mut self, arrays: &mut StepArrays<'_>) {
        let rows = arrays.seq_index.len();
        self.tables = vec![TableRow::default(); rows];
        self.draft_tables = vec![TableRow::default(); rows];
        arrays.seq_index.fill(-1);
        for array in [&mut arrays.slot_mapping, &mut arrays.draft_slot_mapping] {
            array.fill(-1);
        }
        for array in [
            &mut arrays.query_start_loc,
            &mut arrays.seq_lens,
            &mut arrays.num_draft_tokens,
            &mut arrays.input_ids,
            &mut arrays.positions,
            &mut arrays.block_tables,
            &mut arrays.logits_start_loc,
            &mut arrays.logits_indices,
            &mut arrays.draft_query_start_loc,
            &mut arrays.draft_seq_lens,
            &mut arrays.draft_input_ids,
            &mut arrays.draft_positions,
            &mut arrays.draft_block_tables,
        ] {
            array.fill(0);
        }
    }

    /// Writes `plan` into the arrays and returns the step's sizes (pool and queue counts left 0).
    pub fn fill(&mut self, plan: &StepPlan, rows: &Slab, config: &Config, arrays: &mut StepArrays<'_>) -> StepInfo {
        let mut info = StepInfo {
            kind: plan.kind as i32,
            method: plan.method as i32,
            num_rows: plan.rows.len(),
            ..StepInfo::default()
        };
        let width = arrays.block_tables.len() / arrays.seq_index.len();
        let draft_width = arrays.draft_block_tables.len() / arrays.seq_index.len();
        let decode = plan.kind == StepKind::Decode;
        let (mut token, mut logit, mut draft_token) = (0, 0, 0);
        for (i, row) in plan.rows.iter().enumerate() {
            let sequence = &rows[row.handle];
            arrays.seq_index[i] = row.handle as i32;
            arrays.query_start_loc[i] = token as i32;
            arrays.logits_start_loc[i] = logit as i32;
            arrays.draft_query_start_loc[i] = draft_token as i32;
            arrays.num_draft_tokens[i] = row.drafts as i32;
            let seq_len = if row.len == 0 { 0 } else { row.start + row.len };
            arrays.seq_lens[i] = seq_len as i32;
            let draft_seq_len = if row.draft_len == 0 { 0 } else { row.draft_start + row.draft_len };
            arrays.draft_seq_lens[i] = draft_seq_len as i32;

            let table = &mut self.tables[i];
            if row.len > 0 {
                let end = token + row.len;
                let ids = &mut arrays.input_ids[token..end];
                let committed = row.len - row.drafts;
                copy(&mut ids[..committed], &sequence.tokens[row.start..row.start + committed]);
                match plan.proposals.get(row.proposal_start..row.proposal_start + row.drafts) {
                    Some(proposal) => copy(&mut ids[committed..], proposal),
                    None => ids[committed..].iter_mut().for_each(|id| *id = 0),
                }
                let positions = &mut arrays.positions[token..end];
                write_range(
                    row.start,
                    &sequence.pages,
                    config.block_size,
                    positions,
                    &mut arrays.slot_mapping[token..end],
                );
                let stable = stable_pages(&sequence.pages, sequence.num_committed(), config.block_size);
                table.write(
                    &mut arrays.block_tables[i * width..][..width],
                    sequence.residency,
                    &sequence.pages,
                    stable,
                );
                token = end;
            } else if table.written > 0 {
                table.write(&mut arrays.block_tables[i * width..][..width], 0, &[], 0);
            }

            if row.wants_logits {
                let wanted = if decode { row.len } else { 1 };
                let indices = arrays.logits_indices[logit..logit + wanted].iter_mut();
                for (index, at) in indices.zip(token - wanted..) {
                    *index = at as i32;
                }
                logit += wanted;
            }

            let table = &mut self.draft_tables[i];
            if row.draft_len > 0 {
                let end = draft_token + row.draft_len;
                let unseen = &sequence.tokens[row.draft_start..row.draft_start + row.draft_len];
                copy(&mut arrays.draft_input_ids[draft_token..end], unseen);
                let draft = &sequence.draft;
                let positions = &mut arrays.draft_positions[draft_token..end];
                let slots = &mut arrays.draft_slot_mapping[draft_token..end];
                write_range(row.draft_start, &draft.pages, config.draft_block_size, positions, slots);
                let stable = stable_pages(&draft.pages, draft.computed, config.draft_block_size);
                let out = &mut arrays.draft_block_tables[i * draft_width..][..draft_width];
                table.write(out, draft.residency, &draft.pages, stable);
                draft_token = end;
            } else if table.written > 0 {
                table.write(&mut arrays.draft_block_tables[i * draft_width..][..draft_width], 0, &[], 0);
            }

            info.max_query_len = info.max_query_len.max(row.len);
            info.max_seq_len = info.max_seq_len.max(seq_len);
            info.total_seq_len += seq_len;
            info.num_draft_tokens += row.drafts;
            info.max_draft_tokens = info.max_draft_tokens.max(row.drafts);
            info.draft_max_query_len = info.draft_max_query_len.max(row.draft_len);
            info.draft_max_seq_len = info.draft_max_seq_len.max(draft_seq_len);
        }
        info.num_tokens = token;
        info.num_logits = logit;
        info.draft_num_tokens = draft_token;
        if info.num_draft_tokens + info.draft_num_tokens == 0 {
            info.method = 0;
        }
        self.pad(arrays, &info);
        info
    }

    /// Cleans what the previous step used and this one does not.
    fn pad(&mut self, arrays: &mut StepArrays<'_>, info: &StepInfo) {
        let rows = info.num_rows;
        let width = arrays.block_tables.len() / arrays.seq_index.len();
        let draft_width = arrays.draft_block_tables.len() / arrays.seq_index.len();
        for i in rows..self.rows {
            arrays.seq_index[i] = -1;
            arrays.seq_lens[i] = 0;
            arrays.num_draft_tokens[i] = 0;
            arrays.draft_seq_lens[i] = 0;
            self.tables[i].write(&mut arrays.block_tables[i * width..(i + 1) * width], 0, &[], 0);
            self.draft_tables[i].write(
                &mut arrays.draft_block_tables[i * draft_width..(i + 1) * draft_width],
                0,
                &[],
                0,
            );
        }
        arrays.query_start_loc[rows..].fill(info.num_tokens as i32);
        arrays.logits_start_loc[rows..].fill(info.num_logits as i32);
        arrays.draft_query_start_loc[rows..].fill(info.draft_num_tokens as i32);
        if info.num_tokens < self.tokens {
            let surplus = info.num_tokens..self.tokens;
            arrays.input_ids[surplus.clone()].fill(0);
            arrays.positions[surplus.clone()].fill(0);
            arrays.slot_mapping[surplus].fill(-1);
        }
        if info.num_logits < self.logits {
            arrays.logits_indices[info.num_logits..self.logits].fill(0);
        }
        if info.draft_num_tokens < self.draft_tokens {
            let surplus = info.draft_num_tokens..self.draft_tokens;
            arrays.draft_input_ids[surplus.clone()].fill(0);
            arrays.draft_positions[surplus.clone()].fill(0);
            arrays.draft_slot_mapping[surplus].fill(-1);
        }
        self.rows = rows;
        self.tokens = info.num_tokens;
        self.logits = info.num_logits;
        self.draft_tokens = info.draft_num_tokens;
    }
}

impl TableRow {
    fn write(&mut self, out: &mut [i32], residency: u64, pages: &[PageId], stable: usize) {
        let same = residency != 0 && residency == self.residency;
        let from = if same { self.stable.min(pages.len()) } else { 0 };
        for (slot, &page) in out[from..].iter_mut().zip(&pages[from..]) {
            *slot = page as i32;
        }
        if self.written > pages.len() {
            out[pages.len()..self.written].fill(0);
        }
        *self = Self { residency, stable: stable.min(pages.len()), written: pages.len() };
    }
}

/// As `copy_from_slice`, without its call when a few tokens are all there is.
#[inline]
fn copy(to: &mut [i32], from: &[i32]) {
    if to.len() > 16 {
        to.copy_from_slice(from);
    } else {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = from;
        }
    }
}

/// Leading pages of a table that cannot change while its residency lasts: those that hold some of its `known` tokens.
#[inline]
fn stable_pages(pages: &[PageId], known: usize, block_size: usize) -> usize {
    // Mostly all of them.
    if pages.len() * block_size < known + block_size { pages.len() } else { known.div_ceil(block_size) }
}

/// Positions `start..` and their slots. Positions and slots fit 32 bits (`Config::validate`), whose division is faster.
#[inline]
fn write_range(start: usize, pages: &[PageId], block_size: usize, positions: &mut [i32], slots: &mut [i32]) {
    let block = block_size as u32;
    let mut page = start as u32 / block;
    let mut offset = start as u32 % block;
    let mut base = pages[page as usize] * block;
    for (position, (at, slot)) in (start as u32..).zip(positions.iter_mut().zip(slots)) {
        if offset == block {
            offset = 0;
            page += 1;
            base = pages[page as usize] * block;
        }
        *at = position.cast_signed();
        *slot = (base + offset).cast_signed();
        offset += 1;
    }
}
