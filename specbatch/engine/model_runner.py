"""Runs one model on packed rows over its pages. Knows nothing of requests, sampling or which tokens are drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionBackend, AttentionMetadata
from specbatch.models.loading import LoadedModel


class ModelRunner:
    """Binds a model to its KV pages and an attention backend.

    Tensors of a step may be padded: tokens past metadata.num_tokens are computed, but reach no page (slot -1) and no
    row. One runner owns its model: making another one over the same model takes the model over.
    """

    def __init__(self, model: LoadedModel, pages: Tensor, backend: AttentionBackend) -> None:
        """`pages` [num_pages, layers, 2, block_size, kv_heads, head_dim]: PagedKVCache.pages("target" or "draft").

        A model type that is not proved is compared with transformers' own attention at once, with the first pages as
        scratch. Raises ValueError when the pages are another model's, RuntimeError when the model would be wrong.
        """
        expected = (model.shape.num_layers, 2, model.shape.num_kv_heads, model.shape.head_dim)
        actual = (pages.shape[1], pages.shape[2], pages.shape[4], pages.shape[5])
        if actual != expected:
            raise ValueError(f"KV pages hold (layers, 2, kv_heads, head_dim) {actual}, the model needs {expected}")
        self.model = model
        self.backend = backend
        self.pages = pages
        self._step = model.step
        self._step.backend = backend
        self._wiring_checked = False
        if model.packed is not None:
            model.packed.bind(pages)
        for layer in model.layers:
            layer.key_pages, layer.value_pages = pages[:, layer.layer, 0], pages[:, layer.layer, 1]
        if model.support.status == "unproved" and model.packed is None:  # packed: compared when it was packed
            from specbatch.engine.model_check import check_against_transformers

            check_against_transformers(self)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor) -> Tensor:
        """Run packed tokens [T] (int32); returns float32 logits [L, vocab] of the packed tokens `logits_indices` [L].

        The model's own head is used, on those tokens alone, with whatever scaling or capping it applies.
        """
        packed = self.model.packed
        if packed is not None:
            return packed.logits(packed.hidden(input_ids, metadata, logits_indices), logits_indices)
        output = self._run(self._module, input_ids, metadata, logits_to_keep=logits_indices)
        logits: Tensor = output.logits[0]
        return logits.float()

    @property
    def can_choose(self) -> bool:
        """`greedy` serves: the best token comes without its logits."""
        return self.model.packed is not None

    @torch.inference_mode()
    def greedy(self, input_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor, vocab: int) -> Tensor:
        """As `forward`, but returns int32 [L]: what `argmax_finite` says of the first `vocab` logits."""
        packed = self.model.packed
        assert packed is not None
        return packed.greedy(packed.hidden(input_ids, metadata, logits_indices), logits_indices, vocab)

    @torch.inference_mode()
    def forward_hidden(self, input_ids: Tensor, metadata: AttentionMetadata) -> None:
        """Run packed tokens [T] for their KV alone."""
        if self.model.packed is not None:
            self.model.packed.hidden(input_ids, metadata, torch.empty(0, dtype=torch.int32))
        else:
            self._run(self._module.base_model, input_ids, metadata)

    @property
    def _module(self) -> Any:
        """Where nothing is packed there is one."""
        assert self.model.module is not None
        return self.model.module

    def _run(self, module: Any, input_ids: Tensor, metadata: AttentionMetadata, **kwargs: Any) -> Any:
        metadata.plan = None  # of the tensors' last contents, where a caller keeps one metadata over static tensors
        self._step.metadata = metadata
        if not self._wiring_checked:
            self._step.called = []
        try:
            output = module(
                input_ids=input_ids.unsqueeze(0),
                position_ids=metadata.positions.unsqueeze(0),
                use_cache=False,
                **kwargs,
            )
        finally:
            called, self._step.called = self._step.called, None
        if called is not None:
            self._check_wiring(called)
        return output

    def _check_wiring(self, called: list[int]) -> None:
        """Once: every layer attended exactly once through our function, none kept to its own."""
        expected = list(range(self.model.shape.num_layers))
        if called != expected:
            raise RuntimeError(
                f"{type(self._module).__name__} attended through specbatch in layers {called}, not in {expected}: "
                "it cannot run on paged KV"
            )
        self._wiring_checked = True
