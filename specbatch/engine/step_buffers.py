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


@dataclass(slots=True)
class _TablePart:
    """Views of the first rows and columns of a block table on their way to the device."""

    host: NDArray[np.int32]
    staged: NDArray[np.int32] | None  # side by side in pinned memory; None: the rows are copied whole
    sent: Tensor
    arrived: Tensor
    device: Tensor


def _rounded(count: int) -> int:
    """Up to one of few numbers, at most an eighth more (or 8)."""
    step = max(8, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


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
        end = self._offsets["draft_block_tables"]
        self._all_but_tables = self.packed_device[:end], self.packed_host[:end]
        self._table_parts: dict[tuple[str, int, int], _TablePart] = {}  # views cost the host more than small copies
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
        self._all_but_tables[0].copy_(self._all_but_tables[1], non_blocking=True)
        self._copy_table("block_tables", info.num_rows, info.max_seq_len)
        if info.draft_num_tokens:
            self._copy_table("draft_block_tables", info.num_rows, info.draft_max_seq_len + info.max_draft_tokens)
        if self._copied is not None:
            self._copied.record()

    def _copy_table(self, name: str, rows: int, tokens: int) -> None:
        """The first `rows` rows of a table and a few more, and of them the columns that `tokens` tokens can reach.

        Columns past them keep what earlier steps left: nobody reads a table beyond its row's length.
        """
        size, (most, width) = self._block_sizes[name], self.shapes[name]
        columns = -(-tokens // size) if size else width
        shape = min(_rounded(rows), most), min(_rounded(columns), width)
        part = self._table_parts.get((name, *shape))
        if part is None:
            part = self._table_parts[name, *shape] = self._table_part(name, *shape)
        if part.staged is not None:
            np.copyto(part.staged, part.host)
        part.arrived.copy_(part.sent, non_blocking=True)
        if part.staged is not None:
            part.device.copy_(part.arrived)

    def _table_part(self, name: str, rows: int, columns: int) -> _TablePart:
        """How a part of a table is copied. A copy of columns cannot be asynchronous; packed side by side they can."""
        device, host = self.device[name][:rows, :columns], self.host[name][:rows, :columns]
        if 2 * columns > self.shapes[name][1]:
            whole = self.device[name][:rows]
            return _TablePart(host, None, torch.from_numpy(self.host[name][:rows]), whole, whole)
        start = self._offsets[name] - self._offsets["draft_block_tables"]
        sent, arrived = (t[start : start + rows * columns].view(rows, columns) for t in (self._staged, self._arrived))
        return _TablePart(host, sent.numpy(), sent, arrived, device)

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
