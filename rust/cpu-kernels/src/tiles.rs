//! AMX tiles: their shapes, and an instruction each. The compiler has no stable intrinsics for tiles, hence the assembler; no
//! code that it makes itself touches them, so what stands in a tile stays there from one statement to the next.

use std::arch::asm;

/// Bytes of a tile's row, in tiles that are packed.
pub(crate) const ROW: usize = 64;

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
pub(crate) struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// Eight tiles of so many rows of 64 bytes.
    pub(crate) const fn new(rows: [usize; 8]) -> Self {
        let mut all = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut i = 0;
        while i < 8 {
            all.row_bytes[i] = 64;
            all.rows[i] = rows[i] as u8;
            i += 1;
        }
        all
    }
}

/// # Safety
/// The process may use AMX; no tile has more than 16 rows.
pub(crate) unsafe fn configure(configuration: &Configuration) {
    // SAFETY: the configuration is of palette 1, the rest is the caller's.
    unsafe { asm!("ldtilecfg [{at}]", at = in(reg) configuration, options(readonly, nostack, preserves_flags)) };
}

/// Empty tiles cost the system nothing to keep.
///
/// # Safety
/// The process may use AMX.
pub(crate) unsafe fn release() {
    // SAFETY: the caller's.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
}

macro_rules! zero {
    ($tile:literal) => {
        std::arch::asm!(concat!("tilezero tmm", $tile), options(nomem, nostack, preserves_flags))
    };
}
macro_rules! load {
    ($tile:literal, $at:expr, $stride:expr) => {
        $crate::tiles::load!("", $tile, $at, $stride)
    };
    // "t1": what is read once leaves the first cache as it is.
    ($kind:literal, $tile:literal, $at:expr, $stride:expr) => {
        std::arch::asm!(concat!("tileloadd", $kind, " tmm", $tile, ", [{at} + {stride}]"), at = in(reg) $at,
            stride = in(reg) $stride, options(readonly, nostack, preserves_flags))
    };
}
macro_rules! store {
    ($tile:literal, $at:expr) => {
        std::arch::asm!(concat!("tilestored [{at} + {stride}], tmm", $tile), at = in(reg) $at, stride = in(reg) $crate::tiles::ROW,
            options(nostack, preserves_flags))
    };
}
/// First += second * third.
macro_rules! multiply {
    ($sum:literal, $left:literal, $right:literal) => {
        std::arch::asm!(
            concat!("tdpbf16ps tmm", $sum, ", tmm", $left, ", tmm", $right),
            options(nomem, nostack, preserves_flags)
        )
    };
}
pub(crate) use {load, multiply, store, zero};
