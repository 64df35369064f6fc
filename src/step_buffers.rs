//! `StepBuffers`: the step's arrays, owned by Python, and the memory of what they hold.

use std::sync::Mutex;

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use specbatch_core::layout::{Layout, StepArrays};

use crate::arrays::cast;

type Vector = Py<PyArray1<i32>>;
type Table = Py<PyArray2<i32>>;

/// The step's arrays: int32, C-contiguous, allocated by the caller, filled in place by `Scheduler.step`.
#[pyclass(frozen, module = "specbatch._core")]
pub struct StepBuffers {
    seq_index: Vector,
    query_start_loc: Vector,
    seq_lens: Vector,
    num_draft_tokens: Vector,
    input_ids: Vector,
    positions: Vector,
    slot_mapping: Vector,
    block_tables: Table,
    logits_start_loc: Vector,
    logits_indices: Vector,
    draft_query_start_loc: Vector,
    draft_seq_lens: Vector,
    draft_input_ids: Vector,
    draft_positions: Vector,
    draft_slot_mapping: Vector,
    draft_block_tables: Table,
    layout: Mutex<Layout>,
}

/// Borrows every array for writing and builds the core's view of them.
macro_rules! borrow_arrays {
    ($self:ident, $py:ident, $arrays:ident, [$($field:ident),*]) => {
        $(
            let mut $field = $self.$field.bind($py).try_readwrite().map_err(|error| {
                PyValueError::new_err(format!("{}: expected an array of its own, writeable: {error}", stringify!($field)))
            })?;
        )*
        let mut $arrays = StepArrays { $($field: $field.as_slice_mut()?),* };
    };
}

impl StepBuffers {
    /// Runs `f` on the arrays with the interpreter released.
    pub fn with_arrays<R: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut StepArrays<'_>, &mut Layout) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        borrow_arrays!(
            self,
            py,
            arrays,
            [
                seq_index,
                query_start_loc,
                seq_lens,
                num_draft_tokens,
                input_ids,
                positions,
                slot_mapping,
                block_tables,
                logits_start_loc,
                logits_indices,
                draft_query_start_loc,
                draft_seq_lens,
                draft_input_ids,
                draft_positions,
                draft_slot_mapping,
                draft_block_tables
            ]
        );
        let layout = &self.layout;
        py.detach(|| {
            let mut layout = layout.lock().map_err(|_| PyRuntimeError::new_err("an earlier step panicked"))?;
            f(&mut arrays, &mut layout)
        })
    }
}

/// A one-dimensional array, of `len` elements when given.
fn vector(name: &str, value: &Bound<'_, PyAny>, letter: &str, len: Option<usize>) -> PyResult<Vector> {
    let array = cast::<i32, _>(name, value, &format!("[{letter}]"))?;
    match len {
        Some(len) if array.shape() != [len] => Err(PyValueError::new_err(format!(
            "{name}: expected int32[{letter}] = int32[{len}], got int32{:?}",
            array.shape()
        ))),
        _ => Ok(array.clone().unbind()),
    }
}

fn table(name: &str, value: &Bound<'_, PyAny>, letter: &str, rows: usize) -> PyResult<Table> {
    let array = cast::<i32, _>(name, value, &format!("[R, {letter}]"))?;
    if array.shape()[0] == rows {
        Ok(array.clone().unbind())
    } else {
        let shape = array.shape();
        Err(PyValueError::new_err(format!("{name}: expected int32[R, {letter}] with R = {rows}, got int32{shape:?}")))
    }
}

#[pymethods]
impl StepBuffers {
    #[new]
    #[pyo3(signature = (
        *, seq_index, query_start_loc, seq_lens, num_draft_tokens, input_ids, positions, slot_mapping, block_tables,
        logits_start_loc, logits_indices, draft_query_start_loc, draft_seq_lens, draft_input_ids, draft_positions,
        draft_slot_mapping, draft_block_tables
    ))]
    #[allow(clippy::too_many_arguments)] // one keyword an array
    fn new(
        py: Python<'_>,
        seq_index: &Bound<'_, PyAny>,
        query_start_loc: &Bound<'_, PyAny>,
        seq_lens: &Bound<'_, PyAny>,
        num_draft_tokens: &Bound<'_, PyAny>,
        input_ids: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        slot_mapping: &Bound<'_, PyAny>,
        block_tables: &Bound<'_, PyAny>,
        logits_start_loc: &Bound<'_, PyAny>,
        logits_indices: &Bound<'_, PyAny>,
        draft_query_start_loc: &Bound<'_, PyAny>,
        draft_seq_lens: &Bound<'_, PyAny>,
        draft_input_ids: &Bound<'_, PyAny>,
        draft_positions: &Bound<'_, PyAny>,
        draft_slot_mapping: &Bound<'_, PyAny>,
        draft_block_tables: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let first = vector("seq_index", seq_index, "R", None)?;
        let rows = first.bind(py).len();
        if rows == 0 {
            return Err(PyValueError::new_err("seq_index: expected int32[R] with R >= 1, got int32[0]"));
        }
        let ids = vector("input_ids", input_ids, "T", None)?;
        let tokens = ids.bind(py).len();
        let buffers = Self {
            seq_index: first,
            query_start_loc: vector("query_start_loc", query_start_loc, "R + 1", Some(rows + 1))?,
            seq_lens: vector("seq_lens", seq_lens, "R", Some(rows))?,
            num_draft_tokens: vector("num_draft_tokens", num_draft_tokens, "R", Some(rows))?,
            input_ids: ids,
            positions: vector("positions", positions, "T", Some(tokens))?,
            slot_mapping: vector("slot_mapping", slot_mapping, "T", Some(tokens))?,
            block_tables: table("block_tables", block_tables, "P", rows)?,
            logits_start_loc: vector("logits_start_loc", logits_start_loc, "R + 1", Some(rows + 1))?,
            logits_indices: vector("logits_indices", logits_indices, "L", None)?,
            draft_query_start_loc: vector("draft_query_start_loc", draft_query_start_loc, "R + 1", Some(rows + 1))?,
            draft_seq_lens: vector("draft_seq_lens", draft_seq_lens, "R", Some(rows))?,
            draft_input_ids: vector("draft_input_ids", draft_input_ids, "T", Some(tokens))?,
            draft_positions: vector("draft_positions", draft_positions, "T", Some(tokens))?,
            draft_slot_mapping: vector("draft_slot_mapping", draft_slot_mapping, "T", Some(tokens))?,
            draft_block_tables: table("draft_block_tables", draft_block_tables, "Pd", rows)?,
            layout: Mutex::default(),
        };
        buffers.with_arrays(py, |arrays, layout| {
            layout.reset(arrays);
            Ok(())
        })?;
        Ok(buffers)
    }
}
