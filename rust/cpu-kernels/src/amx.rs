//! Products in AMX tiles: 16 x 16 sums; bfloat16 pairs, 32 k a step, or int8 fours, 64 k. Stable Rust has no intrinsics for them, hence `asm!`.
//! Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3.

use std::arch::asm;

use crate::epilogue::finish;
use crate::int8::dequantise;
use crate::packed::{COLUMNS, GROUP, Line, Number, Packed};
use crate::product::{Block, Product, Rows};

/// What `ldtilecfg` reads: all eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
pub(crate) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

pub(crate) static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Bytes from one step's line of a panel to the next.
pub(crate) const LINE_STRIDE: usize = GROUP * 64;
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
pub(crate) fn rows_first(weight: &Packed) -> bool {
    ROWS * weight.k_padded * weight.number().bytes() <= FIRST_CACHE
}

#[repr(C, align(64))]
struct Scratch([f32; 32 * WIDE]);

/// # Safety
/// As `Product::run`; the process may use AMX (`simd::amx_ready`).
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn bf16(product: &Product<'_>, block: Block) {
    let Rows::Bf16 { at, stride } = product.input else { unreachable!("it takes bfloat16") };
    // SAFETY: the caller's.
    unsafe { run(product, block, at.cast(), 2 * stride, &HALF) }
}

/// # Safety
/// As `bf16`, with products of int8 (`simd::amx_int8_ready`).
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn int8(product: &Product<'_>, block: Block) {
    let Rows::Int8 { at, stride, .. } = product.input else { unreachable!("it takes int8") };
    // SAFETY: the caller's.
    unsafe { run(product, block, at.cast(), stride, &INT8) }
}

/// Rows of 64 bytes a step, `stride` bytes apart; weights of one step are a tile of lines. Returns the sums' bits.
type Tiles = unsafe fn(x: *const u8, stride: usize, w: *const Line, steps: usize, out: *mut f32);

/// As `Tiles`, with the place that the processor may be asked to bring nearer.
type TilesAhead =
    unsafe fn(x: *const u8, stride: usize, w: *const Line, ahead: *const Line, steps: usize, out: *mut f32);

/// One dtype's ways to fill tiles of sums.
struct Shapes {
    one_by_four: Tiles,
    two_by_two: TilesAhead,
    two_by_two_ahead: TilesAhead,
    two_by_one: Tiles,
}

/// # Safety
/// As `bf16`; `x` are the input's rows of `x_stride` bytes, `shapes` are of its dtype.
// NOTE: with the instructions itself, not inlined into functions that have them: its closure would be without.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn run(product: &Product<'_>, block: Block, x: *const u8, x_stride: usize, shapes: &Shapes) {
    let steps = product.weight.steps() / 16;
    let is_int8 = product.weight.number() == Number::Int8;
    let mut scratch = Scratch([0.0; 32 * WIDE]);
    let last_row = block.row + block.rows;
    let end = block.panel + block.panels;
    let mut tile = |row: usize, strip: usize| {
        let (rows, panels) = (ROWS.min(last_row - row), GROUP.min(end - strip));
        let mut panel = 0;
        // SAFETY: rows are readable up to whole tiles (`Rows`), panels are whole, the scratch holds 32 x 4 panels; tiles
        // are configured below.
        unsafe {
            let (x, out) = (x.add(row * x_stride), scratch.0.as_mut_ptr());
            while panel < panels {
                let w = product.weight.panel(strip + panel);
                let out = out.add(panel * COLUMNS);
                if rows <= 16 && panels - panel == GROUP {
                    (shapes.one_by_four)(x, x_stride, w, steps, out);
                    panel += GROUP;
                } else if panels - panel >= 2 {
                    let ahead = product.weight.panel(strip).wrapping_add(DISTANCE / 64 + panel / 2 * 32);
                    if row == block.row {
                        (shapes.two_by_two_ahead)(x, x_stride, w, ahead, steps, out);
                    } else {
                        (shapes.two_by_two)(x, x_stride, w, ahead, steps, out);
                    }
                    panel += 2;
                } else {
                    (shapes.two_by_one)(x, x_stride, w, steps, out);
                    panel += 1;
                }
            }
            let tile = product.tile(row, rows, strip, panels);
            if is_int8 {
                dequantise(product, tile, &mut scratch.0, WIDE, false);
            }
            finish(product, tile, &scratch.0, WIDE);
        }
    };
    // SAFETY: the process may use AMX.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
        if rows_first(product.weight) {
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

/// The loop of 32 rows by 2 panels, with what is asked for meanwhile.
macro_rules! two_by_two {
    ($dot:literal, $first:expr, $second:expr, $third:expr, $fourth:expr, $x:expr, $stride:expr, $w:expr, $ahead:expr, $steps:expr, $out:expr) => {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{x} + {xs}]",
            "tileloaddt1 tmm6, [{w} + {ws}]",
            concat!($dot, " tmm0, tmm4, tmm6"),
            $first,
            "tileloaddt1 tmm7, [{w} + {ws} + 64]",
            concat!($dot, " tmm1, tmm4, tmm7"),
            $second,
            "tileloadd tmm5, [{y} + {xs}]",
            concat!($dot, " tmm2, tmm5, tmm6"),
            $third,
            concat!($dot, " tmm3, tmm5, tmm7"),
            $fourth,
            "add {x}, 64", "add {y}, 64", "add {w}, 4096", "add {p}, 4096",
            "dec {n}", "jnz 2b",
            "tilestored [{out} + {os}], tmm0",
            "tilestored [{out} + {os} + 64], tmm1",
            "tilestored [{low} + {os}], tmm2",
            "tilestored [{low} + {os} + 64], tmm3",
            x = inout(reg) $x => _, y = inout(reg) $x.add(16 * $stride) => _, xs = in(reg) $stride,
            ws = in(reg) LINE_STRIDE, w = inout(reg) $w => _, p = inout(reg) $ahead => _,
            n = inout(reg) $steps => _, out = in(reg) $out, low = in(reg) $out.add(16 * WIDE), os = in(reg) WIDE * 4,
            options(nostack),
        )
    };
}

