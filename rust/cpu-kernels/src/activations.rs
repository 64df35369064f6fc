//! Activations of a step's tokens as a kernel takes them: rows padded in k, whole tiles of rows, in the kernel's numbers.

use crate::packed::Number;
use crate::pages::Element;
use crate::product::{Activation, Output, Rows};
use crate::room::Room;
use crate::team::Team;
use crate::token_ops::{self, Sink};

/// Grows to what the largest step needs.
pub(crate) struct Buffer {
    number: Number,
    k: usize,
    stride: usize,
    wide: Room<f32>,
    half: Room<u16>,
    int8: Room<i8>,
    /// Of int8: one a token.
    scales: Room<f32>,
    /// A gated output's numbers until they can be rounded: a token's scale is known when all of its columns are there.
    staged: Room<f32>,
}

impl Buffer {
    pub(crate) fn new(k: usize, number: Number) -> Self {
        let stride = number.padded(k);
        let (wide, half, int8) = (Room::new(), Room::new(), Room::new());
        Self { number, k, stride, wide, half, int8, scales: Room::new(), staged: Room::new() }
    }

    /// Make room for `rows` tokens.
    pub(crate) fn fit(&mut self, rows: usize) {
        let rows = rows.next_multiple_of(32);
        let size = rows * self.stride;
        match self.number {
            Number::F32 => self.wide.fit(size),
            Number::Bf16 => self.half.fit(size),
            Number::Int8 => {
                self.int8.fit(size);
                self.scales.fit(rows);
            }
        }
    }

    /// As `fit`, for `gated` too.
    pub(crate) fn fit_gated(&mut self, rows: usize) {
        self.fit(rows);
        if self.number == Number::Int8 {
            self.staged.fit(rows * self.k);
        }
    }

    pub(crate) fn rows(&self) -> Rows {
        let stride = self.stride;
        match self.number {
            Number::F32 => Rows::F32 { at: self.wide.as_ptr(), stride },
            Number::Bf16 => Rows::Bf16 { at: self.half.as_ptr(), stride },
            Number::Int8 => Rows::Int8 { at: self.int8.as_ptr(), stride, scales: self.scales.as_ptr() },
        }
    }

    /// What the first `rows` tokens hold, [rows, k]; not of int8.
    pub(crate) fn values(&self, rows: usize) -> Vec<f32> {
        let row = |at: usize| at * self.stride..at * self.stride + self.k;
        match self.number {
            Number::F32 => (0..rows).flat_map(|r| &self.wide[row(r)]).copied().collect(),
            Number::Bf16 => (0..rows).flat_map(|r| &self.half[row(r)]).map(|v| v.to_f32()).collect(),
            Number::Int8 => unreachable!("numbers that were rounded"),
        }
    }

    pub(crate) fn sink(&mut self) -> Sink {
        let stride = self.stride;
        match self.number {
            Number::F32 => Sink::F32 { at: self.wide.as_mut_ptr(), stride },
            Number::Bf16 => Sink::Bf16 { at: self.half.as_mut_ptr(), stride },
            Number::Int8 => Sink::Int8 { at: self.int8.as_mut_ptr(), stride, scales: self.scales.as_mut_ptr() },
        }
    }

    /// The rows of a bfloat16 buffer, `padded` numbers from one to the next.
    pub(crate) fn halves(&mut self) -> *mut u16 {
        debug_assert!(self.number == Number::Bf16);
        self.half.as_mut_ptr()
    }

    /// Where a product leaves gated numbers; `settle` makes them rows.
    pub(crate) fn gated(&mut self, activation: Activation) -> Output {
        let stride = self.stride;
        match self.number {
            Number::F32 => Output::Gated { at: self.wide.as_mut_ptr(), stride, activation },
            Number::Bf16 => Output::GatedHalf { at: self.half.as_mut_ptr(), stride, activation },
            Number::Int8 => Output::Gated { at: self.staged.as_mut_ptr(), stride: self.k, activation },
        }
    }

    /// Round what `gated` left of `rows` tokens, where that is still to be done.
    pub(crate) fn settle(&mut self, team: &Team, rows: usize) {
        if self.number == Number::Int8 {
            let to = self.sink();
            token_ops::convert(team, &self.staged, self.k, rows, to);
        }
    }
}
