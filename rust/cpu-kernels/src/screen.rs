//! An int8 screen before a head: bounds on every product say which groups of columns can hold a token's largest, so that
//! only those are multiplied as they are. The result is the same to the bit; half of the weights' bytes stay unread.
//!
//! A column w is kept as w' in int8, a token x as x' in two int8 numbers (the second of what the first leaves). Then
//! |x w - x' w'| <= |x| |w - w'| + |x - x'| |w'| (Cauchy and Schwarz), and a sum of k products in float32, in any order, is
//! off by at most k 2^-23 |x| |w| (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, with room for two
//! roundings a product).

use crate::epilogue::Tile;
use crate::int8::{padded, quantise};
use crate::packed::{COLUMNS, GROUP, Packed};
use crate::pages::Element;
use crate::product::{Kernel, Output, Product, Rows};
use crate::team::Team;

/// Makes up for the rounding of bounds themselves.
const ROOM: f64 = 1.00001;
/// More than all that is lost where products or sums are too small to be normal numbers.
const VANISHING: f32 = 1e-30;

/// What is known of each column, padded to whole groups.
struct Bounds {
    /// |w - w'|
    errors: Vec<f32>,
    /// The larger of |w| and |w'|.
    lengths: Vec<f32>,
}

pub(crate) struct Screen {
    weight: Packed,
    of: Bounds,
    /// The largest of `lengths`.
    longest: f64,
    kernel: Kernel,
    /// Two rows a token.
    numbers: Vec<i8>,
    scales: Vec<f32>,
    /// Factors of `errors` and of `lengths`, a token.
    factors: Vec<[f32; 2]>,
    /// [groups, tokens]: at most this is a group's largest, and at least that.
    ranges: Vec<[f32; 2]>,
}

/// Where `finish` puts a group's range.
#[derive(Clone, Copy)]
pub struct Ranges {
    at: *mut [f32; 2],
    tokens: usize,
    limit: usize,
    errors: *const f32,
    lengths: *const f32,
    factors: *const [f32; 2],
}

impl Screen {
    /// Of the rows of `weight` [columns, k], multiplied as bfloat16 where `half`.
    pub(crate) fn new<E: Element>(weight: &[E], k: usize, half: bool) -> Result<Self, String> {
        let packed = Packed::int8(&[weight], k, false)?;
        let whole = packed.columns.next_multiple_of(GROUP * COLUMNS);
        let mut of = Bounds { errors: vec![0.0; whole], lengths: vec![0.0; whole] };
        let mut rounded = vec![0i8; k];
        for ((row, error), length) in weight.chunks_exact(k).zip(&mut of.errors).zip(&mut of.lengths) {
            let scale = f64::from(quantise(row.iter().map(|v| v.to_f32()), &mut rounded));
            let [mut away, mut own, mut kept] = [0.0f64; 3];
            for (value, q) in row.iter().zip(&rounded) {
                let value = value.to_f32();
                let value = f64::from(if half { u16::from_f32(value).to_f32() } else { value });
                let near = f64::from(*q) * scale;
                away += (value - near) * (value - near);
                own += value * value;
                kept += near * near;
            }
            *error = (away.sqrt() * ROOM) as f32;
            *length = (own.max(kept).sqrt() * ROOM) as f32;
        }
        let longest = f64::from(of.lengths.iter().copied().fold(0.0, f32::max));
        let (numbers, scales, factors) = (Vec::new(), Vec::new(), Vec::new());
        let kernel = Kernel::best_int8();
        Ok(Self { weight: packed, of, longest, kernel, numbers, scales, factors, ranges: Vec::new() })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    /// Take tokens' activations, [tokens, k]. False when one is not finite, or so large or small that a float32 of its
    /// bounds might overflow or vanish: then there are none.
    pub(crate) fn take<'a>(&mut self, tokens: impl ExactSizeIterator<Item = &'a [f32]>) -> bool {
        let k = self.weight.k;
        let stride = padded(k);
        let rows = 2 * tokens.len();
        self.numbers.resize(self.numbers.len().max(rows.next_multiple_of(32) * stride), 0);
        self.scales.resize(rows, 0.0);
        self.factors.clear();
        let mut rest = vec![0.0f32; k];
        for (token, values) in tokens.enumerate() {
            let (first, second) = self.numbers[2 * token * stride..].split_at_mut(stride);
            let (first, second) = (&mut first[..k], &mut second[..k]);
            let scale = quantise(values.iter().copied(), first);
            for ((r, v), q) in rest.iter_mut().zip(values).zip(first.iter()) {
                *r = v - f32::from(*q) * scale;
            }
            let fine = quantise(rest.iter().copied(), second);
            let [mut own, mut away] = [0.0f64; 2];
            for ((v, q), r) in values.iter().zip(first.iter()).zip(second.iter()) {
                let near = f64::from(*q) * f64::from(scale) + f64::from(*r) * f64::from(fine);
                own += f64::from(*v) * f64::from(*v);
                away += (f64::from(*v) - near) * (f64::from(*v) - near);
            }
            let (own, away) = (own.sqrt(), away.sqrt());
            if !(1e-20..1e30).contains(&(own * self.longest)) {
                return false; // NaN too
            }
            self.scales[2 * token] = scale;
            self.scales[2 * token + 1] = fine;
            let sums = (k + 64) as f64 / f64::from(1 << 23) * own;
            self.factors.push([(own * ROOM) as f32, ((away + sums) * ROOM) as f32]);
        }
        true
    }