/// The loops over k, with an instruction for one step.
macro_rules! tiles {
    ($name:ident, $dot:literal) => {
        const $name: Shapes = {
        /// 16 rows by 4 panels: as many sums as there are tiles for, for few rows.
        unsafe fn one_by_four(x: *const u8, stride: usize, w: *const Line, steps: usize, out: *mut f32) {
            // SAFETY: the caller's.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "2:",
                    "tileloadd tmm4, [{x} + {xs}]",
                    "tileloadd tmm5, [{w} + {ws}]",
                    concat!($dot, " tmm0, tmm4, tmm5"),
                    "tileloadd tmm6, [{w} + {ws} + 64]",
                    concat!($dot, " tmm1, tmm4, tmm6"),
                    "tileloadd tmm7, [{w} + {ws} + 128]",
                    concat!($dot, " tmm2, tmm4, tmm7"),
                    "tileloadd tmm5, [{w} + {ws} + 192]",
                    concat!($dot, " tmm3, tmm4, tmm5"),
                    "add {x}, 64", "add {w}, 4096",
                    "dec {n}", "jnz 2b",
                    "tilestored [{out} + {os}], tmm0",
                    "tilestored [{out} + {os} + 64], tmm1",
                    "tilestored [{out} + {os} + 128], tmm2",
                    "tilestored [{out} + {os} + 192], tmm3",
                    x = inout(reg) x => _, xs = in(reg) stride, ws = in(reg) LINE_STRIDE,
                    w = inout(reg) w => _, n = inout(reg) steps => _, out = in(reg) out, os = in(reg) WIDE * 4,
                    options(nostack),
                );
            }
        }

            /// 32 rows by 2 panels; of `ahead`, two kilobytes a step are asked for.
            unsafe fn two_by_two_ahead(
                x: *const u8,
                stride: usize,
                w: *const Line,
                ahead: *const Line,
                steps: usize,
                out: *mut f32,
            ) {
                // SAFETY: the caller's; a prefetch may name any address.
                unsafe {
                    two_by_two!($dot, ask!("0"), ask!("512"), ask!("1024"), ask!("1536"), x, stride, w, ahead, steps, out);
                }
            }

            /// As `two_by_two_ahead`, without asking.
            unsafe fn two_by_two(
                x: *const u8,
                stride: usize,
                w: *const Line,
                ahead: *const Line,
                steps: usize,
                out: *mut f32,
            ) {
                // SAFETY: the caller's.
                unsafe {
                    two_by_two!($dot, "", "", "", "", x, stride, w, ahead, steps, out);
                }
            }

        /// 32 rows by the last, odd panel.
        unsafe fn two_by_one(x: *const u8, stride: usize, w: *const Line, steps: usize, out: *mut f32) {
            // SAFETY: the caller's.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1",
                    "2:",
                    "tileloadd tmm4, [{x} + {xs}]",
                    "tileloadd tmm6, [{w} + {ws}]",
                    concat!($dot, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm5, [{y} + {xs}]",
                    concat!($dot, " tmm1, tmm5, tmm6"),
                    "add {x}, 64", "add {y}, 64", "add {w}, 4096",
                    "dec {n}", "jnz 2b",
                    "tilestored [{out} + {os}], tmm0",
                    "tilestored [{low} + {os}], tmm1",
                    x = inout(reg) x => _, y = inout(reg) x.add(16 * stride) => _, xs = in(reg) stride, ws = in(reg) LINE_STRIDE,
                    w = inout(reg) w => _,
                    n = inout(reg) steps => _, out = in(reg) out, low = in(reg) out.add(16 * WIDE), os = in(reg) WIDE * 4,
                    options(nostack),
                );
            }
        }

            Shapes { one_by_four, two_by_two, two_by_two_ahead, two_by_one }
        };
    };
}

tiles!(HALF, "tdpbf16ps");
tiles!(INT8, "tdpbssd");
