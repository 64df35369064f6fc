//! Numbers as int8 with a scale: how weights (a scale a column) and activations (a scale a token, found as they come) are
//! rounded, and how integer sums become float32 again. Symmetric, -127 to 127, so zero stays zero and no instruction
//! saturates. Knows no instruction set: every kernel gives the same integer sums, and these loops the same bits.

use crate::epilogue::Tile;
use crate::lines::Lines;
use crate::packed::{COLUMNS, GROUP, Packed, Panels, order};
use crate::pages::Element;
use crate::product::{Product, Rows};

/// k is padded to a multiple of this: one line of activations, one AMX tile.
pub const K_STEP: usize = 64;
/// Beyond this many k a sum of products might not fit an int32.
const MOST_K: usize = i32::MAX as usize / (127 * 127);
/// Numbers all smaller than this count as zero: 127 / x must be finite.
const TINY: f32 = 1e-30;
/// Adding it leaves a number rounded to the nearest whole (even on ties) in the last bits.
const ROUND: f32 = 12_582_912.0;

/// What belongs to each column of int8 weights, padded to whole panels.
pub struct Columns {
    pub scales: Vec<f32>,
    /// Sum of the column's int8 numbers times 128: what unsigned activations (x + 128) add to its sums.
    pub offsets: Vec<i32>,
}

/// k rounded up to whole steps: the row length of int8 activations.
#[must_use]
pub fn padded(k: usize) -> usize {
    k.next_multiple_of(K_STEP)
}

/// Round `values` to `out` so that `out * scale` is near them; returns the scale, largest / 127. Plain loops.
///
/// A NaN or infinity among them makes the scale NaN or infinite, and whatever is multiplied with it NaN.
#[inline(always)]
pub fn quantise(values: impl Iterator<Item = f32> + Clone, out: &mut [i8]) -> f32 {
    // By their bits: NaN is then the largest.
    let largest = values.clone().fold(0u32, |most, v| most.max(v.to_bits() & 0x7FFF_FFFF));
    let largest = f32::from_bits(largest);
    if largest < TINY {
        out.fill(0);
        return 0.0;
    }
    let factor = 127.0 / largest;
    out.iter_mut().zip(values).for_each(|(o, v)| *o = (v * factor + ROUND).to_bits() as i8);
    largest / 127.0
}

impl Packed {
    /// As `Packed::new`, rounded to int8 with a scale a column.
    ///
    /// # Errors
    /// A message when there is no memory, a weight is not finite, or k is too large for int32 sums.
    ///
    /// # Panics
    /// When the sizes do not fit.
    pub fn int8<E: Element>(parts: &[&[E]], k: usize, interleave: bool) -> Result<Self, String> {
        assert!(k > 0 && parts.iter().all(|p| p.len().is_multiple_of(k)), "weights must be [columns, {k}]");
        if k > MOST_K {
            return Err(format!("int8 sums over {k} numbers may not fit an int32: at most {MOST_K}"));
        }
        let rows: Vec<&[E]> = order(parts, k, interleave);
        let (columns, k_padded) = (rows.len(), padded(k));
        let lines_a_group = GROUP * k_padded / 4;
        let mut lines = Lines::zeros(columns.div_ceil(GROUP * COLUMNS) * lines_a_group)?;
        let whole = columns.next_multiple_of(COLUMNS);
        let mut of = Columns { scales: vec![0.0; whole], offsets: vec![0; whole] };
        let mut rounded = vec![0i8; k];
        for (index, row) in rows.iter().enumerate() {
            let scale = quantise(row.iter().map(|v| v.to_f32()), &mut rounded);
            if !scale.is_finite() {
                return Err(format!("row {index} of the weights has numbers that are not finite"));
            }
            of.scales[index] = scale;
            of.offsets[index] = 128 * rounded.iter().map(|&q| i32::from(q)).sum::<i32>();
            let (group, panel) = (index / (GROUP * COLUMNS), index / COLUMNS % GROUP);
            let group = &mut lines.as_mut_slice()[group * lines_a_group..][..lines_a_group];
            for (step, four) in rounded.chunks(4).enumerate() {
                let mut bytes = [0u8; 4];
                bytes.iter_mut().zip(four).for_each(|(b, &q)| *b = q as u8);
                group[step * GROUP + panel].0[index % COLUMNS] = u32::from_le_bytes(bytes);
            }
        }
        Ok(Self { columns, k, k_padded, panels: Panels::Int8(lines, of), bias: None })
    }
}

