"""The KV memory of a device: one allocation, cut into pages that either model may use.

Owns bytes and views. Which page belongs to whom is the block pool's business (Rust), what is in it the model's.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Literal

import torch
from torch import Tensor

from specbatch.engine.kv_layout import KVShape, PageLayout, plan_pages

__all__ = ["KVShape", "PageLayout", "PagedKVCache", "Tenant", "plan_pages"]

Tenant = Literal["target", "draft"]
_HUGE_PAGE = 2 << 20


class PagedKVCache:
    """Pages of two tenants over the same bytes.

    `pages("target")` is a strided view [num_pages, layers, 2, block_size, kv_heads, head_dim] in the target's dtype,
    `pages("draft")` the same over the same storage with the draft's sizes. Page 0 is the null page: block tables are
    padded with it and nothing is ever written to it.
    """

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device | str = "cpu") -> None:
        """Allocate `num_pages` pages of zeros. Raises ValueError for fewer than 2 (the null page and one to use)."""
        if num_pages < 2:
            raise ValueError(
                f"the KV memory holds {num_pages} pages of {layout.page_bytes} bytes, at least 2 are needed "
                "(raise --kv-memory or lower the block size)"
            )
        self.layout = layout
        self.num_pages = num_pages
        self.device = torch.device(device)
        self.storage = _zeros(layout.bytes_for(num_pages), self.device)
        self._views: dict[Tenant, Tensor] = {"target": self._view(layout.target, layout.block_size)}
        if layout.draft is not None:
            self._views["draft"] = self._view(layout.draft, layout.draft_block_size)

    def _view(self, shape: KVShape, block_size: int) -> Tensor:
        typed = self.storage.view(getattr(torch, shape.dtype))
        size = (self.num_pages, shape.layers, 2, block_size, shape.kv_heads, shape.head_dim)
        strides = [self.layout.page_bytes // shape.itemsize, 0, 0, 0, 0, 1]
        for axis in range(4, 0, -1):
            strides[axis] = strides[axis + 1] * size[axis + 1]
        return typed.as_strided(size, strides)

    def pages(self, tenant: Tenant) -> Tensor:
        """[num_pages, layers, 2, block_size, kv_heads, head_dim]; KeyError when there is no such tenant."""
        return self._views[tenant]

    def layer_pages(self, tenant: Tenant, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [num_pages, block_size, kv_heads, head_dim] with the page's stride."""
        view = self._views[tenant][:, layer]
        return view[:, 0], view[:, 1]

    def block_size(self, tenant: Tenant) -> int:
        """Tokens a page holds for the tenant."""
        return self.layout.block_size if tenant == "target" else self.layout.draft_block_size

    @property
    def nbytes(self) -> int:
        return self.storage.numel()


def _zeros(count: int, device: torch.device) -> Tensor:
    """Zeroed bytes. In host memory on huge pages where the system has them: attention jumps from page to page of the
    pool, and with 4 kB pages most of its time went into address translation (64 rows x 400 tokens: 1.6x)."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(count, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, count + _HUGE_PAGE)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)  # keeps the mapping alive
