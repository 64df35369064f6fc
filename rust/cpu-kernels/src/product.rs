//! y = x W^T over packed weights: which kernel serves, what becomes of the result, and how the work is cut into chunks.
//!
//! Every output is one sum over k in order, whatever the number of rows: a row's result does not depend on its
//! neighbours in the batch.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::epilogue::Tile;
use crate::packed::{COLUMNS, GROUP, Number, Packed};
use crate::screen::Ranges;
use crate::simd::{amx_int8_ready, amx_ready, has_avx2, has_avx512, has_avx512_bf16, has_avx512_vnni};
use crate::team::Team;

/// The instructions that multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// bfloat16 tiles, sums in float32.
    Amx,
    /// bfloat16 pairs in 512-bit vectors, sums in float32.
    Avx512Bf16,
    /// float32 products; bfloat16 weights are widened on the way.
    Avx512,
    Avx2,
    Plain,
    /// int8 tiles, sums in int32, as of all kernels of int8: they give the same bits.
    AmxInt8,
    /// int8 fours in 512-bit vectors.
    Avx512Vnni,
    Avx2Int8,
    PlainInt8,
}

impl Kernel {
    /// The fastest that this processor has; `half` asks for activations in bfloat16 where there are instructions for it.
    #[must_use]
    pub fn best(half: bool) -> Self {
        match () {
            () if half && amx_ready() => Self::Amx,
            () if half && has_avx512_bf16() => Self::Avx512Bf16,
            () if has_avx512() => Self::Avx512,
            () if has_avx2() => Self::Avx2,
            () => Self::Plain,
        }
    }

    /// The fastest for int8 that this processor has.
    #[must_use]
    pub fn best_int8() -> Self {
        match () {
            () if amx_int8_ready() => Self::AmxInt8,
            () if has_avx512_vnni() => Self::Avx512Vnni,
            () if has_avx2() => Self::Avx2Int8,
            () => Self::PlainInt8,
        }
    }

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Amx => "AMX bfloat16",
            Self::Avx512Bf16 => "AVX-512 bfloat16",
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2",
            Self::Plain => "plain",
            Self::AmxInt8 => "AMX int8",
            Self::Avx512Vnni => "AVX-512 int8",
            Self::Avx2Int8 => "AVX2 int8",
            Self::PlainInt8 => "plain int8",
        }
    }

    /// Every kernel that runs here, for tests.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let all = [
            (Self::Amx, amx_ready()),
            (Self::Avx512Bf16, has_avx512_bf16()),
            (Self::Avx512, has_avx512()),
            (Self::Avx2, has_avx2()),
            (Self::Plain, true),
            (Self::AmxInt8, amx_int8_ready()),
            (Self::Avx512Vnni, has_avx512_vnni()),
            (Self::Avx2Int8, has_avx2()),
            (Self::PlainInt8, true),
        ];
        all.into_iter().filter_map(|(kernel, there)| there.then_some(kernel)).collect()
    }

    /// What the activations must be.
    #[must_use]
    pub fn takes(self) -> Number {
        match self {
            Self::Amx | Self::Avx512Bf16 => Number::Bf16,
            Self::Avx512 | Self::Avx2 | Self::Plain => Number::F32,
            Self::AmxInt8 | Self::Avx512Vnni | Self::Avx2Int8 | Self::PlainInt8 => Number::Int8,
        }
    }

    /// Whether it multiplies weights stored so.
    #[must_use]
    pub fn multiplies(self, stored: Number) -> bool {
        self.takes() == stored || (self.takes() == Number::F32 && stored == Number::Bf16)
    }
}

/// Rows of activations: `stride` numbers from one to the next, zeros from k to the padded k.
/// NOTE: readable up to a whole number of 32 rows, since AMX reads whole tiles; what is there reaches no output.
#[derive(Clone, Copy)]
pub enum Rows {
    F32 {
        at: *const f32,
        stride: usize,
    },
    Bf16 {
        at: *const u16,
        stride: usize,
    },
    /// Numbers times the scale of their row.
    Int8 {
        at: *const i8,
        stride: usize,
        scales: *const f32,
    },
}

