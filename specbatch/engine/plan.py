"""From options to numbers: models, device, dtype, pages, rows. Everything that can be refused is refused here, by name,
before a weight is loaded.

Knows nothing of requests or steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from specbatch.engine.device import free_memory, resolve_device, resolve_dtype, use_threads
from specbatch.engine.kv_layout import KVShape, PageLayout, plan_pages
from specbatch.engine.packing import can_pack, packed_dtype
from specbatch.engine.quantized import why_not_int8
from specbatch.engine_options import EngineOptions
from specbatch.models.packed import MODEL_TYPES
from specbatch.models.support import ModelShape, model_shape
from specbatch.models.tokenizer_compare import compare_folders

DEFAULT_K = 4  # when a fixed speculator is asked for without a k
MAX_K = 8  # the most the controller chooses by itself
CPU_KV_LIMIT = 4 << 30
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What a run will use; every number resolved."""

    model: str
    draft_model: str | None
    target: ModelShape
    draft: ModelShape | None
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    quantize: str  # none | int8
    threads: int
    layout: PageLayout
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    draft_max_model_len: int
    max_speculative_tokens: int
    max_rows_ar: int  # rows of full context that fit the pages without a draft
    max_rows_speculative: int  # the same with a draft table each
    weight_bytes: int
    activation_bytes: int  # what a full step needs; estimated, on CUDA measured
    graph_bytes: int = 0  # what captured graphs hold, measured

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_model_len // self.layout.block_size)

    @property
    def draft_pages_per_row(self) -> int:
        size = self.layout.draft_block_size
        return -(-self.draft_max_model_len // size) if size else 0

    def describe(self) -> dict[str, Any]:
        """The plan as JSON can hold it."""
        return {
            "model": self.model,
            "draft_model": self.draft_model,
            "parameters": self.target.num_parameters,
            "draft_parameters": self.draft.num_parameters if self.draft else 0,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "dtype_reason": self.dtype_reason,
            "quantize": self.quantize,
            "threads": self.threads,
            "weight_bytes": self.weight_bytes,
            "activation_bytes": self.activation_bytes,
            "graph_bytes": self.graph_bytes,
            "block_size": self.layout.block_size,
            "draft_block_size": self.layout.draft_block_size,
            "num_pages": self.num_pages,
            "kv_bytes": self.layout.bytes_for(self.num_pages),
            "kv_bytes_per_token": self.layout.target.bytes_per_token,
            "draft_kv_bytes_per_token": self.layout.draft.bytes_per_token if self.layout.draft else 0,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "max_speculative_tokens": self.max_speculative_tokens,
            "max_rows_ar": self.max_rows_ar,
            "max_rows_speculative": self.max_rows_speculative,
        }


def plan_engine(options: EngineOptions) -> EnginePlan:
    """Resolve options. Raises ValueError naming the option or the model and the fix."""
    model, draft_model = model_paths(options)
    target = model_shape(model)
    draft = model_shape(draft_model) if draft_model else None
    if draft_model:
        check_draft(model, draft_model)
    device = resolve_device(options.device)
    threads = use_threads(options.threads) if device.type == "cpu" else torch.get_num_threads()
    if options.dtype == "auto" and target.model_type in MODEL_TYPES and can_pack(device, options.attention):
        dtype, dtype_reason = packed_dtype()
    else:
        dtype, dtype_reason = resolve_dtype(options.dtype, device, target.hidden_size)
    name = str(dtype).removeprefix("torch.")
    if options.quantize == "int8" and (reason := why_not_int8(device, options.attention, dtype, target)):
        raise ValueError(f"--quantize int8: {reason}")

    max_model_len = min(options.max_model_len or target.max_model_len, target.max_model_len)
    if options.max_model_len and options.max_model_len > target.max_model_len:
        raise ValueError(
            f"max_model_len {options.max_model_len} is beyond the model's own {target.max_model_len} tokens"
        )
    draft_max_model_len = min(draft.max_model_len, max_model_len) if draft else 0
    block_size = options.block_size or 16
    layout = plan_pages(_kv_shape(target, name), _kv_shape(draft, name) if draft else None, block_size)
    max_num_seqs = options.max_num_seqs or (256 if device.type == "cuda" else 64)
    max_num_batched_tokens = options.max_num_batched_tokens or (8192 if device.type == "cuda" else 1024)

    itemsize = dtype.itemsize
    int8 = options.quantize == "int8"
    weight_bytes = sum(s.parameter_bytes(itemsize, int8_layers=int8) for s in (target, draft) if s is not None)
    k = options.num_speculative_tokens
    max_k = (
        0
        if options.speculate == "off"
        else (k if k is not None else (MAX_K if options.speculate == "auto" else DEFAULT_K))
    )
    tokens = max(max_num_batched_tokens, max_num_seqs * (max_k + 1))
    activation = tokens * target.hidden_size * itemsize * 16 + max_num_seqs * (max_k + 1) * target.vocab_size * 4 * 3
    budget = kv_budget(options, device, weight_bytes + activation)
    fitting = layout.pages_for(budget)
    if fitting < 2:
        raise ValueError(
            f"the KV memory of {budget / GIB:.2f} GiB holds no page of {layout.page_bytes} bytes: raise --kv-memory, "
            "free memory on the device, or use a smaller model"
        )
    plan = EnginePlan(
        model=str(model),
        draft_model=str(draft_model) if draft_model else None,
        target=target,
        draft=draft,
        device=device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        quantize=options.quantize,
        threads=threads,
        layout=layout,
        num_pages=fitting,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        draft_max_model_len=draft_max_model_len,
        max_speculative_tokens=max(max_k, 1),
        max_rows_ar=0,
        max_rows_speculative=0,
        weight_bytes=weight_bytes,
        activation_bytes=activation,
    )
    return with_pages(plan, min(fitting, wanted_pages(plan)))


def wanted_pages(plan: EnginePlan) -> int:
    """Pages that all rows at their longest use, the null page included."""
    return plan.max_num_seqs * (plan.pages_per_row + plan.draft_pages_per_row) + 1


def with_pages(plan: EnginePlan, num_pages: int) -> EnginePlan:
    """The plan over another number of pages, the null page included."""
    return replace(
        plan,
        num_pages=num_pages,
        max_rows_ar=(num_pages - 1) // plan.pages_per_row,
        max_rows_speculative=(num_pages - 1) // (plan.pages_per_row + plan.draft_pages_per_row),
    )


def model_paths(options: EngineOptions) -> tuple[str, str | None]:
    """Folders of the target and of the draft model (None: there is none, or it is not wanted)."""
    if options.model is not None:
        return options.model, options.draft_model
    from specbatch.models.builtin import builtin_paths

    target, draft = builtin_paths()
    return str(target), str(draft) if options.speculate in ("auto", "draft") else None


def check_draft(model: str, draft_model: str) -> None:
    """Refuse a draft whose tokens are not the target's. Raises ValueError naming the first difference."""
    comparison = compare_folders(model, draft_model, model_shape(draft_model).vocab_size)
    if not comparison.compatible:
        raise ValueError(f"draft model {draft_model} does not fit {model}: {comparison.reason}")


def kv_budget(options: EngineOptions, device: torch.device, reserved: int) -> int:
    """Bytes for the pages: as asked, or a share of what is free once weights and activations have theirs."""
    if options.kv_memory_bytes is not None:
        return options.kv_memory_bytes
    return kv_share(options, device, max(free_memory(device) - reserved, 0))


def kv_share(options: EngineOptions, device: torch.device, free: int) -> int:
    """Of `free` bytes, those that become pages."""
    if options.kv_memory_fraction is not None:
        return int(free * options.kv_memory_fraction)
    return int(free * 0.9) if device.type == "cuda" else min(int(free * 0.4), CPU_KV_LIMIT)


def _kv_shape(shape: ModelShape, dtype: str) -> KVShape:
    return KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
