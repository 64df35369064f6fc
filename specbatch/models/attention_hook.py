"""How transformers' attention layers reach specbatch's paged KV: one attention function registered under a name.

Each attention module carries a LayerContext; the context of the current step (metadata, backend, KV pages) hangs off it, so
a target and a draft live side by side and nothing is global. Knows no model by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specbatch.attention.backend import AttentionBackend, AttentionMetadata

ATTENTION_NAME = "specbatch"
_ATTRIBUTE = "_specbatch_context"


@dataclass(slots=True)
class StepContext:
    """What all layers of one model share in a step. Set by the ModelRunner before each forward pass."""

    backend: AttentionBackend | None = None
    metadata: AttentionMetadata | None = None


@dataclass(slots=True)
class LayerContext:
    """What one attention layer needs: its pages and, by the model's config, its window."""

    layer: int
    step: StepContext
    sliding_window: int | None
    key_pages: Tensor | None = None  # [num_pages, block_size, kv_heads, head_dim]
    value_pages: Tensor | None = None
    calls: int = field(default=0)  # counted for the check that each layer attends exactly once


def register() -> None:
    """Make `attn_implementation="specbatch"` known to transformers (idempotent).

    NOTE: no mask function goes with it on purpose: for a name without one transformers builds no mask at all, while a mask
    function of ours would first make it look for packed sequences in the positions, which waits for the device.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)


def attach(module: nn.Module, context: LayerContext) -> None:
    object.__setattr__(module, _ATTRIBUTE, context)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: writes this step's KV, attends over the pages. Returns [1, T, heads, head_dim]."""
    context: LayerContext | None = getattr(module, _ATTRIBUTE, None)
    if context is None or context.key_pages is None or context.value_pages is None or context.step.metadata is None:
        raise RuntimeError(f"{type(module).__name__} ran outside a ModelRunner: it has no KV pages")
    context.calls += 1
    backend, metadata = context.step.backend, context.step.metadata
    assert backend is not None
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    backend.write_kv(key, value, context.key_pages, context.value_pages, metadata.slot_mapping)
    output = backend.forward(
        query,
        context.key_pages,
        context.value_pages,
        metadata,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=context.sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output.unsqueeze(0), None


def attention_modules(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """The modules that hold a layer index, one or more a layer, in layer order. Raises ValueError when layers are missing."""
    found = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    missing = set(range(num_layers)) - {int(m.layer_idx) for m in found}  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{type(model).__name__} has no attention module for layers {sorted(missing)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
