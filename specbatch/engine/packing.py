"""Packs a loaded model for the CPU where its shape allows, and proves it: the same logits as the module's own layers.

Knows neither plan nor requests. A model that comes out different is loaded again and run as transformers has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionBackend
from specbatch.engine.kv_cache import PagedKVCache
from specbatch.engine.kv_layout import plan_pages
from specbatch.engine.model_check import TOLERANCE, compare_logits, paged_logits, sample_rows
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.proof import Proof, kept_file, known_proof, store_proof
from specbatch.models.lean import NotPlain, load_plain, plain_config
from specbatch.models.loading import LoadedModel
from specbatch.models.packed import PackedDecoder, bfloat16_kernel, module_weights, why_not

_PAGES, _BLOCK_SIZE = 8, 16  # scratch for the comparison


def load_for_cpu(
    path: str, dtype: torch.dtype, backend: AttentionBackend, threads: int, load: Callable[[], LoadedModel]
) -> tuple[LoadedModel, str]:
    """The model of a folder, packed where that is right, and what it runs on, for people.

    Where transformers' logits are known from before, the files are read without it. `load` loads through it. Raises
    ValueError naming the folder or file and the reason.
    """
    try:
        plain = plain_config(path)
    except NotPlain:
        return pack(load(), backend, threads, load)
    proof = known_proof(path, dtype, plain.shape.vocab_size)
    if proof is not None:
        try:
            model = load_plain(path, dtype, threads)
        except NotPlain:
            return pack(load(), backend, threads, load)
        if is_proved(model, backend, proof):
            assert model.packed is not None
            return model, model.packed.kernel
        del model  # its memory first
    return pack(load(), backend, threads, load, keep=lambda proof: store_proof(kept_file(path, dtype), proof))


def is_proved(model: LoadedModel, backend: AttentionBackend, proof: Proof) -> bool:
    """The model gives the logits of the proof, within what another order of sums may do in its dtype."""
    difference = compare_logits(paged_logits(ModelRunner(model, _scratch(model), backend), proof.rows), proof.logits)
    return difference <= TOLERANCE[model.dtype]  # NaN counts as different


def pack(
    model: LoadedModel,
    backend: AttentionBackend,
    threads: int,
    reload: Callable[[], LoadedModel],
    keep: Callable[[Proof], None] = lambda _: None,
) -> tuple[LoadedModel, str]:
    """A loaded model, packed where that is right, and what it runs on, for people. `keep` gets the module's logits if so."""
    reason = why_not(model)
    if reason is not None:
        return model, f"torch ({reason})"
    pages = _scratch(model)
    rows = sample_rows(model.vocab_size, model.device)
    expected = paged_logits(ModelRunner(model, pages, backend), rows)
    try:
        model.packed = PackedDecoder(module_weights(model), threads)
    except (TypeError, ValueError) as error:  # a shape that `why_not` does not know of
        return reload(), f"torch ({error})"
    difference = compare_logits(paged_logits(ModelRunner(model, pages, backend), rows), expected)
    if not difference <= TOLERANCE[model.dtype]:  # NaN counts as different
        return reload(), f"torch (packed weights gave other logits, off by {difference:.1%} of the largest)"
    keep(Proof(rows, expected))
    return model, model.packed.kernel


def _scratch(model: LoadedModel) -> Tensor:
    """Pages for the comparison."""
    return PagedKVCache(plan_pages(model.kv_shape, None, _BLOCK_SIZE), _PAGES, model.device).pages("target")


def can_pack(device: torch.device, attention: str) -> bool:
    """Packed weights bring their own attention: only where the one asked for is not another."""
    return device.type == "cpu" and attention in ("auto", "cpu")


def packed_dtype() -> tuple[torch.dtype, str]:
    """What "auto" is for packed weights on this processor, and why."""
    kernel = bfloat16_kernel()
    if kernel is None:
        return torch.float32, "this processor multiplies no bfloat16"
    return torch.bfloat16, f"this processor multiplies it: {kernel}"
