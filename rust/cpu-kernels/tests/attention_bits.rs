//! What a query gets is the same to the last bit in any company, and nothing that is not its row's gets in; bfloat16
//! pages give what their rounding allows.

mod cases;

use cases::{Case, Numbers, largest_difference, make, paths};
use proptest::prelude::*;
use specbatch_cpu_kernels::attention::{Options, Path, Prepared, Rows, Tasks, forward};
use specbatch_cpu_kernels::pages::Element;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Row `row`'s tokens `from..to` alone, as a step that comes when only the tokens before `to` are there.
fn part(case: &Case, row: usize, from: usize, to: usize) -> (Vec<i32>, Vec<i32>, &[i32], &[f32]) {
    let (start, end) = (case.query_start[row] as usize, case.query_start[row + 1] as usize);
    let width = case.heads * case.pages.head_dim;
    let seq_len = case.seq_lens[row] - (end - start - to) as i32;
    let table = &case.tables[row * case.pages_per_row..][..case.pages_per_row];
    (vec![0, (to - from) as i32], vec![seq_len], table, &case.query[(start + from) * width..(start + to) * width])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_query_in_any_company_gets_the_same_bits(
        rows in prop::collection::vec((0usize..200, 1usize..40), 1..4),
        kv_heads in 1usize..3,
        group in 1usize..5,
        head_dim in prop::sample::select(vec![16usize, 32, 64, 96, 128]),
        block_size in prop::sample::select(vec![1usize, 3, 16, 21, 32]),
        window in prop::option::of(1i32..150),
        softcap in prop::option::of(2.0f32..30.0),
        with_sinks: bool,
        half: bool,
        cuts in prop::collection::vec(1usize..40, 1..4),
        seed: u64,
    ) {
        let mut case = make(&rows, kv_heads, group, head_dim, block_size, seed);
        case.spoil(if seed % 2 == 0 { f32::NAN } else { f32::INFINITY });
        let sinks: Vec<f32> = (0..case.heads).map(|h| h as f32 - 2.0).collect();
        let options = Options { scale: 0.3, window, softcap, sinks: with_sinks.then_some(&sinks) };
        for path in paths(half, head_dim) {
            let whole = bits(&case.kernel(half, path, &options, None));
            let width = case.heads * head_dim;
            for (row, &(_, queries)) in rows.iter().enumerate() {
                let mut from = 0;
                for cut in cuts.iter().copied().chain([1, queries]) {
                    let to = queries.min(from + cut);
                    if from == to {
                        break;
                    }
                    let (query_start, seq_lens, table, query) = part(&case, row, from, to);
                    let alone = Rows {
                        query_start: &query_start,
                        seq_lens: &seq_lens,
                        block_tables: table,
                        pages_per_row: case.pages_per_row,
                        ancestors: None,
                        positions: &[],
                    };
                    let got = bits(&case.kernel_of(half, path, &options, &alone, query));
                    let at = (case.query_start[row] as usize + from) * width;
                    prop_assert!(got == whole[at..][..got.len()], "{path:?}, row {row}, tokens {from} to {to}");
                    from = to;
                }
            }
        }
    }

    #[test]
    fn bfloat16_pages_are_as_exact_as_bfloat16(
        rows in prop::collection::vec((0usize..200, 1usize..20), 1..4),
        kv_heads in 1usize..3,
        group in 1usize..6,
        head_dim in prop::sample::select(vec![16usize, 32, 64, 96, 128]),
        block_size in prop::sample::select(vec![1usize, 3, 16, 21, 32]),
        window in prop::option::of(1i32..50),
        softcap in prop::option::of(2.0f32..30.0),
        with_sinks: bool,
        seed: u64,
    ) {
        let mut case = make(&rows, kv_heads, group, head_dim, block_size, seed);
        case.round();
        let sinks: Vec<f32> = (0..case.heads).map(|h| h as f32 - 2.0).collect();
        let options = Options { scale: 0.3, window, softcap, sinks: with_sinks.then_some(&sinks) };
        let want = case.reference(&options, None, 0);
        case.spoil(f32::NAN);
        for path in paths(true, head_dim) {
            let got = case.kernel(true, path, &options, None);
            // Weights are rounded for tiles: by 2^-9 at most, which values of at most 1 cannot make more than 2^-8.
            let rounding = if path == Path::Amx { 1.0 / 256.0 } else { 0.0 };
            let largest = largest_difference(&got, &want);
            prop_assert!(largest < rounding + 2e-5, "{path:?} is off by {largest}");
            let mean = got.iter().zip(&want).map(|(g, w)| f64::from(*g) - w).sum::<f64>() / want.len() as f64;
            prop_assert!(mean.abs() < rounding / 20.0 + 1e-6, "{path:?} leans by {mean}");
        }
    }

    #[test]
    fn trees_in_bfloat16_see_their_ancestors_only(
        context in 0usize..150, nodes in 1usize..60, window in prop::option::of(1i32..100), seed: u64,
    ) {
        let mut case = make(&[(context, nodes), (5, 1)], 2, 3, 64, 16, seed);
        case.round();
        let mut numbers = Numbers(seed);
        let mut ancestors: Vec<i64> = Vec::new();
        for i in 0..nodes {
            let parent = if i == 0 { 0 } else { ancestors[((0.5 * numbers.next() + 0.5) * i as f32) as usize % i] };
            ancestors.push(parent | 1 << i);
        }
        ancestors.push(1);
        let options = Options { scale: 0.125, window, softcap: None, sinks: None };
        let want = case.reference(&options, Some(&ancestors), 0);
        case.spoil(f32::NAN);
        for path in paths(true, 64) {
            let got = case.kernel(true, path, &options, Some(&ancestors));
            let difference = largest_difference(&got, &want);
            prop_assert!(difference < 1.0 / 256.0, "{path:?} is off by {difference}");
            // A draft alone, without its tree, is as much a query as another: the first token sees the context only.
            let chain = Rows { ancestors: None, ..case.rows(None, &[]) };
            let first = case.kernel_of(true, path, &options, &chain, &case.query);
            let width = case.heads * 64;
            prop_assert_eq!(bits(&first[..width]), bits(&got[..width]), "{:?}", path);
        }
    }
}

