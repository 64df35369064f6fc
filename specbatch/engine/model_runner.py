"""Runs one model on packed rows over its pages. Knows nothing of requests, sampling or which tokens are drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionBackend, AttentionMetadata
from specbatch.models.loading import LoadedModel


class ModelRunner:
    """Binds a model to its KV pages and an attention backend.

    Tensors of a step may be padded: tokens past metadata.num_tokens are computed but reach no page (slot -1) and no row.
    """

    def __init__(self, model: LoadedModel, pages: Tensor, backend: AttentionBackend) -> None:
        """`pages` [num_pages, layers, 2, block_size, kv_heads, head_dim]: PagedKVCache.pages("target" or "draft")."""
        expected = (model.shape.num_layers, 2, model.shape.num_kv_heads, model.shape.head_dim)
        actual = (pages.shape[1], pages.shape[2], pages.shape[4], pages.shape[5])
        if actual != expected:
            raise ValueError(f"KV pages hold (layers, 2, kv_heads, head_dim) {actual}, the model needs {expected}")
        self.model = model
        self.backend = backend
        self.pages = pages
        self._step = model.step
        self._step.backend = backend
        for layer in model.layers:
            layer.key_pages, layer.value_pages = pages[:, layer.layer, 0], pages[:, layer.layer, 1]

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor) -> Tensor:
        """Run packed tokens [T] and return float32 logits [L, vocab] of the packed tokens `logits_indices` [L]."""
        self._step.metadata = metadata
        output = self.model.module(
            input_ids=input_ids.unsqueeze(0),
            position_ids=metadata.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_indices,
        )
        logits: Tensor = output.logits[0]
        return logits.float()

    @torch.inference_mode()
    def forward_hidden(self, input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Run packed tokens [T] for their KV alone; returns the last hidden states [T, hidden], without logits."""
        self._step.metadata = metadata
        output = self.model.module.base_model(  # type: ignore[operator]
            input_ids=input_ids.unsqueeze(0),
            position_ids=metadata.positions.unsqueeze(0),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden
