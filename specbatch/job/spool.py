"""Finished answers of one shard on disk until the shard is whole: append-only, checked, and readable in any order.

A killed run leaves a spool whose intact frames the next start takes over, so that no finished row is computed again.
Knows nothing of shards' contents or of parts. The file is a header and frames: magic, CRC-32, length, an Arrow batch.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specbatch.job.answers import empty, in_order, one_batch
from specbatch.job.durable import writing

_FRAME: Final = struct.Struct("<4sIQ")
_MAGIC: Final = b"sbfr"
_POSITION_BITS: Final = 32
FLUSH_ROWS: Final = 4096
FLUSH_BYTES: Final = 4 * 2**20
FLUSH_SECONDS: Final = 1.0
_CACHE_BYTES: Final = 16 * 2**20
ABSENT: Final = -1


class Spool:
    """Answers by slot. One thread appends; another may gather once appending is over."""

    def __init__(self, path: Path, identity: str, slots: int, schema: Any) -> None:
        """`identity`: what the file must have been written for; another one is thrown away."""
        self.path = path
        self.schema = schema
        self._header = _MAGIC + blob(f"{identity}\n{schema}".encode())
        self._where: NDArray[np.int64] = np.full(slots, ABSENT, np.int64)  # frame << 32 | position in it
        self._frames: list[tuple[int, int]] = []  # offset and length of the payload
        self._end = 0  # of the intact frames
        self._written = False  # by this process
        self._pending: list[Any] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._cache_bytes = 0

    # -- writing

    def append(self, answers: Any) -> int:
        """Keep answers; returns how many of their slots had none yet. A later answer for a slot replaces an earlier."""
        if answers.num_rows == 0:
            return 0
        if not self._pending:
            self._pending_since = time.monotonic()
        slots = answers.column("slot").to_numpy()
        fresh = int(np.count_nonzero(self._where[slots] == ABSENT))
        start = len(self._frames) << _POSITION_BITS | self._pending_rows
        self._where[slots] = np.arange(start, start + len(slots))
        self._pending.append(answers)
        self._pending_rows += len(slots)
        self._pending_bytes += answers.nbytes
        if self._pending_rows >= FLUSH_ROWS or self._pending_bytes >= FLUSH_BYTES:
            self.flush()
        return fresh

    def flush_if_old(self, now: float) -> None:
        if self._pending and now - self._pending_since >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one frame. Raises DiskFull."""
        if not self._pending:
            return
        payload = one_batch(pa.Table.from_batches(self._pending), self.schema).serialize()
        with writing(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if not self._written:  # whatever an earlier process left behind the intact frames
                    os.ftruncate(descriptor, self._end)
                    self._written = True
                if self._end == 0:
                    _write_all(descriptor, self._header, 0)
                    self._end = len(self._header)
                head = _FRAME.pack(_MAGIC, zlib.crc32(payload), payload.size)
                _write_all(descriptor, head, self._end)
                _write_all(descriptor, payload, self._end + len(head))
            finally:
                os.close(descriptor)
        self._frames.append((self._end + _FRAME.size, payload.size))
        self._end += _FRAME.size + payload.size
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0

    def sync(self) -> None:
        """Flush, and make the file durable."""
        self.flush()
        if self._end:
            with writing(self.path):
                descriptor = os.open(self.path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    # -- reading

    @property
    def answered(self) -> NDArray[np.bool_]:
        """[slots] which slots have an answer."""
        return np.not_equal(self._where, ABSENT)

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.not_equal(self._where[slots], ABSENT)

    def recover(self, keep: Any = None) -> list[Any]:
        """Take over the intact frames of an earlier process; returns their batches (all but text and lists).

        `keep`: Arrow expression-like callable, batch -> mask of the rows to take. What follows a damaged frame is cut.
        """
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed below, in every case
        except FileNotFoundError:
            return []
        taken = []
        with file:
            if file.read(len(self._header)) != self._header:
                return []
            self._end = len(self._header)
            while len(head := file.read(_FRAME.size)) == _FRAME.size:
                magic, checksum, length = _FRAME.unpack(head)
                payload = file.read(length) if magic == _MAGIC and length < 2**40 else b""
                if len(payload) != length or zlib.crc32(payload) != checksum:
                    break
                batch = pa.ipc.read_record_batch(pa.py_buffer(payload), self.schema)
                mask = np.ones(batch.num_rows, np.bool_) if keep is None else keep(batch)
                slots = batch.column("slot").to_numpy()
                where = np.arange(batch.num_rows) | len(self._frames) << _POSITION_BITS
                self._where[slots[mask]] = where[mask]
                self._frames.append((self._end + _FRAME.size, length))
                self._end += _FRAME.size + length
                taken.append(batch.select(["slot", "reason", "code"]).filter(pa.array(mask)))
        return taken

    def gather(self, slots: NDArray[np.int64]) -> Any:
        """Answers of the given slots, in that order, as one batch. Every slot must have one; nothing may be pending."""
        if len(slots) == 0:
            return empty(self.schema)
        where = self._where[slots]
        if (missing := slots[where == ABSENT]).size:
            raise AssertionError(f"{self.path}: no answer for {missing.size} slots, the first {missing[0]}")
        frames, rows = where >> _POSITION_BITS, where & (1 << _POSITION_BITS) - 1
        order = np.argsort(frames, kind="stable")
        used, starts = np.unique(frames[order], return_index=True)
        pieces, positions = [], []
        for frame, chosen in zip(used.tolist(), np.split(order, starts[1:]), strict=True):
            picked, batch = rows[chosen], self._frame(frame)
            whole = len(picked) == 1 or (
                picked[-1] - picked[0] + 1 == len(picked) and bool((np.diff(picked) == 1).all())
            )
            pieces.append(batch.slice(picked[0], len(picked)) if whole else batch.take(pa.array(picked)))
            positions.append(chosen)
        return in_order(pieces, positions, self.schema)

    def _frame(self, index: int) -> Any:
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        offset, length = self._frames[index]
        with open(self.path, "rb") as file:
            file.seek(offset)
            payload = file.read(length)
        if len(payload) != length:
            raise OSError(f"{self.path} was cut short by someone else")
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), self.schema)
        self._cache[index] = batch
        self._cache_bytes += length
        while self._cache_bytes > _CACHE_BYTES and len(self._cache) > 1:
            old, _ = self._cache.popitem(last=False)
            self._cache_bytes -= self._frames[old][1]
        return batch


def blob(data: bytes) -> bytes:
    """Length-prefixed bytes."""
    return len(data).to_bytes(8, "little") + data


def _write_all(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
