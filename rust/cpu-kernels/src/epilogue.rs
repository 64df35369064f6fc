//! What is done with a tile of sums while it is in the first cache: bias, residual, gated activation, rounding.
//! Plain loops, compiled anew inside each kernel so that they use its vectors.

use crate::packed::{COLUMNS, GROUP};
use crate::product::{Activation, Best, Output, Product};
use crate::screen;

/// Where a tile of sums belongs.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub row: usize,
    pub rows: usize,
    pub column: usize,
    /// Real columns; the sums may have more.
    pub columns: usize,
}

/// exp(x) to 2 units in the last place for |x| below 87; clamped beyond. Written so that compilers make vectors of it.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + 12_582_912.0; // the whole number is in its last bits
    let n = shifted - 12_582_912.0;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p.mul_add(r, c);
    }
    let p = (p * r).mul_add(r, r + 1.0);
    // NaN has passed the clamp: then these bits are any, and p is NaN.
    p * f32::from_bits(shifted.to_bits().wrapping_sub(0x4B40_0000 - 127) << 23)
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    let inner = 0.797_884_6 * (0.044_715 * x * x).mul_add(x, x);
    x / (1.0 + exp(-2.0 * inner)) // x (1 + tanh(inner)) / 2
}

/// Hand `sums` [rows, stride] over. `stride` is a multiple of 16 columns.
///
/// # Safety
/// The product's output is valid for the tile.
#[inline(always)]
pub(crate) unsafe fn finish(product: &Product<'_>, tile: Tile, sums: &[f32], stride: usize) {
    if let Output::Ranges(ranges) = product.output {
        // SAFETY: the caller's.
        return unsafe { screen::finish(ranges, tile, sums, stride) };
    }
    let bias = product.weight.bias.as_deref().map(|b| &b[tile.column..][..tile.columns]);
    for row in 0..tile.rows {
        let sums = &sums[row * stride..][..tile.columns.next_multiple_of(COLUMNS)];
        // SAFETY: the caller's.
        unsafe {
            match product.output {
                Output::Store { at, stride } => {
                    let out = at.add((tile.row + row) * stride + tile.column);
                    let out = std::slice::from_raw_parts_mut(out, tile.columns);
                    match bias {
                        None => {
                            // Whole panels first: a copy of unknown length is a call.
                            let (whole, rest) = out.as_chunks_mut::<COLUMNS>();
                            let (from, last) = sums[..tile.columns].as_chunks::<COLUMNS>();
                            whole.iter_mut().zip(from).for_each(|(o, s)| *o = *s);
                            rest.copy_from_slice(last);
                        }
                        Some(bias) => {
                            for ((o, s), b) in out.iter_mut().zip(sums).zip(bias) {
                                *o = s + b;
                            }
                        }
                    }
                }
                Output::Add { at, stride } => {
                    let out = at.add((tile.row + row) * stride + tile.column);
                    let out = std::slice::from_raw_parts_mut(out, tile.columns);
                    match bias {
                        None => out.iter_mut().zip(sums).for_each(|(o, s)| *o += s),
                        Some(bias) => {
                            for ((o, s), b) in out.iter_mut().zip(sums).zip(bias) {
                                *o += s + b;
                            }
                        }
                    }
                }
                Output::Ranges(_) => unreachable!("done above"),
                Output::Best { at, rows, limit } => {
                    let columns = tile.columns.min(limit.saturating_sub(tile.column));
                    let best = best(sums, bias, tile.column, columns);
                    at.add(tile.column / (GROUP * COLUMNS) * rows + tile.row + row).write(best);
                }
                Output::Gated { at, stride, activation } => {
                    let out = at.add((tile.row + row) * stride + tile.column / 2);
                    gated(sums, bias, activation, |i, values| {
                        out.add(i).cast::<[f32; COLUMNS]>().write_unaligned(*values);
                    });
                }
                Output::GatedHalf { at, stride, activation } => {
                    let out = at.add((tile.row + row) * stride + tile.column / 2);
                    gated(sums, bias, activation, |i, values| {
                        out.add(i).cast::<[u16; COLUMNS]>().write_unaligned(halves(values));
                    });
                }
            }
        }
    }
}

/// The best of a tile's row; `columns` of the sums count.
#[inline(always)]
fn best(sums: &[f32], bias: Option<&[f32]>, first: usize, columns: usize) -> Best {
    let mut values = [f32::NEG_INFINITY; GROUP * COLUMNS];
    values[..columns].copy_from_slice(&sums[..columns]);
    if let Some(bias) = bias {
        values[..columns].iter_mut().zip(bias).for_each(|(v, b)| *v += b);
    }
    let mut lanes = [f32::NEG_INFINITY; COLUMNS];
    let mut nan = [false; COLUMNS];
    for chunk in values.chunks_exact(COLUMNS) {
        for i in 0..COLUMNS {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            nan[i] |= chunk[i].is_nan();
        }
    }
    if nan.contains(&true) {
        return Best { value: f32::NAN, column: first as u32 };
    }
    let value = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let at = values.iter().position(|&v| v >= value).unwrap_or(0);
    Best { value, column: (first + at) as u32 }
}

/// Rounded to bfloat16 (to nearest even, NaN stays NaN), without branches.
#[inline(always)]
pub(crate) fn halves(values: &[f32; COLUMNS]) -> [u16; COLUMNS] {
    let mut out = [0; COLUMNS];
    for (o, v) in out.iter_mut().zip(values) {
        let bits = v.to_bits();
        let rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        *o = if v.is_nan() { bits >> 16 | 0x40 } else { rounded } as u16;
    }
    out
}

#[inline(always)]
fn gated(sums: &[f32], bias: Option<&[f32]>, activation: Activation, mut put: impl FnMut(usize, &[f32; COLUMNS])) {
    for (pair, both) in sums.chunks_exact(2 * COLUMNS).enumerate() {
        let (gate, up) = both.split_at(COLUMNS);
        let mut values = [0.0f32; COLUMNS];
        let mut lifted = [0.0f32; COLUMNS];
        values.copy_from_slice(gate);
        lifted.copy_from_slice(up);
        if let Some(bias) = bias {
            for i in 0..COLUMNS {
                values[i] += bias[pair * 2 * COLUMNS + i];
                lifted[i] += bias[(pair * 2 + 1) * COLUMNS + i];
            }
        }
        match activation {
            Activation::Silu => values.iter_mut().for_each(|v| *v = silu(*v)),
            Activation::GeluTanh => values.iter_mut().for_each(|v| *v = gelu_tanh(*v)),
        }
        values.iter_mut().zip(lifted).for_each(|(v, u)| *v *= u);
        put(pair * COLUMNS, &values);
    }
}
