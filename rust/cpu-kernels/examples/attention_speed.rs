//! Times attention over paged keys and values on one thread, at the sizes of SmolLM2-135M (9 heads over 3, head size
//! 64), in the layout that the engine has: 30 layers share the pages, so that each call reads from memory.
//!
//! `taskset -c 1 cargo run --release --example attention_speed [CASE [PATH]]`, for instance `prefill Amx`

use specbatch_cpu_kernels::attention::{Options, Path, Prepared, Rows, Stored, Tasks};
use specbatch_cpu_kernels::pages::LayerPages;
use specbatch_cpu_kernels::simd::want_huge_pages;

const LAYERS: usize = 30;
const BLOCK_SIZE: usize = 16;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const DIM: usize = 64;

/// Seconds that this thread has been running: other processes may want the core too.
fn seconds() -> f64 {
    let mut time = [0i64; 2];
    // SAFETY: clock_gettime(CLOCK_THREAD_CPUTIME_ID) writes two numbers; the call clobbers rcx and r11.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") 228i64 => _, in("rdi") 3, in("rsi") time.as_mut_ptr(),
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    time[0] as f64 + time[1] as f64 / 1e9
}

fn main() {
    let asked = std::env::args().nth(1);
    for (name, rows, context, queries) in
        [("decode", 64, 400, 1), ("verify", 64, 400, 5), ("one row", 1, 2000, 1), ("prefill", 6, 330, 330)]
    {
        if asked.as_ref().is_some_and(|a| a != name) {
            continue;
        }
        measure::<f32>(name, rows, context, queries);
        measure::<u16>(name, rows, context, queries);
    }
}

fn measure<E: Stored>(name: &str, rows: usize, context: usize, queries: usize) {
    let pages_per_row = context.div_ceil(BLOCK_SIZE);
    let count = rows * pages_per_row + 1;
    let layer = BLOCK_SIZE * KV_HEADS * DIM;
    let page_stride = LAYERS * 2 * layer;
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    let size = count * page_stride;
    let mut memory: Vec<E> = Vec::with_capacity(size + 64);
    want_huge_pages(memory.as_ptr().cast(), memory.capacity() * size_of::<E>());
    memory.extend((0..size + 64).map(|_| E::from_f32(next())));
    let storage = &memory[memory.as_ptr().align_offset(64)..]; // as the engine's memory is
    let query: Vec<f32> = (0..rows * queries * HEADS * DIM).map(|_| next()).collect();
    let mut tables: Vec<i32> = (1..count as i32).collect();
    for i in (1..tables.len()).rev() {
        tables.swap(i, ((f32::midpoint(next(), 1.0) * i as f32) as usize).min(i));
    }
    let query_start: Vec<i32> = (0..=rows).map(|r| (r * queries) as i32).collect();
    let seq_lens = vec![context as i32; rows];
    let at = Rows {
        query_start: &query_start,
        seq_lens: &seq_lens,
        block_tables: &tables,
        pages_per_row,
        ancestors: None,
        positions: &[],
    };
    let options = Options { scale: 0.125, window: None, softcap: None, sinks: None };
    let tasks = Tasks::new(&query_start, HEADS, KV_HEADS, 1).unwrap();
    let mut out = vec![0.0; query.len()];
    let seen: usize = (0..queries).map(|q| context - q).sum::<usize>() * rows;
    let (flops, bytes) = (seen * HEADS * DIM * 4, rows * context * KV_HEADS * DIM * 2 * size_of::<E>());
    for path in [Path::Avx2, Path::Avx512, Path::Amx] {
        if std::env::args().nth(2).is_some_and(|a| a != format!("{path:?}")) {
            continue;
        }
        let mut best = f64::INFINITY;
        let mut used = path;
        let begun = seconds();
        // The shortest of single calls: what others on the machine do comes and goes.
        for l in (0..LAYERS).cycle() {
            let pages = LayerPages {
                key_offset: 2 * l * layer,
                value_offset: (2 * l + 1) * layer,
                page_stride,
                block_size: BLOCK_SIZE,
                kv_heads: KV_HEADS,
                head_dim: DIM,
            };
            let start = seconds();
            let prepared =
                Prepared::new(&tasks, &query, HEADS, storage, &pages, &at, &options, &mut out).unwrap().at_most(path);
            used = prepared.path();
            if used != path {
                break;
            }
            for i in 0..prepared.len() {
                // SAFETY: one after the other.
                unsafe { prepared.run(i) };
            }
            let end = seconds();
            best = best.min(end - start);
            if end > begun + 2.0 {
                break;
            }
        }
        if used == path {
            println!(
                "{name:8} {rows:3} x {context} x {queries:3}, {} bytes a number, {path:?}: {:.2} ms, {:.0} GFLOP/s, {:.1} GB/s",
                size_of::<E>(),
                best * 1e3,
                flops as f64 / best / 1e9,
                bytes as f64 / best / 1e9
            );
        }
    }
}
