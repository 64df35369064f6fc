"""The step's arrays: one packed int32 tensor on the host, filled by Rust, and its twin on the device.

Owns memory and shapes. What the numbers mean is the scheduler's business; on the CPU both are the same tensor.
"""

from __future__ import annotations

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
    def max_draft_tokens(self) -> int: ...
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


class StepArrays:
    """Host and device arrays of one step, named as in specbatch._core.StepBuffers.

    `host[name]` is a numpy view (int32, C-contiguous), `device[name]` the tensor a model reads; addresses never change.
    NOTE: the copy to a GPU is asynchronous: call `await_copy` before the host arrays are refilled.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_num_logits: int,
        pages_per_row: int,
        draft_pages_per_row: int = 0,
        block_size: int = 0,
        draft_block_size: int = 0,
        device: torch.device | str = "cpu",
        mirror: bool = False,
    ) -> None:
        """Block sizes, where given, let a step copy the used columns of its tables alone. `mirror`: keep two tensors on
        the CPU too, so that what a GPU needs can be tried without one."""
        rows, tokens = max_num_seqs, max_num_tokens
        # Block tables come last: of a long context they are the most of it, and to_device copies what is in use.
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
        self._block_sizes = {"block_tables": block_size, "draft_block_tables": draft_block_size}
        self.packed_host = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        two = cuda or mirror
        self.packed_device = torch.zeros(size, dtype=torch.int32, device=device) if two else self.packed_host
        self.host: dict[str, NDArray[np.int32]] = {n: self._slice(self.packed_host, n).numpy() for n in self.shapes}
        self.device: dict[str, Tensor] = {n: self._slice(self.packed_device, n) for n in self.shapes}
        self._core: StepBuffers | None = None
        self._copied = torch.cuda.Event() if cuda and torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
        tables = size - self._offsets["draft_block_tables"] if two else 0
        self._staged = torch.empty(tables, dtype=torch.int32, pin_memory=cuda)
        self._arrived = torch.empty_like(self._staged, device=device)

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

    def to_device(self, info: StepSizes) -> None:
        """Copy what the step needs to the device, asynchronously; nothing on the CPU."""
        if self.packed_device is self.packed_host:
            return
        end = self._offsets["draft_block_tables"]
        self.packed_device[:end].copy_(self.packed_host[:end], non_blocking=True)
        self._copy_tables("block_tables", info.num_rows, info.max_seq_len)
        if info.draft_num_tokens:
            self._copy_tables("draft_block_tables", info.num_rows, info.draft_max_seq_len + info.max_draft_tokens)
        if self._copied is not None:
            self._copied.record()

    def _copy_tables(self, name: str, rows: int, tokens: int) -> None:
        """The first `rows` rows of a table, and of them the columns that `tokens` tokens can reach.

        Columns past them keep what earlier steps left: nobody reads a table beyond its row's length.
        """
        device, host = self.device[name], self.host[name]
        size, width = self._block_sizes[name], host.shape[1]
        columns = min(-(-tokens // size), width) if size else width
        if 2 * columns > width:
            device[:rows].copy_(torch.from_numpy(host[:rows]), non_blocking=True)
            return
        # A copy of columns cannot be asynchronous; packed side by side they can.
        start = (
            0 if name == "draft_block_tables" else self._offsets["block_tables"] - self._offsets["draft_block_tables"]
        )
        staged = self._staged[start : start + rows * columns].view(rows, columns)
        np.copyto(staged.numpy(), host[:rows, :columns])
        arrived = self._arrived[start : start + rows * columns].view(rows, columns)
        arrived.copy_(staged, non_blocking=True)
        device[:rows, :columns].copy_(arrived)

    def await_copy(self) -> None:
        """Return when the last copy to the device is through, and the host arrays may be refilled."""
        if self._copied is not None:
            self._copied.synchronize()

    def metadata(self, info: StepSizes, draft: bool = False) -> AttentionMetadata:
        """Views for one model's attention, cut to the step."""
        prefix = "draft_" if draft else ""
        rows = info.num_rows
        tokens = info.draft_num_tokens if draft else info.num_tokens
        arrays = self.device
        return AttentionMetadata(
            query_start_loc=arrays[prefix + "query_start_loc"][: rows + 1],
            seq_lens=arrays[prefix + "seq_lens"][:rows],
            positions=arrays[prefix + "positions"][:tokens],
            slot_mapping=arrays[prefix + "slot_mapping"][:tokens],
            block_tables=arrays[prefix + "block_tables"][:rows],
            num_rows=rows,
            num_tokens=tokens,
            max_query_len=info.draft_max_query_len if draft else info.max_query_len,
            max_seq_len=info.draft_max_seq_len if draft else info.max_seq_len,
        )
