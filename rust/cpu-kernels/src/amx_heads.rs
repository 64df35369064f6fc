//! Query, key and value projections whose sums become rotated queries, and keys and values in their pages, while they are in
//! the first cache: for heads of 64 numbers, a group of panels each. The operations are those of `token_ops.rs` one by one.

use std::arch::x86_64::*;

use crate::amx_rows::{End, SIDE};
use crate::attention::Stored;
use crate::attention_avx512::halves;
use crate::decoder::{Layer, Shape};
use crate::epilogue::Tile;
use crate::pages::LayerPages;
use crate::product::Product;
use crate::token_ops::Rotary;

const DIM: usize = 2 * SIDE;

/// Where the heads of some tokens go.
pub(crate) struct IntoHeads<'a> {
    pub shape: &'a Shape,
    pub rotary: Rotary<'a>,
    /// The token of the product's first row.
    pub first: usize,
    /// [tokens, heads, 64]
    pub query: *mut f32,
    pub slots: &'a [i32],
    pub storage: *mut u16,
    pub pages: &'a LayerPages,
}

/// Whether a layer's heads can go this way.
pub(crate) fn fits<E: Stored>(shape: &Shape, layer: &Layer, rotary: &Rotary<'_>) -> bool {
    let plain = layer.query_norm.is_none() && layer.key_norm.is_none() && layer.qkv.bias.is_none();
    E::HALF && plain && shape.head_dim == DIM && rotary.angles.dim == DIM
}

impl End for IntoHeads<'_> {
    const TILES: usize = 2;

    #[inline(always)]
    unsafe fn give(&self, _: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize) {
        let head = tile.column / DIM;
        let (heads, kv_heads) = (self.shape.heads, self.shape.kv_heads);
        for row in first..first + count {
            let token = self.first + tile.row + row;
            // SAFETY: the caller's: the token's slot, angles and query are there; two tiles of sums.
            unsafe {
                let low = sums.add(row * SIDE);
                let high = low.add(SIDE * SIDE);
                let mut numbers = [low, low.add(16), high, high.add(16)].map(|at| _mm512_load_ps(at));
                if head < heads + kv_heads {
                    let at = DIM * *self.rotary.positions.get_unchecked(token) as usize;
                    let (cos, sin) = (self.rotary.angles.cos.as_ptr().add(at), self.rotary.angles.sin.as_ptr().add(at));
                    turn(&mut numbers, cos, sin);
                }
                if head < heads {
                    let to = self.query.add((token * heads + head) * DIM);
                    for (i, n) in numbers.iter().enumerate() {
                        _mm512_storeu_ps(to.add(16 * i), *n);
                    }
                    continue;
                }
                let slot = *self.slots.get_unchecked(token);
                if slot < 0 {
                    continue;
                }
                let (slot, size) = (slot as u32, self.pages.block_size as u32);
                let of_page = (slot % size) as usize * kv_heads * DIM;
                let (kv, offset) = if head < heads + kv_heads {
                    (head - heads, self.pages.key_offset)
                } else {
                    (head - heads - kv_heads, self.pages.value_offset)
                };
                let at = (slot / size) as usize * self.pages.page_stride + of_page + kv * DIM + offset;
                for (i, n) in numbers.iter().enumerate() {
                    _mm256_storeu_si256(self.storage.add(at + 16 * i).cast(), halves(*n));
                }
            }
        }
    }
}

/// A head turned by its angles.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn turn(numbers: &mut [__m512; 4], cos: *const f32, sin: *const f32) {
    let [a, b, c, d] = *numbers;
    for (i, (low, high)) in [(a, c), (b, d)].into_iter().enumerate() {
        // SAFETY: the caller's: 64 cosines and sines.
        unsafe {
            let at = |table: *const f32, half: usize| _mm512_loadu_ps(table.add(half * SIDE + 16 * i));
            numbers[i] = _mm512_sub_ps(_mm512_mul_ps(low, at(cos, 0)), _mm512_mul_ps(high, at(sin, 0)));
            numbers[2 + i] = _mm512_add_ps(_mm512_mul_ps(high, at(cos, 1)), _mm512_mul_ps(low, at(sin, 1)));
        }
    }
}