/// One visible key has weight 1, so its value comes out as it is: each number in its place.
#[test]
fn the_only_key_gives_its_value() {
    for head_dim in [16, 32, 64, 96, 128] {
        let mut case = make(&[(0, 1), (0, 1)], 2, 3, head_dim, 16, 11);
        case.round();
        let options = Options { scale: 0.3, window: None, softcap: None, sinks: None };
        for path in paths(true, head_dim) {
            let got = case.kernel(true, path, &options, None);
            let difference = largest_difference(&got, &case.reference(&options, None, 0));
            assert!(difference < 2.0 * f64::from(f32::EPSILON), "{path:?}, {head_dim}: {difference}");
        }
    }
}

#[test]
fn a_key_that_is_no_number_is_not_hidden() {
    let mut case = make(&[(70, 1)], 1, 1, 64, 16, 3);
    let place = case.tables[0] as usize * case.pages.page_stride + case.pages.key_offset;
    case.storage[place + 5] = f32::NAN;
    let options = Options { scale: 0.3, window: None, softcap: None, sinks: None };
    for half in [false, true] {
        for path in paths(half, 64) {
            let got = case.kernel(half, path, &options, None);
            assert!(got.iter().all(|v| v.is_nan()), "{path:?}");
        }
    }
}

#[test]
fn tasks_may_be_run_by_any_threads_in_any_order() {
    let case = make(&[(100, 40), (300, 1), (0, 70)], 3, 3, 64, 16, 7);
    let storage: Vec<u16> = case.storage.iter().map(|v| u16::from_f32(*v)).collect();
    let options = Options { scale: 0.125, window: None, softcap: None, sinks: None };
    let rows = case.rows(None, &[]);
    let mut want = vec![0.0; case.query.len()];
    forward(&case.query, case.heads, &storage, &case.pages, &rows, &options, &mut want).unwrap();
    let mut tasks = Tasks::new(&[0, 1], 4, 2, 1).unwrap();
    tasks.refill(rows.query_start, case.heads, case.pages.kv_heads, 1).unwrap();
    let mut out = vec![0.0; case.query.len()];
    let prepared =
        Prepared::new(&tasks, &case.query, case.heads, &storage, &case.pages, &rows, &options, &mut out).unwrap();
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if i >= prepared.len() {
                        break;
                    }
                    // SAFETY: each number is drawn once, and the scope ends before `out` is read.
                    unsafe { prepared.run(prepared.len() - 1 - i) };
                }
            });
        }
    });
    assert_eq!(bits(&out), bits(&want));
}

#[test]
fn tasks_of_other_rows_are_refused() {
    let case = make(&[(10, 5)], 2, 2, 16, 4, 1);
    let options = Options { scale: 1.0, window: None, softcap: None, sinks: None };
    let rows = case.rows(None, &[]);
    let mut out = vec![0.0; case.query.len()];
    for (query_start, heads) in [(&[0, 4][..], 4), (&[0, 5], 6)] {
        let tasks = Tasks::new(query_start, heads, 2, 1).unwrap();
        let made =
            Prepared::new(&tasks, &case.query, case.heads, &case.storage, &case.pages, &rows, &options, &mut out);
        assert!(made.is_err());
    }
    assert!(Tasks::new(&[0, 5, 3], 4, 2, 1).is_err());
    assert!(Tasks::new(&[-1, 5], 4, 2, 1).is_err());
    assert!(Tasks::new(&[], 4, 2, 1).is_err());
    assert!(Tasks::new(&[0, 5], 3, 2, 1).is_err());
    assert!(Tasks::new(&[0, 5], 3, 0, 1).is_err());
}
