//! Products of int8, over random shapes: every kernel that runs here gives the bits of a plain reference, and what
//! rounding costs stays within its bound.

use proptest::prelude::*;
use specbatch_cpu_kernels::int8::{padded, quantise};
use specbatch_cpu_kernels::packed::{Number, Packed};
use specbatch_cpu_kernels::pages::Element;
use specbatch_cpu_kernels::product::{Activation, Best, Kernel, Output, Product, Rows};
use specbatch_cpu_kernels::team::Team;

/// Numbers whose size varies from row to row, some rows all zeros, some with one number far out: what scales are for.
fn numbers(seed: u64, rows: usize, k: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut values = Vec::with_capacity(rows * k);
    for _ in 0..rows {
        let kind = next();
        let size = if kind > 0.9 { 0.0 } else { 10.0f32.powf(6.0 * next()) };
        let row = values.len();
        values.extend((0..k).map(|_| size * if kind < -0.8 { next().signum() } else { next() }));
        if kind > 0.6 {
            values[row + k / 2] *= 50.0;
        }
    }
    values
}

/// A matrix as int8, row by row.
struct Rounded {
    numbers: Vec<i8>,
    scales: Vec<f32>,
    stride: usize,
}

impl Rounded {
    fn new(values: &[f32], k: usize, rows: usize) -> Self {
        let stride = padded(k);
        // What stands in the padding must reach no output.
        let mut numbers = vec![113i8; rows.next_multiple_of(32) * stride];
        let scales = (values.chunks_exact(k).zip(numbers.chunks_exact_mut(stride)))
            .map(|(from, to)| quantise(from.iter().copied(), &mut to[..k]))
            .collect();
        Self { numbers, scales, stride }
    }

    fn rows(&self) -> Rows {
        Rows::Int8 { at: self.numbers.as_ptr(), stride: self.stride, scales: self.scales.as_ptr() }
    }

    fn row(&self, row: usize, k: usize) -> &[i8] {
        &self.numbers[row * self.stride..][..k]
    }
}

/// The definition: sum * (scale of the token * scale of the column).
fn expected(x: &Rounded, w: &Rounded, rows: usize, columns: usize, k: usize) -> Vec<f32> {
    (0..rows * columns)
        .map(|i| {
            let (row, column) = (i / columns, i % columns);
            let pairs = x.row(row, k).iter().zip(w.row(column, k));
            let sum: i32 = pairs.map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
            sum as f32 * (x.scales[row] * w.scales[column])
        })
        .collect()
}

fn kernels() -> impl Iterator<Item = Kernel> {
    Kernel::available().into_iter().filter(|k| k.takes() == Number::Int8)
}

fn run(kernel: Kernel, weight: &Packed, input: &Rounded, rows: usize, output: Output, team: &Team) {
    // SAFETY: callers make inputs and outputs as large as the product says.
    unsafe { Product { weight, input: input.rows(), rows, output }.run(kernel, team) };
}

