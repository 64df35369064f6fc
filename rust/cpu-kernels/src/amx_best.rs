//! The largest of each group of columns, found while the group's sums are in the first cache: what `epilogue::best` finds,
//! in vectors that fit between the steps of the next tile.

use std::arch::x86_64::*;

use crate::amx_rows::{End, SIDE};
use crate::epilogue::Tile;
use crate::packed::COLUMNS;
use crate::product::{Best, Output, Product};

/// Of products without bias.
pub(crate) struct Largest;

/// Columns of a group.
const GROUP: usize = 2 * SIDE;

impl End for Largest {
    const TILES: usize = 2;
    const SOME_COLUMNS: bool = true;

    #[inline(always)]
    unsafe fn give(&self, product: &Product<'_>, tile: Tile, sums: *mut f32, first: usize, count: usize) {
        let Output::Best { at, rows, limit } = product.output else { unreachable!("its only output") };
        let columns = tile.columns.min(limit.saturating_sub(tile.column));
        let there = if columns < GROUP { (1u64 << columns) - 1 } else { u64::MAX };
        for row in first..first + count {
            // SAFETY: the caller's: a place for each group and row; two tiles of sums.
            unsafe {
                let best = largest(sums.add(row * SIDE), tile.column, there);
                at.add(tile.column / GROUP * rows + tile.row + row).write(best);
            }
        }
    }
}

/// Of a row of two tiles, the first of which has column `first`; only those in `there` count.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn largest(sums: *const f32, first: usize, there: u64) -> Best {
    // SAFETY: the caller's.
    let low = unsafe { [0, COLUMNS, SIDE * SIDE, SIDE * SIDE + COLUMNS].map(|at| _mm512_load_ps(sums.add(at))) };
    let part = |i: usize| (there >> (COLUMNS * i)) as __mmask16;
    let least = _mm512_set1_ps(f32::NEG_INFINITY);
    let values = [0, 1, 2, 3].map(|i| _mm512_mask_mov_ps(least, part(i), low[i]));
    let unordered = |i: usize, j: usize| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values[i], values[j]);
    if unordered(0, 1) | unordered(2, 3) != 0 {
        return Best { value: f32::NAN, column: first as u32 };
    }
    let most = _mm512_max_ps(_mm512_max_ps(values[0], values[1]), _mm512_max_ps(values[2], values[3]));
    let value = _mm512_reduce_max_ps(most);
    let all = _mm512_set1_ps(value);
    let equal = |i: usize| u64::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(values[i], all)) << (COLUMNS * i);
    let at = (equal(0) | equal(1) | equal(2) | equal(3)).trailing_zeros();
    Best { value, column: first as u32 + at }
}
