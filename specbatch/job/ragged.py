"""Rows of different length as values and offsets: gather, cut, from and to Arrow. Pure numpy; no loops over rows."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


def cut(values: NDArray[T], starts: Offsets, lengths: Offsets) -> tuple[NDArray[T], Offsets]:
    """Pieces values[starts[i] : starts[i] + lengths[i]] one after another; returns values and offsets [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if len(lengths) == 0:
        return values[:0], offsets
    if np.array_equal(starts[1:], starts[:-1] + lengths[:-1]):  # already one piece
        return values[starts[0] : starts[0] + offsets[-1]], offsets
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return values[index], offsets


def take(values: NDArray[T], offsets: Offsets, rows: Offsets) -> tuple[NDArray[T], Offsets]:
    """Rows `rows` of a ragged array, in that order."""
    return cut(values, offsets[:-1][rows], np.diff(offsets)[rows])


def text_buffers(array: Any) -> tuple[NDArray[np.uint8], Offsets]:
    """Bytes and offsets [n + 1] of a large_string or large_binary array, without a copy; offsets may start above 0."""
    _, offset_buffer, value_buffer = array.buffers()
    if len(array) == 0 or offset_buffer is None:
        return np.zeros(0, np.uint8), np.zeros(len(array) + 1, np.int64)
    offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(value_buffer, np.uint8) if value_buffer is not None else np.zeros(0, np.uint8), offsets


def text_array(values: NDArray[np.uint8], offsets: Offsets) -> Any:
    """UTF-8 bytes and offsets [n + 1] as a large_string array without a copy. Invalid UTF-8 is replaced (U+FFFD)."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), pa.py_buffer(np.ascontiguousarray(values))]
    array = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        data = values.tobytes()
        pairs = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        array = pa.array([data[begin:end].decode("utf-8", "replace") for begin, end in pairs], pa.large_string())
    return array


def list_array(values: NDArray[Any], offsets: Offsets) -> Any:
    """Values and offsets [n + 1] as a large_list array."""
    return pa.LargeListArray.from_arrays(pa.array(np.ascontiguousarray(offsets, np.int64)), pa.array(values))
