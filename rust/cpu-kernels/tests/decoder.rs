//! A decoder's layers over many tokens at once, as in prefill, give the bits that they give over few: hidden states and
//! the keys and values of all layers, for every kernel that runs here.

use proptest::prelude::*;
use specbatch_cpu_kernels::attention::{Rows, Stored};
use specbatch_cpu_kernels::decoder::{Angles, Decoder, Layer, Shape, Step};
use specbatch_cpu_kernels::packed::{Number, Packed};
use specbatch_cpu_kernels::pages::LayerPages;
use specbatch_cpu_kernels::product::{Activation, Kernel};
use specbatch_cpu_kernels::team::Team;

const LAYERS: usize = 3;
const BLOCK: usize = 16;

struct Random(u64);

impl Random {
    fn numbers(&mut self, count: usize, size: f32) -> Vec<f32> {
        let mut next = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            ((self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0) * size
        };
        (0..count).map(|_| next()).collect()
    }
}

fn decoder(shape: &Shape, kernel: Kernel, random: &mut Random, biased: bool, normed: bool) -> Decoder {
    let mut decoder = Decoder::new(shape.clone(), kernel);
    let half = kernel.takes() == Number::Bf16;
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let weight = |parts: &[usize], k: usize, random: &mut Random| {
        let parts: Vec<_> = parts.iter().map(|c| random.numbers(c * k, 1.5 / (k as f32).sqrt())).collect();
        let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        Packed::new(&parts, k, half, parts.len() == 2).expect("memory")
    };
    for layer in 0..LAYERS {
        let qkv = weight(&[width, kv_width, kv_width], shape.hidden, random);
        let bias = biased.then(|| random.numbers(qkv.columns, 1.0));
        let norm = |size: usize, random: &mut Random| normed.then(|| random.numbers(size, 1.0));
        let layer = Layer {
            attention_norm: random.numbers(shape.hidden, 1.0),
            qkv: qkv.with_bias(bias),
            query_norm: norm(shape.head_dim, random),
            key_norm: norm(shape.head_dim, random),
            output: weight(&[shape.hidden], width, random),
            mlp_norm: random.numbers(shape.hidden, 1.0),
            gate_up: weight(&[shape.intermediate, shape.intermediate], shape.hidden, random),
            down: weight(&[shape.hidden], shape.intermediate, random),
            window: (layer == 1).then_some(50),
        };
        decoder.push(layer).expect("a layer that fits");
    }
    let angles = random.numbers(1024 * shape.head_dim, 1.0);
    decoder.set_angles(Angles { cos: angles.clone(), sin: angles, dim: shape.head_dim }).expect("angles that fit");
    decoder
}

