"""Puts an engine together from its options: plan, parts, costs, policy. What the command line and the Python API call.

Knows every layer below the command line; owns none of their work.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specbatch import __version__
from specbatch.cache import cache_folder
from specbatch.control.controller import Controller, ControllerOptions, FixedPolicy, Policy
from specbatch.control.cost_model import AffineCost, CostCache, StepCost, roofline
from specbatch.control.profiler import profile
from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM, METHOD_NONE
from specbatch.engine.engine import Engine
from specbatch.engine.host_cost import host_seconds
from specbatch.engine.parts import EngineParts, build_parts
from specbatch.engine.plan import DEFAULT_K, EnginePlan, plan_engine
from specbatch.engine.profiling import StepMeasure
from specbatch.engine_options import EngineOptions
from specbatch.models.support import ModelShape
from specbatch.models.tokenizer import HFTokenizer

LogDecision = Callable[[dict[str, Any]], None]
Say = Callable[[str], None]
KS = (1, 2, 3, 4, 6, 8)

# What --no-profile assumes to be reached: (bytes a second, FLOP a second, seconds of overhead a step).
_ASSUMED = {"cpu": (20e9, 100e9, 2e-3), "cuda": (1.2e12, 150e12, 1e-3)}


def make_engine(
    options: EngineOptions,
    *,
    log_decision: LogDecision | None = None,
    tokenizer: HFTokenizer | None = None,
    say: Say | None = None,
) -> Engine:
    """Load models and make an engine ready to step. Raises ValueError naming the option or model and the fix.

    `say` hears what takes a while (loading, measuring step times).
    """
    plan = plan_engine(options)
    parts = build_parts(plan, options, tokenizer)
    return Engine(parts, make_policy(options, parts, log_decision, say))


def make_policy(
    options: EngineOptions, parts: EngineParts, log: LogDecision | None = None, say: Say | None = None
) -> Policy:
    """The policy that --speculate names."""
    k = options.num_speculative_tokens
    if options.speculate == "off" or k == 0:
        return FixedPolicy(METHOD_NONE, 0, log=log)
    if options.speculate != "auto":
        method = METHOD_DRAFT if options.speculate == "draft" else METHOD_NGRAM
        return FixedPolicy(method, DEFAULT_K if k is None else k, log=log)
    return Controller(controller_options(options, parts), step_costs(options, parts, say), log=log)


def controller_options(
    options: EngineOptions, parts: EngineParts, max_num_seqs: int | None = None
) -> ControllerOptions:
    """What `auto` may choose from on this engine. max_num_seqs: rows at once, as planned if None."""
    k = options.num_speculative_tokens
    layout, drafting = parts.plan.layout, parts.speculator is not None
    return ControllerOptions(
        methods=(METHOD_NGRAM, METHOD_DRAFT) if drafting else (METHOD_NGRAM,),
        max_num_seqs=max_num_seqs or parts.plan.max_num_seqs,
        ks=KS if k is None else (k,),
        draft_kv_ratio=layout.draft.bytes_per_token / layout.target.bytes_per_token
        if drafting and layout.draft
        else 0.0,
        block_size=layout.block_size,
        can_probe_draft=drafting,
    )


def step_costs(options: EngineOptions, parts: EngineParts, say: Say | None = None) -> StepCost:
    """Step times of this engine: from the disk, else measured now (and kept), else assumed with --no-profile."""
    if not options.profile:
        if say is not None:
            say("step times are assumed from the models' sizes (--no-profile), and corrected as steps run")
        return assumed_costs(parts.plan)
    cache, key = CostCache(cache_folder()), cost_key(parts)
    cost = cache.load(key)
    if cost is not None:
        return cost
    measured = profile(
        StepMeasure(parts),
        max_rows=parts.plan.max_num_seqs,
        max_k=parts.plan.max_speculative_tokens,
        with_draft=parts.speculator is not None,
        progress=say,
    )
    measured = replace(measured, host_seconds=host_seconds(parts, measured.target))
    try:
        cache.store(key, measured)
    except OSError as error:
        if say is not None:
            say(f"step times are not kept for the next run: {error}")
    return measured


def cost_key(parts: EngineParts) -> dict[str, str]:
    """Everything that step times depend on."""
    plan = parts.plan
    cuda = plan.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(plan.device) if cuda else _processor(),
        "threads": "" if cuda else str(plan.threads),
        "dtype": str(plan.dtype),
        "quantize": plan.quantize,
        "attention": parts.attention,
        "compute": parts.compute,
        "specbatch": __version__,
        "target": _shape_key(plan.target),
        "draft": _shape_key(plan.draft) if plan.draft else "",
        "rows": str(plan.max_num_seqs),
        "k": str(plan.max_speculative_tokens),
        "length": str(plan.max_model_len),
        "block_size": str(plan.layout.block_size),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def assumed_costs(plan: EnginePlan) -> AffineCost:
    """Step times by size alone."""
    bandwidth, flops, overhead = _ASSUMED[plan.device.type]

    def cost(shape: ModelShape, kv_bytes: int) -> Any:
        return roofline(
            parameter_bytes=shape.parameter_bytes(plan.dtype.itemsize, int8_layers=plan.quantize == "int8"),
            parameters=shape.num_parameters,
            kv_bytes_per_token=kv_bytes,
            bandwidth=bandwidth,
            flops=flops,
            overhead=overhead,
        )

    draft = plan.layout.draft
    return AffineCost(
        cost(plan.target, plan.layout.target.bytes_per_token),
        cost(plan.draft, draft.bytes_per_token) if plan.draft and draft else None,
        source="assumed (--no-profile)",
    )


def _shape_key(shape: ModelShape) -> str:
    return f"{shape.architecture} {shape.num_parameters} {shape.num_layers} {shape.hidden_size} {shape.vocab_size}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
