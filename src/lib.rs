//! `specbatch._core`: the Python boundary of specbatch-core, one file an exposed class. Checks arrays, hands slices to
//! the core, wraps what comes back; decides nothing.
#![forbid(unsafe_code)]

mod acceptance;
mod arrays;
mod cpu_decoder;
mod cpu_drafts;
mod cpu_kernels;
mod finished;
mod ngram;
mod scheduler;
mod step_buffers;
mod step_info;

use pyo3::prelude::*;
use specbatch_core::sequence::{FinishReason, RowError};
use specbatch_core::speculation::Method;
use specbatch_core::step::StepKind;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    for (name, value) in [
        ("STEP_IDLE", StepKind::Idle as i32),
        ("STEP_PREFILL", StepKind::Prefill as i32),
        ("STEP_DECODE", StepKind::Decode as i32),
        ("STEP_DRAFT_PREFILL", StepKind::DraftPrefill as i32),
        ("METHOD_NONE", Method::None as i32),
        ("METHOD_NGRAM", Method::Ngram as i32),
        ("METHOD_DRAFT", Method::Draft as i32),
        ("METHOD_EXTERNAL", Method::External as i32),
        ("METHOD_NGRAM_SHADOW", Method::NgramShadow as i32),
        ("FINISH_STOP", FinishReason::Stop as i32),
        ("FINISH_LENGTH", FinishReason::Length as i32),
        ("FINISH_ERROR", FinishReason::Error as i32),
        ("FINISH_ABORTED", FinishReason::Aborted as i32),
        ("ERROR_NONE", RowError::None as i32),
        ("ERROR_PROMPT_TOO_LONG", RowError::PromptTooLong as i32),
        ("ERROR_TOO_FEW_PAGES", RowError::TooFewPages as i32),
        ("ERROR_EMPTY_PROMPT", RowError::EmptyPrompt as i32),
    ] {
        module.add(name, value)?;
    }
    module.add_class::<acceptance::AcceptanceCounts>()?;
    module.add_class::<finished::FinishedBatch>()?;
    module.add_class::<scheduler::Scheduler>()?;
    module.add_class::<step_buffers::StepBuffers>()?;
    module.add_class::<step_info::StepInfo>()?;
    module.add_function(wrap_pyfunction!(ngram::find_ngram, module)?)?;
    module.add_class::<cpu_decoder::CpuDecoder>()?;
    module.add_class::<cpu_kernels::CpuLayerPages>()?;
    module.add_function(wrap_pyfunction!(cpu_drafts::cpu_draft, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_drafts::accept_drafts, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_kernels::cpu_write_kv, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_kernels::cpu_attention, module)?)?;
    Ok(())
}