/// Hidden states and pages after rows of these lengths went through, `most` tokens of each row in a step; `some`: hidden
/// states of every 37th token of a step alone.
fn run<E: Stored>(
    decoder: &mut Decoder,
    team: &Team,
    embedded: &[f32],
    lens: &[usize],
    most: usize,
    some: bool,
) -> (Vec<f32>, Vec<f32>) {
    let shape = decoder.shape.clone();
    let pages_per_row = lens.iter().max().unwrap().div_ceil(BLOCK);
    let layer = BLOCK * shape.kv_heads * shape.head_dim;
    let mut storage = vec![E::from_f32(0.0); (lens.len() * pages_per_row + 1) * LAYERS * 2 * layer];
    let pages: Vec<_> = (0..LAYERS)
        .map(|at| LayerPages {
            key_offset: 2 * at * layer,
            value_offset: (2 * at + 1) * layer,
            page_stride: LAYERS * 2 * layer,
            block_size: BLOCK,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
        })
        .collect();
    let tables: Vec<i32> = (1..=(lens.len() * pages_per_row) as i32).rev().collect();
    let starts: Vec<usize> = lens.iter().scan(0, |at, n| Some(std::mem::replace(at, *at + n))).collect();
    let mut out = vec![0.0; embedded.len()];
    for begin in (0..*lens.iter().max().unwrap()).step_by(most) {
        let (mut hidden, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut query_start, mut seq_lens, mut places) = (vec![0], Vec::new(), Vec::new());
        for (row, &len) in lens.iter().enumerate() {
            let end = len.min(begin + most);
            for at in begin..end {
                let token = starts[row] + at;
                places.push(token);
                hidden.extend_from_slice(&embedded[token * shape.hidden..][..shape.hidden]);
                positions.push(at as i32);
                slots.push(tables[row * pages_per_row + at / BLOCK] * BLOCK as i32 + (at % BLOCK) as i32);
            }
            query_start.push(slots.len() as i32);
            seq_lens.push(end as i32);
        }
        let rows = Rows {
            query_start: &query_start,
            seq_lens: &seq_lens,
            block_tables: &tables,
            pages_per_row,
            ancestors: None,
            positions: &[],
        };
        let mut step = Step { positions: &positions, slots: &slots, rows, storage: &mut storage, pages: &pages };
        // Of a step of many tokens some rows only, on and off.
        let all = 0..places.len() as i32;
        let wanted: Vec<i32> = if some { all.filter(|t| t % 37 == 5).collect() } else { all.collect() };
        decoder.forward_for(team, &mut hidden, &mut step, some.then_some(&wanted[..])).expect("a step");
        let rows: Vec<_> = places.iter().zip(hidden.chunks_exact(shape.hidden)).collect();
        for (place, from) in wanted.iter().map(|&t| rows[t as usize]) {
            out[place * shape.hidden..][..shape.hidden].copy_from_slice(from);
        }
    }
    (out, storage.iter().map(|v| v.to_f32()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn many_tokens_at_once_are_the_same_as_few(
        hidden in 3usize..10, group in 1usize..3, kv_heads in 1usize..3, intermediate in 1usize..8,
        lens in prop::collection::vec(1usize..300, 1..4), threads in 1usize..4, seed: u64, kind in 0usize..4,
        gelu: bool, wide: bool,
    ) {
        let shape = Shape {
            hidden: hidden * 8,
            heads: group * kv_heads,
            kv_heads,
            head_dim: if wide { 64 } else { 32 },
            intermediate: intermediate * 16,
            eps: 1e-5,
            activation: if gelu { Activation::GeluTanh } else { Activation::Silu },
            scale: 0.2,
        };
        let team = Team::new(threads);
        for kernel in Kernel::available().into_iter().filter(|k| k.takes() != Number::Int8 && *k != Kernel::Plain) {
            let mut random = Random(seed | 1);
            let mut decoder = decoder(&shape, kernel, &mut random, kind == 1, kind == 2);
            let embedded = random.numbers(lens.iter().sum::<usize>() * shape.hidden, 1.0);
            let results = [(1000, false), (17, false), (1000, true)].map(|(most, some)| {
                if kernel.takes() == Number::Bf16 {
                    run::<u16>(&mut decoder, &team, &embedded, &lens, most, some)
                } else {
                    run::<f32>(&mut decoder, &team, &embedded, &lens, most, some)
                }
            });
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert!(results[0].0.iter().all(|v| v.is_finite()));
            prop_assert!(bits(&results[0].0) == bits(&results[1].0), "{kernel:?}: hidden states");
            prop_assert!(bits(&results[0].1) == bits(&results[1].1), "{kernel:?}: pages");
            prop_assert!(bits(&results[0].1) == bits(&results[2].1), "{kernel:?}: pages of steps that ask for some rows");
            let rows = results[0].0.chunks_exact(shape.hidden).zip(results[2].0.chunks_exact(shape.hidden));
            for (token, (all, some)) in rows.enumerate().filter(|(token, _)| token % 37 == 5) {
                prop_assert!(bits(all) == bits(some), "{kernel:?}: token {token} alone");
            }
        }
    }
}
