//! The layers over many tokens, as in prefill: blocks of tokens, each the work of one thread from a layer's attention to
//! the next layer's, so that what a product gives is still in the second cache when the next one takes it. Weights go
//! past a block once; threads meet at attention alone. The bits are those of `decoder.rs`.

use std::time::Instant;

use crate::attention::{Options, Prepared, Stored};
use crate::decoder::{Decoder, Layer, Step};
use crate::product::{Kernel, Output, Product, Rows};
use crate::team::Team;
use crate::token_ops::{self, Heads, Rotary, Sink};

/// Places in `PARTS`.
const ATTENTION: usize = 3;
const REST: usize = 9;

/// Tokens of a block at most, and what is too few for one.
const MOST: usize = 512;
const LEAST: usize = 64;
/// Rows of a product that follow one another through small weights, and what small weights are.
const FEW: usize = 128;
const SMALL: usize = 5 << 18;
/// Bytes of a product's activations that stay in the second cache while large weights go past.
const STAY: usize = 3 << 18;

/// Of how many tokens each block is: whole tiles of rows; none where blocks do not pay.
pub(crate) fn block_size(kernel: Kernel, tokens: usize, threads: usize, widest: usize) -> Option<usize> {
    let number = kernel.takes();
    // Of wider models too few rows would stay in the cache for weights to go past them once.
    let fits = STAY / (widest * number.bytes()) >= 2 * FEW;
    if !matches!(kernel, Kernel::Amx) || !fits || tokens < LEAST * threads {
        return None;
    }
    let blocks = tokens.div_ceil(MOST * threads) * threads;
    Some(tokens.div_ceil(blocks).next_multiple_of(32))
}

/// How many rows of a product with this weight are taken at a time.
fn rows_at_once(bytes: usize, row_bytes: usize) -> usize {
    if bytes <= SMALL { FEW } else { (STAY / row_bytes).max(FEW) / 32 * 32 }
}

/// What blocks share: buffers of which each touches its own tokens' rows.
struct Shared<E> {
    hidden: *mut f32,
    query: *mut f32,
    qkv: *mut f32,
    attention: *const f32,
    normed: *mut u16,
    attended: *mut u16,
    gated: *mut u16,
    storage: *mut E,
}
// SAFETY: see above.
unsafe impl<E> Sync for Shared<E> {}

/// Tokens of one block.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    end: usize,
}

impl Decoder {
    /// All layers, in blocks of `size` tokens; the last one's attention and what follows it for the `wanted` only. Everything has been checked and made to fit (`Decoder::forward`).
    pub(crate) fn forward_blocks<E: Stored>(
        &mut self,
        team: &Team,
        hidden: &mut [f32],
        step: &mut Step<'_, E>,
        size: usize,
        wanted: Option<&[i32]>,
    ) -> Result<(), String> {
        let tokens = step.slots.len();
        let shared = Shared {
            hidden: hidden.as_mut_ptr(),
            query: self.query.as_mut_ptr(),
            qkv: self.qkv.as_mut_ptr(),
            attention: self.attention.as_ptr(),
            normed: self.normed.halves(),
            attended: self.attended.halves(),
            gated: self.gated.halves(),
            storage: step.storage.as_mut_ptr(),
        };
        let shape = self.shape.clone();
        let width = shape.heads * shape.head_dim;
        let blocks = tokens.div_ceil(size);
        let (mut since, mut seconds) = (Instant::now(), [0.0; 2]);
        let mut lap = |part: usize| {
            let now = Instant::now();
            seconds[part] += (now - since).as_secs_f64();
            since = now;
        };
        let block = |index: usize| Block { first: index * size, end: ((index + 1) * size).min(tokens) };
        {
            let (this, step) = (&*self, &*step);
            // SAFETY: blocks are disjoint, here and below.
            team.run(blocks, &|index| unsafe { this.before_attention(0, block(index), &shared, step) });
        }
        lap(0);
        for (at, (layer, pages)) in self.layers.iter().zip(step.pages).enumerate() {
            let options = Options { scale: shape.scale, window: layer.window, softcap: None, sinks: None };
            let (query, out) = (&self.query[..tokens * width], &mut self.attention[..]);
            let storage = &*step.storage;
            let prepared = Prepared::new(&self.tasks, query, shape.heads, storage, pages, &step.rows, &options, out)?;
            let rounded = prepared.rounds();
            // SAFETY: the buffer holds all tokens' rows.
            let prepared =
                if rounded { unsafe { prepared.rounded(shared.attended, layer.output.k_padded) } } else { prepared };
            let few = wanted.filter(|wanted| rounded && at + 1 == self.layers.len() && wanted.len() * 2 < tokens);
            let needed = few.map(|wanted| prepared.of_tokens(wanted));
            // SAFETY: `run` gives each task once and returns when all have ended.
            match &needed {
                None => team.run(prepared.len(), &|task| unsafe { prepared.run(task) }),
                Some(needed) => team.run(needed.len(), &|i| unsafe { prepared.run(needed[i]) }),
            }
            lap(1);
            if let Some(wanted) = few {
                // SAFETY: `wanted` rise within the tokens.
                unsafe { self.after_attention_of(layer, wanted, &shared) };
                lap(0);
                break;
            }
            let (this, step) = (&*self, &*step);
            team.run(blocks, &|index| unsafe {
                this.after_attention(layer, block(index), &shared, rounded);
                if at + 1 < this.layers.len() {
                    this.before_attention(at + 1, block(index), &shared, step);
                }
            });
            lap(0);
        }
        self.seconds[ATTENTION] += seconds[1];
        self.seconds[REST] += seconds[0];
        Ok(())
    }

