//! The n-gram proposer's cost in a step: 128 rows of 8,192 tokens, one to three new tokens and one proposal each.

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use specbatch_core::ngram::NgramIndex;

const ROWS: usize = 128;
const LENGTH: usize = 8192;

struct Row {
    index: NgramIndex,
    tokens: Vec<i32>,
}

fn random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *seed >> 33
}

/// A token as text has them: few are frequent, most are rare, and now and then an earlier passage comes again.
fn push(tokens: &mut Vec<i32>, passage: &mut Option<usize>, seed: &mut u64) {
    if passage.is_none() && tokens.len() > 64 && random(seed).is_multiple_of(64) {
        *passage = Some(random(seed) as usize % (tokens.len() - 32));
    }
    if let Some(at) = *passage {
        tokens.push(tokens[at]);
        *passage = if random(seed).is_multiple_of(24) { None } else { Some(at + 1) };
    } else {
        let spread = 1u64 << (1 + random(seed) % 15);
        tokens.push((random(seed) % spread) as i32);
    }
}

fn ngram(criterion: &mut Criterion) {
    let mut seed = 7;
    let mut passages = vec![None; ROWS];
    let mut out = Vec::new();
    let mut rows: Vec<Row> = passages
        .iter_mut()
        .map(|passage| {
            let mut tokens = Vec::with_capacity(2 * LENGTH);
            while tokens.len() < LENGTH {
                push(&mut tokens, passage, &mut seed);
            }
            let mut index = NgramIndex::new(2, 4);
            index.propose(&tokens, 4, &mut out);
            Row { index, tokens }
        })
        .collect();
    criterion.bench_function("n-gram step, 128 rows of 8k tokens", |bencher| {
        bencher.iter_custom(|rounds| {
            let times = (0..rounds).map(|round| {
                for (row, passage) in rows.iter_mut().zip(&mut passages) {
                    if row.tokens.len() > 2 * LENGTH - 4 {
                        row.tokens.truncate(LENGTH);
                        row.index = NgramIndex::new(2, 4);
                        row.index.propose(&row.tokens, 4, &mut out);
                        *passage = None;
                    }
                    for _ in 0..=round % 3 {
                        push(&mut row.tokens, passage, &mut seed);
                    }
                }
                out.clear();
                let start = Instant::now();
                for row in &mut rows {
                    row.index.propose(&row.tokens, 4, &mut out);
                }
                start.elapsed()
            });
            let mut times: Vec<Duration> = times.collect();
            times.sort_unstable();
            // As if each round took the median: other processes on the machine do not count.
            times[times.len() / 2] * times.len() as u32
        });
    });
}

criterion_group!(benches, ngram);
criterion_main!(benches);
