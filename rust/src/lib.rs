//! The core of specbatch: block pool, queues, scheduling, stop conditions and n-gram proposals of one device.
//!
//! Pure Rust: no Python, no tensors, no I/O. The binding crate hands it plain slices.
#![forbid(unsafe_code)]

pub mod block_pool;
pub mod config;
pub mod error;
pub mod fewer;
pub mod layout;
pub mod ngram;
pub mod prefix;
pub mod queue;
pub mod scheduler;
pub mod sequence;
pub mod shadow;
pub mod slab;
pub mod speculation;
pub mod step;
pub mod stop;
pub mod worth;