    /// Norm, projections and rotary angles of a layer: queries, and keys and values in their pages.
    unsafe fn before_attention<E: Stored>(&self, layer: usize, block: Block, shared: &Shared<E>, step: &Step<'_, E>) {
        let (shape, pages, layer) = (&self.shape, &step.pages[layer], &self.layers[layer]);
        let all = layer.qkv.columns;
        let rotary = Rotary { angles: &self.angles, positions: step.positions };
        let heads = Heads { shape, layer, rotary, eps: shape.eps };
        let stride = layer.qkv.k_padded;
        let most = rows_at_once(layer.qkv.bytes(), 2 * stride);
        // SAFETY: the block's own rows; its first rows of `normed` and `qkv` serve all of them in turn.
        unsafe {
            let (normed, qkv) = (shared.normed.add(block.first * stride), shared.qkv.add(block.first * all));
            for first in (block.first..block.end).step_by(most) {
                let rows = most.min(block.end - first);
                let hidden = std::slice::from_raw_parts(shared.hidden.add(first * shape.hidden), rows * shape.hidden);
                token_ops::norm_here(hidden, &layer.attention_norm, shape.eps, Sink::Bf16 { at: normed, stride });
                let output = Output::Store { at: qkv, stride: all };
                let input = Rows::Bf16 { at: normed, stride };
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                if crate::amx_heads::fits::<E>(shape, layer, &rotary) {
                    let (query, slots, storage) = (shared.query, step.slots, shared.storage.cast());
                    let end = crate::amx_heads::IntoHeads { shape, rotary, first, query, slots, storage, pages };
                    crate::amx_rows::rows_to(&Product { weight: &layer.qkv, input, rows, output }, &end);
                    continue;
                }
                Product { weight: &layer.qkv, input, rows, output }.run_here(self.kernel);
                let qkv = std::slice::from_raw_parts(qkv, rows * all);
                heads.rotate_here(qkv, first, shared.query, step.slots, shared.storage, pages);
            }
        }
    }

    /// As `after_attention`, of some tokens, which rise: as if they were the first.
    unsafe fn after_attention_of<E: Stored>(&self, layer: &Layer, wanted: &[i32], shared: &Shared<E>) {
        let (size, stride) = (self.shape.hidden, layer.output.k_padded);
        let mut some = vec![0.0f32; wanted.len() * size];
        let end = wanted.len();
        // SAFETY: a token's place is at or behind the one that its numbers are moved to.
        unsafe {
            for (i, (&token, row)) in wanted.iter().zip(some.chunks_exact_mut(size)).enumerate() {
                let token = token as usize;
                row.copy_from_slice(std::slice::from_raw_parts(shared.hidden.add(token * size), size));
                std::ptr::copy(shared.attended.add(token * stride), shared.attended.add(i * stride), stride);
            }
            self.after_attention(
                layer,
                Block { first: 0, end },
                &Shared { hidden: some.as_mut_ptr(), ..*shared },
                true,
            );
            for (&token, row) in wanted.iter().zip(some.chunks_exact(size)) {
                std::slice::from_raw_parts_mut(shared.hidden.add(token as usize * size), size).copy_from_slice(row);
            }
        }
    }

    /// Output projection and gated MLP of a layer, into `hidden`. `rounded`: attention's output is in `attended` already.
    unsafe fn after_attention<E: Stored>(&self, layer: &Layer, block: Block, shared: &Shared<E>, rounded: bool) {
        let shape = &self.shape;
        let width = shape.heads * shape.head_dim;
        let hidden = |token: usize| shared.hidden.wrapping_add(token * shape.hidden);
        let stride = layer.output.k_padded;
        let most = rows_at_once(layer.output.bytes(), 2 * stride);
        let normed_stride = layer.gate_up.k_padded;
        let normed = |token: usize| shared.normed.wrapping_add(token * normed_stride);
        // SAFETY: the block's own rows.
        unsafe {
            for first in (block.first..block.end).step_by(most) {
                let rows = most.min(block.end - first);
                let attended = shared.attended.add(first * stride);
                if !rounded {
                    let from = std::slice::from_raw_parts(shared.attention.add(first * width), rows * width);
                    token_ops::convert_here(from, width, Sink::Bf16 { at: attended, stride });
                }
                let output = Output::Add { at: hidden(first), stride: shape.hidden };
                let input = Rows::Bf16 { at: attended, stride };
                Product { weight: &layer.output, input, rows, output }.run_here(self.kernel);
                let from = std::slice::from_raw_parts(hidden(first), rows * shape.hidden);
                let to = Sink::Bf16 { at: normed(first), stride: normed_stride };
                token_ops::norm_here(from, &layer.mlp_norm, shape.eps, to);
            }
            let gated_stride = layer.down.k_padded;
            let gated = |token: usize| shared.gated.wrapping_add(token * gated_stride);
            let most = rows_at_once(layer.gate_up.bytes(), 2 * normed_stride);
            for first in (block.first..block.end).step_by(most) {
                let rows = most.min(block.end - first);
                let output = Output::GatedHalf { at: gated(first), stride: gated_stride, activation: shape.activation };
                let input = Rows::Bf16 { at: normed(first), stride: normed_stride };
                Product { weight: &layer.gate_up, input, rows, output }.run_here(self.kernel);
            }
            let most = rows_at_once(layer.down.bytes(), 2 * gated_stride);
            for first in (block.first..block.end).step_by(most) {
                let rows = most.min(block.end - first);
                let output = Output::Add { at: hidden(first), stride: shape.hidden };
                let input = Rows::Bf16 { at: gated(first), stride: gated_stride };
                Product { weight: &layer.down, input, rows, output }.run_here(self.kernel);
            }
        }
    }
}
