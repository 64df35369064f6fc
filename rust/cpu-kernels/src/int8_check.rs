//! Proof by example that int8 weights were packed right and that this processor multiplies them right: sums of made-up
//! tokens against the definition, bit for bit. Integer sums leave no room for a tolerance.

use crate::int8::quantise;
use crate::packed::{Number, Packed, order};
use crate::pages::Element;
use crate::product::{Kernel, Output, Product, Rows};
use crate::team::Team;

/// Tokens: enough for every way in which a kernel takes rows.
const TOKENS: usize = 33;
/// Columns from one that is looked at to the next: it comes by all places of a panel and all panels of a group.
const STRIDE: usize = 13;

impl Packed {
    /// Whether `kernel` gives the sums of `parts`, from which these weights were made by `Packed::int8`, for some tokens
    /// and columns, the first and last among them.
    ///
    /// # Panics
    /// When the weights are not int8 or not of these parts' size, or the kernel does not run here.
    #[must_use]
    pub fn is_int8_of<E: Element>(&self, parts: &[&[E]], interleave: bool, kernel: Kernel) -> bool {
        assert!(self.number() == Number::Int8 && kernel.takes() == Number::Int8, "int8 is checked");
        assert!(Kernel::available().contains(&kernel), "{kernel:?} does not run here");
        let rows = order(parts, self.k, interleave);
        assert_eq!(rows.len(), self.columns, "weights of other parts");
        let mut tokens = vec![0i8; TOKENS.next_multiple_of(32) * self.k_padded];
        let mut state = 1u32;
        for token in &mut tokens {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223); // Numerical Recipes' generator
            *token = ((state >> 24) % 255) as u8 as i8; // of 0 to 254: -128 is not among them
            *token = if *token == -128 { 0 } else { *token };
        }
        let scales = [0.5f32; TOKENS];
        let mut out = vec![f32::NAN; TOKENS * self.columns];
        let input = Rows::Int8 { at: tokens.as_ptr(), stride: self.k_padded, scales: scales.as_ptr() };
        let output = Output::Store { at: out.as_mut_ptr(), stride: self.columns };
        // SAFETY: tokens in whole tiles, a scale and a row of `out` each; the kernel runs here.
        unsafe { Product { weight: self, input, rows: TOKENS, output }.run(kernel, &Team::new(1)) };
        let mut rounded = vec![0i8; self.k];
        (0..self.columns).step_by(STRIDE).chain([self.columns - 1]).all(|column| {
            let scale = quantise(rows[column].iter().map(|v| v.to_f32()), &mut rounded);
            let bias = self.bias.as_ref().map_or(0.0, |b| b[column]);
            [0, TOKENS / 2, TOKENS - 1].into_iter().all(|token| {
                let numbers = &tokens[token * self.k_padded..][..self.k];
                let sum: i32 = numbers.iter().zip(&rounded).map(|(x, w)| i32::from(*x) * i32::from(*w)).sum();
                let want = sum as f32 * (scales[token] * scale) + bias;
                let got = out[token * self.columns + column];
                got.to_bits() == want.to_bits() || (got == 0.0 && want == 0.0)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::Panels;

    fn weights(columns: usize, k: usize) -> Vec<f32> {
        (0..columns * k).map(|i| (i * 7919 % 10_007) as f32 / 5003.0 - 1.0).collect()
    }

    #[test]
    fn what_was_packed_is_found_right_by_every_kernel() {
        for (columns, k) in [(200, 130), (16, 64), (1, 1), (67, 300)] {
            let w = weights(columns, k);
            let packed = Packed::int8(&[&w[..]], k, false).expect("memory");
            for kernel in Kernel::available().into_iter().filter(|k| k.takes() == Number::Int8) {
                assert!(packed.is_int8_of(&[&w[..]], false, kernel), "{kernel:?} {columns} x {k}");
            }
        }
        let (gate, up) = (weights(32, 48), weights(32, 48).into_iter().rev().collect::<Vec<_>>());
        let packed = Packed::int8(&[&gate[..], &up[..]], 48, true).expect("memory");
        assert!(packed.is_int8_of(&[&gate[..], &up[..]], true, Kernel::best_int8()));
        assert!(!packed.is_int8_of(&[&up[..], &gate[..]], true, Kernel::best_int8()));
        assert!(!packed.is_int8_of(&[&gate[..], &up[..]], false, Kernel::best_int8()));
    }

    #[test]
    fn one_wrong_number_is_found() {
        let w = weights(61, 70);
        let mut packed = Packed::int8(&[&w[..]], 70, false).expect("memory");
        let Panels::Int8(lines, _) = &mut packed.panels else { unreachable!() };
        lines.as_mut_slice()[3 * 4].0[0] ^= 1 << 16; // column 0, k = 14
        assert!(!packed.is_int8_of(&[&w[..]], false, Kernel::best_int8()));
    }
}
