"""A stand-in for a model: answers at once, always the same, without any weights. For trying a pipeline, and for tests.

`specbatch run table.parquet --model stand-in` reads, checks, writes and resumes exactly as with a model; only the
answers are made up: each is a function of prompt, parameters and seed. Its tokens are the bytes of the text.

SPECBATCH_STANDIN=capacity=64,delay=0.01 slows it down (rows a step, seconds a step). The other settings of
StandInSettings make it fail in the ways real engines do.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from specbatch.errors import OutOfMemory, UsageError
from specbatch.job.options import EngineContext, EngineFactory, Target
from specbatch.requests import BatchEngine, EngineProgress, FinishedRows, RequestBatch
from specbatch.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specbatch.engine_options import EngineOptions

VARIABLE: Final = "SPECBATCH_STANDIN"
EOS: Final = 256
DEFAULT_MODEL_LEN: Final = 131_072
_STOP, _LENGTH, _ERROR = 1, 2, 3
_ALL = 1 << 40


@dataclass(frozen=True, slots=True)
class StandInSettings:
    """How slow, and how broken. Times in seconds; `*_on` are texts that a prompt contains."""

    capacity: int = _ALL  # rows that finish in a step
    delay: float = 0.0  # a step takes
    load: float = 0.0  # making the engine takes
    raise_on: str = ""  # a step with such a row raises
    raise_once: int = 0  # this step (counted from 1) raises, whatever it holds
    oom_above: int = 0  # a step with more rows than this runs out of memory (0: never)
    oom_on: str = ""  # a step with such a row runs out of memory
    hang_after: int = 0  # the step after this many never returns (0: never)


def parse_settings(text: str) -> StandInSettings:
    """Settings from "name=value,name=value". Raises UsageError."""
    known: dict[str, type] = {name: type(value) for name, value in asdict(StandInSettings()).items()}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in known:
            raise UsageError(f"{VARIABLE}: unknown setting {name!r}; known: {', '.join(known)}")
        try:
            values[name] = known[name](value)
        except ValueError:
            raise UsageError(f"{VARIABLE}: {name} must be {known[name].__name__}, got {value!r}") from None
    return StandInSettings(**values)


def make_stand_in(options: EngineOptions | None = None) -> tuple[Target, EngineFactory]:
    """Target and engine factory of `--model stand-in`. Raises UsageError for a bad SPECBATCH_STANDIN."""
    settings = parse_settings(os.environ.get(VARIABLE, ""))
    length = (options.max_model_len if options is not None else None) or DEFAULT_MODEL_LEN
    fingerprint = {"model": "stand-in", "tokenizer": "bytes", "chat_template": "stand-in"}
    target = Target("stand-in", length, fingerprint, StandInTokenizer)

    def make(context: EngineContext, chosen: object = None) -> BatchEngine:
        return StandInEngine(settings, max_model_len=length)

    if options is not None and len(options.devices) > 1 and options.devices != "all":
        from specbatch.target import make_fleet

        several = [(f"stand-in {number}", options) for number in options.devices]
        return target, lambda context: make_fleet(several, context, make)
    return target, make


class StandInTokenizer:
    """Bytes of the UTF-8 text as token ids."""

    has_chat_template = True
    prefers_chat = False

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids as values and offsets [n + 1]."""
        data = [text.encode() for text in texts]
        offsets = np.zeros(len(data) + 1, np.int64)
        np.cumsum([len(item) for item in data], out=offsets[1:])
        return np.frombuffer(b"".join(data), np.uint8).astype(np.int32), offsets

    def encode_utf8(
        self, values: NDArray[np.uint8], offsets: NDArray[np.int64], *, add_special_tokens: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The same from bytes and offsets [n + 1] as Arrow has them, without a Python object a row."""
        return values[offsets[0] : offsets[-1]].astype(np.int32), offsets - offsets[0]

    def render(self, messages: Sequence[dict[str, object]]) -> str:
        """One line a message. Raises ValueError for roles it does not know."""
        lines = []
        for message in messages:
            if message["role"] not in ("system", "user", "assistant", "tool"):
                raise ValueError(f"unknown role {message['role']!r}")
            lines.append(f"<{message['role']}> {message.get('content', '')}\n")
        return "".join(lines) + "<assistant> "


class StandInEngine:
    """A BatchEngine without a model. Rows finish in an order of their own when `capacity` is limited."""

    def __init__(self, settings: StandInSettings | None = None, *, max_model_len: int = DEFAULT_MODEL_LEN) -> None:
        self.settings = settings or StandInSettings()
        self.max_model_len = max_model_len
        self._capacity = self.settings.capacity
        self._queue: deque[RequestBatch] = deque()
        self._held: list[RequestBatch] = []  # rows that take one step more than others
        self._finished: list[FinishedRows] = []
        self._waiting = 0
        self._untaken = 0
        self._steps = 0
        self._progress = EngineProgress()
        time.sleep(self.settings.load)

    def add(self, batch: RequestBatch) -> None:
        if len(batch) != len(batch.prompt_offsets) - 1 or len(batch) == 0:
            raise ValueError(f"{len(batch)} request ids, {len(batch.prompt_offsets)} prompt offsets")
        self._queue.append(batch)
        self._waiting += len(batch)

    @property
    def num_unfinished(self) -> int:
        return self._waiting + self._untaken

    def step(self) -> bool:
        """Finish up to `capacity` rows."""
        if not self._waiting:
            return False
        start = time.perf_counter()
        self._steps += 1
        if self.settings.hang_after and self._steps > self.settings.hang_after:
            while True:
                time.sleep(3600)
        if self.settings.delay:
            time.sleep(self.settings.delay)
        running = self._held + self._next_rows(self._capacity - sum(map(len, self._held)))
        self._held = []
        try:
            self._fail(running)
        except BaseException:
            self._queue.extendleft(reversed(running))  # nothing was committed: the same rows go on
            raise
        for batch in running:
            late = (batch.request_id >> 10) % 5 == 0 if self._capacity < _ALL and self._steps % 2 else None
            if late is not None and late.any() and not late.all():
                self._held.append(_choose(batch, late))
                batch = _choose(batch, ~late)
            self._finish(batch)
        self._progress.steps += 1
        self._progress.busy_seconds += time.perf_counter() - start
        return True

    def _next_rows(self, count: int) -> list[RequestBatch]:
        rows = []
        while self._queue and count > 0:
            batch = self._queue.popleft()
            if len(batch) > count:
                mask = np.arange(len(batch)) < count
                self._queue.appendleft(_choose(batch, ~mask))
                batch = _choose(batch, mask)
            rows.append(batch)
            count -= len(batch)
        return rows

    def _fail(self, running: list[RequestBatch]) -> None:
        settings = self.settings
        count = sum(map(len, running))
        if settings.raise_once and self._steps == settings.raise_once:
            raise RuntimeError("the stand-in raises once")
        if settings.oom_above and count > settings.oom_above:
            raise OutOfMemory(f"out of memory with {count} rows")
        for text, error in ((settings.raise_on, RuntimeError), (settings.oom_on, OutOfMemory)):
            if text and any(text.encode() in batch.prompt_values.astype(np.uint8).tobytes() for batch in running):
                raise error(f"the stand-in fails on {text!r} ({count} rows)")

    def _finish(self, batch: RequestBatch) -> None:
        finished = _answer(batch, self.max_model_len)
        self._waiting -= len(batch)
        self._untaken += len(batch)
        self._progress.prompt_tokens += len(batch.prompt_values)
        self._progress.completion_tokens += len(finished.token_values)
        self._finished.append(finished)

    def take_finished(self) -> FinishedRows | None:
        if not self._finished:
            return None
        rows = self._finished.pop() if len(self._finished) == 1 else _concat(self._finished)
        self._finished = []
        self._untaken = 0
        return rows

    def abort_all(self) -> None:
        self._queue.clear()
        self._held, self._finished = [], []
        self._waiting = self._untaken = 0

    def abort_waiting(self) -> None:
        """Drop rows that are in no step yet."""
        self._queue.clear()
        self._waiting = sum(map(len, self._held))

    def reduce_batch(self) -> int:
        """Halve the rows a step takes; at 1 end the next row with an error."""
        count = min(self._capacity, self._waiting)
        if count > 1:
            self._capacity = count // 2
            return self._capacity
        (row,) = self._next_rows(1)
        message = "out of memory with this row alone"
        finished = _answer(row, self.max_model_len)
        self._waiting -= 1
        self._untaken += 1
        self._finished.append(
            replace(
                finished,
                finish_reason=np.full(1, _ERROR, np.uint8),
                error=[("out_of_memory", message)],
                completion_tokens=np.zeros(1, np.int32),
                token_values=finished.token_values[:0],
                token_offsets=np.zeros(2, np.int64),
                text_values=finished.text_values[:0],
                text_offsets=np.zeros(2, np.int64),
            )
        )
        return 0

    @property
    def progress(self) -> EngineProgress:
        self._progress.waiting = self._waiting
        return self._progress

    def describe(self) -> dict[str, object]:
        return {"model": "stand-in", "device": "none", "settings": asdict(self.settings)}

    def close(self) -> None:
        self.abort_all()


def _answer(batch: RequestBatch, max_model_len: int) -> FinishedRows:
    """Letters made of the prompt, the parameters and the seed; then the end token if max_tokens lets it."""
    count = len(batch)
    lengths = np.diff(batch.prompt_offsets)
    shared = isinstance(batch.params, SamplingParams)
    params = [batch.params] if isinstance(batch.params, SamplingParams) else batch.params
    max_tokens = np.array([p.max_tokens for p in params], np.int64)
    sampled = np.array([not p.is_greedy for p in params], np.bool_)
    salt = np.array([zlib.crc32(repr((p.temperature, p.top_p, p.top_k, p.stop)).encode()) for p in params], np.uint64)
    if shared:
        max_tokens, sampled, salt = np.repeat(max_tokens, count), np.repeat(sampled, count), np.repeat(salt, count)
    own = np.array([p.seed or 0 for p in params], np.int64)
    seeds = batch.seeds if batch.seeds is not None else np.repeat(own, count) if shared else own
    with np.errstate(over="ignore"):
        value = _checksums(batch.prompt_values, batch.prompt_offsets) ^ salt << np.uint64(17)
        value = value + np.where(sampled, seeds, 0).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ value >> np.uint64(31)) * np.uint64(0xBF58476D1CE4E5B9)
        value = value ^ value >> np.uint64(29)
    wanted = (value % np.uint64(25)).astype(np.int64)  # letters; 0: the first token is the end
    room = np.minimum(max_tokens, max_model_len - lengths)
    stopped = wanted + 1 <= room
    letters = np.where(stopped, wanted, room)
    tokens = letters + stopped
    token_offsets, text_offsets = _offsets(tokens), _offsets(letters)
    row = np.repeat(np.arange(count), letters)
    j = np.arange(text_offsets[-1]) - text_offsets[:-1][row]
    source = batch.prompt_values[batch.prompt_offsets[:-1][row] + j % lengths[row]].astype(np.uint64)
    text = (97 + (source + (value[row] >> (j % 37).astype(np.uint64)) + j.astype(np.uint64)) % np.uint64(26)).astype(
        np.uint8
    )
    values = np.full(token_offsets[-1], EOS, np.int32)
    values[token_offsets[:-1][row] + j] = text
    zeros = np.zeros(count, np.int32)
    wants_logprobs = any(p.logprobs for p in params)
    return FinishedRows(
        request_id=batch.request_id,
        finish_reason=np.where(stopped, _STOP, _LENGTH).astype(np.uint8),
        error=[None] * count,
        prompt_tokens=lengths.astype(np.int32),
        completion_tokens=tokens.astype(np.int32),
        token_values=values,
        token_offsets=token_offsets,
        text_values=text,
        text_offsets=text_offsets,
        steps=tokens.astype(np.int32),
        drafted=zeros,
        accepted=zeros,
        wasted=zeros,
        preemptions=zeros,
        cached_tokens=zeros,
        logprobs=(-(values % 8) / 8).astype(np.float32) if wants_logprobs else None,
    )


def _checksums(values: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A number a row that depends on every token and its position."""
    with np.errstate(over="ignore"):
        position = (np.arange(len(values)) - np.repeat(offsets[:-1], np.diff(offsets))).astype(np.uint64)
        mixed = (values.astype(np.uint64) + np.uint64(1)) * (
            position * np.uint64(0xD1342543DE82EF95) + np.uint64(0x632BE5AB)
        )
        mixed ^= mixed >> np.uint64(33)
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        return np.asarray(total[offsets[1:]] - total[offsets[:-1]])


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def _choose(batch: RequestBatch, mask: NDArray[np.bool_]) -> RequestBatch:
    index = np.flatnonzero(mask)
    lengths = np.diff(batch.prompt_offsets)
    offsets = _offsets(lengths[index])
    params = batch.params if isinstance(batch.params, SamplingParams) else [batch.params[i] for i in index.tolist()]
    values = batch.prompt_values[np.repeat(mask, lengths)]
    seeds = None if batch.seeds is None else batch.seeds[index]
    return RequestBatch(batch.request_id[index], batch.shard, values, offsets, params, seeds)


def _concat(parts: list[FinishedRows]) -> FinishedRows:
    joined: dict[str, Any] = {}
    for spec in fields(FinishedRows):
        values = [getattr(part, spec.name) for part in parts]
        if spec.name == "error":
            joined[spec.name] = [item for value in values for item in value]
        elif spec.name.endswith("_offsets"):
            joined[spec.name] = _offsets(np.concatenate([np.diff(value) for value in values]))
        elif spec.name == "logprobs" and values[0] is None:
            joined[spec.name] = None
        else:
            joined[spec.name] = np.concatenate(values)
    return FinishedRows(**joined)
