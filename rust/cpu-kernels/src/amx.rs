//! Products in AMX tiles: 16 x 16 sums, bfloat16 pairs, 32 k a step. Stable Rust has no intrinsics for them, hence `asm!`.
//! Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.

use std::arch::asm;

use crate::epilogue::finish;
use crate::packed::{COLUMNS, GROUP, K_STEP, Line};
use crate::product::{Block, Product, Rows};

/// What `ldtilecfg` reads: all eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Bytes from one step's line of a panel to the next.
const LINE_STRIDE: usize = GROUP * 64;
/// Columns of the scratch: four panels.
const WIDE: usize = GROUP * COLUMNS;

/// Rows of a tile of sums.
const ROWS: usize = 32;
/// Bytes ahead of the weights' reading that memory is asked for them.
const DISTANCE: usize = 32 << 10;
/// What of the first cache a block of rows may take.
const FIRST_CACHE: usize = 40 << 10;

/// Whether a block of rows fits the first cache: then it stays there while a chunk's panels stream past it out of the
/// second, else a group of panels stays while the rows do.
pub(crate) fn rows_first(k_padded: usize) -> bool {
    ROWS * k_padded * 2 <= FIRST_CACHE
}

#[repr(C, align(64))]
struct Scratch([f32; 32 * WIDE]);

/// # Safety
/// As `Product::run`; the process may use AMX (`simd::amx_ready`).
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn block(product: &Product<'_>, block: Block) {
    let Rows::Bf16 { at: x, stride } = product.input else { unreachable!("AMX takes bfloat16") };
    let steps = product.weight.k_padded / K_STEP;
    let mut scratch = Scratch([0.0; 32 * WIDE]);
    let last_row = block.row + block.rows;
    let end = block.panel + block.panels;
    let mut tile = |row: usize, strip: usize| {
        let (rows, panels) = (ROWS.min(last_row - row), GROUP.min(end - strip));
        let mut panel = 0;
        // SAFETY: rows are readable up to whole tiles (`Rows`), panels are whole, the scratch holds 32 x 4 panels; tiles
        // are configured below.
        unsafe {
            let (x, out) = (x.add(row * stride), scratch.0.as_mut_ptr());
            while panel < panels {
                let w = product.weight.panel(strip + panel);
                let out = out.add(panel * COLUMNS);
                if rows <= 16 && panels - panel == GROUP {
                    one_by_four(x, stride, w, steps, out);
                    panel += GROUP;
                } else if panels - panel >= 2 {
                    let ahead = product.weight.panel(strip).wrapping_add(DISTANCE / 64 + panel / 2 * 32);
                    if row == block.row {
                        two_by_two::<true>(x, stride, w, ahead, steps, out);
                    } else {
                        two_by_two::<false>(x, stride, w, ahead, steps, out);
                    }
                    panel += 2;
                } else {
                    two_by_one(x, stride, w, steps, out);
                    panel += 1;
                }
            }
            finish(product, product.tile(row, rows, strip, panels), &scratch.0, WIDE);
        }
    };
    // SAFETY: the process may use AMX.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
        if rows_first(product.weight.k_padded) {
            for row in (block.row..last_row).step_by(ROWS) {
                for strip in (block.panel..end).step_by(GROUP) {
                    tile(row, strip);
                }
            }
        } else {
            for strip in (block.panel..end).step_by(GROUP) {
                for row in (block.row..last_row).step_by(ROWS) {
                    tile(row, strip);
                }
            }
        }
        asm!("tilerelease", options(nostack, nomem));
    }
}

/// 16 rows by 4 panels: as many sums as there are tiles for, for few rows.
#[inline(always)]
unsafe fn one_by_four(x: *const u16, stride: usize, w: *const Line, steps: usize, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x} + {xs}]",
            "tileloadd tmm5, [{w} + {ws}]",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tileloadd tmm6, [{w} + {ws} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {ws} + 128]",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tileloadd tmm5, [{w} + {ws} + 192]",
            "tdpbf16ps tmm3, tmm4, tmm5",
            "add {x}, 64", "add {w}, 4096",
            "dec {n}", "jnz 2b",
            "tilestored [{out} + {os}], tmm0",
            "tilestored [{out} + {os} + 64], tmm1",
            "tilestored [{out} + {os} + 128], tmm2",
            "tilestored [{out} + {os} + 192], tmm3",
            x = inout(reg) x => _, xs = in(reg) stride * 2, ws = in(reg) LINE_STRIDE,
            w = inout(reg) w => _, n = inout(reg) steps => _, out = in(reg) out, os = in(reg) WIDE * 4,
            options(nostack),
        );
    }
}

