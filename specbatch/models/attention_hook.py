"""How transformers' attention layers reach specbatch's paged KV: one attention function registered under a name.

Each attention module carries a LayerContext; what a step brings (metadata, backend, KV pages) hangs off it, so a target
and a draft live side by side and nothing is global. Knows no model by name.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    called: list[int] | None = None  # layers that attended, while a ModelRunner checks the wiring


@dataclass(slots=True)
class LayerContext:
    """What one attention layer needs: its pages and, by the model's config, its window."""

    layer: int
    step: StepContext
    sliding_window: int | None
    key_pages: Tensor | None = None  # [num_pages, block_size, kv_heads, head_dim]
    value_pages: Tensor | None = None


def register() -> None:
    """Make `attn_implementation="specbatch"` known to transformers (idempotent).

    NOTE: no mask function goes with it on purpose: for a name without one transformers builds no mask at all, while a
    mask function of ours would first make it look for packed sequences in the positions, which waits for the device.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)


def attach(module: nn.Module, context: LayerContext) -> None:
    """Give an attention module its context (past nn.Module's bookkeeping: it is neither parameter nor submodule)."""
    object.__setattr__(module, _ATTRIBUTE, context)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,  # [1, kv_heads, T, at most head_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: write this step's KV, attend over the pages.

    Returns [1, T, heads, value's head_dim]. Raises RuntimeError when the model asks for what pages cannot give.
    """
    context: LayerContext | None = getattr(module, _ATTRIBUTE, None)
    if context is None or context.key_pages is None or context.value_pages is None:
        raise RuntimeError(f"{type(module).__name__} has no KV pages: it ran outside a ModelRunner")
    step = context.step
    backend, metadata = step.backend, step.metadata
    if backend is None or metadata is None:
        raise RuntimeError(f"{type(module).__name__} ran outside a step of its ModelRunner")
    if step.called is not None:
        step.called.append(context.layer)
        _check_call(module, context, key, attention_mask, sliding_window)
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    value_dim = value.shape[-1]
    if value_dim < key.shape[-1]:
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - value_dim))
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
    return output[None, ..., :value_dim], None


def _check_call(
    module: nn.Module, context: LayerContext, key: Tensor, attention_mask: Tensor | None, sliding_window: int | None
) -> None:
    """Refuse calls that mean more than the pages know (checked on a runner's first pass)."""
    name = f"layer {context.layer} ({type(module).__name__})"
    assert context.key_pages is not None
    if attention_mask is not None:
        raise RuntimeError(f"{name} brings a mask of its own, which paged attention cannot follow")
    if (sliding_window or None) is not None and sliding_window != context.sliding_window:
        raise RuntimeError(f"{name} has a window of {sliding_window} tokens, its config says {context.sliding_window}")
    expected, actual = tuple(context.key_pages.shape[-2:]), (key.shape[1], key.shape[3])
    if actual != expected:
        raise RuntimeError(f"{name} has keys of (kv_heads, head_dim) {actual}, its pages hold {expected}")


def attention_modules(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """The modules that hold a layer index (one or more a layer). Raises ValueError naming layers without one."""
    found = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
    missing = set(range(num_layers)) - {int(m.layer_idx) for m in found}  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{type(model).__name__} has no attention module for layers {sorted(missing)}")
    return [m for m in found if 0 <= int(m.layer_idx) < num_layers]  # type: ignore[arg-type]