fn multiply(kernel: Kernel, weight: &Packed, input: &Rounded, rows: usize, team: &Team) -> Vec<f32> {
    let mut out = vec![7.0f32; rows * weight.columns];
    let output = Output::Store { at: out.as_mut_ptr(), stride: weight.columns };
    run(kernel, weight, input, rows, output, team);
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn there_is_a_kernel_everywhere() {
    assert!(kernels().any(|k| k == Kernel::PlainInt8));
    assert!(kernels().any(|k| k == Kernel::best_int8()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_kernel_gives_the_bits_of_the_definition(
        rows in 1usize..70, columns in 1usize..200, k in 1usize..300, seed: u64, size in 1usize..4
    ) {
        let (x, w) = (numbers(seed, rows, k), numbers(!seed, columns, k));
        let (input, rounded) = (Rounded::new(&x, k, rows), Rounded::new(&w, k, columns));
        let weight = Packed::int8(&[&w[..]], k, false).expect("memory");
        let (team, expected) = (Team::new(size), expected(&input, &rounded, rows, columns, k));
        for kernel in kernels() {
            let got = multiply(kernel, &weight, &input, rows, &team);
            prop_assert!(bits(&got) == bits(&expected), "{:?}", kernel);
        }
        // Half a step of either number, times the other, over all of k.
        for (i, got) in expected.iter().enumerate() {
            let (row, column) = (i / columns, i % columns);
            let (x, w) = (&x[row * k..][..k], &w[column * k..][..k]);
            let (xs, ws) = (f64::from(input.scales[row]), f64::from(rounded.scales[column]));
            let exact: f64 = x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let of = |values: &[f32]| values.iter().map(|v| f64::from(v.abs())).sum::<f64>();
            let bound = 0.5001 * (xs * of(w) + ws * of(x) + k as f64 * xs * ws / 2.0) + 1e-6 * exact.abs() + 1e-28;
            prop_assert!((f64::from(*got) - exact).abs() <= bound, "{got} for {exact}, bound {bound}");
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours(rows in 2usize..80, columns in 1usize..150, k in 1usize..150, seed: u64) {
        let (x, w) = (numbers(seed, rows, k), numbers(!seed, columns, k));
        let weight = Packed::int8(&[&w[..]], k, false).expect("memory");
        let team = Team::new(2);
        for kernel in kernels() {
            let together = multiply(kernel, &weight, &Rounded::new(&x, k, rows), rows, &team);
            for row in [0, rows / 2, rows - 1] {
                let alone = multiply(kernel, &weight, &Rounded::new(&x[row * k..][..k], k, 1), 1, &team);
                prop_assert!(bits(&alone) == bits(&together[row * columns..][..columns]), "{:?} row {}", kernel, row);
            }
        }
    }

    #[test]
    fn half_stored_checkpoints_round_alike(columns in 1usize..60, k in 1usize..100, seed: u64) {
        let half: Vec<u16> = numbers(seed, columns, k).into_iter().map(u16::from_f32).collect();
        let wide: Vec<f32> = half.iter().map(|h| h.to_f32()).collect();
        let input = Rounded::new(&numbers(!seed, 3, k), k, 3);
        let team = Team::new(1);
        let of = |weight: Packed| bits(&multiply(Kernel::PlainInt8, &weight, &input, 3, &team));
        prop_assert_eq!(of(Packed::int8(&[&half[..]], k, false).expect("memory")), of(Packed::int8(&[&wide[..]], k, false).expect("memory")));
    }

    #[test]
    fn outputs(rows in 1usize..40, pairs in 1usize..12, k in 1usize..80, seed: u64, with_bias: bool, cut in 0usize..40) {
        let columns = pairs * 16;
        let (x, gate, up) = (numbers(seed, rows, k), numbers(!seed, columns, k), numbers(seed ^ 5, columns, k));
        let bias = with_bias.then(|| numbers(seed ^ 9, 1, 2 * columns));
        let weight = Packed::int8(&[&gate[..], &up[..]], k, true).expect("memory").with_bias(bias.clone());
        let (input, team) = (Rounded::new(&x, k, rows), Team::new(2));
        let [g, u] = [&gate, &up].map(|w| expected(&input, &Rounded::new(w, k, columns), rows, columns, k));
        let limit = 2 * columns - cut.min(2 * columns - 1);
        for kernel in kernels() {
            let mut gated = vec![0.0f32; rows * columns];
            let mut sums = vec![0.0f32; rows * 2 * columns];
            let groups = weight.num_panels().div_ceil(4);
            let mut best = vec![Best::NONE; groups * rows];
            let output = Output::Gated { at: gated.as_mut_ptr(), stride: columns, activation: Activation::Silu };
            run(kernel, &weight, &input, rows, output, &team);
            run(kernel, &weight, &input, rows, Output::Add { at: sums.as_mut_ptr(), stride: 2 * columns }, &team);
            run(kernel, &weight, &input, rows, Output::Best { at: best.as_mut_ptr(), rows, limit }, &team);
            for (i, gated) in gated.iter().enumerate() {
                let (row, column) = (i / columns, i % columns);
                let at = column / 16 * 32 + column % 16; // where gates stand among the interleaved panels
                let b = |offset: usize| bias.as_ref().map_or(0.0, |b| b[at + offset]);
                let (g, u) = (g[i] + b(0), u[i] + b(16));
                let both = [sums[row * 2 * columns + at] + 0.0, sums[row * 2 * columns + at + 16] + 0.0];
                prop_assert_eq!(bits(&both), bits(&[g + 0.0, u + 0.0])); // -0 + 0 is 0
                let want = f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u);
                let bound = 1e-5 * want.abs() + 1e-6 * (f64::from(g) * f64::from(u)).abs();
                prop_assert!((f64::from(*gated) - want).abs() <= bound, "{:?}: {} not {}", kernel, gated, want);
            }
            for row in 0..rows {
                let of_row = &sums[row * 2 * columns..][..limit];
                let largest = of_row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let found = best[row..].iter().step_by(rows).fold(Best::NONE, |a, &b| a.or(b));
                prop_assert_eq!(found.column as usize, of_row.iter().position(|&v| v >= largest).unwrap());
            }
        }
    }
}

/// The largest sums that there are: no step of any kernel may saturate or wrap.
#[test]
fn extremes() {
    let k = 8192;
    for (a, b) in [(1.0f32, 1.0f32), (1.0, -1.0), (-1.0, -1.0)] {
        let (x, w) = (vec![a; k], vec![b; k]);
        let weight = Packed::int8(&[&w[..]], k, false).expect("memory");
        for kernel in kernels() {
            let got = multiply(kernel, &weight, &Rounded::new(&x, k, 1), 1, &Team::new(1));
            let want = (127 * 127 * k as i32) as f32 * (1.0f32 / 127.0 * (1.0 / 127.0)) * a * b;
            assert_eq!(got[0].to_bits(), want.to_bits(), "{kernel:?}");
        }
    }
}

/// A row that is not finite shows as NaN in all of its outputs, and in no other row's.
#[test]
fn what_is_not_finite_stays_visible() {
    let (k, columns) = (100, 33);
    let mut x = numbers(1, 3, k);
    for (bad, at) in [(f32::NAN, 0), (f32::INFINITY, 99)] {
        x[k + at] = bad;
        let weight = Packed::int8(&[&numbers(2, columns, k)[..]], k, false).expect("memory");
        for kernel in kernels() {
            let got = multiply(kernel, &weight, &Rounded::new(&x, k, 3), 3, &Team::new(1));
            assert!(got[columns..2 * columns].iter().all(|v| !v.is_finite()), "{kernel:?}");
            assert!(got[..columns].iter().chain(&got[2 * columns..]).all(|v| v.is_finite()), "{kernel:?}");
        }
    }
}
