//! Random lives of a scheduler: whatever happens (speculation by any method, acceptance and rejection, preemption and
//! abortion at any moment, pools that are far too small), every row's output is what the model says one token at a
//! time, every KV entry is where it is read, and in the end every page is back.

#[path = "support/machine.rs"]
mod machine;
#[path = "support/model.rs"]
mod model;
mod support;

use machine::Machine;
use model::{Model, Random, Spec, autoregressive};
use proptest::prelude::*;
use specbatch_core::config::Config;
use specbatch_core::scheduler::FinishedRow;
use specbatch_core::sequence::{FinishReason, RowError};

#[derive(Clone, Debug)]
struct Setting {
    seed: u64,
    block_size: usize,
    draft_block_size: usize,
    pages: usize,
    rows: usize,
    budget: usize,
    max_model_len: usize,
    requests: usize,
    chaos: usize,
    prefix_cache: bool,
    model: Model,
}

fn settings() -> impl Strategy<Value = Setting> {
    let sizes = (prop_oneof![Just(1usize), Just(2), Just(16)], prop_oneof![Just(0usize), Just(1), Just(3), Just(16)]);
    let limits = (1..7usize, 1..40usize, 4..60usize, 1..14usize);
    let model = (2..6i32, any::<bool>(), prop_oneof![Just(0u64), Just(60), Just(100)]);
    (any::<u64>(), sizes, 0..40usize, limits, prop_oneof![Just(0usize), Just(10), Just(40)], any::<bool>(), model)
        .prop_map(
            |(seed, (block_size, draft_block_size), pages, limits, chaos, prefix_cache, (vocabulary, local, skill))| {
                let (rows, budget, max_model_len, requests) = limits;
                Setting {
                    seed,
                    block_size,
                    draft_block_size,
                    // From hopeless to roomy.
                    pages: 2 + pages * (1 + 24 / block_size) / 8,
                    rows,
                    budget,
                    max_model_len,
                    requests,
                    chaos,
                    prefix_cache,
                    model: Model { vocabulary, local, draft_skill: skill },
                }
            },
        )
}

fn config(setting: &Setting) -> Config {
    let mut config = Config::new(setting.pages, setting.block_size, setting.rows, setting.max_model_len);
    config.draft_block_size = setting.draft_block_size;
    config.max_num_batched_tokens = setting.budget.max(1);
    config.max_speculative_tokens = 5;
    config.prefix_cache = setting.prefix_cache;
    config.eos_token_ids = vec![1];
    config.draft_max_model_len = if setting.seed.is_multiple_of(3) { setting.max_model_len / 2 } else { 0 };
    config
}

fn request(random: &mut Random, setting: &Setting, request_id: i64) -> Spec {
    let vocabulary = setting.model.vocabulary;
    let len = random.range(0, setting.max_model_len + 1);
    // Few beginnings, so that prefixes are shared.
    let beginning = random.below(2) as i32;
    let mut prompt: Vec<i32> = (0..len as i32).map(|i| (i * (1 + beginning)) % vocabulary).collect();
    for token in prompt.iter_mut().skip(random.below(len + 1)) {
        *token = random.below(vocabulary as usize) as i32;
    }
    Spec {
        request_id,
        prompt,
        shard: random.below(3) as i32,
        max_tokens: random.range(1, 40),
        min_tokens: if random.chance(20) { random.below(10) } else { 0 },
        ignore_eos: random.chance(70),
        may_draft: random.chance(85),
        stop_tokens: if random.chance(15) { vec![random.below(vocabulary as usize) as i32] } else { vec![] },
        stop_strings: if random.chance(30) {
            (0..random.range(1, 2))
                .map(|_| (0..random.range(2, 6)).map(|_| b'a' + random.below(3) as u8).collect())
                .collect()
        } else {
            vec![]
        },
    }
}

/// Something that callers may do between two steps.
fn disturb(machine: &mut Machine, random: &mut Random, setting: &Setting) {
    machine.events += 1;
    let handles = machine.live();
    let any = handles.get(random.below(handles.len())).copied().unwrap_or(999);
    match random.below(12) {
        0..=2 => {
            let running = machine.scheduler.rows().get(any).is_some_and(specbatch_core::sequence::Sequence::is_running);
            assert_eq!(machine.scheduler.preempt(any), running);
        }
        3 => machine.abort_step(),
        4 | 5 => {
            let method = [0, 1, 3, if setting.draft_block_size > 0 { 2 } else { 3 }][random.below(4)];
            let shard = if random.chance(50) { None } else { Some(random.below(3) as i32) };
            machine.scheduler.set_speculation(method, random.below(6) as i64, shard).expect("a valid method");
        }
        6 => {
            machine.scheduler.drop_draft(if random.chance(50) { None } else { Some(any) });
        }
        7 => machine.scheduler.set_max_num_seqs(random.range(1, setting.rows) as i64).expect("a valid number"),
        8 if random.chance(20) => {
            machine.scheduler.abort(any);
        }
        9 => {
            machine.scheduler.clear_prefix_cache();
        }
        10 => machine.scheduler.set_shadow_ngram(random.below(6) as i64).expect("a valid k"),
        _ => {}
    }
}

