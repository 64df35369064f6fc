//! Products a second of each kernel over the shapes of a small model: `product_speed [THREADS [KERNEL]]`

use std::time::Instant;

use specbatch_cpu_kernels::packed::{Number, Packed};
use specbatch_cpu_kernels::product::{Kernel, Output, Product, Rows};
use specbatch_cpu_kernels::team::Team;

fn pack(values: &[f32], k: usize, stored: Number) -> Packed {
    let packed = match stored {
        Number::Int8 => Packed::int8(&[values], k, false),
        Number::F32 | Number::Bf16 => Packed::new(&[values], k, stored == Number::Bf16, false),
    };
    packed.expect("memory")
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1);
    let team = Team::new(threads);
    let shapes = [("qkv", 960, 576), ("gate_up", 3072, 576), ("down", 576, 1536), ("head", 49152, 576)];
    for kernel in Kernel::available() {
        if std::env::args().nth(2).is_some_and(|a| a != format!("{kernel:?}")) {
            continue;
        }
        for stored in [Number::Bf16, Number::F32, Number::Int8] {
            if matches!(kernel, Kernel::Plain | Kernel::PlainInt8) || !kernel.multiplies(stored) {
                continue;
            }
            for (name, columns, k) in shapes {
                // As many copies as make more than the caches hold, as the layers of a model do.
                let copies = if columns > 10_000 { 2 } else { 30 };
                let values = vec![0.5f32; columns * k];
                let weights: Vec<_> = (0..copies).map(|_| pack(&values, k, stored)).collect();
                print!("{kernel:?} over {stored:?} {name:8}");
                for rows in [1usize, 4, 8, 16, 64, 1024] {
                    if rows == 1024 && columns > 10_000 {
                        continue;
                    }
                    let stride = kernel.takes().padded(k);
                    let (int8, scales) = (vec![1i8; rows.next_multiple_of(32) * stride], vec![0.1f32; rows]);
                    let half = vec![0x3F80u16; rows.next_multiple_of(32) * stride];
                    let wide = vec![1.0f32; rows.next_multiple_of(32) * stride];
                    let input = match kernel.takes() {
                        Number::F32 => Rows::F32 { at: wide.as_ptr(), stride },
                        Number::Bf16 => Rows::Bf16 { at: half.as_ptr(), stride },
                        Number::Int8 => Rows::Int8 { at: int8.as_ptr(), stride, scales: scales.as_ptr() },
                    };
                    let mut out = vec![0.0f32; rows * columns];
                    let mut best = f64::MAX;
                    for _ in 0..5 {
                        let start = Instant::now();
                        for weight in &weights {
                            let output = Output::Store { at: out.as_mut_ptr(), stride: columns };
                            // SAFETY: sizes as the product says.
                            unsafe { Product { weight, input, rows, output }.run(kernel, &team) };
                        }
                        best = best.min(start.elapsed().as_secs_f64() / f64::from(copies));
                    }
                    let flops = 2.0 * (rows * columns * k) as f64 / best / 1e9;
                    print!(
                        "  {rows}: {:.0} us {flops:.0} GF {:.0} GB/s",
                        best * 1e6,
                        weights[0].bytes() as f64 / best / 1e9
                    );
                }
                println!();
            }
        }
    }
}
