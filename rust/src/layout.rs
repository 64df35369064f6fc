//! Fills the step's arrays from its plan, in place. Writes only what changes: block tables keep the pages of committed
//! tokens from step to step, and only what the previous step used is cleaned. Knows nothing of how the plan came about.

use crate::block_pool::PageId;
use crate::config::Config;
use crate::error::{Result, ensure};
use crate::slab::Slab;
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
        let mut target = Packed::new(arrays.block_tables.len() / arrays.seq_index.len());
        let mut draft = Packed::new(arrays.draft_block_tables.len() / arrays.seq_index.len());
        let (mut num_logits, mut num_drafts, mut max_drafts) = (0, 0, 0);
        let decode = plan.kind == StepKind::Decode;
        let num_rows = plan.rows.len();
        // Slices of one known length, so that their bounds are checked once.
        let seq_index = &mut arrays.seq_index[..num_rows];
        let num_draft_tokens = &mut arrays.num_draft_tokens[..num_rows];
        let query_start_loc = &mut arrays.query_start_loc[..num_rows];
        let seq_lens = &mut arrays.seq_lens[..num_rows];
        let logits_start_loc = &mut arrays.logits_start_loc[..num_rows];
        let draft_query_start_loc = &mut arrays.draft_query_start_loc[..num_rows];
        let draft_seq_lens = &mut arrays.draft_seq_lens[..num_rows];
        let tables = &mut self.tables[..num_rows];
        let draft_tables = &mut self.draft_tables[..num_rows];
        for (i, row) in plan.rows.iter().enumerate() {
            let sequence = &rows[row.handle];
            seq_index[i] = row.handle as i32;
            num_draft_tokens[i] = row.drafts as i32;
            query_start_loc[i] = target.tokens as i32;
            draft_query_start_loc[i] = draft.tokens as i32;
            logits_start_loc[i] = num_logits as i32;
            num_drafts += row.drafts;
            max_drafts = max_drafts.max(row.drafts);

            let range = Range {
                start: row.start,
                known: &sequence.tokens[row.start..row.start + row.len - row.drafts],
                proposal: plan.proposals.get(row.proposal_start..row.proposal_start + row.drafts).unwrap_or(&[]),
                len: row.len,
                pages: &sequence.pages,
                block_size: config.block_size,
            };
            let (ids, positions, slots) = (&mut *arrays.input_ids, &mut *arrays.positions, &mut *arrays.slot_mapping);
            seq_lens[i] = target.push(&range, ids, positions, slots);
            let stable = range.stable_pages(sequence.num_committed());
            target.write_table(i, &mut tables[i], arrays.block_tables, sequence.residency, range.pages(), stable);

            if decode {
                num_logits = target.tokens;
            } else if row.wants_logits {
                arrays.logits_indices[num_logits] = target.tokens as i32 - 1;
                num_logits += 1;
            }

            if row.draft_len == 0 {
                draft_seq_lens[i] = 0;
                draft.write_table(i, &mut draft_tables[i], arrays.draft_block_tables, 0, &[], 0);
                continue;
            }
            let range = Range {
                start: row.draft_start,
                known: &sequence.tokens[row.draft_start..row.draft_start + row.draft_len],
                proposal: &[],
                len: row.draft_len,
                pages: &sequence.draft.pages,
                block_size: config.draft_block_size,
            };
            let (ids, positions) = (&mut *arrays.draft_input_ids, &mut *arrays.draft_positions);
            draft_seq_lens[i] = draft.push(&range, ids, positions, arrays.draft_slot_mapping);
            let stable = range.stable_pages(sequence.draft.computed);
            let (table, residency) = (&mut draft_tables[i], sequence.draft.residency);
            draft.write_table(i, table, arrays.draft_block_tables, residency, range.pages(), stable);
        }
        if decode {
            // Every token of every row.
            for (index, at) in arrays.logits_indices[..num_logits].iter_mut().zip(0..) {
                *index = at;
            }
        }
        let info = StepInfo {
            kind: plan.kind as i32,
            method: if num_drafts + draft.tokens == 0 { 0 } else { plan.method as i32 },
            num_rows,
            num_tokens: target.tokens,
            num_logits,
            max_query_len: target.max_query_len,
            max_seq_len: target.max_seq_len,
            total_seq_len: target.total_seq_len,
            num_draft_tokens: num_drafts,
            max_draft_tokens: max_drafts,
            draft_num_tokens: draft.tokens,
            draft_max_query_len: draft.max_query_len,
            draft_max_seq_len: draft.max_seq_len,
            ..StepInfo::default()
        };
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

