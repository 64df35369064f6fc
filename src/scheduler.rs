//! `Scheduler`: arrays in, arrays filled, plain numbers out. The core sits behind a lock that is only taken while the
//! interpreter is released, so two threads cannot wait for each other.

use std::sync::{Mutex, MutexGuard};

use numpy::PyArray1;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use specbatch_core::config::Config;
use specbatch_core::error::Result as CoreResult;
use specbatch_core::scheduler::{Request, Scheduler as Core};
use specbatch_core::sequence::Handle;
use specbatch_core::step::StepResult;
use specbatch_core::stop::{StopConditions, TokenBytes};

use crate::acceptance::AcceptanceCounts;
use crate::arrays::{matrix, optional_vector, ranges, to_py, vector};
use crate::finished::FinishedBatch;
use crate::step_buffers::StepBuffers;
use crate::step_info::StepInfo;

/// Block pool, queues, scheduling and stop conditions of one device.
#[pyclass(frozen, module = "specbatch._core")]
pub struct Scheduler {
    core: Mutex<Core>,
    max_speculative_tokens: usize,
    num_pages: usize,
}

impl Scheduler {
    fn lock(&self) -> PyResult<MutexGuard<'_, Core>> {
        self.core.lock().map_err(|_| PyRuntimeError::new_err("the scheduler panicked in an earlier call"))
    }

    /// Runs `f` on the core with the interpreter released.
    fn with<R: Send>(&self, py: Python<'_>, f: impl FnOnce(&mut Core) -> CoreResult<R> + Send) -> PyResult<R> {
        py.detach(|| f(&mut *self.lock()?).map_err(to_py))
    }
}

/// A Python int as a size; `ValueError` when negative.
fn size(name: &str, value: i64) -> PyResult<usize> {
    usize::try_from(value).map_err(|_| PyValueError::new_err(format!("{name}: expected at least 0, got {value}")))
}

