//! Weights of a linear layer, rearranged once so that a product reads them from front to back: groups of four panels of 16
//! output columns; within a group, for each step of k, one cache line a panel. bfloat16 lines hold two k of each column side
//! by side, as the processors' bfloat16 instructions take them, int8 lines four. k is padded with zeros to a multiple of 32
//! (int8: 64), columns to whole groups.

use crate::int8::Columns;
use crate::lines::Lines;
use crate::pages::Element;

/// Output columns of a panel.
pub const COLUMNS: usize = 16;
/// Panels whose lines lie side by side: one stream for the prefetchers, whatever the kernel takes at a time.
pub const GROUP: usize = 4;
/// k is padded to a multiple of this (one AMX tile of bfloat16).
pub const K_STEP: usize = 32;

/// What weights or activations are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    F32,
    Bf16,
    Int8,
}

impl Number {
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Int8 => 1,
        }
    }

    /// k rounded up to whole steps: the row length of activations.
    #[must_use]
    pub fn padded(self, k: usize) -> usize {
        if self == Self::Int8 { crate::int8::padded(k) } else { padded(k) }
    }
}

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Line(pub [u32; 16]);

/// The stored numbers, as cache lines.
pub enum Panels {
    /// Line k: the panel's 16 columns in float32.
    F32(Lines),
    /// Line k: k = 2 line and 2 line + 1 of its 16 columns in bfloat16.
    Bf16(Lines),
    /// Line k: k = 4 line to 4 line + 3 of its 16 columns in int8 (see `int8.rs`).
    Int8(Lines, Columns),
}

/// W of y = x W^T + bias.
pub struct Packed {
    pub columns: usize,
    pub k: usize,
    pub k_padded: usize,
    pub panels: Panels,
    /// [columns]
    pub bias: Option<Vec<f32>>,
}

/// k rounded up to whole steps: the row length of activations.
#[must_use]
pub fn padded(k: usize) -> usize {
    k.next_multiple_of(K_STEP)
}

impl Packed {
    /// Pack rows of `weight` [columns, k] in the order that `row_of` gives them. With `half` they are stored in bfloat16,
    /// rounded to nearest even where they are not bfloat16 already.
    ///
    /// # Errors
    /// A message when there is no memory.
    ///
    /// # Panics
    /// When the sizes do not fit.
    pub fn new<E: Element>(parts: &[&[E]], k: usize, half: bool, interleave: bool) -> Result<Self, String> {
        assert!(k > 0 && parts.iter().all(|p| p.len().is_multiple_of(k)), "weights must be [columns, {k}]");
        let rows: Vec<&[E]> = order(parts, k, interleave);
        let (columns, k_padded) = (rows.len(), padded(k));
        let lines_a_group = GROUP * if half { k_padded / 2 } else { k_padded };
        let mut lines = Lines::zeros(columns.div_ceil(GROUP * COLUMNS) * lines_a_group)?;
        for (group, rows) in lines.as_mut_slice().chunks_exact_mut(lines_a_group).zip(rows.chunks(GROUP * COLUMNS)) {
            for (column, row) in rows.iter().enumerate() {
                let (panel, column) = (column / COLUMNS, column % COLUMNS);
                for (at, &value) in row.iter().enumerate() {
                    let value = value.to_f32();
                    if half {
                        let bits = u32::from(u16::from_f32(value)) << (16 * (at % 2));
                        group[at / 2 * GROUP + panel].0[column] |= bits;
                    } else {
                        group[at * GROUP + panel].0[column] = value.to_bits();
                    }
                }
            }
        }
        let panels = if half { Panels::Bf16(lines) } else { Panels::F32(lines) };
        Ok(Self { columns, k, k_padded, panels, bias: None })
    }

    /// # Panics
    /// When there is not one bias a column.
    #[must_use]
    pub fn with_bias(mut self, bias: Option<Vec<f32>>) -> Self {
        assert!(bias.as_ref().is_none_or(|b| b.len() == self.columns), "one bias a column");
        self.bias = bias;
        self
    }

    #[must_use]
    pub fn num_panels(&self) -> usize {
        self.columns.div_ceil(COLUMNS)
    }

    /// The first line of a panel; the next step of k is `GROUP` lines on.
    #[inline(always)]
    pub(crate) fn panel(&self, panel: usize) -> *const Line {
        let at = panel / GROUP * self.steps() * GROUP + panel % GROUP;
        self.lines()[at..].as_ptr()
    }

    /// Lines of a panel.
    #[must_use]
    pub fn steps(&self) -> usize {
        match self.panels {
            Panels::F32(_) => self.k_padded,
            Panels::Bf16(_) => self.k_padded / 2,
            Panels::Int8(..) => self.k_padded / 4,
        }
    }

    #[must_use]
    pub fn lines(&self) -> &[Line] {
        match &self.panels {
            Panels::F32(lines) | Panels::Bf16(lines) | Panels::Int8(lines, _) => lines,
        }
    }

    /// The dtype in which the weights are stored.
    #[must_use]
    pub fn number(&self) -> Number {
        match self.panels {
            Panels::F32(_) => Number::F32,
            Panels::Bf16(_) => Number::Bf16,
            Panels::Int8(..) => Number::Int8,
        }
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.lines())
    }
}

/// The parts one after the other, or, with `interleave`, a panel of the first, a panel of the second, and so on: gate and
/// up projections so that both halves of an output are at hand together.
pub(crate) fn order<'a, E>(parts: &[&'a [E]], k: usize, interleave: bool) -> Vec<&'a [E]> {
    if !interleave {
        return parts.iter().flat_map(|p| p.chunks_exact(k)).collect();
    }
    let rows = parts[0].len() / k;
    assert!(parts.iter().all(|p| p.len() == rows * k), "interleaved parts must be alike");
    assert!(rows.is_multiple_of(COLUMNS), "interleaved parts must fill whole panels");
    (0..rows / COLUMNS)
        .flat_map(|panel| parts.iter().flat_map(move |p| p[panel * COLUMNS * k..][..COLUMNS * k].chunks_exact(k)))
        .collect()
}

/// Is every number a bfloat16 as it is? Then storing it so loses nothing.
#[must_use]
pub fn all_half(values: &[f32]) -> bool {
    values.iter().all(|v| v.to_bits().trailing_zeros() >= 16)
}
