//! The head behind its int8 screen: the same best tokens as without, to the last tie, and hardly anything multiplied twice.

use proptest::prelude::*;
use specbatch_cpu_kernels::decoder::{Decoder, Shape};
use specbatch_cpu_kernels::head::Head;
use specbatch_cpu_kernels::packed::{Number, Packed};
use specbatch_cpu_kernels::product::{Activation, Kernel};
use specbatch_cpu_kernels::team::Team;

fn decoder(hidden: usize, weight: &[f32], kernel: Kernel, screened: bool) -> Decoder {
    let shape = Shape {
        hidden,
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        intermediate: 16,
        eps: 1e-6,
        activation: Activation::Silu,
        scale: 1.0,
    };
    let half = kernel.takes() == Number::Bf16;
    let packed = Packed::new(&[weight], hidden, half, false).expect("memory");
    let norm: Vec<f32> = (0..hidden).map(|i| 0.5 + (i % 7) as f32 / 5.0).collect();
    let mut head = Head::new(norm, packed, kernel).expect("it fits");
    if screened {
        head = head.screened(weight).expect("finite weights");
    }
    let mut decoder = Decoder::new(shape, kernel);
    decoder.set_head(head).expect("it fits");
    decoder
}

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() * if next() > 0.9 { 8.0 } else { 1.0 }).collect()
}

fn kernels() -> impl Iterator<Item = Kernel> {
    Kernel::available().into_iter().filter(|k| k.takes() != Number::Int8)
}

fn best(decoder: &mut Decoder, hidden: &[f32], tokens: usize, limit: usize) -> Vec<i32> {
    let indices: Vec<i32> = (0..tokens as i32).rev().collect();
    let mut out = vec![-7; tokens];
    decoder.best(&Team::new(2), hidden, &indices, limit, &mut out).expect("tokens that are there");
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Among many columns some are equal, some differ in a last bit, some are far larger than all others.
    #[test]
    fn the_screen_changes_no_choice(
        tokens in 1usize..9, vocabulary in 1usize..400, hidden in 2usize..130, seed: u64, spread in 0usize..3, cut in 0usize..50
    ) {
        let mut weight = numbers(seed, vocabulary * hidden);
        for column in 1..vocabulary {
            let (before, own) = weight.split_at_mut(column * hidden);
            match (seed as usize + column) % 5 {
                0 => own[..hidden].copy_from_slice(&before[(column * 7 % column) * hidden..][..hidden]),
                1 => {
                    own[..hidden].copy_from_slice(&before[(column - 1) * hidden..][..hidden]);
                    own[column % hidden] = f32::from_bits(own[column % hidden].to_bits() ^ 1 << (16 * (column % 2)));
                }
                2 if spread == 2 => own[..hidden].iter_mut().for_each(|w| *w *= 1e3),
                3 if spread == 1 => own[..hidden].fill(0.0),
                _ => {}
            }
        }
        let states = numbers(!seed, tokens * hidden);
        let limit = vocabulary - cut.min(vocabulary - 1);
        for kernel in kernels() {
            let [plain, screened] = [false, true].map(|s| best(&mut decoder(hidden, &weight, kernel, s), &states, tokens, limit));
            prop_assert_eq!(plain, screened, "{:?}", kernel);
        }
    }
}

/// A token that is not finite has no best token, and its neighbours keep theirs.
#[test]
fn tokens_that_are_not_finite() {
    let (vocabulary, hidden) = (300, 40);
    let weight = numbers(3, vocabulary * hidden);
    for bad in [f32::NAN, f32::INFINITY] {
        let mut states = numbers(4, 4 * hidden);
        states[hidden + 7] = bad;
        for kernel in kernels() {
            let [plain, screened] =
                [false, true].map(|s| best(&mut decoder(hidden, &weight, kernel, s), &states, 4, vocabulary));
            assert_eq!(plain, screened, "{kernel:?}");
            assert_eq!(screened[2], -1);
        }
    }
}
