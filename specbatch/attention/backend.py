"""The interface between a model's attention layers and a kernel family.

Backends see packed rows and paged, strided KV; they know nothing of models, sampling or scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """One step of one model. All tensors int32 on the model's device unless said otherwise.

    Query token i of row r stands at index `seq_lens[r] - query_len(r) + (i - query_start_loc[r])` of the row's
    context. It sees every context index up to and including its own (causal), or, with `tree_ancestors`, the
    row's context before this step plus those of the row's own query tokens whose bit is set.
    """

    query_start_loc: Tensor  # [R + 1]
    seq_lens: Tensor  # [R] context length with this step's tokens
    positions: Tensor  # [T] rotary / sliding-window position of each token
    slot_mapping: Tensor  # [T] page * block_size + offset; -1: write nothing
    block_tables: Tensor  # [R, P]; 0 is the null page
    num_rows: int  # rows in use (host numbers; tensors may be padded beyond)
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    tree_ancestors: Tensor | None = (
        None  # int64 [T]; bit j: own query token j (within the row) is visible. At most 63 a row
    )
    plan: object | None = None  # what a backend worked out at this step's first layer, for the layers after it


class AttentionBackend(Protocol):
    """Stateless; one instance serves every layer of every model on a device."""

    name: str

    def write_kv(
        self, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store key, value [T, kv_heads, head_dim] into pages [num_pages, block_size, kv_heads, head_dim] (any page
        stride; the last three dimensions are contiguous). Slots of -1 are skipped."""
        ...

    def forward(
        self,
        query: Tensor,  # [T, heads, head_dim]
        key_pages: Tensor,  # [num_pages, block_size, kv_heads, head_dim], written already
        value_pages: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,  # a token sees indices > own - sliding_window
        softcap: float | None = None,  # softcap * tanh(scores / softcap) before the mask (Gemma 2)
        sinks: Tensor | None = None,  # [heads] attention sink logits
    ) -> Tensor:
        """Attention output [T, heads, head_dim]; tokens past metadata.num_tokens are undefined but finite.

        Pages hold whatever their last tenant left, in its dtype: bytes past a row's seq_lens may read as NaN or infinity
        and must not reach the output."""
        ...