/// What becomes of the sums.
#[derive(Clone, Copy)]
pub enum Output {
    /// `out[row, column] = sum + bias`
    Store { at: *mut f32, stride: usize },
    /// `out[row, column] += sum + bias`
    Add { at: *mut f32, stride: usize },
    /// Panels come in pairs (gate, up): `out[row, column] = activation(gate) * up`.
    Gated { at: *mut f32, stride: usize, activation: Activation },
    /// `best[group, row]` = the largest sum of each group of panels, of the columns below `limit`.
    Best { at: *mut Best, rows: usize, limit: usize },
    /// Of pairs of rows: the range of each group of panels (`screen.rs`).
    Ranges(Ranges),
    /// As `Gated`, rounded to bfloat16.
    GatedHalf { at: *mut u16, stride: usize, activation: Activation },
}

/// The largest of some columns, the lowest column among equals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// NaN when there is one among them.
    pub value: f32,
    pub column: u32,
}

impl Best {
    pub const NONE: Self = Self { value: f32::NEG_INFINITY, column: u32::MAX };

    /// The better of two; `self` holds the lower columns.
    #[must_use]
    pub fn or(self, later: Self) -> Self {
        if later.value > self.value || (later.value.is_nan() && !self.value.is_nan()) { later } else { self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + exp(-x))
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

/// One product of `rows` rows.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub weight: &'a Packed,
    pub input: Rows,
    pub rows: usize,
    pub output: Output,
}

// SAFETY: chunks of `run` write disjoint columns or rows of the output and only read the input (the caller's promise).
unsafe impl Sync for Product<'_> {}
unsafe impl Send for Product<'_> {}

/// A rectangle of the product: rows and panels.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub row: usize,
    pub rows: usize,
    pub panel: usize,
    pub panels: usize,
}

/// What should stay in the second cache.
const CHUNK_BYTES: usize = 3 << 18;

/// More rows than one tile has, up to as many as memory is slower than the products; a bfloat16 head's also beyond, as long
/// as they stay in the second cache.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
const STREAMED: std::ops::RangeInclusive<usize> = 17..=128;

