"""Attention on a CPU: a Rust kernel that reads paged keys and values in place, for all query heads of a KV head at once.

Owns the translation from tensors to the kernel's arrays. The arithmetic is in rust/cpu-kernels; sums are in float32
(where the processor has AMX, queries and weights meet bfloat16 pages rounded to bfloat16).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch import _core
from specbatch.attention.backend import AttentionBackend, AttentionMetadata
from specbatch.attention.registry import AttentionNeeds

_Layer = tuple[NDArray[np.float32] | NDArray[np.uint16], _core.CpuLayerPages]


def create(device: torch.device, dtype: torch.dtype, needs: AttentionNeeds) -> AttentionBackend:
    """Raises RuntimeError with the reason when the kernel cannot serve."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(f"cpu attends in float32 and bfloat16, not in {dtype}")
    return CpuPagedAttention()


class CpuPagedAttention:
    """Implements AttentionBackend over float32 and bfloat16 pages in host memory."""

    name = "cpu"

    def __init__(self) -> None:
        # By addresses and layout: both tenants' views of a layer may begin at the same byte.
        self._layers: dict[tuple[object, ...], _Layer] = {}

    def write_kv(
        self, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
    ) -> None:
        storage, pages = self._layer(key_pages, value_pages)
        dtype = key_pages.dtype
        _core.cpu_write_kv(
            storage,
            pages,
            _stored(key, dtype),
            _stored(value, dtype),
            slot_mapping[: key.shape[0]].contiguous().numpy(),
        )

    def forward(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        storage, pages = self._layer(key_pages, value_pages)
        rows = metadata.num_rows
        tree = metadata.tree_ancestors
        out = torch.empty(query.shape, dtype=torch.float32)
        if query.shape[0] > metadata.num_tokens:
            out[metadata.num_tokens :] = 0
        _core.cpu_attention(
            _floats(query),
            storage,
            pages,
            metadata.query_start_loc[: rows + 1].numpy(),
            metadata.seq_lens[:rows].numpy(),
            metadata.block_tables[:rows].contiguous().numpy(),
            out.numpy(),
            scale=scale,
            positions=None if tree is None else metadata.positions.numpy(),
            tree_ancestors=None if tree is None else tree.numpy(),
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=None if sinks is None else _floats(sinks),
        )
        return out if query.dtype == torch.float32 else out.to(query.dtype)

    def _layer(self, key_pages: Tensor, value_pages: Tensor) -> _Layer:
        """The whole storage as one flat array, and where this layer's pages are in it."""
        address = (key_pages.data_ptr(), value_pages.data_ptr(), key_pages.stride(0), *key_pages.shape[1:])
        found = self._layers.get(address)
        if found is None:
            flat = key_pages.as_strided((key_pages.untyped_storage().nbytes() // key_pages.element_size(),), (1,), 0)
            storage = flat.numpy() if flat.dtype == torch.float32 else flat.view(torch.int16).numpy().view(np.uint16)
            _, block_size, kv_heads, head_dim = key_pages.shape
            pages = _core.CpuLayerPages(
                key_offset=int(key_pages.storage_offset()),
                value_offset=int(value_pages.storage_offset()),
                page_stride=key_pages.stride(0),
                block_size=block_size,
                kv_heads=kv_heads,
                head_dim=head_dim,
            )
            found = self._layers[address] = (storage, pages)
        return found


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    """A contiguous float32 array; no copy where the tensor is so already."""
    array: NDArray[np.float32] = tensor.detach().to(torch.float32).contiguous().numpy()
    return array


def _stored(tensor: Tensor, dtype: torch.dtype) -> NDArray[np.float32] | NDArray[np.uint16]:
    """The same in the pages' dtype, bfloat16 as its bits."""
    if dtype == torch.float32:
        return _floats(tensor)
    bits: NDArray[np.uint16] = tensor.detach().to(dtype).contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits
