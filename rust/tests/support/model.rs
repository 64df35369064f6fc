//! A stand-in for a language model: the next token is a function of all tokens before it, so a single wrong token,
//! position or slot changes everything after it. And what such a model would say one token at a time.
#![allow(dead_code)]

use specbatch_core::sequence::FinishReason;

/// splitmix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    pub fn range(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What a KV entry stands for: a token and everything before it.
pub type Context = u64;

pub const EMPTY: Context = 0x1234_5678;

pub fn extend(context: Context, token: i32) -> Context {
    mix(context.rotate_left(17) ^ u64::from(token.cast_unsigned()) ^ 0x9e37_79b9_7f4a_7c15)
}

#[derive(Clone, Debug)]
pub struct Model {
    pub vocabulary: i32,
    /// Only the last tokens matter to the next one, so that text repeats itself.
    pub local: bool,
    /// How often the draft model is right, in percent.
    pub draft_skill: u64,
}

impl Model {
    pub fn next(&self, context: Context, last: &[i32]) -> i32 {
        let state = if self.local {
            last.iter().rev().take(2).fold(EMPTY, |state, &token| extend(state, token))
        } else {
            context
        };
        (mix(state ^ 0xabcd) % self.vocabulary as u64) as i32
    }

    pub fn draft(&self, context: Context, last: &[i32]) -> i32 {
        let right = self.next(context, last);
        if mix(context ^ 0x77) % 100 < self.draft_skill { right } else { (right + 1) % self.vocabulary }
    }
}

#[derive(Clone, Debug)]
pub struct Spec {
    pub request_id: i64,
    pub prompt: Vec<i32>,
    pub shard: i32,
    pub max_tokens: usize,
    pub min_tokens: usize,
    pub ignore_eos: bool,
    pub may_draft: bool,
    pub stop_tokens: Vec<i32>,
    pub stop_strings: Vec<Vec<u8>>,
}

/// Bytes of a token: one or two letters, and none for every seventh.
pub fn bytes_of(token: i32) -> Vec<u8> {
    match token % 7 {
        6 => vec![],
        5 => vec![b'a' + (token % 3) as u8, b'a'],
        _ => vec![b'a' + (token % 5) as u8],
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub tokens: Vec<i32>,
    pub text: Vec<u8>,
    pub reason: FinishReason,
}

/// The row alone, one token at a time.
pub fn autoregressive(model: &Model, spec: &Spec, eos: &[i32], max_model_len: usize) -> Answer {
    let mut all = spec.prompt.clone();
    let mut context = all.iter().fold(EMPTY, |context, &token| extend(context, token));
    let mut tokens = Vec::new();
    let mut text = Vec::new();
    loop {
        let token = model.next(context, &all);
        let before = text.len();
        tokens.push(token);
        all.push(token);
        context = extend(context, token);
        text.extend(bytes_of(token));
        if tokens.len() >= spec.min_tokens {
            if (!spec.ignore_eos && eos.contains(&token)) || spec.stop_tokens.contains(&token) {
                text.truncate(before);
                return Answer { tokens, text, reason: FinishReason::Stop };
            }
            let starts = spec.stop_strings.iter().flat_map(|stop| {
                let ends_late = move |&at: &usize| at + stop.len() > before;
                let text = &text;
                (0..text.len()).filter(move |&at| text[at..].starts_with(stop)).filter(ends_late)
            });
            if let Some(cut) = starts.min() {
                text.truncate(cut);
                return Answer { tokens, text, reason: FinishReason::Stop };
            }
        }
        if tokens.len() == spec.max_tokens || all.len() == max_model_len {
            return Answer { tokens, text, reason: FinishReason::Length };
        }
    }
}
