//! The layers of a pre-norm decoder (RMS norm, rotary attention over grouped KV heads, gated MLP) run from packed weights,
//! for packed rows over paged KV: Llama, Mistral, Qwen2, Qwen3 and whatever else has this shape. Owns weights and scratch.
//! Which model has this shape, its token embeddings and its rotary angles are the caller's to know.
//!
//! Every number of a token's row is computed in the same order whatever else the step holds, so a row's result does not
//! depend on batch, chunking or drafts, in either dtype.

use std::time::Instant;

use crate::activations::Buffer;
use crate::attention::{self, Options, Prepared, Rows as StepRows, Stored, Tasks};
use crate::decoder_blocks;
use crate::head::Head;
use crate::packed::{Number, Packed};
use crate::pages::{Element, LayerPages};
use crate::product::{Activation, Kernel, Output, Product};
use crate::room::Room;
use crate::team::Team;
use crate::token_ops::{self, Rotary};

/// What all layers share.
#[derive(Clone, Debug)]
pub struct Shape {
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub eps: f32,
    pub activation: Activation,
    /// Of attention scores.
    pub scale: f32,
}

pub struct Layer {
    pub attention_norm: Vec<f32>,
    /// Query, key and value projections, one below the other.
    pub qkv: Packed,
    /// Norms of each head's query and key (Qwen3), [`head_dim`].
    pub query_norm: Option<Vec<f32>>,
    pub key_norm: Option<Vec<f32>>,
    pub output: Packed,
    pub mlp_norm: Vec<f32>,
    /// Gate and up projections, panels interleaved.
    pub gate_up: Packed,
    pub down: Packed,
    pub window: Option<i32>,
}

/// Cosines and sines of every position, [positions, dim] each, as transformers' rotary modules give them (both halves
/// alike, scaled as the model wants).
#[derive(Default)]
pub struct Angles {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    /// How much of a head is turned.
    pub dim: usize,
}

/// One step's arrays. Tokens are packed; all that is a token's has [tokens] entries.
pub struct Step<'a, E> {
    pub positions: &'a [i32],
    /// Where a token's keys and values go; negative: nowhere.
    pub slots: &'a [i32],
    pub rows: StepRows<'a>,
    pub storage: &'a mut [E],
    /// One a layer.
    pub pages: &'a [LayerPages],
}

pub struct Decoder {
    pub shape: Shape,
    pub(crate) layers: Vec<Layer>,
    pub(crate) head: Option<Head>,
    pub(crate) angles: Angles,
    pub(crate) kernel: Kernel,
    pub(crate) tasks: Tasks,
    /// Input of the products over the hidden size, of the output projection, of the down projection.
    pub(crate) normed: Buffer,
    pub(crate) attended: Buffer,
    pub(crate) gated: Buffer,
    pub(crate) qkv: Room<f32>,
    pub(crate) query: Room<f32>,
    pub(crate) attention: Room<f32>,
    slots: Vec<i32>,
    /// Seconds of each part of all layers so far (see `PARTS`).
    pub(crate) seconds: [f64; PARTS.len()],
}

/// What a layer does, in order: the names of `Decoder::seconds`. The last is all but attention where tokens are many.
pub const PARTS: [&str; 10] = [
    "norm",
    "qkv",
    "rotate and store",
    "attention",
    "convert",
    "output",
    "mlp norm",
    "gate and up",
    "down",
    "in blocks",
];

pub(crate) fn need(ok: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if ok { Ok(()) } else { Err(message()) }
}

impl Decoder {
    /// # Panics
    /// When this processor does not have the kernel's instructions.
    #[must_use]
    pub fn new(shape: Shape, kernel: Kernel) -> Self {
        assert!(Kernel::available().contains(&kernel), "{kernel:?} does not run here");
        let number = kernel.takes();
        let width = shape.heads * shape.head_dim;
        Self {
            layers: Vec::new(),
            head: None,
            angles: Angles::default(),
            kernel,
            tasks: Tasks::default(),
            normed: Buffer::new(shape.hidden, number),
            attended: Buffer::new(width, number),
            gated: Buffer::new(shape.intermediate, number),
            qkv: Room::new(),
            query: Room::new(),
            attention: Room::new(),
            slots: Vec::new(),
            seconds: [0.0; PARTS.len()],
            shape,
        }
    }