/// Eight prefetches from `p` on.
macro_rules! ask {
    ($at:literal) => {
        concat!(
            "prefetcht1 [{p} + ",
            $at,
            "]\nprefetcht1 [{p} + ",
            $at,
            " + 64]\n",
            "prefetcht1 [{p} + ",
            $at,
            " + 128]\nprefetcht1 [{p} + ",
            $at,
            " + 192]\n",
            "prefetcht1 [{p} + ",
            $at,
            " + 256]\nprefetcht1 [{p} + ",
            $at,
            " + 320]\n",
            "prefetcht1 [{p} + ",
            $at,
            " + 384]\nprefetcht1 [{p} + ",
            $at,
            " + 448]",
        )
    };
}

macro_rules! two_by_two {
    ($first:expr, $second:expr, $third:expr, $fourth:expr, $x:expr, $stride:expr, $w:expr, $ahead:expr, $steps:expr, $out:expr) => {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x} + {xs}]",
            "tileloaddt1 tmm6, [{w} + {ws}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            $first,
            "tileloaddt1 tmm7, [{w} + {ws} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            $second,
            "tileloadd tmm5, [{y} + {xs}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            $third,
            "tdpbf16ps tmm3, tmm5, tmm7",
            $fourth,
            "add {x}, 64", "add {y}, 64", "add {w}, 4096", "add {p}, 4096",
            "dec {n}", "jnz 2b",
            "tilestored [{out} + {os}], tmm0",
            "tilestored [{out} + {os} + 64], tmm1",
            "tilestored [{low} + {os}], tmm2",
            "tilestored [{low} + {os} + 64], tmm3",
            x = inout(reg) $x => _, y = inout(reg) $x.add(16 * $stride) => _, xs = in(reg) $stride * 2,
            ws = in(reg) LINE_STRIDE, w = inout(reg) $w => _, p = inout(reg) $ahead => _,
            n = inout(reg) $steps => _, out = in(reg) $out, low = in(reg) $out.add(16 * WIDE), os = in(reg) WIDE * 4,
            options(nostack),
        )
    };
}

/// 32 rows by 2 panels; `AHEAD`: two kilobytes a step are asked for from `ahead` on.
#[inline(always)]
unsafe fn two_by_two<const AHEAD: bool>(
    x: *const u16,
    stride: usize,
    w: *const Line,
    ahead: *const Line,
    steps: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's; a prefetch may name any address.
    unsafe {
        if AHEAD {
            two_by_two!(ask!("0"), ask!("512"), ask!("1024"), ask!("1536"), x, stride, w, ahead, steps, out);
        } else {
            two_by_two!("", "", "", "", x, stride, w, ahead, steps, out);
        }
    }
}

/// 32 rows by the last, odd panel.
#[inline(always)]
unsafe fn two_by_one(x: *const u16, stride: usize, w: *const Line, steps: usize, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "tilezero tmm0", "tilezero tmm1",
            "2:",
            "tileloadd tmm4, [{x} + {xs}]",
            "tileloadd tmm6, [{w} + {ws}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{y} + {xs}]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            "add {x}, 64", "add {y}, 64", "add {w}, 4096",
            "dec {n}", "jnz 2b",
            "tilestored [{out} + {os}], tmm0",
            "tilestored [{low} + {os}], tmm1",
            x = inout(reg) x => _, y = inout(reg) x.add(16 * stride) => _, xs = in(reg) stride * 2, ws = in(reg) LINE_STRIDE,
            w = inout(reg) w => _,
            n = inout(reg) steps => _, out = in(reg) out, low = in(reg) out.add(16 * WIDE), os = in(reg) WIDE * 4,
            options(nostack),
        );
    }
}
