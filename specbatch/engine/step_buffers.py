"""The step's arrays: one packed int32 tensor on the host, filled by Rust, and its twin on the device.

Owns memory and shapes. What the numbers mean is the scheduler's business; on the CPU host and device are the same tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.attention.backend import AttentionMetadata

if TYPE_CHECKING:
    from specbatch._core import StepBuffers

ALIGNMENT = 32  # int32 elements: every array starts on its own 128 bytes


class StepSizes(Protocol):
    """The numbers of specbatch._core.StepInfo that views need."""

    num_rows: int
    num_tokens: int
    num_logits: int
    max_query_len: int
    max_seq_len: int
    draft_num_tokens: int
    draft_max_query_len: int
    draft_max_seq_len: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Padded sizes of a step: what a captured graph was captured for."""

    rows: int
    tokens_per_row: int

    @property
    def tokens(self) -> int:
        return self.rows * self.tokens_per_row


class StepArrays:
    """Host and device arrays of one step, named as in specbatch._core.StepBuffers.

    `host[name]` is a numpy view (int32, C-contiguous), `device[name]` the tensor a model reads. NOTE: the copy to a GPU is
    asynchronous, so the host arrays may be refilled only once the device has passed it: after the step's result has
    been read.
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
        self.device_type = torch.device(device)
        rows = max_num_seqs
        self.shapes: dict[str, tuple[int, ...]] = {
            "seq_index": (rows,),
            "query_start_loc": (rows + 1,),
            "seq_lens": (rows,),
            "num_draft_tokens": (rows,),
            "logits_start_loc": (rows + 1,),
            "draft_query_start_loc": (rows + 1,),
            "draft_seq_lens": (rows,),
            "input_ids": (max_num_tokens,),
            "positions": (max_num_tokens,),
            "slot_mapping": (max_num_tokens,),
            "logits_indices": (max_num_logits,),
            "draft_input_ids": (max_num_tokens,),
            "draft_positions": (max_num_tokens,),
            "draft_slot_mapping": (max_num_tokens,),
            "block_tables": (rows, pages_per_row),
            "draft_block_tables": (rows, max(draft_pages_per_row, 1)),
        }
        offsets: dict[str, int] = {}
        size = 0
        for name, shape in self.shapes.items():
            offsets[name] = size
            size += -(-int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT
        self._offsets = offsets
        cuda = self.device_type.type == "cuda"
        self.packed_host = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        self.packed_device = torch.zeros(size, dtype=torch.int32, device=self.device_type) if cuda else self.packed_host
        self.host: dict[str, NDArray[np.int32]] = {n: self._slice(self.packed_host, n).numpy() for n in self.shapes}
        self.device: dict[str, Tensor] = {n: self._slice(self.packed_device, n) for n in self.shapes}
        self._core: StepBuffers | None = None

    def _slice(self, packed: Tensor, name: str) -> Tensor:
        start, shape = self._offsets[name], self.shapes[name]
        return packed[start : start + int(np.prod(shape))].view(shape)

    @property
    def core(self) -> StepBuffers:
        """The same host arrays as specbatch._core.StepBuffers."""
        if self._core is None:
            from specbatch._core import StepBuffers

            self._core = StepBuffers(**self.host)
        return self._core

    def to_device(self) -> None:
        """One asynchronous copy of everything to the device; nothing on the CPU."""
        if self.packed_device is not self.packed_host:
            self.packed_device.copy_(self.packed_host, non_blocking=True)

    def metadata(self, info: StepSizes, draft: bool = False, bucket: Bucket | None = None) -> AttentionMetadata:
        """Views for a model's attention; with a bucket, padded to its rows and tokens."""
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
