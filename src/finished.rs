//! `FinishedBatch`: finished rows as arrays.

use numpy::PyArray1;
use pyo3::prelude::*;
use specbatch_core::scheduler::FinishedRow;

/// Finished rows as arrays; values + offsets for what has no fixed length.
#[pyclass(frozen, get_all, module = "specbatch._core")]
pub struct FinishedBatch {
    handle: Py<PyArray1<i32>>,
    request_id: Py<PyArray1<i64>>,
    shard: Py<PyArray1<i32>>,
    finish_reason: Py<PyArray1<u8>>,
    error_code: Py<PyArray1<u8>>,
    stop_token: Py<PyArray1<i32>>,
    num_prompt_tokens: Py<PyArray1<i32>>,
    num_cached_tokens: Py<PyArray1<i32>>,
    num_output_tokens: Py<PyArray1<i32>>,
    num_steps: Py<PyArray1<i32>>,
    num_drafted: Py<PyArray1<i32>>,
    num_accepted: Py<PyArray1<i32>>,
    num_wasted: Py<PyArray1<i32>>,
    num_preempted: Py<PyArray1<i32>>,
    token_values: Py<PyArray1<i32>>,
    token_offsets: Py<PyArray1<i64>>,
    text_values: Py<PyArray1<u8>>,
    text_offsets: Py<PyArray1<i64>>,
}

impl FinishedBatch {
    pub fn new(py: Python<'_>, rows: &[FinishedRow]) -> Self {
        let ints =
            |f: &dyn Fn(&FinishedRow) -> usize| PyArray1::from_iter(py, rows.iter().map(|r| f(r) as i32)).unbind();
        let offsets = |f: &dyn Fn(&FinishedRow) -> usize| {
            let mut end = 0;
            let ends = rows.iter().map(|row| {
                end += f(row) as i64;
                end
            });
            PyArray1::from_vec(py, std::iter::once(0).chain(ends).collect()).unbind()
        };
        let tokens: Vec<i32> = rows.iter().flat_map(|row| row.tokens.iter().copied()).collect();
        let text: Vec<u8> = rows.iter().flat_map(|row| row.text.iter().copied()).collect();
        Self {
            handle: ints(&|row| row.handle as usize),
            request_id: PyArray1::from_iter(py, rows.iter().map(|row| row.request_id)).unbind(),
            shard: PyArray1::from_iter(py, rows.iter().map(|row| row.shard)).unbind(),
            finish_reason: PyArray1::from_iter(py, rows.iter().map(|row| row.reason as u8)).unbind(),
            error_code: PyArray1::from_iter(py, rows.iter().map(|row| row.error as u8)).unbind(),
            stop_token: PyArray1::from_iter(py, rows.iter().map(|row| row.stop_token.unwrap_or(-1))).unbind(),
            num_prompt_tokens: ints(&|row| row.num_prompt),
            num_cached_tokens: ints(&|row| row.counters.cached as usize),
            num_output_tokens: ints(&|row| row.tokens.len()),
            num_steps: ints(&|row| row.counters.steps as usize),
            num_drafted: ints(&|row| row.counters.drafted as usize),
            num_accepted: ints(&|row| row.counters.accepted as usize),
            num_wasted: ints(&|row| row.counters.wasted as usize),
            num_preempted: ints(&|row| row.counters.preempted as usize),
            token_values: PyArray1::from_vec(py, tokens).unbind(),
            token_offsets: offsets(&|row| row.tokens.len()),
            text_values: PyArray1::from_vec(py, text).unbind(),
            text_offsets: offsets(&|row| row.text.len()),
        }
    }
}

#[pymethods]
impl FinishedBatch {
    fn __len__(&self, py: Python<'_>) -> usize {
        use numpy::PyUntypedArrayMethods;
        self.handle.bind(py).len()
    }
}