    #[must_use]
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// Seconds spent in each of `PARTS` since the start.
    #[must_use]
    pub fn seconds(&self) -> [f64; PARTS.len()] {
        self.seconds
    }

    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        layers.map(Packed::bytes).sum::<usize>() + self.head.as_ref().map_or(0, Head::bytes)
    }

    /// # Errors
    /// A message naming the weight that does not fit the shape.
    pub fn push(&mut self, layer: Layer) -> Result<(), String> {
        let s = &self.shape;
        let width = s.heads * s.head_dim;
        let fits = |name: &str, weight: &Packed, columns: usize, k: usize| {
            need(weight.columns == columns && weight.k == k, || {
                format!("{name} is [{}, {}], not [{columns}, {k}]", weight.columns, weight.k)
            })?;
            need(self.kernel.multiplies(weight.number()), || {
                format!("{name} is stored in {:?}, which {:?} does not multiply", weight.number(), self.kernel)
            })
        };
        fits("qkv", &layer.qkv, width + 2 * s.kv_heads * s.head_dim, s.hidden)?;
        fits("output", &layer.output, s.hidden, width)?;
        fits("gate_up", &layer.gate_up, 2 * s.intermediate, s.hidden)?;
        fits("down", &layer.down, s.hidden, s.intermediate)?;
        for (name, norm, size) in [
            ("attention_norm", Some(&layer.attention_norm), s.hidden),
            ("mlp_norm", Some(&layer.mlp_norm), s.hidden),
            ("query_norm", layer.query_norm.as_ref(), s.head_dim),
            ("key_norm", layer.key_norm.as_ref(), s.head_dim),
        ] {
            need(norm.is_none_or(|n| n.len() == size), || format!("{name} must hold {size} numbers"))?;
        }
        let normed = layer.query_norm.is_some() || layer.key_norm.is_some();
        need(!normed || s.head_dim <= token_ops::MAX_HEAD, || {
            format!("heads of {} numbers are not normed, at most {}", s.head_dim, token_ops::MAX_HEAD)
        })?;
        self.layers.push(layer);
        Ok(())
    }

    /// # Errors
    /// A message when the tables do not fit the shape.
    pub fn set_angles(&mut self, angles: Angles) -> Result<(), String> {
        let dim = angles.dim;
        need(dim > 0 && dim <= self.shape.head_dim && dim.is_multiple_of(2), || {
            format!("rotary size {dim} of {}", self.shape.head_dim)
        })?;
        need(angles.cos.len() == angles.sin.len() && angles.cos.len().is_multiple_of(dim), || {
            format!("cos and sin must be [positions, {dim}]")
        })?;
        self.angles = angles;
        Ok(())
    }

    /// Run all layers on `hidden` [tokens, hidden size] in place: embeddings in, the last layer's output out (not yet
    /// normed). Keys and values are written to the pages.
    ///
    /// # Errors
    /// A message when sizes do not fit together, a page is not there or two tokens have one slot; no page is written then.
    pub fn forward<E: Stored>(
        &mut self,
        team: &Team,
        hidden: &mut [f32],
        step: &mut Step<'_, E>,
    ) -> Result<(), String> {
        self.forward_for(team, hidden, step, None)
    }

    /// As `forward`, but of `hidden` only the `wanted` tokens' rows (rising) are asked for: the others may hold anything then.
    ///
    /// # Errors
    /// As `forward`.
    pub fn forward_for<E: Stored>(
        &mut self,
        team: &Team,
        hidden: &mut [f32],
        step: &mut Step<'_, E>,
        wanted: Option<&[i32]>,
    ) -> Result<(), String> {
        let shape = self.shape.clone();
        let tokens = step.slots.len();
        self.check(hidden, step)?;
        let in_order = wanted.is_none_or(|w| {
            w.windows(2).all(|w| w[0] < w[1])
                && w.first().is_none_or(|&t| t >= 0)
                && w.last().is_none_or(|&t| (t as usize) < tokens)
        });
        need(in_order, || format!("wanted tokens must rise within the {tokens} of the step"))?;
        self.tasks.refill(step.rows.query_start, shape.heads, shape.kv_heads, team.size())?;
        let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let all = width + 2 * kv_width;
        self.fit(tokens, width, all);
        if let Some(pages) = step.pages.iter().min_by_key(|p| p.pages_within(step.storage.len())) {
            let options = Options { scale: shape.scale, window: None, softcap: None, sinks: None };
            let (query, out) = (&self.query[..], &self.attention[..]);
            attention::check(query, shape.heads, step.storage.len(), pages, &step.rows, &options, out)?;
        }
        // Prefill: what a product gives is taken up while it is still in the cache.
        let widest = shape.hidden.max(width).max(shape.intermediate);
        let size = decoder_blocks::block_size(self.kernel, tokens, team.size(), widest);
        if let Some(size) = size {
            return self.forward_blocks(team, hidden, step, size, wanted);
        }
        let rotary = Rotary { angles: &self.angles, positions: step.positions };
        let kernel = self.kernel;
        let seconds = &mut self.seconds;
        let mut since = Instant::now();
        let mut lap = |part: usize| {
            let now = Instant::now();
            seconds[part] += (now - since).as_secs_f64();
            since = now;
        };
        for (layer, pages) in self.layers.iter().zip(step.pages) {
            token_ops::norm(team, hidden, &layer.attention_norm, shape.eps, tokens, self.normed.sink());
            lap(0);
            let qkv = Output::Store { at: self.qkv.as_mut_ptr(), stride: all };
            let product = Product { weight: &layer.qkv, input: self.normed.rows(), rows: tokens, output: qkv };
            // SAFETY: buffers hold `tokens` rows of what each product takes and gives (`fit`, `push`); nothing else
            // touches them meanwhile; the kernel runs here (`Kernel::best`).
            unsafe { product.run(kernel, team) };
            lap(1);
            let heads = token_ops::Heads { shape: &shape, layer, rotary, eps: shape.eps };
            // SAFETY: slots are distinct and within the pages by `check`.
            unsafe {
                heads.rotate(team, &self.qkv[..tokens * all], &mut self.query, step.slots, step.storage, pages);
            }
            lap(2);
            let options = Options { scale: shape.scale, window: layer.window, softcap: None, sinks: None };
            let (query, rows) = (&self.query[..tokens * width], &step.rows);
            let attention = &mut self.attention[..];
            let prepared =
                Prepared::new(&self.tasks, query, shape.heads, step.storage, pages, rows, &options, attention)?;
            let rounded = kernel.takes() == Number::Bf16 && prepared.rounds();
            let to = if rounded { self.attended.halves() } else { std::ptr::null_mut() };
            // SAFETY: the buffer holds all tokens' rows.
            let prepared = if rounded { unsafe { prepared.rounded(to, layer.output.k_padded) } } else { prepared };
            // SAFETY: `run` gives each task once and returns when all have ended.
            team.run(prepared.len(), &|task| unsafe { prepared.run(task) });
            lap(3);
            if !rounded {
                token_ops::convert(team, &self.attention, width, tokens, self.attended.sink());
            }
            lap(4);
            let output = Output::Add { at: hidden.as_mut_ptr(), stride: shape.hidden };
            let product = Product { weight: &layer.output, input: self.attended.rows(), rows: tokens, output };
            // SAFETY: as above; `hidden` has [tokens, hidden].
            unsafe { product.run(kernel, team) };
            lap(5);
            token_ops::norm(team, hidden, &layer.mlp_norm, shape.eps, tokens, self.normed.sink());
            lap(6);
            let gated = self.gated.gated(shape.activation);
            let product = Product { weight: &layer.gate_up, input: self.normed.rows(), rows: tokens, output: gated };
            // SAFETY: as above.
            unsafe { product.run(kernel, team) };
            self.gated.settle(team, tokens);
            lap(7);
            let output = Output::Add { at: hidden.as_mut_ptr(), stride: shape.hidden };
            let product = Product { weight: &layer.down, input: self.gated.rows(), rows: tokens, output };
            // SAFETY: as above.
            unsafe { product.run(kernel, team) };
            lap(8);
        }
        Ok(())
    }

    fn fit(&mut self, tokens: usize, width: usize, all: usize) {
        self.normed.fit(tokens);
        self.attended.fit(tokens);
        self.gated.fit_gated(tokens);
        self.qkv.fit(tokens * all);
        self.query.fit(tokens * width);
        self.attention.fit(tokens * width);
    }

    fn check<E: Element>(&mut self, hidden: &[f32], step: &Step<'_, E>) -> Result<(), String> {
        self.slots.clear();
        self.slots.extend(step.slots.iter().filter(|&&slot| slot >= 0));
        self.slots.sort_unstable();
        let twice = self.slots.windows(2).find(|w| w[0] == w[1]);
        need(twice.is_none(), || format!("slot {} is given to two tokens", twice.map_or(0, |w| w[0])))?;
        let (s, tokens) = (&self.shape, step.slots.len());
        need(hidden.len() == tokens * s.hidden, || format!("hidden must be [{tokens}, {}]", s.hidden))?;
        need(step.positions.len() == tokens, || format!("{} positions of {tokens} tokens", step.positions.len()))?;
        let limit = self.angles.cos.len() / self.angles.dim.max(1);
        let far = step.positions.iter().find(|&&p| p < 0 || p as usize >= limit);
        need(far.is_none(), || format!("position {} of {limit}", far.copied().unwrap_or_default()))?;
        need(step.pages.len() == self.layers.len(), || {
            format!("{} layers, pages of {}", self.layers.len(), step.pages.len())
        })?;
        let used = step.rows.query_start.last().copied().unwrap_or(0) as usize;
        need(used <= tokens, || format!("rows of {used} tokens, {tokens} are there"))?;
        for pages in step.pages {
            need(pages.kv_heads == s.kv_heads && pages.head_dim == s.head_dim, || "pages of other heads".into())?;
            let limit = (pages.pages_within(step.storage.len()) * pages.block_size) as i64;
            let slot = step.slots.iter().find(|&&slot| i64::from(slot) >= limit);
            need(slot.is_none(), || format!("slot {} of {limit}", slot.copied().unwrap_or_default()))?;
        }
        Ok(())
    }
}