/// A Python int as a handle; one no row can have when out of range.
fn as_handle(value: i64) -> Handle {
    Handle::try_from(value).unwrap_or(Handle::MAX)
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (
        *, num_pages, block_size, draft_block_size=0, max_num_seqs, max_num_batched_tokens, max_model_len,
        draft_max_model_len=0, max_speculative_tokens=8, eos_token_ids=None, prefix_cache=true, ngram_min=2,
        ngram_max=4
    ))]
    #[allow(clippy::too_many_arguments)] // one keyword an option
    fn new(
        num_pages: i64,
        block_size: i64,
        draft_block_size: i64,
        max_num_seqs: i64,
        max_num_batched_tokens: i64,
        max_model_len: i64,
        draft_max_model_len: i64,
        max_speculative_tokens: i64,
        eos_token_ids: Option<&Bound<'_, PyAny>>,
        prefix_cache: bool,
        ngram_min: i64,
        ngram_max: i64,
    ) -> PyResult<Self> {
        let core = Core::new(Config {
            num_pages: size("num_pages", num_pages)?,
            block_size: size("block_size", block_size)?,
            draft_block_size: size("draft_block_size", draft_block_size)?,
            max_num_seqs: size("max_num_seqs", max_num_seqs)?,
            max_num_batched_tokens: size("max_num_batched_tokens", max_num_batched_tokens)?,
            max_model_len: size("max_model_len", max_model_len)?,
            draft_max_model_len: size("draft_max_model_len", draft_max_model_len)?,
            max_speculative_tokens: size("max_speculative_tokens", max_speculative_tokens)?,
            eos_token_ids: optional_vector("eos_token_ids", eos_token_ids, "[e]", None)?.unwrap_or_default(),
            prefix_cache,
            ngram_min: size("ngram_min", ngram_min)?,
            ngram_max: size("ngram_max", ngram_max)?,
        })
        .map_err(to_py)?;
        let (max_speculative_tokens, num_pages) = (core.config().max_speculative_tokens, core.config().num_pages);
        Ok(Self { core: Mutex::new(core), max_speculative_tokens, num_pages })
    }

    /// Bytes of every vocabulary entry (special tokens: none); needed for stop strings and `text_values`.
    fn set_token_bytes(&self, py: Python<'_>, values: &Bound<'_, PyAny>, offsets: &Bound<'_, PyAny>) -> PyResult<()> {
        let values = vector("values", values, "[bytes]", None)?;
        let offsets = vector("offsets", offsets, "[entries + 1]", None)?;
        self.with(py, |core| {
            core.set_token_bytes(TokenBytes::new(values, offsets)?);
            Ok(())
        })
    }

    /// Queue requests; returns their handles.
    #[pyo3(signature = (
        *, request_id, shard, prompt_values, prompt_offsets, max_tokens, min_tokens=None, ignore_eos=None,
        may_draft=None, stop_token_values=None, stop_token_offsets=None, stop_string_values=None,
        stop_string_offsets=None, stop_string_rows=None
    ))]
    #[allow(clippy::too_many_arguments)] // one keyword an array
    fn add_requests<'py>(
        &self,
        py: Python<'py>,
        request_id: &Bound<'py, PyAny>,
        shard: &Bound<'py, PyAny>,
        prompt_values: &Bound<'py, PyAny>,
        prompt_offsets: &Bound<'py, PyAny>,
        max_tokens: &Bound<'py, PyAny>,
        min_tokens: Option<&Bound<'py, PyAny>>,
        ignore_eos: Option<&Bound<'py, PyAny>>,
        may_draft: Option<&Bound<'py, PyAny>>,
        stop_token_values: Option<&Bound<'py, PyAny>>,
        stop_token_offsets: Option<&Bound<'py, PyAny>>,
        stop_string_values: Option<&Bound<'py, PyAny>>,
        stop_string_offsets: Option<&Bound<'py, PyAny>>,
        stop_string_rows: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let request_id = vector::<i64>("request_id", request_id, "[n]", None)?;
        let n = request_id.len();
        let shard = vector::<i32>("shard", shard, "[n]", Some(n))?;
        let prompts = vector::<i32>("prompt_values", prompt_values, "[tokens]", None)?;
        let offsets = vector::<i64>("prompt_offsets", prompt_offsets, "[n + 1]", Some(n + 1))?;
        let prompt_ranges = ranges("prompt_offsets", &offsets, prompts.len())?;
        let max_tokens = counts("max_tokens", Some(max_tokens), n, 1, 1)?;
        let min_tokens = counts("min_tokens", min_tokens, n, 0, 0)?;
        let ignore_eos = optional_vector::<bool>("ignore_eos", ignore_eos, "[n]", Some(n))?;
        let may_draft = optional_vector::<bool>("may_draft", may_draft, "[n]", Some(n))?;
        let mut stop_tokens = ragged::<i32>("stop_token", stop_token_values, stop_token_offsets, n)?;
        let mut stop_strings = strings(stop_string_values, stop_string_offsets, stop_string_rows, n)?;
        let requests = (0..n).map(|i| Request {
            request_id: request_id[i],
            shard: shard[i],
            prompt: prompts[prompt_ranges[i].clone()].into(),
            max_tokens: max_tokens[i],
            may_draft: may_draft.as_ref().is_none_or(|values| values[i]),
            stop: StopConditions::new(
                min_tokens[i],
                ignore_eos.as_ref().is_some_and(|values| values[i]),
                std::mem::take(&mut stop_tokens[i]),
                std::mem::take(&mut stop_strings[i]),
            ),
        });
        let requests = requests.collect();
        let handles = self.with(py, |core| core.add_requests(requests))?;
        Ok(PyArray1::from_iter(py, handles.into_iter().map(|handle| handle as i32)))
    }

    /// Apply the result of step `step_id`, schedule the next, fill `buffers`.
    fn step(
        &self,
        py: Python<'_>,
        step_id: i64,
        token_ids: &Bound<'_, PyAny>,
        num_sampled: &Bound<'_, PyAny>,
        num_draft: &Bound<'_, PyAny>,
        buffers: &Bound<'_, StepBuffers>,
    ) -> PyResult<StepInfo> {
        // Copied, because callers may hand in views of the very arrays that are about to be filled.
        let num_sampled = vector::<i32>("num_sampled", num_sampled, "[B]", None)?;
        let num_draft = vector::<i32>("num_draft", num_draft, "[B]", Some(num_sampled.len()))?;
        let (token_ids, width) = matrix::<i32>("token_ids", token_ids, "[B, w]", num_sampled.len())?;
        let info = buffers.get().with_arrays(py, |arrays, layout| {
            let result = StepResult { token_ids: &token_ids, width, num_sampled: &num_sampled, num_draft: &num_draft };
            self.lock()?.step(step_id, &result, arrays, layout).map_err(to_py)
        })?;
        Ok(info.into())
    }

    /// Forget the outstanding step: reservations go back, nothing is committed.
    fn abort_step(&self, py: Python<'_>, step_id: i64) -> PyResult<()> {
        self.with(py, |core| core.abort_step(step_id))
    }

    /// What rows do from the next step on; for one shard, or (None) for all and for shards to come.
    #[pyo3(signature = (method, k, shard=None))]
    fn set_speculation(&self, py: Python<'_>, method: i32, k: i64, shard: Option<i32>) -> PyResult<()> {
        self.with(py, |core| core.set_speculation(method, k, shard))
    }

    /// Score n-gram rounds of 1, 2 ... k drafts against what rows commit, in any mode (0: off).
    fn set_shadow_ngram(&self, py: Python<'_>, k: i64) -> PyResult<()> {
        self.with(py, |core| core.set_shadow_ngram(k))
    }

    /// Score, within the rounds that rows really have, those of fewer drafts.
    fn set_score_fewer(&self, py: Python<'_>, on: bool) -> PyResult<()> {
        self.with(py, |core| {
            core.set_score_fewer(on);
            Ok(())
        })
    }

    /// From which chance of being accepted a draft pays (0: no matter); rows that accept less draft less, or rest.
    #[pyo3(signature = (least, usual=0.0, weight=0.0))]
    fn set_least_acceptance(&self, py: Python<'_>, least: f64, usual: f64, weight: f64) -> PyResult<()> {
        self.with(py, |core| core.set_least_acceptance(least, usual, weight))
    }

    /// Change how many rows may run; surplus rows are preempted, youngest first.
    fn set_max_num_seqs(&self, py: Python<'_>, n: i64) -> PyResult<()> {
        self.with(py, |core| core.set_max_num_seqs(n))
    }

    /// Put a running row back to the front of the queue. False when it is not running.
    fn preempt(&self, py: Python<'_>, handle: i64) -> PyResult<bool> {
        self.with(py, |core| Ok(core.preempt(as_handle(handle))))
    }

    /// Lend draft pages to up to `rows` autoregressive rows and fill the draft arrays with what they have committed.
    fn lend_draft(&self, py: Python<'_>, rows: i64, buffers: &Bound<'_, StepBuffers>) -> PyResult<StepInfo> {
        let rows = size("rows", rows)?;
        let info = buffers
            .get()
            .with_arrays(py, |arrays, layout| self.lock()?.lend_draft(rows, arrays, layout).map_err(to_py))?;
        Ok(info.into())
    }

    /// Give back draft pages of one row or of all; returns how many pages.
    #[pyo3(signature = (handle=None))]
    fn drop_draft(&self, py: Python<'_>, handle: Option<i64>) -> PyResult<usize> {
        self.with(py, |core| Ok(core.drop_draft(handle.map(as_handle))))
    }

    /// Finish a waiting or running row with `FINISH_ABORTED`. False when it is neither.
    fn abort(&self, py: Python<'_>, handle: i64) -> PyResult<bool> {
        self.with(py, |core| Ok(core.abort(as_handle(handle))))
    }

    /// Rows that ended since the last call, in the order they ended.
    fn take_finished(&self, py: Python<'_>) -> PyResult<FinishedBatch> {
        let rows = self.with(py, |core| Ok(core.take_finished()))?;
        Ok(FinishedBatch::new(py, &rows))
    }

    /// Acceptance counts since the last call.
    fn take_acceptance(&self, py: Python<'_>) -> PyResult<AcceptanceCounts> {
        let lines = self.with(py, |core| Ok(core.take_acceptance()))?;
        AcceptanceCounts::new(py, &lines, self.max_speculative_tokens)
    }

    /// Forget all shared prefixes; returns how many pages became free.
    fn clear_prefix_cache(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |core| Ok(core.clear_prefix_cache()))
    }

    /// `RuntimeError` that says which invariant is broken, if one is.
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |core| core.check_integrity())
    }

    #[getter]
    fn num_waiting(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |core| Ok(core.num_waiting()))
    }

    #[getter]
    fn num_running(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |core| Ok(core.num_running()))
    }

    #[getter]
    fn num_unfinished(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |core| Ok(core.num_unfinished()))
    }

    #[getter]
    fn num_pages(&self) -> usize {
        self.num_pages
    }

    #[getter]
    fn max_num_seqs(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |core| Ok(core.max_num_seqs()))
    }
}