impl Product<'_> {
    /// Compute it on the team.
    ///
    /// # Safety
    /// `input` and `output` are valid for `rows` rows (see `Rows`), the output is touched by nobody else meanwhile, and
    /// the processor has the kernel's instructions.
    pub unsafe fn run(&self, kernel: Kernel, team: &Team) {
        let panels = self.weight.num_panels();
        if self.rows == 0 || panels == 0 {
            return;
        }
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if self.streams(kernel) {
            // Each thread takes a group of panels before it begins the last one that it took, to ask for its memory.
            let (groups, taken) = (panels.div_ceil(GROUP), AtomicUsize::new(0));
            return team.run(team.size(), &|_| {
                let mut next = || Some(taken.fetch_add(1, Ordering::Relaxed)).filter(|&group| group < groups);
                // SAFETY: groups are taken once, the rest is the caller's promise.
                unsafe { crate::amx_rows::rows(self, &mut next) };
            });
        }
        // Chunks small enough to share out, large enough to be worth claiming, in whole groups of panels. What a chunk goes
        // through again and again should stay in the second cache: its weights or its activations.
        let bytes_a_panel = (self.weight.steps() * 64).max(1);
        let least = (1 << 16) / bytes_a_panel;
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        let rows_first = matches!(kernel, Kernel::Amx | Kernel::AmxInt8) && crate::amx::rows_first(self.weight);
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        let rows_first = false;
        let (rows_a_part, most) = if rows_first {
            (self.rows.max(1), CHUNK_BYTES / bytes_a_panel)
        } else {
            let row_bytes = self.weight.k_padded * kernel.takes().bytes();
            let parts = (self.rows * row_bytes).div_ceil(CHUNK_BYTES).max(1);
            (self.rows.div_ceil(parts).next_multiple_of(32), 64)
        };
        let parts = self.rows.div_ceil(rows_a_part);
        let wanted = (panels * parts).div_ceil(team.size() * 6);
        let width = wanted.max(least).clamp(GROUP, most.max(GROUP)).next_multiple_of(GROUP);
        let across = panels.div_ceil(width);
        team.run(parts * across, &|chunk| {
            let (part, strip) = (chunk / across, chunk % across);
            let (row, panel) = (part * rows_a_part, strip * width);
            let block = Block { row, rows: rows_a_part.min(self.rows - row), panel, panels: width.min(panels - panel) };
            // SAFETY: blocks are disjoint, the rest is the caller's promise.
            unsafe { self.block(kernel, block) };
        });
    }

    /// Whether it is reading the weights that takes the time, all rows staying in the caches.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn streams(&self, kernel: Kernel) -> bool {
        let row_bytes = self.weight.k_padded * kernel.takes().bytes();
        let most = match self.output {
            Output::Ranges(_) => 0,
            Output::Best { .. } if kernel != Kernel::Amx || self.weight.bias.is_some() => 0,
            Output::Best { .. } => (CHUNK_BYTES / row_bytes).max(*STREAMED.end()),
            _ => *STREAMED.end(),
        };
        matches!(kernel, Kernel::Amx | Kernel::AmxInt8) && (*STREAMED.start()..=most).contains(&self.rows)
    }

    /// Compute it on the calling thread, with the same bits as `run`: for rows that stay in the second cache.
    ///
    /// # Safety
    /// As `run`.
    pub unsafe fn run_here(&self, kernel: Kernel) {
        if self.rows == 0 || self.weight.num_panels() == 0 {
            return;
        }
        // SAFETY: the caller's.
        unsafe {
            match kernel {
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                Kernel::Amx | Kernel::AmxInt8 => {
                    let mut groups = 0..self.weight.num_panels().div_ceil(GROUP);
                    crate::amx_rows::rows(self, &mut || groups.next());
                }
                _ => self.block(kernel, Block { row: 0, rows: self.rows, panel: 0, panels: self.weight.num_panels() }),
            }
        }
    }

    /// Compute some groups of panels, with the same bits as `run`.
    ///
    /// # Safety
    /// As `run`.
    pub(crate) unsafe fn run_groups(&self, kernel: Kernel, team: &Team, groups: &[usize]) {
        let panels = self.weight.num_panels();
        team.run(groups.len(), &|at| {
            let panel = groups[at] * GROUP;
            let block = Block { row: 0, rows: self.rows, panel, panels: GROUP.min(panels - panel) };
            // SAFETY: groups are distinct, the rest is the caller's promise.
            unsafe { self.block(kernel, block) };
        });
    }

    /// # Safety
    /// As `run`, for the block alone.
    unsafe fn block(&self, kernel: Kernel, block: Block) {
        debug_assert!(block.panel.is_multiple_of(GROUP));
        // SAFETY: the caller's; each function is compiled for the instructions that `kernel` stands for.
        unsafe {
            match (kernel, self.weight.number()) {
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                (Kernel::Amx, Number::Bf16) => crate::amx::bf16(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx512Bf16, Number::Bf16) => crate::lanes::avx512_bf16(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx512, Number::Bf16) => crate::lanes::avx512_widen(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx512, Number::F32) => crate::lanes::avx512(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx2, Number::Bf16) => crate::lanes::avx2_widen(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx2, Number::F32) => crate::lanes::avx2(self, block),
                (Kernel::Plain, Number::Bf16) => crate::lanes::plain_widen(self, block),
                (Kernel::Plain, Number::F32) => crate::lanes::plain(self, block),
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                (Kernel::AmxInt8, Number::Int8) => crate::amx::int8(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx512Vnni, Number::Int8) => crate::lanes_int8::avx512(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx2Int8, Number::Int8) => crate::lanes_int8::avx2(self, block),
                (Kernel::PlainInt8, Number::Int8) => crate::lanes_int8::plain(self, block),
                _ => unreachable!("{kernel:?} over these weights"),
            }
        }
    }

    /// The place of a tile: `panel` is its first panel.
    #[inline(always)]
    pub(crate) fn tile(&self, row: usize, rows: usize, panel: usize, panels: usize) -> Tile {
        let column = panel * COLUMNS;
        Tile { row, rows, column, columns: (panels * COLUMNS).min(self.weight.columns - column) }
    }
}
