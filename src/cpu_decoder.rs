//! `CpuDecoder`: a decoder's layers in packed weights, for numpy arrays. bfloat16 crosses as its bits (uint16).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use numpy::{PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1, PyReadwriteArray2};
use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use specbatch_cpu_kernels::attention::Rows;
use specbatch_cpu_kernels::decoder::{Angles, Decoder, Layer, Shape, Step};
use specbatch_cpu_kernels::head::Head;
use specbatch_cpu_kernels::packed::{Number, Packed, all_half};
use specbatch_cpu_kernels::pages::{Element, LayerPages};
use specbatch_cpu_kernels::product::{Activation, Kernel};
use specbatch_cpu_kernels::team::Team;

use crate::cpu_kernels::{CpuLayerPages, slice};

/// One team for each number of threads, shared by the models that live at the same time.
fn team(threads: usize) -> Arc<Team> {
    static TEAMS: OnceLock<Mutex<HashMap<usize, Weak<Team>>>> = OnceLock::new();
    let mut teams = TEAMS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(team) = teams.get(&threads).and_then(Weak::upgrade) {
        return team;
    }
    let team = Arc::new(Team::new(threads));
    teams.insert(threads, Arc::downgrade(&team));
    team
}

/// Weights as they cross: float32, or bfloat16 as its bits.
enum Matrix<'py> {
    F32(PyReadonlyArray2<'py, f32>),
    Bf16(PyReadonlyArray2<'py, u16>),
}

impl<'py> Matrix<'py> {
    fn of(array: &Bound<'py, PyAny>, name: &str) -> PyResult<Self> {
        if let Ok(array) = array.extract::<PyReadonlyArray2<'_, f32>>() {
            return Ok(Self::F32(array));
        }
        if let Ok(array) = array.extract::<PyReadonlyArray2<'_, u16>>() {
            return Ok(Self::Bf16(array));
        }
        Err(PyTypeError::new_err(format!("{name} must be a matrix of float32, or of uint16 for bfloat16")))
    }

    fn columns(&self) -> usize {
        match self {
            Self::F32(a) => a.as_array().shape()[1],
            Self::Bf16(a) => a.as_array().shape()[1],
        }
    }
}

/// Pack matrices of one input as the kernel takes them; bfloat16 also for float32 where nothing is lost.
fn pack(py: Python<'_>, parts: &[Matrix<'_>], kernel: Kernel, interleave: bool) -> PyResult<Packed> {
    let k = parts[0].columns();
    let contiguous = |_| PyValueError::new_err("weights must be contiguous");
    if parts.iter().any(|p| p.columns() != k || k == 0) {
        return Err(PyValueError::new_err("weights of one input must have the same number of columns"));
    }
    let (mut wide, mut half) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            Matrix::F32(a) => wide.push(a.as_slice().map_err(contiguous)?),
            Matrix::Bf16(a) => half.push(a.as_slice().map_err(contiguous)?),
        }
    }
    if !wide.is_empty() && !half.is_empty() {
        return Err(PyTypeError::new_err("weights of one input must have one dtype"));
    }
    py.detach(|| match (kernel.takes(), wide.is_empty()) {
        (Number::Int8, true) => int8(&half, k, kernel, interleave),
        (Number::Int8, false) => int8(&wide, k, kernel, interleave),
        (_, true) => Packed::new(&half, k, true, interleave).map_err(PyMemoryError::new_err),
        (number, false) => {
            let exact = number == Number::Bf16 || wide.iter().all(|w| all_half(w));
            Packed::new(&wide, k, exact, interleave).map_err(PyMemoryError::new_err)
        }
    })
}

fn int8<E: Element>(parts: &[&[E]], k: usize, kernel: Kernel, interleave: bool) -> PyResult<Packed> {
    let packed = Packed::int8(parts, k, interleave).map_err(PyValueError::new_err)?;
    if packed.is_int8_of(parts, interleave, kernel) {
        return Ok(packed);
    }
    Err(PyValueError::new_err(format!("{} gives other sums than it should on this processor", kernel.name())))
}

fn numbers(array: Option<&PyReadonlyArray1<'_, f32>>, name: &str) -> PyResult<Option<Vec<f32>>> {
    array.map(|a| slice(a, name).map(<[f32]>::to_vec)).transpose()
}

/// The layers of a decoder, and its head, in packed weights on a team of threads.
#[pyclass(name = "CpuDecoder", module = "specbatch._core")]
pub struct CpuDecoder {
    decoder: Decoder,
    /// Of the head, which is not quantised.
    head_kernel: Kernel,
    team: Arc<Team>,
}

impl CpuDecoder {
    pub(crate) fn parts(&mut self) -> (&mut Decoder, &Team) {
        (&mut self.decoder, &self.team)
    }
}

#[pymethods]
impl CpuDecoder {
    #[new]
    #[pyo3(signature = (*, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, eps, activation, scale,
        bfloat16, threads, int8=false))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        hidden_size: usize,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        intermediate_size: usize,
        eps: f32,
        activation: &str,
        scale: f32,
        bfloat16: bool,
        threads: usize,
        int8: bool,
    ) -> PyResult<Self> {
        let sizes = [hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, threads];
        if sizes.contains(&0) || !num_heads.is_multiple_of(num_kv_heads) {
            return Err(PyValueError::new_err(format!(
                "sizes {sizes:?} must be positive and heads a multiple of KV heads"
            )));
        }
        let activation = match activation {
            "silu" => Activation::Silu,
            "gelu_pytorch_tanh" => Activation::GeluTanh,
            other => {
                return Err(PyValueError::new_err(format!(
                    "activation {other:?} is neither silu nor gelu_pytorch_tanh"
                )));
            }
        };
        let shape = Shape {
            hidden: hidden_size,
            heads: num_heads,
            kv_heads: num_kv_heads,
            head_dim,
            intermediate: intermediate_size,
            eps,
            activation,
            scale,
        };
        let head_kernel = Kernel::best(bfloat16);
        let kernel = if int8 { Kernel::best_int8() } else { head_kernel };
        Ok(Self { decoder: Decoder::new(shape, kernel), head_kernel, team: team(threads) })
    }

    /// Append a layer; weights [out, in].
    #[pyo3(signature = (*, attention_norm, q, k, v, o, mlp_norm, gate, up, down, qkv_bias=None, o_bias=None, query_norm=None,
        key_norm=None, sliding_window=None))]
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)]
    fn add_layer(
        &mut self,
        py: Python<'_>,
        attention_norm: PyReadonlyArray1<'_, f32>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        o: &Bound<'_, PyAny>,
        mlp_norm: PyReadonlyArray1<'_, f32>,
        gate: &Bound<'_, PyAny>,
        up: &Bound<'_, PyAny>,
        down: &Bound<'_, PyAny>,
        qkv_bias: Option<PyReadonlyArray1<'_, f32>>,
        o_bias: Option<PyReadonlyArray1<'_, f32>>,
        query_norm: Option<PyReadonlyArray1<'_, f32>>,
        key_norm: Option<PyReadonlyArray1<'_, f32>>,
        sliding_window: Option<i32>,
    ) -> PyResult<()> {
        let kernel = self.decoder.kernel();
        let fits = |bias: &Option<Vec<f32>>, weight: &Packed, name: &str| match bias {
            Some(bias) if bias.len() != weight.columns => {
                Err(PyValueError::new_err(format!("{name} must hold {} numbers", weight.columns)))
            }
            _ => Ok(()),
        };
        let qkv = pack(py, &[Matrix::of(q, "q")?, Matrix::of(k, "k")?, Matrix::of(v, "v")?], kernel, false)?;
        let output = pack(py, &[Matrix::of(o, "o")?], kernel, false)?;
        let gate_up = [Matrix::of(gate, "gate")?, Matrix::of(up, "up")?];
        if !self.decoder.shape.intermediate.is_multiple_of(16) {
            return Err(PyValueError::new_err("intermediate_size must be a multiple of 16"));
        }
        let gate_up = pack(py, &gate_up, kernel, true)?;
        let down = pack(py, &[Matrix::of(down, "down")?], kernel, false)?;
        let (qkv_bias, o_bias) = (numbers(qkv_bias.as_ref(), "qkv_bias")?, numbers(o_bias.as_ref(), "o_bias")?);
        fits(&qkv_bias, &qkv, "qkv_bias")?;
        fits(&o_bias, &output, "o_bias")?;
        let layer = Layer {
            attention_norm: slice(&attention_norm, "attention_norm")?.to_vec(),
            qkv: qkv.with_bias(qkv_bias),
            query_norm: numbers(query_norm.as_ref(), "query_norm")?,
            key_norm: numbers(key_norm.as_ref(), "key_norm")?,
            output: output.with_bias(o_bias),
            mlp_norm: slice(&mlp_norm, "mlp_norm")?.to_vec(),
            gate_up,
            down,
            window: sliding_window,
        };
        self.decoder.push(layer).map_err(PyValueError::new_err)
    }

    /// The final norm and the head, weight [vocabulary, hidden].
    #[pyo3(signature = (norm, weight, *, screen=false))]
    #[allow(clippy::needless_pass_by_value)]
    fn set_head(
        &mut self,
        py: Python<'_>,
        norm: PyReadonlyArray1<'_, f32>,
        weight: &Bound<'_, PyAny>,
        screen: bool,
    ) -> PyResult<()> {
        let matrix = [Matrix::of(weight, "weight")?];
        let packed = pack(py, &matrix, self.head_kernel, false)?;
        let mut head = Head::new(slice(&norm, "norm")?.to_vec(), packed, self.head_kernel);
        if screen {
            let contiguous = |_| PyValueError::new_err("weights must be contiguous");
            head = match &matrix[0] {
                Matrix::F32(a) => {
                    let values = a.as_slice().map_err(contiguous)?;
                    py.detach(|| head.and_then(|h| h.screened(values)))
                }
                Matrix::Bf16(a) => {
                    let values = a.as_slice().map_err(contiguous)?;
                    py.detach(|| head.and_then(|h| h.screened(values)))
                }
            };
        }
        head.and_then(|head| self.decoder.set_head(head)).map_err(PyValueError::new_err)
    }

    /// Rotary tables [positions, dim].
    #[allow(clippy::needless_pass_by_value)]
    fn set_angles(&mut self, cos: PyReadonlyArray2<'_, f32>, sin: PyReadonlyArray2<'_, f32>) -> PyResult<()> {
        let contiguous = |_| PyValueError::new_err("cos and sin must be contiguous");
        let dim = cos.as_array().shape()[1];
        let (cos, sin) = (cos.as_slice().map_err(contiguous)?.to_vec(), sin.as_slice().map_err(contiguous)?.to_vec());
        self.decoder.set_angles(Angles { cos, sin, dim }).map_err(PyValueError::new_err)
    }

    /// Run the layers on hidden [tokens, hidden size] in place.
    #[pyo3(signature = (hidden, *, storage, pages, positions, slot_mapping, query_start_loc, seq_lens, block_tables,
        tree_ancestors=None, wanted=None))]
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)]
    fn forward(
        &mut self,
        py: Python<'_>,
        mut hidden: PyReadwriteArray2<'_, f32>,
        storage: &Bound<'_, PyAny>,
        pages: Vec<PyRef<'_, CpuLayerPages>>,
        positions: PyReadonlyArray1<'_, i32>,
        slot_mapping: PyReadonlyArray1<'_, i32>,
        query_start_loc: PyReadonlyArray1<'_, i32>,
        seq_lens: PyReadonlyArray1<'_, i32>,
        block_tables: PyReadonlyArray2<'_, i32>,
        tree_ancestors: Option<PyReadonlyArray1<'_, i64>>,
        wanted: Option<PyReadonlyArray1<'_, i32>>,
    ) -> PyResult<()> {
        let wanted = wanted.as_ref().map(|w| slice(w, "wanted")).transpose()?;
        let contiguous = |name: &str| PyValueError::new_err(format!("{name} must be contiguous"));
        let hidden = hidden.as_slice_mut().map_err(|_| contiguous("hidden"))?;
        let pages: Vec<LayerPages> = pages.iter().map(|p| p.0).collect();
        let positions = slice(&positions, "positions")?;
        let ancestors = tree_ancestors.as_ref().map(|a| slice(a, "tree_ancestors")).transpose()?;
        let rows = Rows {
            query_start: slice(&query_start_loc, "query_start_loc")?,
            seq_lens: slice(&seq_lens, "seq_lens")?,
            pages_per_row: block_tables.as_array().shape()[1],
            block_tables: block_tables.as_slice().map_err(|_| contiguous("block_tables"))?,
            ancestors,
            positions: if ancestors.is_some() { positions } else { &[] },
        };
        let slots = slice(&slot_mapping, "slot_mapping")?;
        let Self { decoder, team, .. } = self;
        if let Ok(mut storage) = storage.extract::<PyReadwriteArray1<'_, f32>>() {
            let storage = storage.as_slice_mut().map_err(|_| contiguous("storage"))?;
            let mut step = Step { positions, slots, rows, storage, pages: &pages };
            py.detach(|| decoder.forward_for(team, hidden, &mut step, wanted))
        } else if let Ok(mut storage) = storage.extract::<PyReadwriteArray1<'_, u16>>() {
            let storage = storage.as_slice_mut().map_err(|_| contiguous("storage"))?;
            let mut step = Step { positions, slots, rows, storage, pages: &pages };
            py.detach(|| decoder.forward_for(team, hidden, &mut step, wanted))
        } else {
            return Err(PyTypeError::new_err("storage must be float32, or uint16 for bfloat16"));
        }
        .map_err(PyValueError::new_err)
    }

    /// Logits of some tokens of hidden (as `forward` left it) into out [indices, vocabulary].
    #[allow(clippy::needless_pass_by_value)]
    fn logits(
        &mut self,
        py: Python<'_>,
        hidden: PyReadonlyArray2<'_, f32>,
        indices: PyReadonlyArray1<'_, i32>,
        mut out: PyReadwriteArray2<'_, f32>,
    ) -> PyResult<()> {
        let contiguous = |name: &str| PyValueError::new_err(format!("{name} must be contiguous"));
        let hidden = hidden.as_slice().map_err(|_| contiguous("hidden"))?;
        let indices = slice(&indices, "indices")?;
        let out = out.as_slice_mut().map_err(|_| contiguous("out"))?;
        let Self { decoder, team, .. } = self;
        py.detach(|| decoder.logits(team, hidden, indices, out)).map_err(PyValueError::new_err)
    }

    /// The best token of some tokens of hidden among the first `limit`, into out; -1 where its logit is not finite.
    #[allow(clippy::needless_pass_by_value)]
    fn best(
        &mut self,
        py: Python<'_>,
        hidden: PyReadonlyArray2<'_, f32>,
        indices: PyReadonlyArray1<'_, i32>,
        limit: usize,
        mut out: PyReadwriteArray1<'_, i32>,
    ) -> PyResult<()> {
        let contiguous = |name: &str| PyValueError::new_err(format!("{name} must be contiguous"));
        let hidden = hidden.as_slice().map_err(|_| contiguous("hidden"))?;
        let indices = slice(&indices, "indices")?;
        let out = out.as_slice_mut().map_err(|_| contiguous("out"))?;
        let Self { decoder, team, .. } = self;
        py.detach(|| decoder.best(team, hidden, indices, limit, out)).map_err(PyValueError::new_err)
    }

    /// What multiplies in the layers.
    #[getter]
    fn kernel(&self) -> &'static str {
        self.decoder.kernel().name()
    }

    /// Bytes of all packed weights.
    #[getter]
    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    #[getter]
    fn threads(&self) -> usize {
        self.team.size()
    }
}
