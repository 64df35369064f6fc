"""Packs a loaded model for the CPU where its shape allows, and proves it: the same logits as the module's own layers.

Knows neither plan nor requests. A model that comes out different is loaded again and run as transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbatch.attention.backend import AttentionBackend
from specbatch.engine.kv_cache import PagedKVCache
from specbatch.engine.kv_layout import plan_pages
from specbatch.engine.model_check import TOLERANCE, compare_logits, paged_logits, sample_rows
from specbatch.engine.model_runner import ModelRunner
from specbatch.models.loading import LoadedModel
from specbatch.models.packed import PackedDecoder, module_weights, why_not

_PAGES, _BLOCK_SIZE = 8, 16  # scratch for the comparison


def pack(
    model: LoadedModel, backend: AttentionBackend, threads: int, reload: Callable[[], LoadedModel]
) -> tuple[LoadedModel, str]:
    """The model to run, packed where that is right, and what it runs on, for people."""
    reason = why_not(model)
    if reason is not None:
        return model, f"torch ({reason})"
    cache = PagedKVCache(plan_pages(model.kv_shape, None, _BLOCK_SIZE), _PAGES, model.device)
    pages = cache.pages("target")
    rows = sample_rows(model.vocab_size, model.device)
    expected = paged_logits(ModelRunner(model, pages, backend), rows)
    try:
        model.packed = PackedDecoder(module_weights(model), threads)
    except (TypeError, ValueError) as error:  # a shape that `why_not` does not know of
        return reload(), f"torch ({error})"
    difference = compare_logits(paged_logits(ModelRunner(model, pages, backend), rows), expected)
    if not difference <= TOLERANCE[model.dtype]:  # NaN counts as different
        return reload(), f"torch (packed weights gave other logits, off by {difference:.1%} of the largest)"
    return model, model.packed.kernel


def can_pack(device: torch.device, attention: str) -> bool:
    """Packed weights bring their own attention: only where the one asked for is not another."""
    return device.type == "cpu" and attention in ("auto", "cpu")
