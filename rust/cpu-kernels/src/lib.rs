//! What a CPU does most of the time: attention over paged keys and values, and products with weights packed in
//! advance. Slices in, slices out; every size is checked at the door, since the insides use `unsafe` for SIMD and for
//! threads that write disjoint parts of one output. Knows no rows' histories, no scheduling, no Python.

mod activations;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx_best;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx_heads;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx_rows;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod attention_amx;
#[cfg(target_arch = "x86_64")]
mod attention_avx512;
#[cfg(target_arch = "x86_64")]
mod attention_blocks;
#[cfg(target_arch = "x86_64")]
mod attention_f32;
#[cfg(target_arch = "x86_64")]
mod attention_few;
#[cfg(target_arch = "x86_64")]
mod attention_groups;
#[cfg(target_arch = "x86_64")]
mod attention_sight;
mod attention_task;
#[cfg(target_arch = "x86_64")]
mod avx2;
pub mod decoder;
mod decoder_blocks;
pub mod drafts;
mod epilogue;
pub mod head;
pub mod int8;
mod int8_check;
mod lanes;
mod lanes_int8;
mod lines;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod norm_avx512;
pub mod packed;
pub mod pages;
pub mod product;
mod room;
mod screen;
pub mod simd;
pub mod team;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod token_ops;
