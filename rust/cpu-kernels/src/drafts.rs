//! Greedy drafting with a decoder: one pass over what rows committed, then one a further draft, each fed what the pass
//! before found. Owns the arrays of the passes; rows, pages and how many drafts each wants are the caller's
//! (Leviathan et al., 2022, arXiv:2211.17192).

use crate::attention::{Rows, Stored};
use crate::decoder::{Decoder, Step, need};
use crate::pages::{Element, LayerPages};
use crate::team::Team;

/// Token embeddings [tokens, hidden size].
#[derive(Clone, Copy)]
pub enum Embedding<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

/// What the first pass reads: tokens that rows committed and the draft has not seen, packed.
pub struct Unseen<'a> {
    pub ids: &'a [i32],
    pub positions: &'a [i32],
    pub slots: &'a [i32],
    /// [rows + 1] packed range of each row.
    pub query_start: &'a [i32],
    /// [rows] context with these tokens.
    pub seq_lens: &'a [i32],
    /// [rows, pages a row], the slots of the drafts to come included.
    pub block_tables: &'a [i32],
}

/// Where the drafts go: behind each row's first token.
pub struct Drafts<'a> {
    /// [rows] how many a row wants.
    pub wanted: &'a [i32],
    /// [rows + 1] packed range of each row in `ids`.
    pub start: &'a [i32],
    pub ids: &'a mut [i32],
}

/// What all passes share.
pub struct Model<'a, E> {
    pub storage: &'a mut [E],
    pub pages: &'a [LayerPages],
    pub embedding: Embedding<'a>,
    /// Tokens from here on are never proposed.
    pub limit: usize,
}

impl Embedding<'_> {
    fn find<E: Element>(table: &[E], size: usize, ids: &[i32], to: &mut Vec<f32>) -> Result<(), String> {
        for &id in ids {
            let row = usize::try_from(id).ok().and_then(|id| table.get(id * size..(id + 1) * size));
            let row = row.ok_or_else(|| format!("token {id} of {}", table.len() / size))?;
            to.extend(row.iter().map(|x| x.to_f32()));
        }
        Ok(())
    }

    fn of(&self, size: usize, ids: &[i32], to: &mut Vec<f32>) -> Result<(), String> {
        to.clear();
        match self {
            Self::F32(table) => Self::find(table, size, ids, to),
            Self::Bf16(table) => Self::find(table, size, ids, to),
        }
    }
}

/// One token a row that still drafts.
#[derive(Default)]
struct Pass {
    ids: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
    tables: Vec<i32>,
}

impl Pass {
    fn clear(&mut self) {
        for list in [&mut self.ids, &mut self.positions, &mut self.slots, &mut self.seq_lens, &mut self.tables] {
            list.clear();
        }
        self.query_start.clear();
        self.query_start.push(0);
    }

    fn push(&mut self, id: i32, position: i32, table: &[i32], block_size: usize) -> Result<(), String> {
        let at = position as usize;
        let page = table.get(at / block_size);
        let page = page.ok_or_else(|| format!("position {position} in a table of {} pages", table.len()))?;
        self.ids.push(id);
        self.positions.push(position);
        self.slots.push(page * block_size as i32 + (at % block_size) as i32);
        self.seq_lens.push(position + 1);
        self.tables.extend_from_slice(table);
        self.query_start.push(self.ids.len() as i32);
        Ok(())
    }
}

impl Decoder {
    /// Fill `drafts.ids` with up to `wanted` greedy drafts a row. Keys and values of every token but the last drafts are
    /// written to the pages.
    ///
    /// # Errors
    /// A message when sizes do not fit together, a token has no embedding or a page is not there.
    pub fn draft<E: Stored>(
        &mut self,
        team: &Team,
        model: &mut Model<'_, E>,
        unseen: &Unseen<'_>,
        drafts: &mut Drafts<'_>,
    ) -> Result<(), String> {
        let rows = drafts.wanted.len();
        let size = self.shape.hidden;
        let pages_per_row = unseen.block_tables.len().checked_div(rows).unwrap_or(0);
        let block_size = model.pages.first().map_or(1, |p| p.block_size);
        need(drafts.start.len() == rows + 1 && unseen.query_start.len() == rows + 1, || {
            format!("ranges of {rows} rows")
        })?;
        need(unseen.seq_lens.len() == rows && unseen.block_tables.len() == rows * pages_per_row, || {
            format!("lengths and tables of {rows} rows")
        })?;
        let mut live: Vec<usize> = (0..rows).filter(|&r| drafts.wanted[r] > 0).collect();
        for &row in &live {
            let (start, end) = (drafts.start[row], drafts.start[row + 1]);
            let room = start >= 0 && end as usize <= drafts.ids.len() && end - start > drafts.wanted[row];
            need(room, || format!("row {row} has no room for {} drafts", drafts.wanted[row]))?;
            need(unseen.query_start[row + 1] > unseen.query_start[row], || {
                format!("row {row} has no token to draft from")
            })?;
        }
        let mut hidden = Vec::new();
        model.embedding.of(size, unseen.ids, &mut hidden)?;
        let step_rows = Rows {
            query_start: unseen.query_start,
            seq_lens: unseen.seq_lens,
            block_tables: unseen.block_tables,
            pages_per_row,
            ancestors: None,
            positions: &[],
        };
        let (positions, slots) = (unseen.positions, unseen.slots);
        let mut step = Step { positions, slots, rows: step_rows, storage: &mut *model.storage, pages: model.pages };
        self.forward(team, &mut hidden, &mut step)?;
        let mut last: Vec<i32> = live.iter().map(|&row| unseen.query_start[row + 1] - 1).collect();
        let mut at: Vec<i32> = last.iter().map(|&token| positions[token as usize]).collect();
        let mut found = Vec::new();
        let mut pass = Pass::default();
        for number in 1.. {
            found.resize(live.len(), 0);
            self.best(team, &hidden, &last, model.limit, &mut found)?;
            pass.clear();
            let mut still = Vec::with_capacity(live.len());
            let mut next = Vec::with_capacity(live.len());
            for ((&row, &position), &token) in live.iter().zip(&at).zip(&found) {
                let token = token.max(0); // of logits that are not finite: just a poor draft
                drafts.ids[drafts.start[row] as usize + number] = token;
                if drafts.wanted[row] as usize > number {
                    let table = &unseen.block_tables[row * pages_per_row..][..pages_per_row];
                    pass.push(token, position + 1, table, block_size)?;
                    still.push(row);
                    next.push(position + 1);
                }
            }
            if still.is_empty() {
                break;
            }
            (live, at) = (still, next);
            model.embedding.of(size, &pass.ids, &mut hidden)?;
            let rows = Rows {
                query_start: &pass.query_start,
                seq_lens: &pass.seq_lens,
                block_tables: &pass.tables,
                pages_per_row,
                ancestors: None,
                positions: &[],
            };
            let (positions, slots) = (&pass.positions[..], &pass.slots[..]);
            let mut step = Step { positions, slots, rows, storage: &mut *model.storage, pages: model.pages };
            self.forward(team, &mut hidden, &mut step)?;
            last.clear();
            last.extend(0..live.len() as i32);
        }
        Ok(())
    }
}
