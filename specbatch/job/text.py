"""Cells as text and Python values, whatever Arrow type holds them. Invalid UTF-8 is reported by row, never raised."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def as_text(column: Any) -> tuple[Any, list[int]]:
    """Any scalar column as large_string. Returns it and the rows that are not valid UTF-8 (null there).

    NaN is null; numbers, dates and booleans are printed as Arrow prints them.
    """
    while isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
        return as_text(column)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    if pa.types.is_float16(column.type):
        column = column.cast(pa.float32())
    binary = any(
        check(column.type)
        for check in (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
            pa.types.is_fixed_size_binary,
        )
    )
    try:
        texts = column.cast(pa.large_string())
        texts.validate(full=not binary)  # Parquet strings are not checked when they are read
        return texts, []
    except pa.ArrowInvalid:
        raw = column.cast(pa.large_binary()) if not binary else column
        decoded: list[str | None] = []
        invalid: list[int] = []
        for row, value in enumerate(raw.to_pylist()):
            try:
                decoded.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                decoded.append(None)
                invalid.append(row)
        return pa.array(decoded, pa.large_string()), invalid


def cells(column: Any) -> list[Any]:
    """Python values of a column; an exception object for a cell that cannot be one (invalid UTF-8 in a struct)."""
    while isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    try:
        return list(column.to_pylist())
    except (UnicodeDecodeError, ValueError, OverflowError):
        return [_cell(value) for value in column]


def _cell(value: Any) -> Any:
    try:
        return value.as_py()
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        return error