/// A count a row; `default` when the argument is None.
fn counts(name: &str, value: Option<&Bound<'_, PyAny>>, n: usize, least: i32, default: usize) -> PyResult<Vec<usize>> {
    let Some(values) = optional_vector::<i32>(name, value, "[n]", Some(n))? else {
        return Ok(vec![default; n]);
    };
    match values.iter().position(|&value| value < least) {
        Some(i) => {
            let message = format!("{name}[{i}]: expected at least {least}, got {}", values[i]);
            Err(PyValueError::new_err(message))
        }
        None => Ok(values.into_iter().map(|value| value as usize).collect()),
    }
}

/// `{name}_values` and `{name}_offsets` as one list a row; empty lists when both are None.
fn ragged<T: numpy::Element + Copy>(
    name: &str,
    values: Option<&Bound<'_, PyAny>>,
    offsets: Option<&Bound<'_, PyAny>>,
    n: usize,
) -> PyResult<Vec<Box<[T]>>> {
    let (values_name, offsets_name) = (format!("{name}_values"), format!("{name}_offsets"));
    let (Some(values), Some(offsets)) = (values, offsets) else {
        return match (values, offsets) {
            (None, None) => Ok((0..n).map(|_| Box::default()).collect()),
            (given, _) => {
                let (has, lacks) =
                    if given.is_some() { (values_name, offsets_name) } else { (offsets_name, values_name) };
                Err(PyValueError::new_err(format!("{lacks}: expected an array beside {has}, got None")))
            }
        };
    };
    let values = vector::<T>(&values_name, values, "[m]", None)?;
    let offsets = vector::<i64>(&offsets_name, offsets, "[n + 1]", Some(n + 1))?;
    Ok(ranges(&offsets_name, &offsets, values.len())?.into_iter().map(|range| values[range].into()).collect())
}

