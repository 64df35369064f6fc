"""JSON-lines files in the OpenAI batch shape as columns: custom_id and the line itself. Knows nothing of prompts.

A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. Blank lines are no rows.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from specbatch.errors import InputUnreadable

BLOCK_ROWS = 1024  # lines that act as one row group
SLICE_BYTES = 8 * 2**20
SCHEMA = pa.schema([("custom_id", pa.string()), ("request", pa.large_string())])


class JsonlFile:
    """One file. Reads it once to find the lines; `request` holds a line as it is, null where it is not valid UTF-8.

    Raises InputUnreadable for what is no JSON lines at all: each line of it would be an error of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.schema = SCHEMA
        self.row_groups: list[int] = []
        self._offsets: list[int] = []
        offset = 0
        with open(path, "rb") as file:
            for line in file:
                if offset == 0:
                    _require_lines(path, line)
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
        lines: list[bytes] = []
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
                lines.append(line.removeprefix(codecs.BOM_UTF8).strip())
                size += len(line)
                if size >= SLICE_BYTES or len(lines) == BLOCK_ROWS or not left:
                    yield len(lines), _columns(lines, names)
                    lines, size = [], 0
        if lines:
            yield len(lines), _columns(lines, names)


def _require_lines(path: Path, first: bytes) -> None:
    if first.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
        raise InputUnreadable(f"cannot read {path}: it is compressed", hint="unpack it first")
    if first.startswith(b"PAR1"):
        raise InputUnreadable(f"cannot read {path}: it is Parquet, by its content", hint="name it .parquet")
    if re.match(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|$)", first):
        hint = f"one object a line: jq -c '.[]' {path} > lines.jsonl"
        raise InputUnreadable(f"cannot read {path}: it is one JSON array, not JSON lines", hint=hint)


def _columns(lines: list[bytes], names: Sequence[str]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if "custom_id" in names:
        columns["custom_id"] = pa.array([_custom_id(line) for line in lines], pa.string())
    if "request" in names:
        columns["request"] = pa.array([_text(line) for line in lines], pa.large_string())
    return columns


def _text(line: bytes) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return None


def _custom_id(line: bytes) -> str | None:
    try:
        value = json.loads(line.decode("utf-8", "replace"))["custom_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        return None
    return value.encode("utf-8", "replace").decode()  # lone surrogates cannot be stored