    /// The groups of columns that may hold the largest of the first `limit` products of any token taken.
    pub(crate) fn groups(&mut self, team: &Team, limit: usize) -> Vec<usize> {
        let tokens = self.factors.len();
        let groups = self.weight.num_panels().div_ceil(GROUP);
        self.ranges.clear();
        self.ranges.resize(groups * tokens, [f32::NEG_INFINITY; 2]);
        let ranges = Ranges {
            at: self.ranges.as_mut_ptr(),
            tokens,
            limit,
            errors: self.of.errors.as_ptr(),
            lengths: self.of.lengths.as_ptr(),
            factors: self.factors.as_ptr(),
        };
        let input =
            Rows::Int8 { at: self.numbers.as_ptr(), stride: self.weight.k_padded, scales: self.scales.as_ptr() };
        let product = Product { weight: &self.weight, input, rows: 2 * tokens, output: Output::Ranges(ranges) };
        // SAFETY: two rows a token in whole tiles, a range a group and token; the kernel runs here.
        unsafe { product.run(self.kernel, team) };
        let mut may = vec![false; groups];
        for token in 0..tokens {
            let of_token = || self.ranges[token..].iter().step_by(tokens);
            let floor = of_token().fold(f32::NEG_INFINITY, |most, r| if r[1] > most { r[1] } else { most });
            // Equal ones too: the lowest id among equals wins.
            may.iter_mut().zip(of_token()).for_each(|(may, r)| *may |= r[0] >= floor);
        }
        (0..groups).filter(|&g| may[g] && g * GROUP * COLUMNS < limit).collect()
    }
}

#[inline(always)]
fn largest(values: &[f32; GROUP * COLUMNS]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; COLUMNS];
    for chunk in values.chunks_exact(COLUMNS) {
        lanes.iter_mut().zip(chunk).for_each(|(l, v)| *l = if *v > *l { *v } else { *l });
    }
    lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// The range of a tile's group for each pair of rows.
///
/// # Safety
/// The ranges are valid for the tile, which begins at an even row.
#[inline(always)]
pub(crate) unsafe fn finish(ranges: Ranges, tile: Tile, sums: &[f32], stride: usize) {
    let columns = tile.columns.min(ranges.limit.saturating_sub(tile.column));
    // SAFETY: the caller's; both are padded to whole groups.
    let (errors, lengths) = unsafe {
        let of = |at: *const f32| std::slice::from_raw_parts(at.add(tile.column), columns);
        (of(ranges.errors), of(ranges.lengths))
    };
    for pair in 0..tile.rows / 2 {
        let token = tile.row / 2 + pair;
        // SAFETY: the caller's.
        let [away, along] = unsafe { *ranges.factors.add(token) };
        let (coarse, fine) = (&sums[2 * pair * stride..][..columns], &sums[(2 * pair + 1) * stride..][..columns]);
        let mut most = [f32::NEG_INFINITY; GROUP * COLUMNS];
        let mut least = [f32::NEG_INFINITY; GROUP * COLUMNS];
        for i in 0..columns {
            let near = coarse[i] + fine[i];
            let bound = (away * errors[i] + along * lengths[i]) * 1.00001 + 1e-6 * near.abs() + VANISHING;
            most[i] = near + bound;
            least[i] = near - bound;
        }
        let range = [largest(&most), largest(&least)];
        // SAFETY: the caller's.
        unsafe { ranges.at.add(tile.column / (GROUP * COLUMNS) * ranges.tokens + token).write(range) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| (i * step % 10_007) as f32 / 5003.0 - 1.0).collect()
    }

    /// Every product lies within the bounds that its own column and token give, and the bounds are not idle.
    #[test]
    fn ranges_hold_and_are_narrow() {
        let (columns, k, tokens) = (64, 320, 3);
        let (weight, states) = (numbers(columns * k, 7919), numbers(tokens * k, 6301));
        for column in 0..columns {
            // One column a screen: its range is the product's own.
            let own = &weight[column * k..][..k];
            let mut screen = Screen::new(own, k, false).expect("memory");
            assert!(screen.take(states.chunks_exact(k)));
            assert_eq!(screen.groups(&Team::new(1), 1), [0]);
            for (token, range) in screen.ranges.iter().enumerate() {
                let x = &states[token * k..][..k];
                let exact: f64 = own.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let length = |v: &[f32]| v.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt();
                assert!(f64::from(range[1]) <= exact && exact <= f64::from(range[0]), "{exact} in {range:?}");
                assert!(f64::from(range[0] - range[1]) < 0.02 * length(own) * length(x), "{range:?}");
            }
        }
    }

    #[test]
    fn a_clear_winner_leaves_one_group() {
        let (columns, k) = (4096, 64);
        let mut weight = numbers(columns * k, 7919);
        let states = numbers(2 * k, 6301);
        weight[1000 * k..][..k].iter_mut().zip(&states).for_each(|(w, x)| *w = 3.0 * x);
        weight[3000 * k..][..k].iter_mut().zip(&states[k..]).for_each(|(w, x)| *w = 3.0 * x);
        let mut screen = Screen::new(&weight, k, false).expect("memory");
        assert!(screen.take(states.chunks_exact(k)));
        assert_eq!(screen.groups(&Team::new(2), columns), [1000 / 64, 3000 / 64]);
        assert_eq!(screen.groups(&Team::new(2), 64), (0..1).collect::<Vec<_>>());
        assert!(!screen.take([&[f32::NAN; 64][..]].into_iter()));
    }
}
