"""Makes an engine's parts from its plan: models, pages, buffers, the core, the speculator.

The only place that decides which class serves; the loop just uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from specbatch._core import Scheduler
from specbatch.attention.registry import AttentionNeeds, BackendChoice, pick_backend
from specbatch.engine.decode_graphs import DecodeGraphs
from specbatch.engine.graphs import Capturer, CudaCapturer, GraphRunner
from specbatch.engine.kv_cache import PagedKVCache
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.packing import can_pack, load_for_cpu
from specbatch.engine.plan import EnginePlan
from specbatch.engine.quantized import load_int8
from specbatch.engine.row_params import RowParams
from specbatch.engine.sampling_state import SamplingState
from specbatch.engine.static_step import StaticStep
from specbatch.engine.step_buffers import StepArrays
from specbatch.engine_options import EngineOptions
from specbatch.errors import panics_as_errors
from specbatch.models.loading import LoadedModel, load_model
from specbatch.models.support import ModelShape
from specbatch.models.tokenizer import HFTokenizer
from specbatch.speculators.base import Speculator
from specbatch.speculators.draft_model import DraftModelSpeculator


@dataclass(slots=True)
class EngineParts:
    """Everything the step loop drives."""

    plan: EnginePlan
    core: Scheduler
    arrays: StepArrays
    sampling: SamplingState
    rows: RowParams  # of the step at hand
    cache: PagedKVCache
    runner: ModelRunner
    speculator: Speculator | None  # the one that proposes in Python, if any
    rejection: bool  # verification by min(1, p/q) instead of coupled samples
    attention: str  # backend and why
    compute: str = ""  # what multiplies, where it is not simply torch
    graphs: DecodeGraphs | None = None  # decode steps padded and replayed; None: they run as they come
    graphs_off: str = ""  # why there are none

    def describe(self) -> dict[str, Any]:
        plan = self.plan.describe()
        return {
            **plan,
            "attention": self.attention,
            "compute": self.compute or "torch",
            "speculator": self.speculator and self.speculator.name,
            "cuda_graphs": self.graphs.describe() if self.graphs else {"enabled": False, "reason": self.graphs_off},
            "resolved": {"dtype": plan["dtype"]},  # choices that change results: a resume repeats them
        }

    def free(self) -> None:
        """Let go of models and pages (the device's memory returns when nothing else refers to them)."""
        self.arrays.device.clear()
        self.speculator = None
        if self.graphs is not None:
            self.graphs.runner.turn_off("the engine is closed")
            self.graphs = None
        self.cache.storage = torch.empty(0)
        if self.plan.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(slots=True)
class Models:
    """What takes long to load and outlives a change of the page pool."""

    target: LoadedModel
    draft: LoadedModel | None
    attention: BackendChoice
    draft_attention: BackendChoice | None
    compute: str = ""  # what multiplies, where it is not simply torch


def build_parts(
    plan: EnginePlan, options: EngineOptions, tokenizer: HFTokenizer | None = None, models: Models | None = None
) -> EngineParts:
    """Load the models (unless they are given) and allocate the pages. Raises ValueError naming what does not fit,
    OutOfMemoryError of torch."""
    tokenizer = tokenizer or HFTokenizer(plan.model)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)  # of this thread: events, streams and graphs are the current device's
    models = models or load_models(plan, options)
    if plan.device.type == "cuda" and options.kv_memory_bytes is None:
        from specbatch.engine.memory_fit import CudaMeter, fit_pages

        plan = fit_pages(plan, options, models, tokenizer, CudaMeter(plan.device))
    parts = assemble(plan, options, models, tokenizer)
    parts.graphs_off = why_no_graphs(plan, options, models)
    if not parts.graphs_off:
        parts.graphs = make_graphs(parts, CudaCapturer(plan.device))
        parts.graphs.prepare()
    return parts


@panics_as_errors()
def load_models(plan: EnginePlan, options: EngineOptions) -> Models:
    """Load target and draft, packed where that serves. Raises what loading raises, InternalError for a panic in Rust."""

    def load(path: str, choice: BackendChoice) -> tuple[LoadedModel, str]:
        if not can_pack(plan.device, options.attention):
            return load_model(path, plan.device, plan.dtype), ""
        through_transformers = partial(load_model, path, plan.device, plan.dtype)
        model, compute = load_for_cpu(path, plan.dtype, choice.backend, plan.threads, through_transformers)
        if plan.quantize == "none" or (model.packed is None and path == plan.draft_model):
            return model, compute  # a draft changes no answers: it may stay as it is
        if model.packed is None:
            raise ValueError(f"--quantize int8: {path} cannot run from packed weights here ({compute}): leave it out")
        del model  # its memory first
        return load_int8(path, plan.dtype, plan.threads, through_transformers)

    attention = backend_for(plan, options, plan.target)
    target, compute = load(plan.model, attention)
    if plan.draft_model is None:
        return Models(target, None, attention, None, compute)
    assert plan.draft is not None
    draft_attention = backend_for(plan, options, plan.draft)
    draft, _ = load(plan.draft_model, draft_attention)
    return Models(target, draft, attention, draft_attention, compute)


