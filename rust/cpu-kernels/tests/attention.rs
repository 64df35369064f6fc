//! The kernel against a slow obvious double-precision reference, over random rows, pages and masks.

mod cases;

use cases::{Numbers, largest_difference, make, paths};
use proptest::prelude::*;
use specbatch_cpu_kernels::attention::{Options, Path, Rows, forward};
use specbatch_cpu_kernels::pages::write;

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
        let want = case.reference(&options, None, 0);
        for path in paths(false, head_dim) {
            let difference = largest_difference(&case.kernel(false, path, &options, None), &want);
            prop_assert!(difference < 2e-5, "{path:?} is off by {difference}");
        }
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
        let want = case.reference(&options, Some(&ancestors), 0);
        for path in paths(false, 64) {
            let difference = largest_difference(&case.kernel(false, path, &options, Some(&ancestors)), &want);
            prop_assert!(difference < 2e-5, "{path:?} is off by {difference}");
        }
    }
}

#[test]
fn the_comparison_notices_a_mask_off_by_one() {
    let case = make(&[(10, 5), (0, 7)], 2, 2, 64, 16, 1);
    let options = Options { scale: 0.125, window: None, softcap: None, sinks: None };
    assert!(
        largest_difference(&case.kernel(false, Path::Amx, &options, None), &case.reference(&options, None, 1)) > 1e-2
    );
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
