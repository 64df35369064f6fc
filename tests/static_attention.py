"""Paged attention in plain torch with static shapes: slow, but fit for a graph, which the reference is not."""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionMetadata


class StaticAttention:
    """Implements AttentionBackend without looking at data. Tokens of no row come out as zeros."""

    name = "static"

    def write_kv(
        self, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
    ) -> None:
        size = key_pages.shape[1]
        kept = slot_mapping >= 0
        # A slot of -1 writes what is already at the start of the null page.
        page = torch.where(kept, slot_mapping // size, 0).long()
        offset = torch.where(kept, slot_mapping % size, 0).long()
        for new, pages in ((key, key_pages), (value, value_pages)):
            pages.index_put_((page, offset), torch.where(kept[:, None, None], new, pages[0, 0]))

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
        assert metadata.tree_ancestors is None
        assert softcap is None
        assert sinks is None
        starts, rows = metadata.query_start_loc, metadata.block_tables.shape[0]
        tokens, heads, _ = query.shape
        token = torch.arange(tokens, dtype=torch.int32)
        row = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=rows - 1)
        own = metadata.seq_lens[row] - starts[row + 1] + token
        tables = metadata.block_tables.long()
        group = heads // key_pages.shape[2]
        index = torch.arange(tables.shape[1] * key_pages.shape[1])
        seen = (index <= own[:, None]) & (token < starts[rows])[:, None]
        if sliding_window is not None:
            seen = seen & (index > own[:, None] - sliding_window)
        in_use = (index < metadata.seq_lens[:, None])[:, :, None, None]
        key, value = (torch.where(in_use, pages[tables].flatten(1, 2), 0.0) for pages in (key_pages, value_pages))
        key, value = (t[row].repeat_interleave(group, dim=2, output_size=heads) for t in (key, value))
        scores = torch.einsum("thd,tjhd->thj", query.float(), key) * scale
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=-1)
        weights = torch.where(seen[:, None], weights, 0.0)
        return torch.einsum("thj,tjhd->thd", weights, value).to(query.dtype)
