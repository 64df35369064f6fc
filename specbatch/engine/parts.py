"""Makes an engine's parts from its plan: models, pages, buffers, the core, the speculator.

The only place that decides which class serves; the loop just uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specbatch._core import Scheduler
from specbatch.attention.registry import AttentionNeeds, pick_backend
from specbatch.engine.kv_cache import PagedKVCache
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.plan import EnginePlan
from specbatch.engine.sampling_state import SamplingState
from specbatch.engine.step_buffers import StepArrays
from specbatch.engine_options import EngineOptions
from specbatch.models.loading import load_model
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
    cache: PagedKVCache
    runner: ModelRunner
    speculator: Speculator | None  # the one that proposes in Python, if any
    rejection: bool  # verification by min(1, p/q) instead of coupled samples
    attention: str  # backend and why

    def describe(self) -> dict[str, Any]:
        plan = self.plan.describe()
        return {
            **plan,
            "attention": self.attention,
            "speculator": self.speculator and self.speculator.name,
            "resolved": {"dtype": plan["dtype"]},  # choices that change results: a resume repeats them
        }

    def free(self) -> None:
        """Let go of models and pages (the device's memory returns when nothing else refers to them)."""
        self.arrays.device.clear()
        self.speculator = None
        self.cache.storage = torch.empty(0)
        if self.plan.device.type == "cuda":
            torch.cuda.empty_cache()


def build_parts(plan: EnginePlan, options: EngineOptions, tokenizer: HFTokenizer | None = None) -> EngineParts:
    """Load the models and allocate the pages. Raises ValueError naming what does not fit, OutOfMemoryError of torch."""
    tokenizer = tokenizer or HFTokenizer(plan.model)
    cache = PagedKVCache(plan.layout, plan.num_pages, plan.device)
    backend = pick_backend(plan.device, plan.dtype, _needs(plan.target), options.attention)
    runner = ModelRunner(load_model(plan.model, plan.device, plan.dtype), cache.pages("target"), backend.backend)
    speculator: Speculator | None = None
    if plan.draft_model is not None:
        assert plan.draft is not None
        draft_backend = pick_backend(plan.device, plan.dtype, _needs(plan.draft), options.attention)
        draft_runner = ModelRunner(
            load_model(plan.draft_model, plan.device, plan.dtype), cache.pages("draft"), draft_backend.backend
        )
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
    return EngineParts(
        plan=plan,
        core=core,
        arrays=StepArrays(
            max_num_seqs=plan.max_num_seqs,
            max_num_tokens=tokens,
            max_num_logits=plan.max_num_seqs * (plan.max_speculative_tokens + 1),
            pages_per_row=plan.pages_per_row,
            draft_pages_per_row=plan.draft_pages_per_row,
            device=plan.device,
        ),
        sampling=SamplingState(
            plan.max_num_seqs,
            runner.vocab_size,
            plan.device,
            run_seed=options.seed,
            eos_token_ids=tokenizer.eos_token_ids,
        ),
        cache=cache,
        runner=runner,
        speculator=speculator,
        rejection=options.verification == "rejection",
        attention=backend.reason,
    )


def _needs(shape: ModelShape) -> AttentionNeeds:
    return AttentionNeeds(
        head_dim=shape.head_dim,
        sliding_window=any(w is not None for w in shape.sliding_windows),
        softcap=shape.softcap,
        sinks=shape.sinks,
    )
