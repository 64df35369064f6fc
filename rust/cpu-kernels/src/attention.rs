//! Causal (or tree-masked) attention of ragged rows over pages, read in place.
//!
//! Owns what may be asked, the checks, and the cut into tasks that any threads may run. A task is one row, a tile of
//! its query tokens and one KV head, whose query heads share the keys they read, or several, whose keys stand side by side
//! in memory. How a task is computed is the business of `attention_task` and of what it calls for the processor's
//! instructions.

use rayon::prelude::*;

pub use crate::attention_task::Path;
use crate::attention_task::Task;
use crate::pages::{Element, LayerPages};

#[cfg(target_arch = "x86_64")]
use crate::{
    attention_amx::Tiles,
    attention_f32::{Floats, Source},
    attention_groups::Kernel,
    avx2::Load8,
};

/// Query tokens of one tile, and at least so many (token, head) pairs, for what is done once for a block of keys.
const TILE: usize = 16;
const TILE_PAIRS: usize = 192;
/// (token, head) pairs of a row and KV head up to which all KV heads may make one task.
const FEW_PAIRS: usize = 32;
/// The largest head whose output can be rounded as it comes.
pub(crate) const MOST_ROUNDED: usize = 256;
/// What such a task takes, in hundredths of its KV heads' own tasks (measured: 60 to 70).
const TOGETHER: usize = 70;

/// What pages may hold: float32, or the bits of bfloat16.
#[cfg(target_arch = "x86_64")]
pub trait Stored: Element + Load8 + Source {
    /// Whether two bytes each.
    const HALF: bool;
    /// The kernel that multiplies tiles, where `HALF`.
    #[doc(hidden)]
    type Matrix: Kernel<Self>;
}
#[cfg(not(target_arch = "x86_64"))]
pub trait Stored: Element {
    const HALF: bool;
}

impl Stored for f32 {
    const HALF: bool = false;
    #[cfg(target_arch = "x86_64")]
    type Matrix = Floats;
}

impl Stored for u16 {
    const HALF: bool = true;
    #[cfg(target_arch = "x86_64")]
    type Matrix = Tiles;
}

/// One step's rows: what `AttentionMetadata` says on the Python side.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// [rows + 1] packed token range of each row.
    pub query_start: &'a [i32],
    /// [rows] context length with this step's tokens.
    pub seq_lens: &'a [i32],
    /// [rows, `pages_per_row`]
    pub block_tables: &'a [i32],
    pub pages_per_row: usize,
    /// [tokens]: bit j says that own query token j of the row is visible. `None`: causal.
    pub ancestors: Option<&'a [i64]>,
    /// [tokens] positions, for the window of a tree's tokens. Empty: index in the context.
    pub positions: &'a [i32],
}

/// How scores become weights.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    pub scale: f32,
    /// A token sees positions above its own minus this.
    pub window: Option<i32>,
    pub softcap: Option<f32>,
    /// [heads] logits that take part in the sum only.
    pub sinks: Option<&'a [f32]>,
}

/// A row, the first packed token of the tile, the first KV head and how many.
#[derive(Clone, Copy, Debug)]
struct Piece {
    row: u32,
    start: u32,
    kv_head: u32,
    span: u32,
}

/// How a step's rows are cut into tasks: made once a step, used by all its layers of the same shape.
#[derive(Debug, Default)]
pub struct Tasks {
    list: Vec<Piece>,
    query_start: Vec<i32>,
    tile: usize,
    group: usize,
    kv_heads: usize,
    threads: usize,
}

impl Tasks {
    /// The tasks of rows with these packed token ranges, for `heads` query heads over `kv_heads`, to be shared out to so
    /// many threads. The results do not depend on the number of threads.
    ///
    /// # Errors
    /// A message when ranges fall or heads do not divide.
    pub fn new(query_start: &[i32], heads: usize, kv_heads: usize, threads: usize) -> Result<Self, String> {
        let mut tasks = Self::default();
        tasks.refill(query_start, heads, kv_heads, threads)?;
        Ok(tasks)
    }

    /// As `new`, in the memory of an earlier step; nothing changes on an error.
    ///
    /// # Errors
    /// As `new`.
    pub fn refill(&mut self, query_start: &[i32], heads: usize, kv_heads: usize, threads: usize) -> Result<(), String> {
        let rows = query_start.windows(2).filter(|range| range[0] < range[1]).count();
        let threads = threads.max(1);
        // Side by side in memory and (often) in the same lanes; but some threads may get less than others.
        let together = rows.div_ceil(threads) * kv_heads * TOGETHER <= (rows * kv_heads).div_ceil(threads) * 100;
        self.cut(query_start, heads, kv_heads, threads, together)
    }

