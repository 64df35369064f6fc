//! Attention kernels of `specbatch-cpu-kernels` over numpy arrays. bfloat16 crosses as its bits (uint16).

use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyReadonlyArray3, PyReadwriteArray1, PyReadwriteArray3};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use specbatch_cpu_kernels::attention::{Options, Rows, forward};
use specbatch_cpu_kernels::pages::{Element, LayerPages, write};

/// Where one layer's keys and values are: offsets and strides in elements of the storage.
#[pyclass(frozen, name = "CpuLayerPages", module = "specbatch._core")]
pub struct CpuLayerPages(pub(crate) LayerPages);

#[pymethods]
impl CpuLayerPages {
    #[new]
    #[pyo3(signature = (*, key_offset, value_offset, page_stride, block_size, kv_heads, head_dim))]
    fn new(
        key_offset: usize,
        value_offset: usize,
        page_stride: usize,
        block_size: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> PyResult<Self> {
        if [page_stride, block_size, kv_heads, head_dim].contains(&0) {
            return Err(PyValueError::new_err("page_stride, block_size, kv_heads and head_dim must be at least 1"));
        }
        Ok(Self(LayerPages { key_offset, value_offset, page_stride, block_size, kv_heads, head_dim }))
    }
}

pub(crate) fn slice<'a, T: numpy::Element>(array: &'a PyReadonlyArray1<'_, T>, name: &str) -> PyResult<&'a [T]> {
    array.as_slice().map_err(|_| PyValueError::new_err(format!("{name} must be contiguous")))
}

fn write_as<E: Element + numpy::Element>(
    py: Python<'_>,
    storage: &Bound<'_, PyAny>,
    pages: &LayerPages,
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    slots: &[i32],
) -> PyResult<()> {
    let mut storage: PyReadwriteArray1<'_, E> = storage.extract()?;
    let (key, value): (PyReadonlyArray3<'_, E>, PyReadonlyArray3<'_, E>) = (key.extract()?, value.extract()?);
    let contiguous = |name: &str| PyValueError::new_err(format!("{name} must be contiguous"));
    let key = key.as_slice().map_err(|_| contiguous("key"))?;
    let value = value.as_slice().map_err(|_| contiguous("value"))?;
    let storage = storage.as_slice_mut().map_err(|_| contiguous("storage"))?;
    py.detach(|| write(storage, pages, key, value, slots)).map_err(PyValueError::new_err)
}

/// Store key and value [T, `kv_heads`, `head_dim`] at slots [T]; negative slots are skipped.
#[pyfunction]
#[pyo3(signature = (storage, pages, key, value, slots))]
#[allow(clippy::needless_pass_by_value)] // PyO3 hands arguments over by value
pub fn cpu_write_kv(
    py: Python<'_>,
    storage: &Bound<'_, PyAny>,
    pages: &CpuLayerPages,
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    slots: PyReadonlyArray1<'_, i32>,
) -> PyResult<()> {
    let slots = slice(&slots, "slots")?;
    if storage.extract::<PyReadonlyArray1<'_, f32>>().is_ok() {
        write_as::<f32>(py, storage, &pages.0, key, value, slots)
    } else if storage.extract::<PyReadonlyArray1<'_, u16>>().is_ok() {
        write_as::<u16>(py, storage, &pages.0, key, value, slots)
    } else {
        Err(PyTypeError::new_err("storage must be float32, or uint16 for bfloat16"))
    }
}

/// Attention of query [T, heads, `head_dim`] (float32) over the pages, into out of the same shape.
#[pyfunction]
#[pyo3(signature = (query, storage, pages, query_start_loc, seq_lens, block_tables, out, *, scale, positions=None,
    tree_ancestors=None, sliding_window=None, softcap=None, sinks=None))]
#[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)]
pub fn cpu_attention(
    py: Python<'_>,
    query: PyReadonlyArray3<'_, f32>,
    storage: &Bound<'_, PyAny>,
    pages: &CpuLayerPages,
    query_start_loc: PyReadonlyArray1<'_, i32>,
    seq_lens: PyReadonlyArray1<'_, i32>,
    block_tables: PyReadonlyArray2<'_, i32>,
    mut out: PyReadwriteArray3<'_, f32>,
    scale: f32,
    positions: Option<PyReadonlyArray1<'_, i32>>,
    tree_ancestors: Option<PyReadonlyArray1<'_, i64>>,
    sliding_window: Option<i32>,
    softcap: Option<f32>,
    sinks: Option<PyReadonlyArray1<'_, f32>>,
) -> PyResult<()> {
    let shape = query.as_array().shape().to_vec();
    if shape[2] != pages.0.head_dim || out.as_array().shape() != shape {
        return Err(PyValueError::new_err(format!(
            "query {shape:?} and out {:?} must be [tokens, heads, {}]",
            out.as_array().shape(),
            pages.0.head_dim
        )));
    }
    let contiguous = |name: &str| PyValueError::new_err(format!("{name} must be contiguous"));
    let rows = Rows {
        query_start: slice(&query_start_loc, "query_start_loc")?,
        seq_lens: slice(&seq_lens, "seq_lens")?,
        pages_per_row: block_tables.as_array().shape()[1],
        block_tables: block_tables.as_slice().map_err(|_| contiguous("block_tables"))?,
        ancestors: tree_ancestors.as_ref().map(|a| slice(a, "tree_ancestors")).transpose()?,
        positions: positions.as_ref().map(|p| slice(p, "positions")).transpose()?.unwrap_or(&[]),
    };
    let options = Options {
        scale,
        window: sliding_window,
        softcap,
        sinks: sinks.as_ref().map(|s| slice(s, "sinks")).transpose()?,
    };
    let query = query.as_slice().map_err(|_| contiguous("query"))?;
    let out = out.as_slice_mut().map_err(|_| contiguous("out"))?;
    let heads = shape[1];
    let result = if let Ok(storage) = storage.extract::<PyReadonlyArray1<'_, f32>>() {
        let storage = slice(&storage, "storage")?;
        py.detach(|| forward(query, heads, storage, &pages.0, &rows, &options, out))
    } else if let Ok(storage) = storage.extract::<PyReadonlyArray1<'_, u16>>() {
        let storage = slice(&storage, "storage")?;
        py.detach(|| forward(query, heads, storage, &pages.0, &rows, &options, out))
    } else {
        return Err(PyTypeError::new_err("storage must be float32, or uint16 for bfloat16"));
    };
    result.map_err(PyValueError::new_err)
}