def backend_for(plan: EnginePlan, options: EngineOptions, shape: ModelShape) -> BackendChoice:
    """The attention backend that a model of this shape runs on."""
    return pick_backend(plan.device, plan.dtype, _needs(shape), options.attention)


def assemble(plan: EnginePlan, options: EngineOptions, models: Models, tokenizer: HFTokenizer) -> EngineParts:
    """Everything of an engine over loaded models, which it takes over, without graphs."""
    cache = PagedKVCache(plan.layout, plan.num_pages, plan.device)
    runner = ModelRunner(models.target, cache.pages("target"), models.attention.backend)
    speculator: Speculator | None = None
    if models.draft is not None:
        assert models.draft_attention is not None
        draft_runner = ModelRunner(models.draft, cache.pages("draft"), models.draft_attention.backend)
        speculator = DraftModelSpeculator(
            draft_runner, plan.layout.draft_block_size, with_probs=options.verification == "rejection"
        )
    eos = np.array(tokenizer.eos_token_ids, np.int32)
    tokens = max(plan.max_num_batched_tokens, plan.max_num_seqs * (plan.max_speculative_tokens + 1))
    core = Scheduler(
        num_pages=plan.num_pages,
        block_size=plan.layout.block_size,
        draft_block_size=plan.layout.draft_block_size,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        draft_max_model_len=plan.draft_max_model_len,
        max_speculative_tokens=plan.max_speculative_tokens,
        eos_token_ids=eos,
        prefix_cache=options.prefix_cache,
    )
    core.set_token_bytes(*tokenizer.token_bytes(runner.vocab_size))
    sampling = SamplingState(
        plan.max_num_seqs,
        runner.vocab_size,
        plan.device,
        run_seed=options.seed,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    return EngineParts(
        plan=plan,
        core=core,
        arrays=StepArrays(
            max_num_seqs=plan.max_num_seqs,
            max_num_tokens=tokens,
            max_num_logits=plan.max_num_seqs * (plan.max_speculative_tokens + 1),
            pages_per_row=plan.pages_per_row,
            draft_pages_per_row=plan.draft_pages_per_row,
            block_size=plan.layout.block_size,
            draft_block_size=plan.layout.draft_block_size,
            device=plan.device,
        ),
        sampling=sampling,
        rows=sampling.new_rows(plan.max_num_seqs),
        cache=cache,
        runner=runner,
        speculator=speculator,
        rejection=options.verification == "rejection",
        attention=models.attention.reason,
        compute=models.compute,
    )


def why_no_graphs(plan: EnginePlan, options: EngineOptions, models: Models) -> str:
    """Why decode steps of such an engine run as they come; empty: graphs serve them."""
    if plan.device.type != "cuda":
        return "graphs are for CUDA devices"
    if options.cuda_graphs == "off":
        return "asked for"
    if options.verification == "rejection":
        return "rejection verification keeps whole distributions of drafts, which graphs do not"
    for choice in (models.attention, models.draft_attention):
        if choice is not None and choice.backend.name != "triton":
            return f"{choice.backend.name} attention looks at lengths on the host"
    return ""


def make_graphs(parts: EngineParts, capturer: Capturer | None, off_reason: str | None = None) -> DecodeGraphs:
    """Decode steps of the parts, padded to few shapes and captured by `capturer` (None: run eagerly all the same)."""
    plan, sampling = parts.plan, parts.sampling
    draft = parts.speculator.runner if isinstance(parts.speculator, DraftModelSpeculator) else None
    step = StaticStep(
        parts.arrays,
        parts.rows,
        parts.runner,
        draft,
        max_speculative_tokens=plan.max_speculative_tokens,
        max_model_len=plan.max_model_len,
        draft_block_size=plan.layout.draft_block_size,
    )
    runner = GraphRunner(capturer, off_reason)
    return DecodeGraphs(step, runner, max_num_seqs=plan.max_num_seqs, generation=lambda: sampling.generation)


def _needs(shape: ModelShape) -> AttentionNeeds:
    return AttentionNeeds(
        head_dim=shape.head_dim,
        sliding_window=any(w is not None for w in shape.sliding_windows),
        softcap=shape.softcap,
        sinks=shape.sinks,
    )