/// One row's tokens of one model in this step.
struct Range<'a> {
    /// Position of the first.
    start: usize,
    /// Committed tokens, then a proposal, then zeros up to `len`.
    known: &'a [i32],
    proposal: &'a [i32],
    len: usize,
    pages: &'a [PageId],
    block_size: usize,
}

impl<'a> Range<'a> {
    /// The block table, when it is needed.
    #[inline]
    fn pages(&self) -> &'a [PageId] {
        if self.len == 0 { &[] } else { self.pages }
    }

    /// Leading pages that cannot change while the table's residency lasts: those that hold some of `known` tokens.
    #[inline]
    fn stable_pages(&self, known: usize) -> usize {
        // Mostly all of them.
        let all = self.pages.len() * self.block_size < known + self.block_size;
        if all { self.pages.len() } else { known.div_ceil(self.block_size) }
    }
}

/// What one model's packed arrays hold so far.
struct Packed {
    /// Columns of its block tables.
    width: usize,
    tokens: usize,
    max_query_len: usize,
    max_seq_len: usize,
    total_seq_len: usize,
}

impl Packed {
    fn new(width: usize) -> Self {
        Self { width, tokens: 0, max_query_len: 0, max_seq_len: 0, total_seq_len: 0 }
    }

    /// Writes the next row's ids, positions and slots; returns its context length. Positions and slots fit 32 bits
    /// (`Config::validate`), whose division is faster.
    #[inline(always)]
    #[allow(clippy::inline_always)] // two callers, each in the loop over rows; a call costs as much as the work
    fn push(&mut self, range: &Range<'_>, ids: &mut [i32], positions: &mut [i32], slots: &mut [i32]) -> i32 {
        let len = range.len;
        if len == 0 {
            return 0;
        }
        assert!(range.start + len <= range.pages.len() * range.block_size, "a step's tokens have their pages");
        let ids = &mut ids[self.tokens..][..len];
        let positions = &mut positions[self.tokens..][..len];
        let slots = &mut slots[self.tokens..][..len];
        let block = range.block_size as u32;
        let page = (range.start as u32 / block) as usize;
        // A decode step's tokens lie on one page or two. No branch depends on which: it could not be predicted.
        let mut base = range.pages[page] * block;
        let mut next = range.pages.get(page + 1).map_or(0, |&page| page * block);
        let (mut at, mut behind) = (range.start as u32 % block, page + 2);
        for i in 0..len {
            if at >= 2 * block {
                (base, next) = (next, range.pages.get(behind).map_or(0, |&page| page * block));
                (at, behind) = (at - block, behind + 1);
            }
            ids[i] = 0;
            positions[i] = (range.start + i) as i32;
            slots[i] = (if at < block { base + at } else { next + at - block }).cast_signed();
            at += 1;
        }
        if let [token] = range.known {
            ids[0] = *token;
        } else {
            ids[..range.known.len()].copy_from_slice(range.known);
        }
        if !range.proposal.is_empty() {
            ids[range.known.len()..].copy_from_slice(range.proposal);
        }
        self.tokens += len;
        let seq_len = range.start + len;
        self.max_query_len = self.max_query_len.max(len);
        self.max_seq_len = self.max_seq_len.max(seq_len);
        self.total_seq_len += seq_len;
        seq_len as i32
    }

    /// Writes row `i` of a block table array.
    #[inline(always)]
    #[allow(clippy::inline_always)] // as `push`
    fn write_table(
        &self,
        i: usize,
        row: &mut TableRow,
        all: &mut [i32],
        residency: u64,
        pages: &[PageId],
        stable: usize,
    ) {
        let unchanged = row.residency == residency && row.stable == pages.len() && row.written == pages.len();
        if !unchanged {
            row.write(&mut all[i * self.width..][..self.width], residency, pages, stable);
        }
    }
}