/// Turn a tile's `sums` [rows, stride], int32 in their bits, into float32: sum * (token's scale * column's scale). With
/// `offset` the activations were taken as x + 128.
///
/// # Safety
/// The product is of int8, and its input valid for the tile's rows.
#[inline(always)]
pub(crate) unsafe fn dequantise(product: &Product<'_>, tile: Tile, sums: &mut [f32], stride: usize, offset: bool) {
    let (Panels::Int8(_, of), Rows::Int8 { scales, .. }) = (&product.weight.panels, product.input) else {
        unreachable!("sums of int8");
    };
    let width = tile.columns.next_multiple_of(COLUMNS);
    let (columns, offsets) = (&of.scales[tile.column..][..width], &of.offsets[tile.column..][..width]);
    for row in 0..tile.rows {
        // SAFETY: the caller's.
        let scale = unsafe { *scales.add(tile.row + row) };
        let sums = &mut sums[row * stride..][..width];
        if offset {
            for ((s, c), o) in sums.iter_mut().zip(columns).zip(offsets) {
                *s = s.to_bits().wrapping_sub(*o as u32) as i32 as f32 * (scale * c);
            }
        } else {
            for (s, c) in sums.iter_mut().zip(columns) {
                *s = s.to_bits() as i32 as f32 * (scale * c);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(values: &[f32]) -> (Vec<i8>, f32) {
        let mut out = vec![9; values.len()];
        let scale = quantise(values.iter().copied(), &mut out);
        (out, scale)
    }

    #[test]
    fn the_largest_becomes_127_and_ties_go_to_even() {
        assert_eq!(round(&[2.0, -254.0, 1.0, 3.0, 0.0, 253.9]), (vec![1, -127, 0, 2, 0, 127], 2.0));
        assert_eq!(round(&[-5.0, 5.0]), (vec![-127, 127], 5.0 / 127.0));
    }

    #[test]
    fn no_number_is_off_by_more_than_half_a_step() {
        let values: Vec<f32> = (0..10_000).map(|i| ((i * 7919) % 10_007) as f32 / 3.0 - 1700.0).collect();
        let (rounded, scale) = round(&values);
        for (q, v) in rounded.iter().zip(&values) {
            assert!((f32::from(*q) * scale - v).abs() <= scale * 0.5001, "{q} for {v}");
            assert_ne!(*q, -128);
        }
    }

    #[test]
    fn zeros_and_tiny_numbers_are_zero_and_what_is_not_finite_shows() {
        assert_eq!(round(&[0.0, -0.0]), (vec![0, 0], 0.0));
        assert_eq!(round(&[1e-31, -1e-40]), (vec![0, 0], 0.0));
        assert!(round(&[1.0, f32::NAN, 2.0]).1.is_nan());
        assert!(!round(&[1.0, f32::NEG_INFINITY]).1.is_finite());
        assert!(round(&[f32::MAX, 1.0]).1.is_finite());
    }

    #[test]
    fn weights_that_int8_cannot_hold_are_refused() {
        assert!(Packed::int8(&[&[1.0f32, f32::NAN][..]], 2, false).is_err_and(|e| e.contains("row 0")));
        assert!(Packed::int8(&[&vec![1.0f32; MOST_K + 1][..]], MOST_K + 1, false).is_err_and(|e| e.contains("int32")));
    }
}
