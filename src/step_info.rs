//! `StepInfo`: one step in plain integers.

use pyo3::prelude::*;
use specbatch_core::step::StepInfo as Core;

macro_rules! step_info {
    ($($field:ident: $type:ty),*) => {
        /// What one step is: plain ints, frozen.
        #[pyclass(frozen, get_all, module = "specbatch._core")]
        pub struct StepInfo { $($field: $type),* }

        impl From<Core> for StepInfo {
            fn from(info: Core) -> Self {
                Self { $($field: info.$field),* }
            }
        }

        #[pymethods]
        impl StepInfo {
            fn __repr__(&self) -> String {
                let fields = [$(format!("{}={}", stringify!($field), self.$field)),*];
                format!("StepInfo({})", fields.join(", "))
            }
        }
    };
}

step_info!(
    step_id: i64,
    kind: i32,
    method: i32,
    num_rows: usize,
    num_tokens: usize,
    num_logits: usize,
    max_query_len: usize,
    max_seq_len: usize,
    total_seq_len: usize,
    num_draft_tokens: usize,
    max_draft_tokens: usize,
    draft_num_tokens: usize,
    draft_max_query_len: usize,
    draft_max_seq_len: usize,
    num_running: usize,
    num_waiting: usize,
    num_finished: usize,
    num_preempted: usize,
    num_draft_dropped: usize,
    free_pages: usize,
    cached_pages: usize,
    target_pages: usize,
    draft_pages: usize
);
