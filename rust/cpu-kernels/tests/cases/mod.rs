//! Random rows over pages, and a slow obvious double-precision reference of attention over them.
#![allow(dead_code)] // each test file uses a part

use specbatch_cpu_kernels::attention::{Options, Path, Prepared, Rows, Stored, Tasks};
use specbatch_cpu_kernels::pages::{Element, LayerPages};

pub struct Case {
    pub pages: LayerPages,
    pub heads: usize,
    pub query_start: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub tables: Vec<i32>,
    pub pages_per_row: usize,
    pub storage: Vec<f32>,
    pub query: Vec<f32>,
}

/// A small generator that needs no crate: numbers in [-1, 1).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32) / (1u32 << 23) as f32 - 1.0
    }
}

pub fn make(
    rows: &[(usize, usize)],
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    block_size: usize,
    seed: u64,
) -> Case {
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
    pub fn rows<'a>(&'a self, ancestors: Option<&'a [i64]>, positions: &'a [i32]) -> Rows<'a> {
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
    pub fn reference(&self, options: &Options<'_>, ancestors: Option<&[i64]>, shift: usize) -> Vec<f64> {
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

    /// What the kernel says, in float32 pages or in bfloat16, with no newer instructions than `path`.
    pub fn kernel(&self, half: bool, path: Path, options: &Options<'_>, ancestors: Option<&[i64]>) -> Vec<f32> {
        self.kernel_of(half, path, options, &self.rows(ancestors, &[]), &self.query)
    }

    /// The same for other rows over the same pages; KV heads each in a task and all in one must give the same bits.
    pub fn kernel_of(&self, half: bool, path: Path, options: &Options<'_>, rows: &Rows<'_>, query: &[f32]) -> Vec<f32> {
        let mut out = [vec![7.0; query.len()], vec![7.0; query.len()]];
        for (out, together) in out.iter_mut().zip([false, true]) {
            let mut tasks = Tasks::default();
            tasks.cut(rows.query_start, self.heads, self.pages.kv_heads, 1 + query.len() % 3, together).unwrap();
            if half {
                let storage: Vec<u16> = self.storage.iter().map(|v| u16::from_f32(*v)).collect();
                run(&tasks, query, self.heads, &storage, &self.pages, rows, options, path, out);
            } else {
                run(&tasks, query, self.heads, &self.storage, &self.pages, rows, options, path, out);
            }
        }
        let [apart, out] = out;
        assert!(
            apart.iter().zip(&out).all(|(a, b)| a.to_bits() == b.to_bits()),
            "{path:?}: KV heads together or apart"
        );
        out
    }

    /// Keys, values and queries to the nearest bfloat16.
    pub fn round(&mut self) {
        for v in self.storage.iter_mut().chain(&mut self.query) {
            *v = u16::from_f32(*v).to_f32();
        }
    }

    /// Put `garbage` wherever no key and no value of a row stands.
    pub fn spoil(&mut self, garbage: f32) {
        let mut mine = vec![false; self.storage.len()];
        let stride = self.pages.token_stride();
        for (row, &len) in self.seq_lens.iter().enumerate() {
            for index in 0..len as usize {
                let page = self.tables[row * self.pages_per_row + index / self.pages.block_size] as usize;
                let place = page * self.pages.page_stride + index % self.pages.block_size * stride;
                for offset in [self.pages.key_offset, self.pages.value_offset] {
                    mine[place + offset..][..stride].fill(true);
                }
            }
        }
        for (v, _) in self.storage.iter_mut().zip(mine).filter(|(_, mine)| !mine) {
            *v = garbage;
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn run<E: Stored>(
    tasks: &Tasks,
    query: &[f32],
    heads: usize,
    storage: &[E],
    pages: &LayerPages,
    rows: &Rows<'_>,
    options: &Options<'_>,
    path: Path,
    out: &mut [f32],
) {
    let prepared = Prepared::new(tasks, query, heads, storage, pages, rows, options, out).unwrap().at_most(path);
    for i in 0..prepared.len() {
        // SAFETY: one after the other.
        unsafe { prepared.run(i) };
    }
}

/// The ways to compute that this processor and these sizes have.
pub fn paths(half: bool, head_dim: usize) -> Vec<Path> {
    let best = if half { Path::best::<u16>(head_dim) } else { Path::best::<f32>(head_dim) };
    [Path::Plain, Path::Avx2, Path::Avx512, Path::Amx].into_iter().filter(|p| *p <= best).collect()
}

pub fn largest_difference(got: &[f32], want: &[f64]) -> f64 {
    got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max)
}