/// One row's stop strings.
type StopStrings = Box<[Box<[u8]>]>;

/// Stop strings of each row: bytes, offsets into the bytes, rows into the offsets.
fn strings(
    values: Option<&Bound<'_, PyAny>>,
    offsets: Option<&Bound<'_, PyAny>>,
    rows: Option<&Bound<'_, PyAny>>,
    n: usize,
) -> PyResult<Vec<StopStrings>> {
    let (Some(values), Some(offsets), Some(rows)) = (values, offsets, rows) else {
        for (name, value) in
            [("stop_string_values", values), ("stop_string_offsets", offsets), ("stop_string_rows", rows)]
        {
            if value.is_none() && (values.is_some() || offsets.is_some() || rows.is_some()) {
                let message = format!("{name}: expected an array beside the other stop_string arrays, got None");
                return Err(PyValueError::new_err(message));
            }
        }
        return Ok((0..n).map(|_| Box::default()).collect());
    };
    let values = vector::<u8>("stop_string_values", values, "[bytes]", None)?;
    let offsets = vector::<i64>("stop_string_offsets", offsets, "[s + 1]", None)?;
    let rows = vector::<i64>("stop_string_rows", rows, "[n + 1]", Some(n + 1))?;
    let texts = ranges("stop_string_offsets", &offsets, values.len())?;
    let rows = ranges("stop_string_rows", &rows, texts.len())?;
    let row = |range: std::ops::Range<usize>| texts[range].iter().map(|text| values[text.clone()].into()).collect();
    Ok(rows.into_iter().map(row).collect())
}
