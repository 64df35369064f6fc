//! The greedy paths of decode steps on a CPU over numpy arrays: a draft model's passes of a step in one call, and the
//! acceptance of drafts by the target's best tokens.

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use specbatch_cpu_kernels::attention::Stored;
use specbatch_cpu_kernels::drafts::{Drafts, Embedding, Model, Unseen};
use specbatch_cpu_kernels::pages::LayerPages;

use crate::cpu_decoder::CpuDecoder;
use crate::cpu_kernels::{CpuLayerPages, slice};

fn contiguous(name: &str) -> PyErr {
    PyValueError::new_err(format!("{name} must be contiguous"))
}

/// Greedy drafts of one step: see `cpu_draft` in the stub file for the arrays.
#[pyfunction]
#[pyo3(signature = (decoder, *, embedding, limit, storage, pages, draft_input_ids, draft_positions, draft_slot_mapping,
    draft_query_start_loc, draft_seq_lens, draft_block_tables, num_draft_tokens, query_start_loc, input_ids))]
#[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)]
pub fn cpu_draft(
    py: Python<'_>,
    mut decoder: PyRefMut<'_, CpuDecoder>,
    embedding: &Bound<'_, PyAny>,
    limit: usize,
    storage: &Bound<'_, PyAny>,
    pages: Vec<PyRef<'_, CpuLayerPages>>,
    draft_input_ids: PyReadonlyArray1<'_, i32>,
    draft_positions: PyReadonlyArray1<'_, i32>,
    draft_slot_mapping: PyReadonlyArray1<'_, i32>,
    draft_query_start_loc: PyReadonlyArray1<'_, i32>,
    draft_seq_lens: PyReadonlyArray1<'_, i32>,
    draft_block_tables: PyReadonlyArray2<'_, i32>,
    num_draft_tokens: PyReadonlyArray1<'_, i32>,
    query_start_loc: PyReadonlyArray1<'_, i32>,
    mut input_ids: PyReadwriteArray1<'_, i32>,
) -> PyResult<()> {
    let (wide, half);
    let table = if let Ok(table) = embedding.extract::<PyReadonlyArray2<'_, f32>>() {
        wide = table;
        Embedding::F32(wide.as_slice().map_err(|_| contiguous("embedding"))?)
    } else if let Ok(table) = embedding.extract::<PyReadonlyArray2<'_, u16>>() {
        half = table;
        Embedding::Bf16(half.as_slice().map_err(|_| contiguous("embedding"))?)
    } else {
        return Err(PyTypeError::new_err("embedding must be a matrix of float32, or of uint16 for bfloat16"));
    };
    let pages: Vec<LayerPages> = pages.iter().map(|p| p.0).collect();
    let unseen = Unseen {
        ids: slice(&draft_input_ids, "draft_input_ids")?,
        positions: slice(&draft_positions, "draft_positions")?,
        slots: slice(&draft_slot_mapping, "draft_slot_mapping")?,
        query_start: slice(&draft_query_start_loc, "draft_query_start_loc")?,
        seq_lens: slice(&draft_seq_lens, "draft_seq_lens")?,
        block_tables: draft_block_tables.as_slice().map_err(|_| contiguous("draft_block_tables"))?,
    };
    let mut drafts = Drafts {
        wanted: slice(&num_draft_tokens, "num_draft_tokens")?,
        start: slice(&query_start_loc, "query_start_loc")?,
        ids: input_ids.as_slice_mut().map_err(|_| contiguous("input_ids"))?,
    };
    let mut run = Run { py, decoder: &mut decoder, pages: &pages, table, limit, unseen, drafts: &mut drafts };
    if let Ok(mut storage) = storage.extract::<PyReadwriteArray1<'_, f32>>() {
        run.over(storage.as_slice_mut().map_err(|_| contiguous("storage"))?)
    } else if let Ok(mut storage) = storage.extract::<PyReadwriteArray1<'_, u16>>() {
        run.over(storage.as_slice_mut().map_err(|_| contiguous("storage"))?)
    } else {
        Err(PyTypeError::new_err("storage must be float32, or uint16 for bfloat16"))
    }
}

struct Run<'a, 'b, 'py> {
    py: Python<'py>,
    decoder: &'a mut CpuDecoder,
    pages: &'a [LayerPages],
    table: Embedding<'a>,
    limit: usize,
    unseen: Unseen<'a>,
    drafts: &'a mut Drafts<'b>,
}

impl Run<'_, '_, '_> {
    fn over<E: Stored>(&mut self, storage: &mut [E]) -> PyResult<()> {
        let mut model = Model { storage, pages: self.pages, embedding: self.table, limit: self.limit };
        let (decoder, team) = self.decoder.parts();
        let (unseen, drafts) = (&self.unseen, &mut *self.drafts);
        self.py.detach(|| decoder.draft(team, &mut model, unseen, drafts)).map_err(PyValueError::new_err)
    }
}

/// Accept each row's drafts while they equal the target's best tokens: `verify_coupled` over numpy arrays.
///
/// best [T]: the target's token after each packed token; `input_ids` [T]; `query_start_loc` [R + 1]; `num_draft` [R]; width:
/// the most tokens a row may commit. Returns `token_ids` [R, width] (-1 past a row's count) and `num_sampled` [R].
#[pyfunction]
#[allow(clippy::needless_pass_by_value, clippy::type_complexity)]
pub fn accept_drafts<'py>(
    py: Python<'py>,
    best: PyReadonlyArray1<'py, i32>,
    input_ids: PyReadonlyArray1<'py, i32>,
    query_start_loc: PyReadonlyArray1<'py, i32>,
    num_draft: PyReadonlyArray1<'py, i32>,
    width: usize,
) -> PyResult<(Bound<'py, PyArray2<i32>>, Bound<'py, PyArray1<i32>>)> {
    let (best, ids) = (slice(&best, "best")?, slice(&input_ids, "input_ids")?);
    let (start, wanted) = (slice(&query_start_loc, "query_start_loc")?, slice(&num_draft, "num_draft")?);
    let rows = wanted.len();
    let good = start.len() == rows + 1 && start.first().is_none_or(|&s| s >= 0) && start.is_sorted();
    if !good
        || width == 0
        || width > 1 << 16
        || start.last().is_some_and(|&end| end as usize > best.len().min(ids.len()))
    {
        let message = format!("{rows} rows in {} packed tokens of {}, width {width}", best.len(), ids.len());
        return Err(PyValueError::new_err(message));
    }
    let mut tokens = vec![-1; rows * width];
    let mut counts = vec![0; rows];
    for (row, count) in counts.iter_mut().enumerate() {
        let (from, to) = (start[row] as usize, start[row + 1] as usize);
        if from == to {
            continue;
        }
        let most = (wanted[row].max(0) as usize).min(to - from - 1).min(width - 1);
        let accepted = (0..most).take_while(|&j| best[from + j] >= 0 && best[from + j] == ids[from + j + 1]).count();
        tokens[row * width..][..=accepted].copy_from_slice(&best[from..=from + accepted]);
        *count = accepted as i32 + 1;
    }
    let tokens = PyArray1::from_vec(py, tokens).reshape([rows, width])?;
    Ok((tokens, PyArray1::from_vec(py, counts)))
}
