//! The kernel against a slow obvious double-precision reference, over random rows, pages and masks.

use proptest::prelude::*;
use specbatch_cpu_kernels::attention::{Options, Rows, forward};
use specbatch_cpu_kernels::pages::{LayerPages, write};

struct Case {
    pages: LayerPages,
    heads: usize,
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
    tables: Vec<i32>,
    pages_per_row: usize,
    storage: Vec<f32>,
    query: Vec<f32>,
}

/// A small generator that needs no crate: numbers in [-1, 1).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32) / (1u32 << 23) as f32 - 1.0
    }
}

fn make(rows: &[(usize, usize)], kv_heads: usize, group: usize, head_dim: usize, block_size: usize, seed: u64) -> Case {
    let mut numbers = Numbers(seed);
    let layers = 2;
    let token = kv_heads * head_dim;
    let page_stride = layers * 2 * block_size * token + 8;
    let pages = LayerPages {
        key_offset: 2 * block_size * token,
        value_offset: 3 * block_size * token,
        page_stride,
        block_size,
        kv_heads,
        head_dim,
    };
    let pages_per_row = rows.iter().map(|&(c, q)| (c + q).div_ceil(block_size)).max().unwrap_or(0) + 1;
    let mut tables = vec![0i32; rows.len() * pages_per_row];
    let mut next = 1;
    // Pages are handed out backwards, so that no row's pages are in order.
    let total: usize = rows.iter().map(|&(c, q)| (c + q).div_ceil(block_size)).sum();
    for (r, &(c, q)) in rows.iter().enumerate() {
        for p in 0..(c + q).div_ceil(block_size) {
            tables[r * pages_per_row + p] = (total + 1 - next) as i32;
            next += 1;
        }
    }
    let storage = (0..(total + 1) * page_stride).map(|_| numbers.next()).collect();
    let mut query_start = vec![0i32];
    for &(_, q) in rows {
        query_start.push(query_start.last().unwrap() + q as i32);
    }
    let tokens = *query_start.last().unwrap() as usize;
    let heads = kv_heads * group;
    let query = (0..tokens * heads * head_dim).map(|_| 3.0 * numbers.next()).collect();
    let seq_lens = rows.iter().map(|&(c, q)| (c + q) as i32).collect();
    Case { pages, heads, query_start, seq_lens, tables, pages_per_row, storage, query }
}

impl Case {
    fn rows<'a>(&'a self, ancestors: Option<&'a [i64]>, positions: &'a [i32]) -> Rows<'a> {
        Rows {
            query_start: &self.query_start,
            seq_lens: &self.seq_lens,
            block_tables: &self.tables,
            pages_per_row: self.pages_per_row,
            ancestors,
            positions,
        }
    }

    fn at(&self, row: usize, index: usize, head: usize, d: usize, offset: usize) -> f64 {
        let page = self.tables[row * self.pages_per_row + index / self.pages.block_size] as usize;
        let place = page * self.pages.page_stride
            + offset
            + (index % self.pages.block_size) * self.pages.token_stride()
            + head * self.pages.head_dim
            + d;
        f64::from(self.storage[place])
    }

    /// `shift` moves the causal border: 0 is right, 1 is the mistake that the test must notice.
    fn reference(&self, options: &Options<'_>, ancestors: Option<&[i64]>, shift: usize) -> Vec<f64> {
        let (dim, group) = (self.pages.head_dim, self.heads / self.pages.kv_heads);
        let mut out = vec![0.0; self.query.len()];
        for row in 0..self.seq_lens.len() {
            let (start, end) = (self.query_start[row] as usize, self.query_start[row + 1] as usize);
            let context = self.seq_lens[row] as usize - (end - start);
            for token in start..end {
                let index = context + token - start;
                for head in 0..self.heads {
                    let mut scores = Vec::new();
                    for key in 0..self.seq_lens[row] as usize {
                        let own = key as i64 - context as i64;
                        let seen = match ancestors {
                            Some(bits) => own < 0 || bits[token] >> own & 1 == 1,
                            None => key <= index + shift,
                        };
                        let near = options.window.is_none_or(|w| key as i64 > index as i64 - i64::from(w));
                        let dot: f64 = (0..dim)
                            .map(|d| {
                                f64::from(self.query[(token * self.heads + head) * dim + d])
                                    * self.at(row, key, head / group, d, self.pages.key_offset)
                            })
                            .sum();
                        let mut s = dot * f64::from(options.scale);
                        if let Some(cap) = options.softcap {
                            s = f64::from(cap) * (s / f64::from(cap)).tanh();
                        }
                        scores.push(if seen && near { s } else { f64::NEG_INFINITY });
                    }
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let mut total: f64 = weights.iter().sum();
                    if let Some(sinks) = options.sinks {
                        total += (f64::from(sinks[head]) - top).exp();
                    }
                    for d in 0..dim {
                        let sum: f64 = weights
                            .iter()
                            .enumerate()
                            .filter(|(_, w)| **w > 0.0)
                            .map(|(key, w)| w * self.at(row, key, head / group, d, self.pages.value_offset))
                            .sum();
                        out[(token * self.heads + head) * dim + d] = sum / total;
                    }
                }
            }
        }
        out
    }

    fn kernel(&self, options: &Options<'_>, ancestors: Option<&[i64]>) -> Vec<f32> {
        let mut out = vec![7.0; self.query.len()];
        forward(&self.query, self.heads, &self.storage, &self.pages, &self.rows(ancestors, &[]), options, &mut out)
            .unwrap();
        out
    }
}

