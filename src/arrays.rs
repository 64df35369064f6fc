//! Checks numpy arrays on their way in. Every refusal names the array, what was expected and what was given.

use numpy::ndarray::{Dimension, Ix1, Ix2};
use numpy::{Element, PyArray, PyArrayMethods, PyReadonlyArray, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use specbatch_core::error::Error;

/// The Python exception of a core error.
pub fn to_py(error: Error) -> PyErr {
    match error {
        Error::Argument(message) => PyValueError::new_err(message),
        Error::Integrity(message) => PyRuntimeError::new_err(message),
    }
}

/// Such as `int32[4, 3]`.
fn describe(array: &Bound<'_, PyUntypedArray>) -> String {
    let layout = if array.is_c_contiguous() { "" } else { " (not C-contiguous)" };
    format!("{}{:?}{layout}", array.dtype(), array.shape())
}

/// The value as an array of `T` with dimensions `D`, C-contiguous. `shape` is the expected shape, in words.
pub fn cast<'a, 'py, T: Element, D: Dimension>(
    name: &str,
    value: &'a Bound<'py, PyAny>,
    shape: &str,
) -> PyResult<&'a Bound<'py, PyArray<T, D>>> {
    let dtype = || T::get_dtype(value.py());
    let Ok(untyped) = value.cast::<PyUntypedArray>() else {
        let kind = value.get_type();
        return Err(PyTypeError::new_err(format!("{name}: expected a numpy array {}{shape}, got {kind}", dtype())));
    };
    match value.cast::<PyArray<T, D>>() {
        Ok(array) if array.is_c_contiguous() => Ok(array),
        _ => Err(PyValueError::new_err(format!(
            "{name}: expected C-contiguous {}{shape}, got {}",
            dtype(),
            describe(untyped)
        ))),
    }
}

/// `ValueError` unless the array has `len` elements along its first axis.
pub fn check_len<T: Element, D: Dimension>(
    name: &str,
    array: &Bound<'_, PyArray<T, D>>,
    len: usize,
    shape: &str,
) -> PyResult<()> {
    if array.shape()[0] == len {
        return Ok(());
    }
    let given = describe(array.as_untyped());
    Err(PyValueError::new_err(format!("{name}: expected {}{shape} with {len} rows, got {given}", array.dtype())))
}

fn borrow<'py, T: Element, D: Dimension>(
    name: &str,
    array: &Bound<'py, PyArray<T, D>>,
) -> PyResult<PyReadonlyArray<'py, T, D>> {
    array.try_readonly().map_err(|error| PyValueError::new_err(format!("{name}: {error}")))
}

/// A copy of a one-dimensional array, of `len` elements when given.
pub fn vector<T: Element + Copy>(
    name: &str,
    value: &Bound<'_, PyAny>,
    shape: &str,
    len: Option<usize>,
) -> PyResult<Vec<T>> {
    let array = cast::<T, Ix1>(name, value, shape)?;
    if let Some(len) = len {
        check_len(name, array, len, shape)?;
    }
    Ok(borrow(name, array)?.as_slice()?.to_vec())
}

/// As [`vector`], of an argument that may be None.
pub fn optional_vector<T: Element + Copy>(
    name: &str,
    value: Option<&Bound<'_, PyAny>>,
    shape: &str,
    len: Option<usize>,
) -> PyResult<Option<Vec<T>>> {
    value.map(|value| vector(name, value, shape, len)).transpose()
}

/// A copy of a two-dimensional array, row-major, and its number of columns.
pub fn matrix<T: Element + Copy>(
    name: &str,
    value: &Bound<'_, PyAny>,
    shape: &str,
    rows: usize,
) -> PyResult<(Vec<T>, usize)> {
    let array = cast::<T, Ix2>(name, value, shape)?;
    check_len(name, array, rows, shape)?;
    Ok((borrow(name, array)?.as_slice()?.to_vec(), array.shape()[1]))
}

/// Values and offsets as one range a row. `ValueError` unless the offsets start at 0, never fall and end at `total`.
pub fn ranges(name: &str, offsets: &[i64], total: usize) -> PyResult<Vec<std::ops::Range<usize>>> {
    let good = offsets.first() == Some(&0) && offsets.last() == Some(&(total as i64)) && offsets.is_sorted();
    if !good {
        return Err(PyValueError::new_err(format!(
            "{name}: expected offsets that start at 0, never fall and end at {total}, got {:?} .. {:?}",
            offsets.first(),
            offsets.last()
        )));
    }
    Ok(offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
}