fn check_answer(setting: &Setting, config: &Config, spec: &Spec, row: &FinishedRow) -> Result<(), String> {
    let id = spec.request_id;
    let fail = |what: String| Err(format!("request {id}: {what}; {row:?}"));
    if row.request_id != id || row.shard != spec.shard || row.num_prompt != spec.prompt.len() {
        return fail("rows are mixed up".into());
    }
    if row.counters.accepted > row.counters.drafted || row.counters.accepted as usize > row.tokens.len() {
        return fail("counts do not add up".into());
    }
    match row.error {
        RowError::EmptyPrompt if spec.prompt.is_empty() => return Ok(()),
        RowError::PromptTooLong if spec.prompt.len() >= setting.max_model_len => return Ok(()),
        RowError::None | RowError::TooFewPages => {}
        _ => return fail("the wrong error".into()),
    }
    let answer = autoregressive(&setting.model, spec, &config.eos_token_ids, setting.max_model_len);
    match row.reason {
        FinishReason::Aborted if answer.tokens.starts_with(&row.tokens) => Ok(()),
        FinishReason::Error if answer.tokens.starts_with(&row.tokens) => {
            let needed = config.target_pages(spec.prompt.len() + row.tokens.len());
            if needed > setting.pages - 1 { Ok(()) } else { fail(format!("{needed} pages would have been enough")) }
        }
        reason if (&row.tokens, &row.text, reason) == (&answer.tokens, &answer.text, answer.reason) => Ok(()),
        _ => fail(format!("expected {answer:?}")),
    }
}

/// One life; the number of events in it.
fn live(setting: &Setting) -> Result<usize, String> {
    let config = config(setting);
    let mut machine = Machine::new(&config, setting.model.clone());
    let mut random = Random(setting.seed);
    let method = [0, 1, 3, if setting.draft_block_size > 0 { 2 } else { 1 }][random.below(4)];
    machine.scheduler.set_speculation(method, random.range(0, 5) as i64, None).expect("a valid method");
    machine.scheduler.set_shadow_ngram(random.below(4) as i64).expect("a valid k");
    let mut specs: Vec<Spec> = (0..setting.requests as i64).map(|id| request(&mut random, setting, id)).collect();
    let tokens: usize = specs.iter().map(|spec| spec.prompt.len() + spec.max_tokens).sum();
    let mut waiting = specs.split_off(specs.len() / 2);
    machine.add(&specs);
    let mut steps = 0;
    loop {
        let info = machine.step()?;
        steps += 1;
        if info.kind == 0 && waiting.is_empty() {
            break;
        }
        if info.kind == 0 || random.chance(10) {
            machine.add(&waiting.pop().into_iter().collect::<Vec<_>>());
        }
        if steps < 40 * (tokens + 20) && random.chance(setting.chaos) {
            disturb(&mut machine, &mut random, setting);
        }
        if steps > 80 * (tokens + 20) {
            return Err(format!("no end after {steps} steps: {info:?}"));
        }
    }
    if machine.finished.len() != setting.requests {
        return Err(format!("{} of {} rows came back", machine.finished.len(), setting.requests));
    }
    for (spec, row) in &machine.finished {
        check_answer(setting, &config, spec, row)?;
    }
    let pool = machine.scheduler.pool();
    if pool.available() != setting.pages - 1 {
        return Err(format!("{} of {} pages came back", pool.available(), setting.pages - 1));
    }
    machine.scheduler.clear_prefix_cache();
    machine.scheduler.check_integrity().map_err(|error| error.to_string())?;
    Ok(machine.events)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn every_life_ends_well(setting in settings()) {
        if let Err(what) = live(&setting) {
            return Err(TestCaseError::fail(what));
        }
    }
}

#[test]
fn ten_thousand_events_a_block_size() {
    for block_size in [1, 2, 16] {
        let mut events = 0;
        for seed in 0.. {
            let setting = Setting {
                seed,
                block_size,
                draft_block_size: block_size + 1,
                pages: 2 + 80 / block_size,
                rows: 5,
                budget: 24,
                max_model_len: 48,
                requests: 24,
                chaos: 50,
                prefix_cache: true,
                model: Model { vocabulary: 4, local: seed % 2 == 0, draft_skill: 70 },
            };
            events += live(&setting).unwrap();
            if events >= 10_000 {
                break;
            }
        }
    }
}

/// The checks are worth something: each fault planted in the arrays is found.
#[test]
fn planted_faults_are_found() {
    type Fault = fn(&mut Machine);
    let faults: [(&str, Fault); 7] = [
        ("a slot off by one", |m| m.arrays.slot_mapping[0] += 1),
        ("a position off by one", |m| m.arrays.positions[0] += 1),
        ("another token", |m| m.arrays.input_ids[0] += 1),
        ("another page", |m| m.arrays.block_tables[0] = m.arrays.block_tables[m.arrays.shape.width]),
        ("a context too short", |m| m.arrays.seq_lens[0] -= 1),
        ("a draft slot off by one", |m| m.arrays.draft_slot_mapping[0] += 1),
        ("a draft page that is not the row's", |m| m.arrays.draft_block_tables[0] += 1),
    ];
    for (name, fault) in faults {
        let setting = Setting {
            seed: 1,
            block_size: 2,
            draft_block_size: 3,
            pages: 200,
            rows: 3,
            budget: 64,
            max_model_len: 60,
            requests: 3,
            chaos: 0,
            prefix_cache: true,
            model: Model { vocabulary: 50, local: false, draft_skill: 70 },
        };
        let mut machine = Machine::new(&config(&setting), setting.model.clone());
        machine.scheduler.set_speculation(2, 3, None).unwrap();
        let spec = |id: i64| Spec {
            request_id: id,
            prompt: (0..10 + id as i32).map(|i| i + 9 * id as i32 + 2).collect(),
            shard: 0,
            max_tokens: 30,
            min_tokens: 0,
            ignore_eos: true,
            may_draft: true,
            stop_tokens: vec![],
            stop_strings: vec![],
        };
        machine.add(&[spec(0), spec(1), spec(2)]);
        while machine.step().unwrap().kind != 2 {}
        machine.step().unwrap();
        assert_eq!(machine.info.kind, 2);
        fault(&mut machine);
        assert!(machine.forward().is_err(), "{name} was not found");
    }
}
