"""Answers as the columns that specbatch adds to the input's. Knows the output schema; writes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specbatch.job.answers import COMPUTED, COUNTERS, ERROR, REASON_NAMES, SKIPPED, SOURCE_NAMES
from specbatch.job.columns import DECODING_TYPE, ERROR_TYPE
from specbatch.job.manifest import PartEntry

_NAMES: Final = pa.array(REASON_NAMES)
_SOURCES: Final = pa.array(SOURCE_NAMES)


def added_columns(answers: Any, n: int) -> list[Any]:
    """Columns of specbatch.job.columns.added_fields for answers in slot order, n a row."""
    rows = answers.num_rows // n
    column = {name: answers.column(name) for name in answers.schema.names}
    reason = np.asarray(column["reason"])
    first = pa.array(np.arange(rows) * n)
    text = _where(reason < ERROR, column["text"]).cast(pa.string())
    tokens = column["completion_tokens"]
    mode = column["mode"].take(first) if n > 1 else column["mode"]
    counters = [pa.array(np.asarray(column[name]).reshape(rows, n).sum(axis=1).astype(np.int32)) for name in COUNTERS]
    source = _SOURCES.take(column["source"].take(first) if n > 1 else column["source"])
    columns = [
        _per_sample(text, n),
        _per_sample(_NAMES.take(column["reason"]), n),
        _error(column["code"], column["message"], reason, n),
        column["prompt_tokens"].take(first) if n > 1 else column["prompt_tokens"],
        _per_sample(tokens, n),
        pa.StructArray.from_arrays([source, mode, *counters], fields=list(DECODING_TYPE), mask=mode.is_null()),
    ]
    for name, kind in (("token_ids", pa.int32()), ("logprobs", pa.float32())):
        if name in column:
            columns.append(_per_sample(_where(reason < ERROR, column[name]).cast(pa.list_(kind)), n))
    return columns


def _where(mask: NDArray[np.bool_], values: Any) -> Any:
    """Values where the mask is set, null elsewhere."""
    if mask.all():
        return values
    keep = np.where(mask, np.arange(len(mask)), -1)
    return values.take(pa.array(keep, mask=~mask))


def _per_sample(values: Any, n: int) -> Any:
    if n == 1:
        return values
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, n, dtype=np.int32)), values)


def _error(code: Any, message: Any, reason: NDArray[np.uint8], n: int) -> Any:
    """The row's error: its first failed sample's."""
    failed = (reason == ERROR).reshape(-1, n)
    if n > 1:
        chosen = pa.array(np.arange(len(failed)) * n + failed.argmax(axis=1))
        code, message = code.take(chosen), message.take(chosen)
    mask = pa.array(~failed.any(axis=1))
    return pa.StructArray.from_arrays([code, message], fields=list(ERROR_TYPE), mask=mask)


def failed_rows(answers: Any, n: int) -> NDArray[np.bool_]:
    """[rows] rows without a whole answer: an error in any sample, or skipped."""
    reason = np.asarray(answers.column("reason")).reshape(-1, n)
    return np.asarray((reason >= ERROR).any(axis=1))


def count(answers: Any, n: int, entry: PartEntry) -> None:
    """Add answers (in slot order) to a part's figures. Counters and modes are of rows computed for this very row."""
    reason = np.asarray(answers.column("reason")).reshape(-1, n)
    rows = len(reason)
    first = np.arange(rows) * n
    failed = (reason == ERROR).any(axis=1)
    entry.rows += rows
    if failed.any():
        chosen = first + (reason == ERROR).argmax(axis=1)
        codes = Counter(answers.column("code").take(pa.array(chosen[failed])).to_pylist())
        entry.row_errors = dict(Counter(entry.row_errors) + codes)
    entry.skipped += int(np.count_nonzero(reason[:, 0] == SKIPPED))
    source = np.asarray(answers.column("source")).reshape(rows, n)[:, 0]
    entry.reused += int(np.count_nonzero(source == SOURCE_NAMES.index("reused")))
    entry.deduplicated += int(np.count_nonzero(source == SOURCE_NAMES.index("duplicate")))
    entry.prompt_tokens += int(np.asarray(answers.column("prompt_tokens").fill_null(0))[first].sum(dtype=np.int64))
    entry.completion_tokens += int(np.asarray(answers.column("completion_tokens").fill_null(0)).sum(dtype=np.int64))
    for name in COUNTERS:
        setattr(entry, name, getattr(entry, name) + int(np.asarray(answers.column(name)).sum(dtype=np.int64)))
    own = answers.column("mode").filter(pa.array(np.repeat(source == COMPUTED, n) & np.tile(np.arange(n) == 0, rows)))
    modes = {item["values"]: item["counts"] for item in own.drop_null().value_counts().to_pylist()}
    entry.modes = dict(Counter(entry.modes) + Counter(modes))
