use std::time::Instant;
use specbatch_cpu_kernels::packed::{Packed, padded};
use specbatch_cpu_kernels::product::{Kernel, Output, Product, Rows, Activation};
use specbatch_cpu_kernels::team::Team;
fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1);
    let team = Team::new(threads);
    for (columns, k) in [(3072usize, 576usize), (576, 1536), (960, 576), (4096, 1024)] {
        let values = vec![0.5f32; columns * k];
        let weight = Packed::new(&[&values[..columns*k/2], &values[columns*k/2..]], k, true, true);
        for rows in [64usize, 512, 1024, 2048] {
            let stride = padded(k);
            let half = vec![0x3F80u16; rows * stride];
            let mut out = vec![0.0f32; rows * columns];
            let mut outh = vec![0u16; rows * columns];
            for (name, output) in [("store", Output::Store { at: out.as_mut_ptr(), stride: columns }), ("gated", Output::GatedHalf { at: outh.as_mut_ptr(), stride: columns/2, activation: Activation::Silu })] {
                let input = Rows::Bf16 { at: half.as_ptr(), stride };
                let mut best = f64::MAX;
                for _ in 0..20 {
                    let start = Instant::now();
                    unsafe { Product { weight: &weight, input, rows, output }.run(Kernel::best(true), &team) };
                    best = best.min(start.elapsed().as_secs_f64());
                }
                print!("{columns}x{k} {name} {rows}: {:.0} us {:.0} GF  ", best * 1e6, 2.0 * (rows * columns * k) as f64 / best / 1e9);
            }
            println!();
        }
    }
}
