"""Paged attention in plain torch, on any device: the answer every other backend is held to.

Knows packed rows and strided pages only. Rows of one query length are gathered together, so it also serves as the
backend of last resort; it reads lengths on the host and can therefore not be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specbatch.attention.backend import AttentionMetadata

MASK_ELEMENTS = 1 << 23  # query x context elements worked on at once
PADDING_WASTE = 1.25  # rows share a gather while the longest is at most this much longer than the shortest


@dataclass(slots=True)
class _Group:
    """Rows of one query length and similar context, computed as one batch. Context is padded to whole pages."""

    tokens: Tensor  # [rows, query_len] packed token indices
    blocks: Tensor  # [rows, pages] block ids
    visible: Tensor  # [rows, query_len, context] bool: causal or tree mask
    place: Tensor  # [rows, query_len] each query token's position in the text
    context_place: Tensor  # [rows or 1, context] the same of the context
    unfilled: Tensor | None  # [rows, context] bool: past the row's end; None: no such place
    masks: dict[int, Tensor] = field(default_factory=dict)  # by window, for the layers after the first

    def mask(self, window: int | None) -> Tensor:
        if window is None:
            return self.visible
        if window not in self.masks:
            distance = self.place[:, :, None] - self.context_place[:, None]
            self.masks[window] = self.visible & (distance < window)
        return self.masks[window]


class ReferenceBackend:
    """Gather a row's pages, attend in float32. Implements AttentionBackend."""

    name = "reference"

    def write_kv(
        self, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
    ) -> None:
        block_size = key_pages.shape[1]
        kept = (slot_mapping >= 0).nonzero().squeeze(-1)
        slots = slot_mapping[kept].long()
        page, offset = slots // block_size, slots % block_size
        key_pages[page, offset] = key[kept].to(key_pages.dtype)
        value_pages[page, offset] = value[kept].to(value_pages.dtype)

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
        groups = metadata.plan
        if not isinstance(groups, list):
            groups = list(_group_rows(metadata, key_pages.shape[1]))
            metadata.plan = groups
        output = torch.zeros_like(query)
        for group in groups:
            mask = group.mask(sliding_window)
            key, value = _gather(key_pages, group), _gather(value_pages, group)
            rows, query_len, context = mask.shape
            tile = max(1, MASK_ELEMENTS // (rows * context * (query.shape[1] // key.shape[1])))
            for start in range(0, query_len, tile):
                tokens = group.tokens[:, start : start + tile]
                attended = _attend(query[tokens], key, value, mask[:, start : start + tile], scale, softcap, sinks)
                output[tokens] = attended.to(query.dtype)
        return output


def create(device: torch.device, dtype: torch.dtype, needs: object) -> ReferenceBackend:
    """For the registry: serves every device, dtype and need."""
    return ReferenceBackend()


def _gather(pages: Tensor, group: _Group) -> Tensor:
    """[rows, kv_heads, context, head_dim] in float32.

    NOTE: past a row's end pages hold bytes of other tenants and dtypes. 0 * NaN is NaN, so they are cleared here, not
    only masked later.
    """
    gathered = pages[group.blocks].flatten(1, 2).float()
    if group.unfilled is not None:
        gathered[group.unfilled] = 0
    return gathered.transpose(1, 2)


def _attend(
    query: Tensor,  # [rows, query_len, heads, head_dim]
    key: Tensor,  # [rows, kv_heads, context, head_dim] float32
    value: Tensor,
    mask: Tensor,  # [rows, query_len, context] bool
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[rows, query_len, heads, head_dim] float32. The query heads of a KV head stand side by side as more queries."""
    rows, query_len, heads, head_dim = query.shape
    kv_heads, context = key.shape[1], key.shape[2]
    group = heads // kv_heads
    folded = query.float().view(rows, query_len, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, kv_heads, group * query_len, head_dim)
    mask = mask[:, None, None].expand(rows, 1, group, query_len, context).reshape(rows, 1, group * query_len, context)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    else:
        scores = folded @ key.transpose(2, 3) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, group, 1).expand(rows, -1, -1, query_len)
            scores = torch.cat([scores, sink.reshape(rows, kv_heads, group * query_len, 1)], dim=-1)
        out = scores.softmax(dim=-1)[..., :context] @ value
    out = out.view(rows, kv_heads, group, query_len, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, query_len, heads, head_dim)


def _group_rows(metadata: AttentionMetadata, block_size: int) -> Iterator[_Group]:
    """Sort rows by (query length, context length) and cut where padding would cost too much."""
    starts = metadata.query_start_loc[: metadata.num_rows + 1].tolist()
    contexts = metadata.seq_lens[: metadata.num_rows].tolist()
    lengths = [end - start for start, end in pairwise(starts)]
    order = sorted((r for r in range(metadata.num_rows) if lengths[r] > 0), key=lambda r: (lengths[r], contexts[r]))
    begin = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            first, row = order[begin], order[end]
            if lengths[row] == lengths[first] and contexts[row] <= PADDING_WASTE * contexts[first] + block_size:
                continue
        rows = order[begin:end]
        begin = end
        pages = -(-contexts[rows[-1]] // block_size)
        yield _make_group(metadata, rows, lengths[rows[0]], pages, block_size)


def _make_group(metadata: AttentionMetadata, rows: list[int], query_len: int, pages: int, block_size: int) -> _Group:
    device = metadata.block_tables.device
    row_index = torch.tensor(rows, device=device)
    seq_lens = metadata.seq_lens[row_index].long()[:, None]
    offsets = torch.arange(query_len, device=device)
    index = torch.arange(pages * block_size, device=device)[None]
    tokens = metadata.query_start_loc[row_index].long()[:, None] + offsets
    own = seq_lens - query_len + offsets  # [rows, query_len] index of each query token in its row
    place, context_place = own, index
    visible = index[:, None] <= own[:, :, None]
    if metadata.tree_ancestors is not None:
        # A tree's tokens stand side by side: their place in the text is their position, not their index.
        node = index - (seq_lens - query_len)  # own query token at that index; negative: context before this step
        bits = metadata.tree_ancestors[tokens][:, :, None] >> node.clamp(0, 62)[:, None]
        visible = (node < 0)[:, None] | ((node < query_len)[:, None] & (bits & 1).bool())
        place = metadata.positions[tokens].long()
        context_place = torch.where(node < 0, index, place.gather(1, node.clamp(0, query_len - 1)))
    unfilled = index >= seq_lens
    return _Group(
        tokens=tokens,
        blocks=metadata.block_tables[row_index, :pages].long(),
        visible=visible,
        place=place,
        context_place=context_place,
        unfilled=unfilled if bool(unfilled.any()) else None,
    )
