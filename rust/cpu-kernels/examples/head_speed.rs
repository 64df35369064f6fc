//! Times the search for the best token of some rows: `head_speed [THREADS [ROWS ...]]`. The sizes are SmolLM2-135M's, the
//! weights and hidden states are random.

use std::time::Instant;

use specbatch_cpu_kernels::decoder::{Decoder, Shape};
use specbatch_cpu_kernels::head::Head;
use specbatch_cpu_kernels::packed::Packed;
use specbatch_cpu_kernels::product::{Activation, Kernel};
use specbatch_cpu_kernels::team::Team;

const HIDDEN: usize = 576;
const VOCABULARY: usize = 49152;

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let team = Team::new(*numbers.first().unwrap_or(&1));
    let rows = if numbers.len() > 1 { &numbers[1..] } else { &[1, 8, 16, 32, 64, 128] };
    let mut state = 1u64;
    let mut next = || {
        // Roughly normal: the sum of four.
        (0..4).fold(0.0, |sum, _| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            sum + (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        })
    };
    let weight: Vec<f32> = (0..HIDDEN * VOCABULARY).map(|_| 0.05 * next()).collect();
    let hidden: Vec<f32> = (0..rows.iter().max().unwrap_or(&1) * HIDDEN).map(|_| next()).collect();
    let kernel = Kernel::best(true);
    let shape = Shape {
        hidden: HIDDEN,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        intermediate: 1536,
        eps: 1e-5,
        activation: Activation::Silu,
        scale: 0.125,
    };
    for screen in [false, true] {
        let packed = Packed::new(&[&weight[..]], HIDDEN, true, false).expect("memory");
        let head = Head::new(vec![1.0; HIDDEN], packed, kernel).expect("a head");
        let head = if screen { head.screened(&weight).expect("finite weights") } else { head };
        let mut decoder = Decoder::new(shape.clone(), kernel);
        decoder.set_head(head).expect("it fits");
        for &rows in rows {
            let indices: Vec<i32> = (0..rows as i32).collect();
            let mut out = vec![0; rows];
            let mut times: Vec<f64> = (0..20)
                .map(|_| {
                    let begin = Instant::now();
                    decoder.best(&team, &hidden[..rows * HIDDEN], &indices, VOCABULARY, &mut out).expect("tokens");
                    begin.elapsed().as_secs_f64()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            println!(
                "{rows:4} rows, {}: median {:.2} ms, best {:.2}",
                if screen { "screened" } else { "whole" },
                times[10] * 1e3,
                times[0] * 1e3
            );
        }
    }
}
