"""JSON-lines files in the OpenAI batch shape as columns: custom_id and the line itself. Knows nothing of prompts.

A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. Blank lines are no rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

BLOCK_ROWS = 1024  # lines that act as one row group
SLICE_BYTES = 8 * 2**20
SCHEMA = pa.schema([("custom_id", pa.string()), ("request", pa.large_string())])


class JsonlFile:
    """One file. Reads it once to find the lines; `request` holds a line as it is (invalid UTF-8 replaced)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.schema = SCHEMA
        self.row_groups: list[int] = []
        self._offsets: list[int] = []
        offset = 0
        with open(path, "rb") as file:
            for line in file:
                if not line.isspace():
                    if not self.row_groups or self.row_groups[-1] == BLOCK_ROWS:
                        self.row_groups.append(0)
                        self._offsets.append(offset)
                    self.row_groups[-1] += 1
                offset += len(line)

    def read(self, names: Sequence[str], first_group: int, num_groups: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows of whole blocks, cut where the lines get long."""
        if num_groups == 0:
            return
        left = sum(self.row_groups[first_group : first_group + num_groups])
        lines: list[str] = []
        size = 0
        with open(self.path, "rb") as file:
            file.seek(self._offsets[first_group])
            while left:
                line = file.readline()
                if not line:
                    break
                if line.isspace():
                    continue
                left -= 1
                lines.append(line.decode("utf-8", "replace").strip())
                size += len(line)
                if size >= SLICE_BYTES or len(lines) == BLOCK_ROWS or not left:
                    yield len(lines), _columns(lines, names)
                    lines, size = [], 0
        if lines:
            yield len(lines), _columns(lines, names)


def _columns(lines: list[str], names: Sequence[str]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if "custom_id" in names:
        columns["custom_id"] = pa.array([_custom_id(line) for line in lines], pa.string())
    if "request" in names:
        columns["request"] = pa.array(lines, pa.large_string())
    return columns


def _custom_id(line: str) -> str | None:
    try:
        value = json.loads(line)["custom_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(value, str):
        return None
    return value.encode("utf-8", "replace").decode()  # lone surrogates cannot be stored
