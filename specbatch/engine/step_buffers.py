"""The step's arrays: one packed int32 tensor on the host, filled by Rust, and its twin on the device.

Owns memory and shapes. What the numbers mean is the scheduler's business; on the CPU both are the same tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.attention.backend import AttentionMetadata

if TYPE_CHECKING:
    from specbatch._core import StepBuffers

ALIGNMENT = 32  # int32 elements: every array starts on its own 128 bytes
TOKENS_PER_ROW = (1, 2, 3, 4, 5, 7, 9)  # k + 1 of the k that are tried


class StepSizes(Protocol):
    """The numbers of specbatch._core.StepInfo that views need."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def draft_num_tokens(self) -> int: ...
    @property
    def draft_max_query_len(self) -> int: ...
    @property
    def draft_max_seq_len(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """Padded sizes of a decode step: what a graph is captured for."""

    rows: int
    tokens_per_row: int

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts graphs are made for: 1, 2, 4, then in steps of 8 to 64, of 16 to 256, of 64 beyond; max_rows last."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 64)]
    return (*(n for n in steps if n < max_rows), max_rows)


class StepArrays:
    """Host and device arrays of one step, named as in specbatch._core.StepBuffers.

    `host[name]` is a numpy view (int32, C-contiguous), `device[name]` the tensor a model reads; addresses never change.
    NOTE: the copy to a GPU is asynchronous, so the host arrays may be refilled only once the device has passed it:
    after the step's result has been read.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_num_logits: int,
        pages_per_row: int,
        draft_pages_per_row: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        rows, tokens = max_num_seqs, max_num_tokens
        # Block tables come last, a row at a time: to_device copies up to the rows in use.
        self.shapes: dict[str, tuple[int, ...]] = {
            "seq_index": (rows,),
            "query_start_loc": (rows + 1,),
            "seq_lens": (rows,),
            "num_draft_tokens": (rows,),
            "logits_start_loc": (rows + 1,),
            "draft_query_start_loc": (rows + 1,),
            "draft_seq_lens": (rows,),
            "input_ids": (tokens,),
            "positions": (tokens,),
            "slot_mapping": (tokens,),
            "logits_indices": (max_num_logits,),
            "draft_input_ids": (tokens,),
            "draft_positions": (tokens,),
            "draft_slot_mapping": (tokens,),
            "draft_block_tables": (rows, max(draft_pages_per_row, 1)),
            "block_tables": (rows, pages_per_row),
        }
        self._offsets: dict[str, int] = {}
        size = 0
        for name, shape in self.shapes.items():
            self._offsets[name] = size
            size += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
        self.device_type = torch.device(device)
        cuda = self.device_type.type == "cuda"
        self.row_buckets = row_buckets(rows)
        self.max_num_tokens = tokens
        self.packed_host = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        self.packed_device = torch.zeros(size, dtype=torch.int32, device=device) if cuda else self.packed_host
        self.host: dict[str, NDArray[np.int32]] = {n: self._slice(self.packed_host, n).numpy() for n in self.shapes}
        self.device: dict[str, Tensor] = {n: self._slice(self.packed_device, n) for n in self.shapes}
        self._core: StepBuffers | None = None

    def _slice(self, packed: Tensor, name: str) -> Tensor:
        start, shape = self._offsets[name], self.shapes[name]
        return packed[start : start + prod(shape)].view(shape)

    @property
    def core(self) -> StepBuffers:
        """The same host arrays as specbatch._core.StepBuffers."""
        if self._core is None:
            from specbatch._core import StepBuffers

            self._core = StepBuffers(**self.host)
        return self._core

    def to_device(self, rows: int | None = None) -> None:
        """One asynchronous copy to the device, of everything or of what `rows` rows use; nothing on the CPU."""
        if self.packed_device is self.packed_host:
            return
        end = len(self.packed_host)
        if rows is not None:
            end = self._offsets["block_tables"] + rows * self.shapes["block_tables"][1]
        self.packed_device[:end].copy_(self.packed_host[:end], non_blocking=True)

    def bucket_for(self, rows: int, tokens_per_row: int) -> Bucket | None:
        """The smallest bucket that holds such a decode step; None when there is none (the step then runs as it is)."""
        row, width = bisect_left(self.row_buckets, rows), bisect_left(TOKENS_PER_ROW, tokens_per_row)
        if row == len(self.row_buckets) or width == len(TOKENS_PER_ROW):
            return None
        bucket = Bucket(self.row_buckets[row], TOKENS_PER_ROW[width])
        return bucket if bucket.tokens <= self.max_num_tokens else None

    def metadata(self, info: StepSizes, draft: bool = False, bucket: Bucket | None = None) -> AttentionMetadata:
        """Views for one model's attention: cut to the step, or, with a bucket, padded to its rows and tokens."""
        prefix = "draft_" if draft else ""
        num_tokens = info.draft_num_tokens if draft else info.num_tokens
        rows = bucket.rows if bucket else info.num_rows
        tokens = bucket.tokens if bucket else num_tokens
        arrays = self.device
        return AttentionMetadata(
            query_start_loc=arrays[prefix + "query_start_loc"][: rows + 1],
            seq_lens=arrays[prefix + "seq_lens"][:rows],
            positions=arrays[prefix + "positions"][:tokens],
            slot_mapping=arrays[prefix + "slot_mapping"][:tokens],
            block_tables=arrays[prefix + "block_tables"][:rows],
            num_rows=info.num_rows,
            num_tokens=num_tokens,
            max_query_len=info.draft_max_query_len if draft else info.max_query_len,
            max_seq_len=info.draft_max_seq_len if draft else info.max_seq_len,
        )
