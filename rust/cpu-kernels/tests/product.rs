//! Products against sums in double precision, over random shapes, for every kernel that runs here.

use proptest::prelude::*;
use specbatch_cpu_kernels::packed::{Number, Packed, all_half, padded};
use specbatch_cpu_kernels::pages::Element;
use specbatch_cpu_kernels::product::{Activation, Kernel, Output, Product, Rows};
use specbatch_cpu_kernels::team::Team;

fn half(value: f32) -> f32 {
    u16::from_f32(value).to_f32()
}

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            half((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
        })
        .collect()
}

/// Activations as the kernels want them: padded rows, whole tiles, NaN in rows that no output may see.
struct Input {
    wide: Vec<f32>,
    half: Vec<u16>,
    stride: usize,
}

impl Input {
    fn new(x: &[f32], rows: usize, k: usize) -> Self {
        let stride = padded(k);
        let mut wide = vec![f32::NAN; rows.next_multiple_of(32) * stride];
        for (row, from) in wide.chunks_exact_mut(stride).zip(x.chunks_exact(k)) {
            row.fill(0.0);
            row[..k].copy_from_slice(from);
        }
        let half = wide.iter().map(|&v| u16::from_f32(v)).collect();
        Self { wide, half, stride }
    }

    fn rows(&self, kernel: Kernel) -> Rows {
        if kernel.takes() == Number::Bf16 {
            Rows::Bf16 { at: self.half.as_ptr(), stride: self.stride }
        } else {
            Rows::F32 { at: self.wide.as_ptr(), stride: self.stride }
        }
    }
}

fn multiply(kernel: Kernel, weight: &Packed, input: &Input, rows: usize, team: &Team) -> Vec<f32> {
    let mut out = vec![7.0f32; rows * weight.columns];
    let output = Output::Store { at: out.as_mut_ptr(), stride: weight.columns };
    let product = Product { weight, input: input.rows(kernel), rows, output };
    // SAFETY: input and output are as large as the product says.
    unsafe { product.run(kernel, team) };
    out
}

fn expected(x: &[f32], w: &[f32], rows: usize, columns: usize, k: usize) -> Vec<f64> {
    (0..rows * columns)
        .map(|i| (0..k).map(|j| f64::from(x[i / columns * k + j]) * f64::from(w[i % columns * k + j])).sum())
        .collect()
}

