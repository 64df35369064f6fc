//! Attention at the edge of memory: pages, queries and outputs end where the process may touch no more, so that a read or
//! a write one number too far is a crash, not luck. Sizes are wider than elsewhere: large groups, odd heads, empty rows.
#![cfg(target_os = "linux")]

mod cases;

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};

use cases::{largest_difference, make, paths};
use proptest::prelude::*;
use specbatch_cpu_kernels::attention::{Options, Path, Prepared, Rows, Stored, Tasks};
use specbatch_cpu_kernels::pages::{Element, LayerPages};

unsafe extern "C" {
    fn mmap(at: *mut c_void, length: usize, protection: i32, flags: i32, file: i32, offset: i64) -> *mut c_void;
    fn mprotect(at: *mut c_void, length: usize, protection: i32) -> i32;
    fn munmap(at: *mut c_void, length: usize) -> i32;
}

/// Large enough for every processor's pages.
const PAGE: usize = 1 << 16;
const READ_WRITE: i32 = 1 | 2;
const PRIVATE_ANONYMOUS: i32 = 2 | 0x20;

/// A copy of some numbers between two pages that must not be touched, right before the second.
struct Edge<T> {
    map: *mut c_void,
    size: usize,
    first: *mut T,
    len: usize,
}

impl<T: Copy> Edge<T> {
    fn new(numbers: &[T]) -> Self {
        let inner = size_of_val(numbers).next_multiple_of(PAGE).max(PAGE);
        let size = inner + 2 * PAGE;
        // SAFETY: memory of its own, of which the middle is used.
        unsafe {
            let map = mmap(std::ptr::null_mut(), size, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0);
            assert_ne!(map as isize, -1, "no memory");
            assert_eq!(mprotect(map, PAGE, 0), 0);
            assert_eq!(mprotect(map.byte_add(PAGE + inner), PAGE, 0), 0);
            let first = map.byte_add(PAGE + inner).cast::<T>().sub(numbers.len());
            std::ptr::copy_nonoverlapping(numbers.as_ptr(), first, numbers.len());
            Self { map, size, first, len: numbers.len() }
        }
    }
}

impl<T> Deref for Edge<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new` put so many numbers there.
        unsafe { std::slice::from_raw_parts(self.first, self.len) }
    }
}

impl<T> DerefMut for Edge<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.first, self.len) }
    }
}

impl<T> Drop for Edge<T> {
    fn drop(&mut self) {
        // SAFETY: what `new` mapped.
        unsafe { munmap(self.map, self.size) };
    }
}

#[allow(clippy::too_many_arguments)]
fn run<E: Stored>(
    storage: &Edge<E>,
    query: &Edge<f32>,
    heads: usize,
    pages: &LayerPages,
    rows: &Rows<'_>,
    options: &Options<'_>,
    path: Path,
    together: bool,
) -> Vec<f32> {
    let mut out = Edge::new(&vec![7.0f32; query.len()]);
    let mut tasks = Tasks::default();
    tasks.cut(rows.query_start, heads, pages.kv_heads, 2, together).unwrap();
    let prepared = Prepared::new(&tasks, query, heads, storage, pages, rows, options, &mut out).unwrap().at_most(path);
    for i in 0..prepared.len() {
        // SAFETY: one after the other.
        unsafe { prepared.run(i) };
    }
    out.to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn nothing_outside_is_touched_and_all_inside_is_right(
        rows in prop::collection::vec((0usize..140, prop::sample::select(vec![0usize, 0, 1, 1, 2, 3, 7, 17, 33])), 1..6),
        (kv_heads, group) in prop::sample::select(
            vec![(1usize, 1usize), (1, 17), (1, 33), (2, 16), (2, 20), (3, 5), (5, 3), (7, 1), (8, 4), (17, 1), (9, 2)]
        ),
        head_dim in prop::sample::select(vec![2usize, 6, 8, 16, 24, 32, 40, 48, 72, 96, 112]),
        block_size in prop::sample::select(vec![1usize, 2, 5, 15, 16, 17, 64, 100]),
        window in prop::option::of(1i32..150),
        with_sinks: bool,
        half: bool,
        seed: u64,
    ) {
        let mut case = make(&rows, kv_heads, group, head_dim, block_size, seed);
        case.round();
        let sinks: Vec<f32> = (0..case.heads).map(|h| h as f32 - 2.0).collect();
        let options = Options { scale: 0.3, window, softcap: None, sinks: with_sinks.then_some(&sinks) };
        let want = case.reference(&options, None, 0);
        case.spoil(f32::NAN);
        let token = case.pages.token_stride();
        let used = case.storage.len() - case.pages.page_stride
            + case.pages.key_offset.max(case.pages.value_offset) + block_size * token;
        let floats = Edge::new(&case.storage[..used]);
        let halves = Edge::new(&floats.iter().map(|v| u16::from_f32(*v)).collect::<Vec<u16>>());
        let query = Edge::new(&case.query);
        for path in paths(half, head_dim) {
            for together in [false, true] {
                let (rows, heads) = (case.rows(None, &[]), case.heads);
                let got = if half {
                    run(&halves, &query, heads, &case.pages, &rows, &options, path, together)
                } else {
                    run(&floats, &query, heads, &case.pages, &rows, &options, path, together)
                };
                let difference = largest_difference(&got, &want);
                let rounding = if path == Path::Amx { 1.0 / 256.0 } else { 0.0 };
                prop_assert!(difference < rounding + 2e-5, "{path:?}, together {together}: off by {difference}");
            }
        }
    }
}

#[test]
fn a_number_too_far_is_a_crash() {
    if std::env::var_os("TOO_FAR").is_some() {
        let edge = Edge::new(&[1u16; 3]);
        // SAFETY: none; that is the point.
        std::process::exit(i32::from(unsafe { edge.first.add(3).read_volatile() }));
    }
    let me = std::env::current_exe().unwrap();
    let done = std::process::Command::new(me)
        .args(["--exact", "a_number_too_far_is_a_crash"])
        .env("TOO_FAR", "1")
        .output()
        .unwrap();
    assert_eq!(done.status.code(), None, "ended by a signal");
}
