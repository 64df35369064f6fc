"""Keys of rows: 128 bits that are equal when prompt tokens, parameters and seed are, and a table to find them in.

Knows no prompts as text and no files but the key files beside an output's parts.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specbatch.job.durable import temporary, writing

Keys = NDArray[np.uint64]  # [n, 2]; (0, 0): no key
Places = NDArray[np.int64]  # see `place`

DIRECTORY: Final = "keys"
_MAGIC: Final = b"sbkeys01"
_PART_BITS, _ROW_BITS = 24, 32
OWN, PREVIOUS = 0, 127  # sources: this run's output; the part that is being replaced (--retry-failed)
MAX_SOURCES: Final = 126
MISSING: Final = -1
_REHASH_ROWS: Final = 65_536  # so that growing needs little memory on top


def place(source: int, part: int, row: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Where a row's answer is, as one integer: source (0 is this run), part number, row in the part."""
    return np.asarray(row, np.int64) | (source << _PART_BITS | part) << _ROW_BITS


def unplace(places: Places) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Source, part and row of places."""
    return (
        places >> (_PART_BITS + _ROW_BITS),
        places >> _ROW_BITS & (1 << _PART_BITS) - 1,
        places & (1 << _ROW_BITS) - 1,
    )


def row_keys(
    values: NDArray[np.int32],
    offsets: NDArray[np.int64],
    params: Sequence[bytes],
    seeds: NDArray[np.int64] | None,
) -> Keys:
    """BLAKE2b over parameters, seed and tokens of each row.

    `params`: one for all, or one a row. `seeds` None, or a negative seed: greedy, the seed does not matter.
    """
    data = memoryview(np.ascontiguousarray(values).data).cast("B")
    bounds = (offsets * values.itemsize).tolist()
    count = len(bounds) - 1
    prefix = [_prefix(params[0])] * count if len(params) == 1 else [_prefix(item) for item in params]
    digests = []
    if seeds is None:
        for base, begin, end in zip(prefix, bounds, bounds[1:], strict=False):
            state = base.copy()
            state.update(data[begin:end])
            digests.append(state.digest())
    else:
        for base, seed, begin, end in zip(prefix, seeds.tolist(), bounds, bounds[1:], strict=False):
            state = base.copy()
            state.update(seed.to_bytes(8, "little", signed=True) if seed >= 0 else b"")
            state.update(data[begin:end])
            digests.append(state.digest())
    return np.frombuffer(b"".join(digests), np.uint64).reshape(count, 2)


def _prefix(params: bytes) -> blake2b:
    return blake2b(len(params).to_bytes(8, "little") + params, digest_size=16)


class KeyTable:
    """Map from key to place: open addressing in numpy, 24 bytes a slot. Not thread-safe.

    It grows up to `max_entries`; from then on new keys are not kept (the rows behind them are only computed again).
    """

    def __init__(self, max_entries: int, expected: int = 0) -> None:
        self.max_entries = max_entries
        self.size = 0
        self._allocate(1 << max(10, int(2 * expected).bit_length()))

    def _allocate(self, slots: int) -> None:
        self._high = np.zeros(slots, np.uint64)
        self._low = np.zeros(slots, np.uint64)
        self._places: Places = np.full(slots, MISSING, np.int64)

    def find(self, keys: Keys) -> Places:
        """Place of each key, MISSING where there is none."""
        result = np.full(len(keys), MISSING, np.int64)
        pending = np.arange(len(keys))
        high, low, slot = self._split(keys)
        while len(pending):
            places = self._places[slot]
            used = places != MISSING
            equal = used & (self._high[slot] == high) & (self._low[slot] == low)
            result[pending[equal]] = places[equal]
            pending, high, low, slot = self._next(used & ~equal, pending, high, low, slot)
        return result

    def insert(self, keys: Keys, places: Places) -> Places:
        """Add keys; returns for each the place that is now (or already was) its own: the first of equal keys wins.

        Places must differ from each other. When the table is full a new key's own place is returned, nothing is kept.
        """
        self._reserve(min(len(keys), self.max_entries - self.size))
        result = places.copy()
        pending = np.arange(len(keys))
        high, low, slot = self._split(keys)
        while len(pending):
            free = np.flatnonzero(self._places[slot] == MISSING)
            if len(free) and self.size < self.max_entries:
                # Several keys may want one slot: written last to first, so that the first one stays.
                order = free[::-1][-(self.max_entries - self.size) :]
                chosen, mine = slot[order], places[pending[order]]
                self._places[chosen] = mine
                self._high[chosen] = high[order]
                self._low[chosen] = low[order]
                self.size += int(np.count_nonzero(self._places[chosen] == mine))
            found = self._places[slot]
            used = found != MISSING
            equal = used & (self._high[slot] == high) & (self._low[slot] == low)
            result[pending[equal]] = found[equal]
            pending, high, low, slot = self._next(used & ~equal, pending, high, low, slot)
        return result

    def _split(self, keys: Keys) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
        high, low = np.ascontiguousarray(keys[:, 0]), np.ascontiguousarray(keys[:, 1])
        return high, low, (high & np.uint64(len(self._places) - 1)).astype(np.int64)

    def _next(
        self,
        more: NDArray[np.bool_],
        pending: NDArray[np.int64],
        high: NDArray[np.uint64],
        low: NDArray[np.uint64],
        slot: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
        return pending[more], high[more], low[more], (slot[more] + 1) & (len(self._places) - 1)

    def _reserve(self, entries: int) -> None:
        """Grow until `entries` more leave the table at most half full."""
        slots = len(self._places)
        while 2 * (self.size + entries) > slots:
            slots *= 2
        if slots == len(self._places):
            return
        used = self._places != MISSING
        keys, places = np.stack([self._high[used], self._low[used]], axis=1), self._places[used]
        self._allocate(slots)
        self.size = 0
        for start in range(0, len(places), _REHASH_ROWS):
            self.insert(keys[start : start + _REHASH_ROWS], places[start : start + _REHASH_ROWS])


def key_path(output: Path, part_stem: str) -> Path:
    return output / "_specbatch" / DIRECTORY / f"{part_stem}.keys"


def write_keys(path: Path, keys: Keys) -> None:
    """Store the keys of one part's rows. Not fsynced: a file that does not check is only not used. Raises DiskFull."""
    data = np.ascontiguousarray(keys).tobytes()
    header = _MAGIC + len(keys).to_bytes(8, "little") + zlib.crc32(data).to_bytes(8, "little")
    path.parent.mkdir(exist_ok=True)
    source = temporary(path)
    with writing(path):
        source.write_bytes(header + data)
        os.replace(source, path)


def read_keys(path: Path, rows: int) -> Keys | None:
    """The keys of a part of `rows` rows; None when there are none or the file is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    header, data = content[:24], content[24:]
    if header[:8] != _MAGIC or int.from_bytes(header[8:16], "little") != rows or len(data) != 16 * rows:
        return None
    if zlib.crc32(data) != int.from_bytes(header[16:24], "little"):
        return None
    return np.frombuffer(data, np.uint64).reshape(rows, 2)
