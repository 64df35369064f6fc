"""Answers read back from a committed Parquet part, row by row number, a row group in memory at a time.

The reverse of specbatch.job.table. Serves --reuse, duplicates of rows in earlier parts, and --retry-failed.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specbatch.job.answers import COUNTERS, REASON_NAMES, SOURCE_NAMES, in_order

_NAMES: Final = {
    "text": "completion",
    "reason": "finish_reason",
    "error": "error",
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "decoding": "decoding",
    "token_ids": "completion_token_ids",
    "logprobs": "completion_logprobs",
}
_CACHED_GROUPS: Final = 2


class PartAnswers:
    """Random access to one part. Raises OSError or pa.ArrowException when the file is not what it was."""

    def __init__(self, path: Path, schema: Any, n: int, prefix: str) -> None:
        """`schema`: of the answers wanted; the part must have their columns (`prefix` before each name)."""
        self._file = pq.ParquetFile(str(path), buffer_size=2**20, pre_buffer=False)
        self._schema = schema
        self._n = n
        wanted = [name for name in _NAMES if name in schema.names or name in ("error", "decoding")]
        self._columns = {name: prefix + _NAMES[name] for name in wanted}
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self._groups: OrderedDict[int, Any] = OrderedDict()

    @property
    def rows(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: NDArray[np.int64]) -> Any:
        """Answers of the given rows in that order, n a row."""
        groups = np.searchsorted(self._starts, rows, "right") - 1
        pieces, positions = [], []
        for group in np.unique(groups).tolist():
            chosen = np.flatnonzero(groups == group)
            local = rows[chosen] - self._starts[group]
            pieces.append(self._group(group).take(pa.array(_spread(local, self._n))))
            positions.append(_spread(chosen, self._n))
        return in_order(pieces, positions, self._schema)

    def failed(self) -> NDArray[np.bool_]:
        """[rows] which rows ended with an error (a row with one failed sample counts)."""
        column = self._columns["reason"]
        found = []
        for batch in self._file.iter_batches(65_536, columns=[column]):
            reasons = batch.column(0)
            values = reasons.flatten() if self._n > 1 else reasons
            found.append(np.asarray(pc.equal(values, "error")).reshape(-1, self._n).any(axis=1))
        return np.concatenate(found) if found else np.zeros(0, np.bool_)

    def close(self) -> None:
        self._file.close()

    def _group(self, index: int) -> Any:
        if index not in self._groups:
            table = self._file.read_row_group(index, columns=list(self._columns.values())).combine_chunks()
            columns = {name: _one(table.column(column)) for name, column in self._columns.items()}
            self._groups[index] = _as_answers(columns, table.num_rows, self._n, self._schema)
            while len(self._groups) > _CACHED_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(index)
        return self._groups[index]


def _spread(rows: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    return (rows[:, None] * n + np.arange(n)).ravel()


def _one(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _as_answers(columns: dict[str, Any], rows: int, n: int, schema: Any) -> Any:
    """Output columns of whole rows as answers. Counters of a row are sums: its first sample gets them all."""
    row = pa.array(np.repeat(np.arange(rows), n))
    first = np.tile(np.arange(n) == 0, rows)
    reasons = columns["reason"].flatten() if n > 1 else columns["reason"]
    reason = pc.index_in(reasons, pa.array(REASON_NAMES)).cast(pa.uint8())
    failed = pc.equal(reasons, "error")
    decoding = columns["decoding"]
    made: dict[str, Any] = {
        "slot": pa.array(np.arange(rows * n)),
        "reason": reason,
        "source": pc.index_in(_child(decoding, "source", row), pa.array(SOURCE_NAMES)).fill_null(0).cast(pa.uint8()),
        "mode": _child(decoding, "mode", row),
        "prompt_tokens": columns["prompt_tokens"].take(row),
    }
    for name in ("code", "message"):
        value = _child(columns["error"], name, row)
        made[name] = pc.if_else(failed, value, pa.scalar(None, value.type))
    for name in COUNTERS:
        values = np.asarray(_child(decoding, name, row).fill_null(0))
        made[name] = pa.array(np.where(first, values, 0).astype(np.int32))
    for name in ("text", "completion_tokens", "token_ids", "logprobs"):
        if name in columns:
            made[name] = (columns[name].flatten() if n > 1 else columns[name]).cast(schema.field(name).type)
    return pa.record_batch([made[name] for name in schema.names], schema=schema)


def _child(struct: Any, name: str, row: Any) -> Any:
    return pc.struct_field(struct, name).take(row)
