//! `AcceptanceCounts`: what speculation achieved, a line a shard and method (and k, of the n-gram shadow).

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;
use specbatch_core::speculation::AcceptanceLine;

/// Counts since the last call, one line a (shard, method), and a k of the shadow.
#[pyclass(frozen, get_all, module = "specbatch._core")]
pub struct AcceptanceCounts {
    shard: Py<PyArray1<i32>>,
    method: Py<PyArray1<i32>>,
    rounds: Py<PyArray1<i64>>,
    proposed: Py<PyArray1<i64>>,
    offered: Py<PyArray2<i64>>,
    accepted: Py<PyArray2<i64>>,
    committed: Py<PyArray1<i64>>,
    k: Py<PyArray1<i64>>,
}

impl AcceptanceCounts {
    pub fn new(py: Python<'_>, lines: &[AcceptanceLine], positions: usize) -> PyResult<Self> {
        let table = |f: &dyn Fn(&AcceptanceLine) -> &[i64]| -> PyResult<Py<PyArray2<i64>>> {
            let values: Vec<i64> = lines.iter().flat_map(|line| f(line).iter().copied()).collect();
            Ok(PyArray1::from_vec(py, values).reshape([lines.len(), positions])?.unbind())
        };
        let counts = |f: &dyn Fn(&AcceptanceLine) -> i64| PyArray1::from_iter(py, lines.iter().map(f)).unbind();
        Ok(Self {
            shard: PyArray1::from_iter(py, lines.iter().map(|line| line.shard)).unbind(),
            method: PyArray1::from_iter(py, lines.iter().map(|line| line.method as i32)).unbind(),
            rounds: counts(&|line| line.rounds),
            proposed: counts(&|line| line.proposed),
            offered: table(&|line| &line.offered)?,
            accepted: table(&|line| &line.accepted)?,
            committed: counts(&|line| line.committed),
            k: counts(&|line| line.k as i64),
        })
    }
}
