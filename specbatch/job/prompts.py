"""Rows of a slice as prompt texts and parameters. Every row that cannot be one gets an outcome of its own.

Knows columns and chat templates; knows nothing of token ids, shards or engines. A bad row never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from specbatch.job.columns import PromptSource
from specbatch.job.messages import parse_messages, text_size, with_system
from specbatch.job.openai_request import RequestProblem, parse_request
from specbatch.job.params import ParamsParser, RowParams
from specbatch.job.ragged import text_buffers
from specbatch.job.reader import Slice
from specbatch.job.text import as_text, cells

ERROR, SKIPPED = 3, 5  # finish reasons as answers hold them (specbatch.job.answers)


@dataclass(slots=True)
class Outcomes:
    """Rows of a slice that end without an engine: errors, and skipped rows (code and message None)."""

    rows: list[int] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)
    codes: list[str | None] = field(default_factory=list)
    messages: list[str | None] = field(default_factory=list)
    prompt_tokens: list[int | None] = field(default_factory=list)

    def error(self, row: int, code: str, message: str, prompt_tokens: int | None = None) -> None:
        self._add(row, ERROR, code, message[:2000], prompt_tokens)

    def skip(self, row: int, prompt_tokens: int | None = None) -> None:
        self._add(row, SKIPPED, None, None, prompt_tokens)

    def _add(self, row: int, reason: int, code: str | None, message: str | None, prompt_tokens: int | None) -> None:
        self.rows.append(row)
        self.reasons.append(reason)
        self.codes.append(code)
        self.messages.append(message)
        self.prompt_tokens.append(prompt_tokens)


@dataclass(slots=True)
class Prompts:
    """Texts ready for the tokenizer: `texts[i]` belongs to row `rows[i]` of the slice (ascending)."""

    texts: Any  # pa.LargeStringArray without nulls
    rows: NDArray[np.int64]
    special: NDArray[np.bool_] | bool  # the tokenizer adds its special tokens (the text is no rendered conversation)
    params: list[RowParams] | RowParams  # one a text, or one for all
    outcomes: Outcomes


class PromptBuilder:
    """Makes Prompts of slices. Safe to use from several threads as far as `render` is."""

    def __init__(
        self,
        source: PromptSource,
        params: ParamsParser,
        render: Callable[[Sequence[dict[str, object]]], str],
        *,
        max_row_bytes: int,
        n: int,
        logprobs: bool,
    ) -> None:
        self._source = source
        self._params = params
        self._render = render
        self._max_row_bytes = max_row_bytes
        self._n = n
        self._logprobs = logprobs

    def build(self, piece: Slice) -> Prompts:
        outcomes = Outcomes()
        kind = self._source.kind
        if kind == "openai":
            return self._openai(piece, outcomes)
        if kind == "messages":
            texts = self._messages(piece, outcomes)
        else:
            texts = self._joined(piece, outcomes) if kind == "template" else self._plain(piece, outcomes)
            if self._source.chat:
                texts = self._as_user(texts, outcomes)
        kept, rows = _without_nulls(texts)
        params: list[RowParams] | RowParams = self._params.defaults
        if self._source.params_column is not None:
            params, good = self._row_params(piece.columns[self._source.params_column], rows, outcomes)
            kept, rows = kept.take(pa.array(good)), rows[good]
        return Prompts(kept, rows, not self._source.chat, params, outcomes)

    # -- texts of a column: null where the row is no prompt and has its outcome

    def _plain(self, piece: Slice, outcomes: Outcomes) -> Any:
        assert self._source.column is not None
        texts, invalid = as_text(piece.columns[self._source.column])
        for row in invalid:
            outcomes.error(row, "invalid_utf8", f"column {self._source.column!r} is not valid UTF-8 in this row")
        if texts.null_count:
            known = set(invalid)
            for row in np.flatnonzero(texts.is_null()).tolist():
                if row not in known:
                    outcomes.skip(row)
        texts = self._drop_large(texts, self._source.column, outcomes)
        return _drop_blank(texts, outcomes)

    def _joined(self, piece: Slice, outcomes: Outcomes) -> Any:
        bad: dict[int, tuple[str, str]] = {}
        pieces: list[Any] = []
        for literal, name in self._source.template:
            if literal:
                pieces.append(pa.scalar(literal, pa.large_string()))
            if name is None:
                continue
            values, invalid = as_text(piece.columns[name])
            for row in np.flatnonzero(values.is_null()).tolist():
                bad.setdefault(
                    row, ("template_value_missing", f"column {name!r} of the template is null or NaN in this row")
                )
            for row in invalid:
                bad[row] = ("invalid_utf8", f"column {name!r} is not valid UTF-8 in this row")
            for row in _large(values, self._max_row_bytes):
                bad[row] = _too_large(name, len(values[row].as_py().encode()), self._max_row_bytes)
            pieces.append(values)
        for row, (code, message) in bad.items():
            outcomes.error(row, code, message)
        usable = np.ones(piece.rows, np.bool_)
        usable[list(bad)] = False
        mask = pa.array(usable)
        # Only good rows are joined: a hundred megabytes in a refused cell are not copied.
        pieces = [
            pc.if_else(mask, item, pa.scalar(None, item.type)) if isinstance(item, pa.Array) else item
            for item in pieces
        ]
        joined = pc.binary_join_element_wise(*pieces, pa.scalar("", pa.large_string()))
        return _drop_blank(joined, outcomes)

    def _messages(self, piece: Slice, outcomes: Outcomes) -> Any:
        assert self._source.column is not None
        column = piece.columns[self._source.column]
        if not pa.types.is_nested(column.type):
            column, invalid = as_text(column)
            for row in invalid:
                outcomes.error(row, "invalid_utf8", f"column {self._source.column!r} is not valid UTF-8 in this row")
            known = set(invalid)
        else:
            known = set()
        texts: list[str | None] = [None] * piece.rows
        for row, value in enumerate(cells(column)):
            if isinstance(value, Exception):
                outcomes.error(row, "invalid_utf8", f"column {self._source.column!r}: {value}")
            elif value is None:
                if row not in known:
                    outcomes.skip(row)
            else:
                texts[row] = self._conversation(row, value, outcomes)
        return pa.array(texts, pa.large_string())

    def _as_user(self, texts: Any, outcomes: Outcomes) -> Any:
        """Each text as a conversation of one user message."""
        rendered: list[str | None] = []
        for row, text in enumerate(texts.to_pylist()):
            message = [{"role": "user", "content": text}]
            rendered.append(None if text is None else self._conversation(row, message, outcomes))
        return pa.array(rendered, pa.large_string())

    def _conversation(self, row: int, value: Any, outcomes: Outcomes) -> str | None:
        size = text_size(value)
        if size > self._max_row_bytes:
            outcomes.error(row, *_too_large(self._source.column or "messages", size, self._max_row_bytes))
            return None
        try:
            messages = parse_messages(value)
        except ValueError as error:
            outcomes.error(row, "invalid_messages", str(error))
            return None
        if not messages:
            outcomes.error(row, "empty_prompt", "the list of messages is empty")
            return None
        try:
            text = self._render(with_system(messages, self._source.system_prompt))
            text.encode()  # lone surrogates (from JSON escapes) have no UTF-8
        except UnicodeEncodeError as error:
            outcomes.error(row, "invalid_utf8", str(error))
            return None
        except Exception as error:  # a template is a program of somebody else's
            outcomes.error(row, "template_error", f"{type(error).__name__}: {error}")
            return None
        if not text.strip():
            outcomes.error(row, "empty_prompt", "the chat template made an empty text of the messages")
            return None
        return text

    def _openai(self, piece: Slice, outcomes: Outcomes) -> Prompts:
        texts: list[str] = []
        rows: list[int] = []
        special: list[bool] = []
        params: list[RowParams] = []
        for row, line in enumerate(piece.columns["request"].to_pylist()):
            if line is None:
                outcomes.error(row, "invalid_utf8", "the line is not valid UTF-8")
                continue
            if len(line) > self._max_row_bytes:
                outcomes.error(row, *_too_large("request", len(line), self._max_row_bytes))
                continue
            try:
                request = parse_request(line, self._n, self._logprobs)
                row_params = self._params.parse(request.params)
            except RequestProblem as problem:
                outcomes.error(row, problem.code, str(problem))
                continue
            except ValueError as error:
                outcomes.error(row, "invalid_parameters", str(error))
                continue
            text = request.prompt
            if request.messages is not None:
                text = self._conversation(row, request.messages, outcomes)
            elif not (request.prompt or "").strip():
                outcomes.error(row, "empty_prompt", f"the prompt has no text ({len(request.prompt or '')} characters)")
                continue
            if text is None:
                continue
            try:
                text.encode()  # lone surrogates (from JSON escapes) have no UTF-8
            except UnicodeEncodeError as error:
                outcomes.error(row, "invalid_utf8", str(error))
                continue
            texts.append(text)
            rows.append(row)
            special.append(request.messages is None)
            params.append(row_params)
        marks = np.array(special, np.bool_)
        return Prompts(pa.array(texts, pa.large_string()), np.array(rows, np.int64), marks, params, outcomes)

    def _row_params(
        self, column: Any, rows: NDArray[np.int64], outcomes: Outcomes
    ) -> tuple[list[RowParams], NDArray[np.int64]]:
        """Parameters of the given rows, and which of them (indices into `rows`) are good."""
        if not pa.types.is_nested(column.type):
            column, invalid = as_text(column)
        else:
            invalid = []
        bad = dict.fromkeys(invalid, "parameters are not valid UTF-8")
        values = cells(column)
        good: list[int] = []
        params: list[RowParams] = []
        for i, row in enumerate(rows.tolist()):
            value = values[row]
            try:
                if row in bad or isinstance(value, Exception):
                    raise ValueError(bad.get(row, str(value)))
                params.append(self._params.parse(value))
                good.append(i)
            except ValueError as error:
                outcomes.error(row, "invalid_parameters", str(error))
        return params, np.array(good, np.int64)

    def _drop_large(self, texts: Any, name: str, outcomes: Outcomes) -> Any:
        large = _large(texts, self._max_row_bytes)
        if len(large) == 0:
            return texts
        _, offsets = text_buffers(texts)
        for row in large:
            outcomes.error(row, *_too_large(name, int(offsets[row + 1] - offsets[row]), self._max_row_bytes))
        usable = np.ones(len(texts), np.bool_)
        usable[large] = False
        return pc.if_else(pa.array(usable), texts, pa.scalar(None, pa.large_string()))


def _large(texts: Any, limit: int) -> list[int]:
    _, offsets = text_buffers(texts)
    return np.flatnonzero(np.diff(offsets) > limit).tolist()


def _too_large(name: str, size: int, limit: int) -> tuple[str, str]:
    return "row_too_large", f"column {name!r} has {size} bytes in this row, --max-row-bytes is {limit}"


def _drop_blank(texts: Any, outcomes: Outcomes) -> Any:
    _, offsets = text_buffers(texts)
    blank = pc.or_kleene(pc.utf8_is_space(texts), pc.equal(pc.binary_length(texts), 0)).fill_null(False)
    rows = np.flatnonzero(blank)
    if len(rows) == 0:
        return texts
    for row in rows.tolist():
        outcomes.error(
            row, "empty_prompt", f"the prompt has no text ({int(offsets[row + 1] - offsets[row])} bytes of white space)"
        )
    return pc.if_else(blank, pa.scalar(None, pa.large_string()), texts)


def _without_nulls(texts: Any) -> tuple[Any, NDArray[np.int64]]:
    if texts.null_count == 0:
        return texts, np.arange(len(texts))
    rows = np.flatnonzero(texts.is_valid())
    return texts.take(pa.array(rows)), rows