    /// As `refill`; `together`: all KV heads of a row with few query tokens in one task. No result depends on it, keys being finite.
    ///
    /// # Errors
    /// As `new`.
    pub fn cut(
        &mut self,
        query_start: &[i32],
        heads: usize,
        kv_heads: usize,
        threads: usize,
        together: bool,
    ) -> Result<(), String> {
        need(kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} heads over {kv_heads} KV heads")
        })?;
        let rises = query_start.first() == Some(&0) && query_start.windows(2).all(|w| w[0] <= w[1]);
        need(rises, || "query_start must begin with 0 and not fall".into())?;
        self.group = heads / kv_heads;
        self.kv_heads = kv_heads;
        self.threads = threads.max(1);
        self.tile = TILE.max(TILE_PAIRS / self.group);
        self.query_start.clear();
        self.query_start.extend_from_slice(query_start);
        self.list.clear();
        for (row, range) in query_start.windows(2).enumerate() {
            let few = (range[1] - range[0]) as usize * self.group <= FEW_PAIRS;
            let span = if few && together { kv_heads } else { 1 };
            for start in (range[0] as u32..range[1] as u32).step_by(self.tile) {
                let heads = (0..kv_heads as u32).step_by(span);
                self.list.extend(heads.map(|kv_head| Piece { row: row as u32, start, kv_head, span: span as u32 }));
            }
        }
        Ok(())
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.list.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

/// A writable slice that several tasks fill at disjoint places.
#[derive(Clone, Copy)]
#[doc(hidden)]
pub struct Shared {
    pub(crate) at: *mut f32,
    /// Rows of bfloat16 that get the output instead, so many numbers apart; null: none.
    pub(crate) half: *mut u16,
    pub(crate) stride: usize,
}
// SAFETY: each task writes only the outputs of its own tokens and heads (see `Prepared::run`).
unsafe impl Send for Shared {}
unsafe impl Sync for Shared {}

/// One layer's attention, checked and cut into tasks, for the caller's own threads to run.
pub struct Prepared<'a, E> {
    query: &'a [f32],
    heads: usize,
    storage: &'a [E],
    pages: &'a LayerPages,
    rows: &'a Rows<'a>,
    options: &'a Options<'a>,
    tasks: &'a Tasks,
    out: Shared,
    path: Path,
}

impl<'a, E: Stored> Prepared<'a, E> {
    /// Attention of `query` [tokens, heads, `head_dim`] into `out` (same shape), by `tasks` of the same rows.
    ///
    /// # Errors
    /// A message when sizes do not fit together or a block table names a page that is not there.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        tasks: &'a Tasks,
        query: &'a [f32],
        heads: usize,
        storage: &'a [E],
        pages: &'a LayerPages,
        rows: &'a Rows<'a>,
        options: &'a Options<'a>,
        out: &'a mut [f32],
    ) -> Result<Self, String> {
        need(tasks.kv_heads == pages.kv_heads && tasks.group * tasks.kv_heads == heads, || {
            format!("tasks of {} heads over {}, not {heads}", tasks.group * tasks.kv_heads, tasks.kv_heads)
        })?;
        need(tasks.query_start == rows.query_start, || "these tasks are of other rows".into())?;
        check(query, heads, storage.len(), pages, rows, options, out)?;
        let path = Path::best::<E>(pages.head_dim);
        let out = Shared { at: out.as_mut_ptr(), half: std::ptr::null_mut(), stride: 0 };
        Ok(Self { query, heads, storage, pages, rows, options, tasks, out, path })
    }

    /// Use no newer instructions than these, to compare and to test.
    #[must_use]
    pub fn at_most(mut self, path: Path) -> Self {
        self.path = self.path.min(path).fitting::<E>(self.pages.head_dim);
        self
    }

    /// Whether the output can be had in bfloat16 (`rounded`).
    #[must_use]
    pub(crate) fn rounds(&self) -> bool {
        self.path == Path::Amx && self.pages.head_dim <= MOST_ROUNDED
    }

    /// Let the output be rounded to bfloat16 as it comes, into rows of tokens, `stride` numbers apart.
    ///
    /// # Safety
    /// It `rounds`; the rows are there for all tokens, and as `out` in `run`.
    #[must_use]
    pub(crate) unsafe fn rounded(mut self, half: *mut u16, stride: usize) -> Self {
        debug_assert!(self.rounds());
        self.out = Shared { half, stride, ..self.out };
        self
    }

    /// What the tasks run on.
    #[must_use]
    pub fn path(&self) -> Path {
        self.path
    }

    /// How many tasks there are; neighbours share a row's pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// The tasks that these tokens need, which rise.
    #[must_use]
    pub(crate) fn of_tokens(&self, wanted: &[i32]) -> Vec<usize> {
        let needed = |piece: &Piece| {
            let end = (piece.start + self.tasks.tile as u32).min(self.rows.query_start[piece.row as usize + 1] as u32);
            let next = wanted.partition_point(|&token| (token as u32) < piece.start);
            wanted.get(next).is_some_and(|&token| (token as u32) < end)
        };
        (0..self.len()).filter(|&i| needed(&self.tasks.list[i])).collect()
    }

    /// Run task `i`. `out` is whole when each of `0..len()` has been run, on any threads in any order. The output of a
    /// query depends neither on the order nor on which other queries the step holds. The state of AMX tiles is lost.
    ///
    /// # Panics
    /// When there is no such task.
    ///
    /// # Safety
    /// No two calls with the same `i` at the same time, and no use of the output until they have ended: tasks of
    /// different `i` write different places.
    pub unsafe fn run(&self, i: usize) {
        let after = self.tasks.list.get(i + self.tasks.threads).map(|piece| self.task(piece));
        self.task(&self.tasks.list[i]).run(self.path, after.as_ref(), self.out);
    }

    fn task(&self, piece: &Piece) -> Task<'_, E> {
        let (row, start) = (piece.row as usize, piece.start as usize);
        let end = (start + self.tasks.tile).min(self.rows.query_start[row + 1] as usize);
        Task {
            query: self.query,
            heads: self.heads,
            group: self.tasks.group,
            storage: self.storage,
            pages: self.pages,
            rows: self.rows,
            options: self.options,
            row,
            start,
            end,
            kv_head: piece.kv_head as usize,
            span: piece.span as usize,
        }
    }
}

