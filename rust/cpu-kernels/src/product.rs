//! y = x W^T over packed weights: which kernel serves, what becomes of the result, and how the work is cut into chunks.
//!
//! Every output is one sum over k in order, whatever the number of rows: a row's result does not depend on its
//! neighbours in the batch.

use crate::epilogue::Tile;
use crate::packed::{COLUMNS, GROUP, Packed};
use crate::simd::{amx_ready, has_avx2, has_avx512, has_avx512_bf16};
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

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Amx => "AMX bfloat16",
            Self::Avx512Bf16 => "AVX-512 bfloat16",
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2",
            Self::Plain => "plain",
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
        ];
        all.into_iter().filter_map(|(kernel, there)| there.then_some(kernel)).collect()
    }

    /// Activations are bfloat16 (else float32).
    #[must_use]
    pub fn takes_half(self) -> bool {
        matches!(self, Self::Amx | Self::Avx512Bf16)
    }
}

/// Rows of activations: `stride` numbers from one to the next, zeros from k to the padded k.
/// NOTE: readable up to a whole number of 32 rows, since AMX reads whole tiles; what is there reaches no output.
#[derive(Clone, Copy)]
pub enum Rows {
    F32 { at: *const f32, stride: usize },
    Bf16 { at: *const u16, stride: usize },
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
        // Chunks small enough to share out, large enough to be worth claiming, in whole groups of panels. What a chunk goes
        // through again and again should stay in the second cache: its weights or its activations.
        let bytes_a_panel = (self.weight.steps() * 64).max(1);
        let least = (1 << 16) / bytes_a_panel;
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        let rows_first = kernel == Kernel::Amx && crate::amx::rows_first(self.weight.k_padded);
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        let rows_first = false;
        let (rows_a_part, most) = if rows_first {
            (self.rows.max(1), CHUNK_BYTES / bytes_a_panel)
        } else {
            let row_bytes = self.weight.k_padded * if kernel.takes_half() { 2 } else { 4 };
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

    /// # Safety
    /// As `run`, for the block alone.
    unsafe fn block(&self, kernel: Kernel, block: Block) {
        debug_assert!(block.panel.is_multiple_of(GROUP));
        // SAFETY: the caller's; each function is compiled for the instructions that `kernel` stands for.
        unsafe {
            match (kernel, self.weight.is_half()) {
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                (Kernel::Amx, true) => crate::amx::block(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx512Bf16, true) => crate::lanes::avx512_bf16(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx512, true) => crate::lanes::avx512_widen(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx512, false) => crate::lanes::avx512(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx2, true) => crate::lanes::avx2_widen(self, block),
                #[cfg(target_arch = "x86_64")]
                (Kernel::Avx2, false) => crate::lanes::avx2(self, block),
                (Kernel::Plain, true) => crate::lanes::plain_widen(self, block),
                (Kernel::Plain, false) => crate::lanes::plain(self, block),
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
