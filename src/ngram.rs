//! `find_ngram`: the n-gram proposer as a function, for tests and probes.

use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::vector;

/// The proposal the n-gram proposer makes after `tokens`: up to k ids, [0] when there is no match.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // PyO3 hands values over
pub fn find_ngram<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    k: i64,
    ngram_min: i64,
    ngram_max: i64,
) -> PyResult<Bound<'py, PyArray1<i32>>> {
    for (name, value, low) in [("k", k, 0), ("ngram_min", ngram_min, 1), ("ngram_max", ngram_max, ngram_min)] {
        if !(low..=1 << 20).contains(&value) {
            return Err(PyValueError::new_err(format!("{name}: expected {low}..={}, got {value}", 1 << 20)));
        }
    }
    let tokens = vector::<i32>("tokens", tokens, "[m]", None)?;
    let found =
        py.detach(|| specbatch_core::ngram::find_ngram(&tokens, k as usize, ngram_min as usize, ngram_max as usize));
    Ok(PyArray1::from_vec(py, found))
}