/// Attention of `query` [tokens, heads, `head_dim`] into `out` (same shape), on rayon's threads.
///
/// # Errors
/// A message when sizes do not fit together or a block table names a page that is not there; `out` is untouched then.
pub fn forward<E: Stored>(
    query: &[f32],
    heads: usize,
    storage: &[E],
    pages: &LayerPages,
    rows: &Rows<'_>,
    options: &Options<'_>,
    out: &mut [f32],
) -> Result<(), String> {
    let tasks = Tasks::new(rows.query_start, heads, pages.kv_heads, rayon::current_num_threads())?;
    let prepared = Prepared::new(&tasks, query, heads, storage, pages, rows, options, out)?;
    let work: usize = rows.seq_lens.iter().map(|&n| n as usize).sum::<usize>() * pages.kv_heads;
    // With one thread a pool would only add a change of threads to every call.
    let alone = rayon::current_num_threads() < 2 || tasks.len() < 2;
    // SAFETY: each task is run once, and `out` is borrowed until all have ended.
    let run = |i: usize| unsafe { prepared.run(i) };
    if alone || work * pages.head_dim < 1 << 14 {
        (0..prepared.len()).for_each(run);
    } else {
        (0..prepared.len()).into_par_iter().for_each(run);
    }
    Ok(())
}

fn need(ok: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if ok { Ok(()) } else { Err(message()) }
}

pub(crate) fn check(
    query: &[f32],
    heads: usize,
    storage: usize,
    pages: &LayerPages,
    rows: &Rows<'_>,
    options: &Options<'_>,
    out: &[f32],
) -> Result<(), String> {
    let count = rows.seq_lens.len();
    let tokens = rows.query_start.last().copied().unwrap_or(0) as usize;
    let starts = rows.query_start.len();
    need(starts == count + 1, || format!("query_start holds {starts}, not {}", count + 1))?;
    need(rows.block_tables.len() == count * rows.pages_per_row, || "block_tables and seq_lens do not fit".into())?;
    let size = tokens * heads * pages.head_dim;
    need(query.len() >= size && out.len() >= size, || format!("query and out need {size} numbers"))?;
    need(options.sinks.is_none_or(|s| s.len() == heads), || "sinks: one a head".into())?;
    need(rows.ancestors.is_none_or(|a| a.len() >= tokens), || "ancestors: one a token".into())?;
    need(rows.positions.is_empty() || rows.positions.len() >= tokens, || "positions: one a token".into())?;
    let limit = pages.pages_within(storage);
    for (row, &len) in rows.seq_lens.iter().enumerate() {
        let queries = rows.query_start[row + 1] - rows.query_start[row];
        if queries == 0 {
            continue;
        }
        need(len >= queries, || format!("row {row} has {queries} query tokens and a context of {len}"))?;
        let used = (len as usize).div_ceil(pages.block_size);
        let held = rows.pages_per_row;
        need(used <= held, || format!("row {row} needs {used} pages, the table has {held}"))?;
        let table = &rows.block_tables[row * held..][..used];
        let bad = table.iter().find(|&&p| p < 0 || p as usize >= limit);
        need(bad.is_none(), || {
            format!("row {row} names page {}, there are {limit}", bad.copied().unwrap_or_default())
        })?;
    }
    Ok(())
}