fn kernels() -> Vec<(Kernel, bool)> {
    let all = Kernel::available().into_iter();
    all.flat_map(|kernel| [(kernel, true), (kernel, false)])
        .filter(|(k, half)| k.multiplies(if *half { Number::Bf16 } else { Number::F32 }))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_kernel_multiplies(rows in 1usize..70, columns in 1usize..200, k in 1usize..150, seed: u64, size in 1usize..4) {
        let (x, w) = (numbers(seed, rows * k), numbers(!seed, columns * k));
        prop_assert!(all_half(&w));
        let (team, input) = (Team::new(size), Input::new(&x, rows, k));
        let expected = expected(&x, &w, rows, columns, k);
        for (kernel, stored_half) in kernels() {
            let weight = Packed::new(&[&w[..]], k, stored_half, false).expect("memory");
            let got = multiply(kernel, &weight, &input, rows, &team);
            for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
                prop_assert!((f64::from(*g) - e).abs() < 1e-4 * (k as f64).sqrt(), "{kernel:?} {stored_half} at {i}: {g} not {e}");
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours(rows in 2usize..80, columns in 1usize..150, k in 1usize..150, seed: u64) {
        let (x, w) = (numbers(seed, rows * k), numbers(!seed, columns * k));
        let team = Team::new(2);
        for (kernel, stored_half) in kernels() {
            let weight = Packed::new(&[&w[..]], k, stored_half, false).expect("memory");
            let together = multiply(kernel, &weight, &Input::new(&x, rows, k), rows, &team);
            for row in [0, rows / 2, rows - 1] {
                let alone = multiply(kernel, &weight, &Input::new(&x[row * k..][..k], 1, k), 1, &team);
                prop_assert_eq!(&alone[..], &together[row * columns..][..columns], "{:?} row {}", kernel, row);
            }
        }
    }

    #[test]
    fn half_stored_weights_give_the_same_bits(rows in 1usize..20, columns in 1usize..60, k in 1usize..100, seed: u64) {
        let (x, w) = (numbers(seed, rows * k), numbers(!seed, columns * k));
        let (team, input) = (Team::new(1), Input::new(&x, rows, k));
        for kernel in Kernel::available().into_iter().filter(|k| k.takes() == Number::F32) {
            let [wide, half] = [false, true].map(|h| multiply(kernel, &Packed::new(&[&w[..]], k, h, false).expect("memory"), &input, rows, &team));
            prop_assert_eq!(wide, half);
        }
    }

    #[test]
    fn outputs(rows in 1usize..40, pairs in 1usize..12, k in 1usize..80, seed: u64, gelu: bool, with_bias: bool) {
        let columns = pairs * 16;
        let (x, gate, up) = (numbers(seed, rows * k), numbers(!seed, columns * k), numbers(seed ^ 5, columns * k));
        let bias = with_bias.then(|| numbers(seed ^ 9, 2 * columns));
        let (team, input) = (Team::new(2), Input::new(&x, rows, k));
        let (g, u) = (expected(&x, &gate, rows, columns, k), expected(&x, &up, rows, columns, k));
        let activation = if gelu { Activation::GeluTanh } else { Activation::Silu };
        for (kernel, stored_half) in kernels() {
            let weight = Packed::new(&[&gate[..], &up[..]], k, stored_half, true).expect("memory").with_bias(bias.clone());
            let mut out = vec![0.0f32; rows * columns];
            let mut out_half = vec![0u16; rows * columns];
            let wide = Output::Gated { at: out.as_mut_ptr(), stride: columns, activation };
            let half = Output::GatedHalf { at: out_half.as_mut_ptr(), stride: columns, activation };
            let mut sums = vec![1.0f32; rows * 2 * columns];
            let add = Output::Add { at: sums.as_mut_ptr(), stride: 2 * columns };
            for output in [wide, half, add] {
                // SAFETY: input and output are as large as the product says.
                unsafe { Product { weight: &weight, input: input.rows(kernel), rows, output }.run(kernel, &team) };
            }
            for i in 0..rows * columns {
                let column = i % columns;
                let at = column / 16 * 32 + column % 16; // where gates stand among the interleaved panels
                let b = |offset: usize| bias.as_ref().map_or(0.0, |b| f64::from(b[at + offset]));
                let (g, u) = (g[i] + b(0), u[i] + b(16));
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g * g * g);
                let acted = if gelu { 0.5 * g * (1.0 + inner.tanh()) } else { g / (1.0 + (-g).exp()) };
                let want = acted * u;
                prop_assert!((f64::from(out[i]) - want).abs() < 2e-3, "{kernel:?}: {} not {want}", out[i]);
                prop_assert_eq!(out_half[i], u16::from_f32(out[i]));
                let added = f64::from(sums[i / columns * 2 * columns + at]);
                prop_assert!((added - 1.0 - g).abs() < 1e-3, "{kernel:?} add: {added}");
            }
        }
    }

    #[test]
    fn on_one_thread_the_same_bits(rows in 1usize..150, pairs in 1usize..12, k in 1usize..150, seed: u64, gelu: bool, with_bias: bool) {
        let columns = pairs * 16;
        let (x, gate, up) = (numbers(seed, rows * k), numbers(!seed, columns * k), numbers(seed ^ 5, columns * k));
        // Gates far from zero on either side too.
        let gate: Vec<f32> = gate.iter().enumerate().map(|(i, g)| if i / k % 7 == 0 { 64.0 * g } else { *g }).collect();
        let bias = with_bias.then(|| numbers(seed ^ 9, 2 * columns));
        let (team, input) = (Team::new(2), Input::new(&x, rows, k));
        let activation = if gelu { Activation::GeluTanh } else { Activation::Silu };
        for (kernel, stored_half) in kernels() {
            let weight = Packed::new(&[&gate[..], &up[..]], k, stored_half, true).expect("memory").with_bias(bias.clone());
            let results = [false, true].map(|here| {
                let (mut gated, mut half) = (vec![0.0f32; rows * columns], vec![0u16; rows * columns]);
                let (mut stored, mut added) = (vec![0.0f32; rows * 2 * columns], vec![1.0f32; rows * 2 * columns]);
                for output in [
                    Output::Gated { at: gated.as_mut_ptr(), stride: columns, activation },
                    Output::GatedHalf { at: half.as_mut_ptr(), stride: columns, activation },
                    Output::Store { at: stored.as_mut_ptr(), stride: 2 * columns },
                    Output::Add { at: added.as_mut_ptr(), stride: 2 * columns },
                ] {
                    let product = Product { weight: &weight, input: input.rows(kernel), rows, output };
                    // SAFETY: input and output are as large as the product says.
                    unsafe { if here { product.run_here(kernel) } else { product.run(kernel, &team) } };
                }
                let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                (bits(gated), half, bits(stored), bits(added))
            });
            prop_assert!(results[0] == results[1], "{kernel:?} {stored_half}");
        }
    }
}
