//! Where a step of a small model spends its time: `decoder_speed [THREADS [half [int8]]]`
//! The shape is SmolLM2-135M's, the weights are random. `CASE=prefill` chooses by name, `REPS=20` how often.

use specbatch_cpu_kernels::attention::{Rows, Stored};
use specbatch_cpu_kernels::decoder::{Angles, Decoder, Layer, PARTS, Shape, Step};
use specbatch_cpu_kernels::packed::Packed;
use specbatch_cpu_kernels::pages::LayerPages;
use specbatch_cpu_kernels::product::{Activation, Kernel};
use specbatch_cpu_kernels::simd::want_huge_pages;
use specbatch_cpu_kernels::team::Team;

const LAYERS: usize = 30;
const BLOCK: usize = 16;

fn weight(columns: &[usize], k: usize, half: bool, int8: bool) -> Packed {
    let parts: Vec<Vec<f32>> =
        columns.iter().map(|&c| (0..c * k).map(|i| (i * 7919 % 201) as f32 / 1000.0 - 0.1).collect()).collect();
    let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
    let interleave = columns.len() == 2;
    if int8 { Packed::int8(&parts, k, interleave) } else { Packed::new(&parts, k, half, interleave) }.expect("memory")
}

fn measure<E: Stored>(decoder: &mut Decoder, team: &Team, name: &str, rows: usize, context: usize, queries: usize) {
    let shape = decoder.shape.clone();
    let pages_a_row = context.div_ceil(BLOCK);
    let a_layer = 2 * BLOCK * shape.kv_heads * shape.head_dim;
    let size = (rows * pages_a_row + 1) * LAYERS * a_layer;
    let mut memory: Vec<E> = Vec::with_capacity(size + 64);
    want_huge_pages(memory.as_ptr().cast(), memory.capacity() * size_of::<E>()); // as the engine does
    memory.resize(size + 64, E::from_f32(0.1));
    let aligned = memory.as_ptr().align_offset(64); // as the engine's memory is
    let storage = &mut memory[aligned..];
    let pages: Vec<_> = (0..LAYERS)
        .map(|layer| LayerPages {
            key_offset: layer * a_layer,
            value_offset: layer * a_layer + a_layer / 2,
            page_stride: LAYERS * a_layer,
            block_size: BLOCK,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
        })
        .collect();
    let tables: Vec<i32> = (1..=(rows * pages_a_row) as i32).collect();
    let position = |t: usize| context - queries + t % queries;
    let slots: Vec<i32> = (0..rows * queries)
        .map(|t| tables[t / queries * pages_a_row + position(t) / BLOCK] * BLOCK as i32 + (position(t) % BLOCK) as i32)
        .collect();
    let positions: Vec<i32> = (0..rows * queries).map(|t| position(t) as i32).collect();
    let starts: Vec<i32> = (0..=rows).map(|r| (r * queries) as i32).collect();
    let lens = vec![context as i32; rows];
    let mut hidden = vec![0.1f32; rows * queries * shape.hidden + 16];
    let hidden = &mut hidden[..];
    let at = hidden.as_ptr().align_offset(64); // as torch's memory is
    let hidden = &mut hidden[at..][..rows * queries * shape.hidden];
    let mut best = [f64::MAX; PARTS.len()];
    let mut whole = f64::MAX;
    for _ in 0..std::env::var("REPS").map_or(6, |r| r.parse().unwrap()) {
        let before = decoder.seconds();
        // Tokens that differ, as real ones do: the matrix unit runs slower on numbers that change.
        hidden.iter_mut().enumerate().for_each(|(i, h)| *h = (i * 7919 % 10_007) as f32 / 5003.0 - 1.0);
        let rows = Rows {
            query_start: &starts,
            seq_lens: &lens,
            block_tables: &tables,
            pages_per_row: pages_a_row,
            ancestors: None,
            positions: &[],
        };
        let mut step = Step { positions: &positions, slots: &slots, rows, storage, pages: &pages };
        let begin = std::time::Instant::now();
        decoder.forward(team, hidden, &mut step).expect("a step");
        whole = whole.min(begin.elapsed().as_secs_f64());
        let after = decoder.seconds();
        for (b, (now, then)) in best.iter_mut().zip(after.iter().zip(before)) {
            *b = b.min(now - then);
        }
    }
    println!("{name}: {:.2} ms", whole * 1e3);
    for (part, seconds) in PARTS.iter().zip(best) {
        println!("    {part:18} {:8.2} ms", seconds * 1e3);
    }
}

fn run<E: Stored>(team: &Team, half: bool, int8: bool) {
    let (hidden, heads, kv_heads, head_dim, intermediate) = (576, 9, 3, 64, 1536);
    let shape = Shape {
        hidden,
        heads,
        kv_heads,
        head_dim,
        intermediate,
        eps: 1e-5,
        activation: Activation::Silu,
        scale: 0.125,
    };
    let mut decoder = Decoder::new(shape, if int8 { Kernel::best_int8() } else { Kernel::best(half) });
    for _ in 0..LAYERS {
        let layer = Layer {
            attention_norm: vec![1.0; hidden],
            qkv: weight(&[heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], hidden, half, int8),
            query_norm: None,
            key_norm: None,
            output: weight(&[hidden], heads * head_dim, half, int8),
            mlp_norm: vec![1.0; hidden],
            gate_up: weight(&[intermediate, intermediate], hidden, half, int8),
            down: weight(&[hidden], intermediate, half, int8),
            window: None,
        };
        decoder.push(layer).expect("a layer");
    }
    let table = vec![0.7; 8192 * head_dim];
    decoder.set_angles(Angles { cos: table.clone(), sin: table, dim: head_dim }).expect("angles");
    println!(
        "{}, {} threads, {:.0} MB of weights",
        decoder.kernel().name(),
        team.size(),
        decoder.weight_bytes() as f64 / 1e6
    );
    for (name, rows, context, queries) in [
        ("one row, 400 tokens of context", 1, 400, 1),
        ("2 rows", 2, 400, 1),
        ("3 rows", 3, 400, 1),
        ("8 rows", 8, 400, 1),
        ("64 rows, 1 token each", 64, 400, 1),
        ("64 rows, 5 tokens each", 64, 400, 5),
        ("prefill of 6 x 330", 6, 330, 330),
        ("prefill of 3 x 330", 3, 330, 330),
        ("prefill of 1 x 1000", 1, 1000, 1000),
    ] {
        if std::env::var("CASE").is_ok_and(|c| !name.contains(&c)) {
            continue;
        }
        measure::<E>(&mut decoder, team, name, rows, context, queries);
    }
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(1);
    let team = Team::new(threads);
    let int8 = std::env::args().any(|a| a == "int8");
    if std::env::args().nth(2).is_some_and(|a| a == "half") {
        run::<u16>(&team, true, int8);
    } else {
        run::<f32>(&team, false, int8);
    }
}
