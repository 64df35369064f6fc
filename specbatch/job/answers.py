"""Answers of single samples as Arrow rows: what engines, earlier parts and bad rows all become before they are written.

Knows neither where answers are kept nor the output's columns. A slot is row * n + sample, counted in the shard.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specbatch.job.prompts import Outcomes
from specbatch.job.ragged import list_array, text_array
from specbatch.requests import FinishedRows

STOP, LENGTH, ERROR, ABORTED, SKIPPED = 1, 2, 3, 4, 5
REASON_NAMES: Final = ("", "stop", "length", "error", "error", "skipped")
COMPUTED, REUSED, DUPLICATE = 0, 1, 2
SOURCE_NAMES: Final = ("computed", "reused", "duplicate")
COUNTERS: Final = ("steps", "drafted", "accepted", "wasted", "preemptions", "cached_tokens")


def answer_schema(token_ids: bool, logprobs: bool) -> Any:
    """Columns of answers. `mode` null: the row never reached an engine, its counters mean nothing."""
    fields = [
        ("slot", pa.int64()),
        ("reason", pa.uint8()),
        ("code", pa.string()),
        ("message", pa.string()),
        ("text", pa.large_string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("source", pa.uint8()),
        ("mode", pa.string()),
        *((name, pa.int32()) for name in COUNTERS),
    ]
    if token_ids:
        fields.append(("token_ids", pa.large_list(pa.int32())))
    if logprobs:
        fields.append(("logprobs", pa.large_list(pa.float32())))
    return pa.schema(fields)


def from_finished(schema: Any, finished: FinishedRows, slots: NDArray[np.int64], mode: str) -> Any:
    """Rows an engine finished. `mode` is what their shard runs in; a row nothing was drafted for is "ar"."""
    count = len(finished)
    reasons = np.where(finished.finish_reason == ABORTED, ERROR, finished.finish_reason).astype(np.uint8)
    failed = reasons == ERROR
    if failed.any():
        errors = [
            pair or ("engine_error", "the engine dropped the row") if bad else (None, None)
            for pair, bad in zip(finished.error, failed.tolist(), strict=True)
        ]
        codes = pa.array([code for code, _ in errors], pa.string())
        messages = pa.array([message for _, message in errors], pa.string())
    else:
        codes = messages = pa.nulls(count, pa.string())
    columns: dict[str, Any] = {
        "slot": pa.array(slots),
        "reason": pa.array(reasons),
        "code": codes,
        "message": messages,
        "text": text_array(finished.text_values, finished.text_offsets),
        "prompt_tokens": pa.array(finished.prompt_tokens),
        "completion_tokens": pa.array(finished.completion_tokens),
        "source": pa.array(np.zeros(count, np.uint8)),
        "mode": pa.array(["ar", mode]).take(pa.array((finished.drafted > 0).astype(np.int8))),
        **{name: pa.array(getattr(finished, name)) for name in COUNTERS},
    }
    if "token_ids" in schema.names:
        columns["token_ids"] = list_array(finished.token_values, finished.token_offsets)
    if "logprobs" in schema.names:
        if finished.logprobs is None:
            columns["logprobs"] = pa.nulls(count, schema.field("logprobs").type)
        else:
            columns["logprobs"] = list_array(finished.logprobs, finished.token_offsets)
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def from_outcomes(schema: Any, outcomes: Outcomes, slots: NDArray[np.int64]) -> Any:
    """Rows that ended without an engine."""
    count = len(slots)
    columns = {
        "slot": pa.array(slots),
        "reason": pa.array(outcomes.reasons, pa.uint8()),
        "code": pa.array(outcomes.codes, pa.string()),
        "message": pa.array([None if m is None else _storable(m) for m in outcomes.messages], pa.string()),
        "prompt_tokens": pa.array(outcomes.prompt_tokens, pa.int32()),
        "source": pa.array(np.zeros(count, np.uint8)),
        **{name: pa.array(np.zeros(count, np.int32)) for name in COUNTERS},
    }
    return pa.record_batch([columns.get(f.name, pa.nulls(count, f.type)) for f in schema], schema=schema)


def failed_slot(schema: Any, slot: int, code: str, message: str, prompt_tokens: int) -> Any:
    """One sample that an engine could not do."""
    outcomes = Outcomes()
    outcomes.error(0, code, message, prompt_tokens)
    return from_outcomes(schema, outcomes, np.array([slot], np.int64))


def taken_over(answers: Any, source: int) -> Any:
    """The same answers, marked with where they come from. Their counters are 0: this row cost no step."""
    columns = list(answers.columns)
    names = answers.schema.names
    columns[names.index("source")] = pa.array(np.full(answers.num_rows, source, np.uint8))
    for name in COUNTERS:
        columns[names.index(name)] = pa.array(np.zeros(answers.num_rows, np.int32))
    return pa.record_batch(columns, schema=answers.schema)


def failed(answers: Any) -> NDArray[np.bool_]:
    """[samples] which answers are errors."""
    return np.asarray(np.asarray(answers.column("reason")) == ERROR)


def in_order(pieces: list[Any], positions: list[NDArray[np.int64]], schema: Any) -> Any:
    """One batch of pieces[i] rows placed at positions[i]; the positions together are 0..rows-1."""
    if len(pieces) == 1 and np.array_equal(positions[0], np.arange(len(positions[0]))):
        return pieces[0]
    if not pieces:
        return empty(schema)
    order = np.empty(sum(map(len, positions)), np.int64)
    place = np.concatenate(positions)
    order[place] = np.arange(len(place))
    table = pa.Table.from_batches(pieces).combine_chunks()
    return one_batch(table.take(pa.array(order)), schema)


def one_batch(table: Any, schema: Any) -> Any:
    """A table as one record batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else empty(schema)


def empty(schema: Any) -> Any:
    return pa.record_batch([pa.array([], field.type) for field in schema], schema=schema)


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