fn largest_difference(got: &[f32], want: &[f64]) -> f64 {
    got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn equals_the_reference(
        rows in prop::collection::vec((0usize..90, 0usize..40), 1..6),
        kv_heads in 1usize..4,
        group in 1usize..5,
        head_dim in prop::sample::select(vec![4usize, 16, 20, 64, 80, 128]),
        block_size in prop::sample::select(vec![1usize, 3, 16, 21, 42]),
        window in prop::option::of(1i32..50),
        softcap in prop::option::of(2.0f32..30.0),
        with_sinks: bool,
        seed: u64,
    ) {
        let case = make(&rows, kv_heads, group, head_dim, block_size, seed);
        let sinks: Vec<f32> = (0..case.heads).map(|h| h as f32 - 2.0).collect();
        let options = Options { scale: 0.3, window, softcap, sinks: with_sinks.then_some(&sinks) };
        let difference = largest_difference(&case.kernel(&options, None), &case.reference(&options, None, 0));
        prop_assert!(difference < 2e-5, "off by {difference}");
    }

    #[test]
    fn trees_see_their_ancestors_only(context in 0usize..60, nodes in 1usize..30, seed: u64) {
        let case = make(&[(context, nodes), (5, 1)], 2, 3, 64, 16, seed);
        let mut numbers = Numbers(seed);
        let mut ancestors: Vec<i64> = Vec::new();
        for i in 0..nodes {
            let parent = if i == 0 { 0 } else { ancestors[((0.5 * numbers.next() + 0.5) * i as f32) as usize % i] };
            ancestors.push(parent | 1 << i);
        }
        ancestors.push(1);
        let options = Options { scale: 0.125, window: None, softcap: None, sinks: None };
        let difference =
            largest_difference(&case.kernel(&options, Some(&ancestors)), &case.reference(&options, Some(&ancestors), 0));
        prop_assert!(difference < 2e-5, "off by {difference}");
    }
}

#[test]
fn the_comparison_notices_a_mask_off_by_one() {
    let case = make(&[(10, 5), (0, 7)], 2, 2, 64, 16, 1);
    let options = Options { scale: 0.125, window: None, softcap: None, sinks: None };
    assert!(largest_difference(&case.kernel(&options, None), &case.reference(&options, None, 1)) > 1e-2);
}

#[test]
fn what_is_written_is_read_and_negative_slots_are_not_written() {
    let case = make(&[(0, 4)], 2, 1, 16, 3, 5);
    let mut storage = vec![0.0f32; case.storage.len()];
    let key: Vec<f32> = (0..4 * 32).map(|i| i as f32).collect();
    let value: Vec<f32> = key.iter().map(|k| -k).collect();
    write(&mut storage, &case.pages, &key, &value, &[3, -1, 5, 4]).unwrap();
    let place = |slot: usize| slot / 3 * case.pages.page_stride + slot % 3 * 32;
    for (token, slot) in [(0, 3), (2, 5), (3, 4)] {
        assert_eq!(storage[place(slot) + case.pages.key_offset..][..32], key[token * 32..][..32]);
        assert_eq!(storage[place(slot) + case.pages.value_offset..][..32], value[token * 32..][..32]);
    }
    assert_eq!(storage.iter().filter(|v| **v != 0.0).count(), 2 * 3 * 32 - 2);
}

#[test]
fn what_does_not_fit_is_refused() {
    let case = make(&[(10, 5)], 2, 2, 16, 4, 1);
    let options = Options { scale: 1.0, window: None, softcap: None, sinks: None };
    let mut out = vec![0.0; case.query.len()];
    let mut tables = case.tables.clone();
    tables[1] = 99;
    let rows = Rows { block_tables: &tables, ..case.rows(None, &[]) };
    let error = forward(&case.query, case.heads, &case.storage, &case.pages, &rows, &options, &mut out).unwrap_err();
    assert!(error.contains("page 99"), "{error}");
    let rows = Rows { seq_lens: &[400], ..case.rows(None, &[]) };
    assert!(forward(&case.query, case.heads, &case.storage, &case.pages, &rows, &options, &mut out).is_err());
    assert!(
        forward(&case.query[1..], case.heads, &case.storage, &case.pages, &case.rows(None, &[]), &options, &mut out)
            .is_err()
    );
    assert!(write(&mut [0.0f32; 64], &case.pages, &[0.0; 32], &[0.0; 32], &[4000]).is_err());
}
