//! One step of 256 rows whose block tables are 128 pages wide: apply, schedule, fill the arrays.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use specbatch_core::config::Config;
use specbatch_core::scheduler::{Request, Scheduler};
use specbatch_core::speculation::Method;
use specbatch_core::step::StepKind;
use support::{Arrays, Outcome, Shape};

const ROWS: usize = 256;
const WIDTH: usize = 128;
const BLOCK: usize = 16;

/// Rows that never end, every one decoding.
struct Machine {
    scheduler: Scheduler,
    arrays: Arrays,
    outcome: Outcome,
    step_id: i64,
    next_id: i64,
    seed: u64,
}

impl Machine {
    fn new(method: Method, k: i64) -> Self {
        let mut config = Config::new(ROWS * WIDTH + 2, BLOCK, ROWS, WIDTH * BLOCK);
        config.max_num_batched_tokens = 8192;
        config.draft_block_size = BLOCK;
        config.draft_max_model_len = WIDTH * BLOCK / 2;
        let mut scheduler = Scheduler::new(config).expect("a valid configuration");
        scheduler.set_speculation(method as i32, k, None).expect("a valid method");
        let shape = Shape { rows: ROWS, tokens: 8192, logits: 8192, width: WIDTH, draft_width: WIDTH };
        let arrays = Arrays::new(shape);
        Self { scheduler, arrays, outcome: Outcome::default(), step_id: 0, next_id: 0, seed: 1 }
    }

    fn random(&mut self) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.seed >> 33
    }

    fn refill(&mut self) {
        let missing = ROWS - self.scheduler.num_unfinished();
        let requests = (0..missing)
            .map(|_| {
                let len = 16 + self.random() as usize % 512;
                let prompt: Vec<i32> = (0..len).map(|_| (self.random() % 30_000) as i32).collect();
                self.next_id += 1;
                Request::new(self.next_id, &prompt, WIDTH * BLOCK)
            })
            .collect();
        self.scheduler.add_requests(requests).expect("good requests");
    }

    /// Steps until the next decode step is planned and its result is ready.
    fn prepare(&mut self) {
        loop {
            self.scheduler.take_finished();
            self.refill();
            let outcome = std::mem::take(&mut self.outcome);
            let info = self.arrays.step(&mut self.scheduler, self.step_id, &outcome.view()).expect("a good result");
            self.step_id = info.step_id;
            self.answer(info.num_rows, info.kind);
            if info.kind == StepKind::Decode as i32 && info.num_rows == ROWS {
                return;
            }
        }
    }

    fn answer(&mut self, rows: usize, kind: i32) {
        let mut outcome = Outcome { width: 9, ..Outcome::default() };
        if kind == StepKind::Prefill as i32 || kind == StepKind::Decode as i32 {
            for row in 0..rows {
                let draft = self.arrays.num_draft_tokens[row];
                let logits = self.arrays.logits_start_loc[row + 1] - self.arrays.logits_start_loc[row];
                let sampled = if logits == 0 { 0 } else { 1 + self.random() as i32 % (draft + 1) };
                outcome.num_sampled.push(sampled);
                outcome.num_draft.push(draft);
                outcome.token_ids.extend((0..9).map(|_| 1 + (self.random() % 30_000) as i32));
            }
        }
        self.outcome = outcome;
    }
}

/// What all rounds would take if each took the median: other processes on the machine do not count.
fn typical(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2] * times.len() as u32
}

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step of 256 rows");
    for (name, method, k) in [
        ("autoregressive", Method::None, 0),
        ("proposed outside, k = 4", Method::External, 4),
        ("draft model, k = 4", Method::Draft, 4),
        ("n-gram, k = 4", Method::Ngram, 4),
    ] {
        let mut machine = Machine::new(method, k);
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| {
                let times = (0..rounds).map(|_| {
                    machine.prepare();
                    let outcome = std::mem::take(&mut machine.outcome);
                    let start = Instant::now();
                    let info = machine
                        .arrays
                        .step(&mut machine.scheduler, machine.step_id, &outcome.view())
                        .expect("a good result");
                    let time = start.elapsed();
                    machine.step_id = info.step_id;
                    machine.answer(info.num_rows, info.kind);
                    time
                });
                typical(times.collect())
            });
        });
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
