"""Paged attention in plain torch, on any device: the answer every other backend is held to.

Knows packed rows and strided pages only. Rows of one query length are gathered together, so it also serves as the
backend of last resort; it reads lengths on the host and can therefore not be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionMetadata

SCORE_ELEMENTS = 1 << 24  # float32 scores held at once (64 MiB)
PADDING_WASTE = 1.25  # rows share a gather while the longest is at most this much longer than the shortest


@dataclass(slots=True)
class _Group:
    """Rows of one query length and a similar context length, computed as one batch."""

    tokens: Tensor  # [rows, query_len] packed token indices
    blocks: Tensor  # [rows, pages] block ids
    visible: Tensor  # [rows, query_len, context] bool: causal and tree mask
    distance: Tensor  # [rows, query_len, context] own index minus context index
    filled: Tensor  # [rows, context] bool: inside the row's context


class ReferenceBackend:
    """Gather, score in float32, mask, softmax, weigh. Implements AttentionBackend."""

    name = "reference"

    def write_kv(self, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor) -> None:
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
        block_size, kv_heads, head_dim = key_pages.shape[1:]
        groups = metadata.plan
        if not isinstance(groups, list):
            groups = list(_group_rows(metadata, block_size))
            metadata.plan = groups
        output = torch.zeros_like(query)
        for group in groups:
            rows, query_len, context = group.visible.shape
            mask = group.visible
            if sliding_window is not None:
                mask = mask & (group.distance < sliding_window)
            # NOTE: pages hold other tenants' bytes past the row's end; 0 * NaN is NaN, so they are cleared, not only masked.
            filled = group.filled[:, :, None, None]
            key = key_pages[group.blocks].flatten(1, 2)[:, :context].float().where(filled, 0)
            value = value_pages[group.blocks].flatten(1, 2)[:, :context].float().where(filled, 0)
            key, value = key.permute(0, 2, 3, 1), value.transpose(1, 2)  # [rows, kv_heads, head_dim, context], [.., context, head_dim]
            tile = max(1, SCORE_ELEMENTS // (rows * query.shape[1] * context))
            for start in range(0, query_len, tile):
                tokens = group.tokens[:, start : start + tile]
                output[tokens] = _attend(
                    query[tokens], key, value, mask[:, start : start + tile], scale, softcap, sinks
                ).to(query.dtype)
        return output


def _attend(
    query: Tensor,  # [rows, query_len, heads, head_dim]
    key: Tensor,  # [rows, kv_heads, head_dim, context] float32
    value: Tensor,  # [rows, kv_heads, context, head_dim] float32
    mask: Tensor,  # [rows, query_len, context] bool
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[rows, query_len, heads, head_dim] float32."""
    rows, query_len, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    grouped = query.float().view(rows, query_len, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(rows, kv_heads, group * query_len, head_dim) @ key
    scores = scores.view(rows, kv_heads, group, query_len, -1).mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(1, kv_heads, group, 1, 1).expand(rows, -1, -1, query_len, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    out = weights.reshape(rows, kv_heads, group * query_len, -1) @ value
    return out.view(rows, kv_heads, group, query_len, head_dim).permute(0, 3, 1, 2, 4).reshape(rows, query_len, heads, head_dim)


def _group_rows(metadata: AttentionMetadata, block_size: int) -> Iterator[_Group]:
    """Sort rows by (query length, context length) and cut where padding would cost too much."""
    device = metadata.block_tables.device
    starts = metadata.query_start_loc[: metadata.num_rows + 1].tolist()
    contexts = metadata.seq_lens[: metadata.num_rows].tolist()
    lengths = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    order = sorted((r for r in range(metadata.num_rows) if lengths[r] > 0), key=lambda r: (lengths[r], contexts[r]))
    begin = 0
    for end in range(1, len(order) + 1):
        if (
            end < len(order)
            and lengths[order[end]] == lengths[order[begin]]
            and contexts[order[end]] <= PADDING_WASTE * contexts[order[begin]] + block_size
        ):
            continue
        rows = order[begin:end]
        begin = end
        query_len, context = lengths[rows[0]], contexts[rows[-1]]
        pages = -(-context // block_size)
        row_index = torch.tensor(rows, device=device)
        first = metadata.query_start_loc[row_index].long()
        seq_lens = metadata.seq_lens[row_index].long()
        offsets = torch.arange(query_len, device=device)
        index = torch.arange(context, device=device)
        tokens = first[:, None] + offsets
        own = seq_lens[:, None] - query_len + offsets  # [rows, query_len]
        distance = own[:, :, None] - index
        visible = distance >= 0
        if metadata.tree_ancestors is not None:
            # A tree's tokens stand side by side: their place in the text is their position, not their index.
            node = index - (seq_lens[:, None] - query_len)  # own query token at that index; negative: older context
            bits = metadata.tree_ancestors[tokens][:, :, None] >> node.clamp(0, 62)[:, None]
            visible = (node < 0)[:, None] | ((node < query_len)[:, None] & (bits & 1).bool())
            positions = metadata.positions[tokens].long()
            place = torch.where(node < 0, index, positions.gather(1, node.clamp(0, query_len - 1)))
            distance = positions[:, :, None] - place[:, None]
        yield _Group(
            tokens=tokens,
            blocks=metadata.block_tables[row_index, :pages].long(),
            visible=visible,
            distance=distance,
            filled=index < seq_lens[:, None],
        )


def create(device: torch.device, dtype: torch.dtype, needs: object) -> ReferenceBackend:
    """For the registry: serves every device, dtype and need."""
    return ReferenceBackend()
