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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// The lowest column of the largest logit that `logits` gives, however many tokens there are; ties, NaN and columns past the limit included.
    #[test]
    fn the_best_are_those_of_the_logits(
        tokens in 1usize..150, vocabulary in 1usize..300, hidden in 2usize..70, seed: u64, cut in 0usize..150, bad in prop::option::of(0usize..300)
    ) {
        let mut weight = numbers(seed, vocabulary * hidden);
        for column in (3..vocabulary).step_by(3) {
            weight.copy_within((column - 3) / 2 * hidden..((column - 3) / 2 + 1) * hidden, column * hidden);
        }
        if let Some(bad) = bad.filter(|b| *b < vocabulary) {
            weight[bad * hidden] = f32::NAN;
        }
        let states = numbers(!seed, tokens * hidden);
        let limit = vocabulary - cut.min(vocabulary - 1);
        let indices: Vec<i32> = (0..tokens as i32).rev().collect();
        for kernel in kernels() {
            let mut decoder = decoder(hidden, &weight, kernel, false);
            let mut logits = vec![0.0; tokens * vocabulary];
            decoder.logits(&Team::new(2), &states, &indices, &mut logits).expect("tokens that are there");
            let want: Vec<i32> = logits.chunks_exact(vocabulary).map(|row| {
                let most = row[..limit].iter().fold(f32::NEG_INFINITY, |a, &b| if b > a || b.is_nan() { b } else { a });
                row[..limit].iter().position(|&v| v >= most).filter(|_| most.is_finite()).map_or(-1, |at| at as i32)
            }).collect();
            let nan = bad.is_some_and(|b| b < limit);
            let got = best(&mut decoder, &states, tokens, limit);
            prop_assert_eq!(&got, &if nan { vec![-1; tokens] } else { want }, "{:?}", kernel);
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
