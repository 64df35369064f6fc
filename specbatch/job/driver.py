"""Drives one engine for the job: gives it rows, files what it finishes, and survives what it throws.

An exception never loses a row: rows in flight are run again, in halves, until the row that raises is alone and becomes
a row error. Knows nothing of reading, tokenising or parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.errors import OutOfMemory, ResourceError
from specbatch.job.answers import failed_slot, from_finished
from specbatch.job.intake import choose, split
from specbatch.job.live import LiveShard
from specbatch.job.ragged import take
from specbatch.job.shards import SAMPLE_BITS
from specbatch.requests import BatchEngine, FinishedRows, RequestBatch

MIN_WINDOW = 1024  # rows the engine holds at least, so that it has something to choose from
MAX_LONE_FAILURES = 16  # rows in a row that fail alone: the engine is broken, not the rows
MAX_TOLD = 16  # warnings of one kind; the rows themselves say the rest
MAX_REDUCTIONS = 64  # of the batch, without a row finished in between


@dataclass(slots=True)
class Flight:
    """Requests that the engine has."""

    live: LiveShard
    batch: RequestBatch
    slots: NDArray[np.int64]


class EngineDriver:
    """One engine, and which rows it holds. All calls come from the thread that made it."""

    def __init__(self, engine: BatchEngine, warn: Callable[[str, str], None]) -> None:
        self.engine = engine
        self._warn = warn
        self._told: Counter[str] = Counter()
        self._flights: list[Flight] = []
        self._in_flights = 0  # requests in _flights, finished ones included
        self._retries: list[list[Flight]] = []  # groups to run alone; the last one is next
        self._group: list[Flight] | None = None  # the group that runs alone now
        self._largest: int | None = None  # rows at once that are known to be too many
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._lives: list[LiveShard] = []
        self._draining = False
        self._lone_failures = 0
        self._reductions = 0
        self.computed = 0  # rows: one whose samples share an answer counts once, as any other
        self.prompt_tokens = 0  # of the samples finished
        self.completion_tokens = 0
        self._reduce = getattr(engine, "reduce_batch", None)
        self._window = MIN_WINDOW * int(getattr(engine, "num_engines", 1))
        if hasattr(engine, "on_warning"):
            engine.on_warning = warn

    # -- shards in work

    def open(self, live: LiveShard) -> None:
        """Shards come in input order."""
        self._lives.append(live)
        self._starts = np.append(self._starts, live.shard.first_key)

    def close(self, live: LiveShard) -> None:
        index = self._lives.index(live)
        del self._lives[index]
        self._starts = np.delete(self._starts, index)

    # -- rows in

    @property
    def unfinished(self) -> int:
        return self.engine.num_unfinished + sum(len(f.slots) for group in self._retries for f in group)

    def room(self, running: int) -> int:
        """Rows the engine would like to have more; 0 while rows are being retried."""
        if self._retries or self._group is not None:
            return 0
        window = max(self._window, 2 * running)
        if self._largest is not None:
            window = min(window, max(1, self._largest // 2))
        return max(0, window - self.engine.num_unfinished)

    def add(self, live: LiveShard, batch: RequestBatch, slots: NDArray[np.int64]) -> None:
        flight = Flight(live, batch, slots)
        live.began = live.began or self._clock()
        try:
            self.engine.add(batch)
        except OutOfMemory as error:
            self._isolate([flight], error, halve=True)
        except Exception as error:  # an engine is somebody else's: its rows must not be lost
            self._isolate([flight], error, halve=True)
        else:
            self._flights.append(flight)
            self._in_flights += len(slots)
            if self._in_flights > 4 * self.engine.num_unfinished + 8 * MIN_WINDOW:
                self._prune()

    def _clock(self) -> tuple[float, int]:
        """The engine's busy seconds and the tokens it made in them."""
        progress = self.engine.progress
        return progress.busy_seconds, progress.completion_tokens

    # -- steps

    def step(self) -> bool:
        """One engine step, or one move of a retry. Files what was finished. False when nothing is left."""
        if self._group is None and self._retries and self.engine.num_unfinished == 0:
            self._start_group()
        try:
            more = self.engine.step()
        except OutOfMemory as error:
            self._out_of_memory(error)
            more = True
        except Exception as error:
            try:
                self._collect()
            except RuntimeError as second:  # of an engine that no longer works; what it said first is what matters
                raise error from second
            self._isolate([], error, halve=False)
            more = True
        self._collect()
        if self.engine.num_unfinished == 0:
            if self._flights and not self._draining:
                self._prune(require_done=True)
            self._group = None
        return more or bool(self._retries)

    def abort(self) -> None:
        """Drop everything unfinished."""
        self._collect()
        self.engine.abort_all()
        self._flights, self._retries, self._group, self._in_flights = [], [], None, 0

    def abort_waiting(self) -> None:
        """Drop rows that do not run yet, where the engine can. Nothing is added from then on."""
        self._draining = True
        self._retries = []
        abort_waiting = getattr(self.engine, "abort_waiting", None)
        if abort_waiting is not None:
            abort_waiting()

    def _collect(self) -> None:
        finished = self.engine.take_finished()
        if finished is None or len(finished) == 0:
            return
        self._lone_failures = self._reductions = 0
        modes = self.engine.progress.mode
        keys = finished.request_id >> SAMPLE_BITS
        owners = np.searchsorted(self._starts, keys, "right") - 1
        for owner in np.unique(owners).tolist():
            live = self._lives[owner]
            chosen = np.flatnonzero(owners == owner)
            part = finished if len(chosen) == len(finished) else pick(finished, chosen)
            rows = keys[chosen] - live.shard.first_key
            if owner < 0 or int(rows.max()) >= live.shard.rows:
                raise AssertionError(f"the engine finished a request nobody gave it: {part.request_id[rows.argmax()]}")
            slots = rows * live.n + (part.request_id & (1 << SAMPLE_BITS) - 1)
            mode = modes.get(live.shard.index, "ar").split(" ")[0]
            live.record(from_finished(live.spool.schema, part, slots, mode))
            live.ended = self._clock()
        self.computed += int(np.count_nonzero(finished.request_id & (1 << SAMPLE_BITS) - 1 == 0))
        self.prompt_tokens += int(finished.prompt_tokens.sum(dtype=np.int64))
        self.completion_tokens += int(finished.completion_tokens.sum(dtype=np.int64))

    # -- when it throws

    def _out_of_memory(self, error: OutOfMemory) -> None:
        self._collect()
        if self._reduce is None:
            self._isolate([], error, halve=True)
            return
        self._reductions += 1
        if self._reductions > MAX_REDUCTIONS:
            raise ResourceError(f"out of memory again and again: {error.message}") from error
        rows = self._reduce()
        what = f"going on with up to {rows} rows at once" if rows else "the row that ran alone ends with an error"
        self._tell("out_of_memory", f"{error.message}; {what}")

    def _isolate(self, extra: list[Flight], error: Exception, *, halve: bool) -> None:
        """Take back all rows in flight and queue them for runs of their own. Raises `error` where the engine cannot even
        drop them."""
        try:
            self.engine.abort_all()
        except RuntimeError as second:
            raise error from second
        self._prune()
        rows = [*self._flights, *extra]
        first_time = self._group is None
        self._flights, self._in_flights, self._group = [], 0, None
        count = sum(len(flight.slots) for flight in rows)
        if count == 0:
            self._count_failure(error)
            return
        text = f"{type(error).__name__}: {error}"
        if count == 1:
            self._count_failure(error)
            code = "out_of_memory" if isinstance(error, OutOfMemory) else "engine_error"
            live, batch, slots = rows[0].live, rows[0].batch, rows[0].slots
            live.record(failed_slot(live.spool.schema, int(slots[0]), code, text, len(batch.prompt_values)))
            self._tell(code, f"one row ends with an error: {text}")
            return
        if isinstance(error, OutOfMemory):
            self._largest = min(count, self._largest or count)
        if first_time and not halve:
            self._tell("engine_error", f"the engine raised with {count} rows, which run again: {text}")
            self._retries.append(rows)
        else:
            self._tell("engine_error", f"the engine raised with {count} rows, which run again in halves: {text}")
            self._retries.extend(reversed(_halves(rows, count)))

    def _tell(self, code: str, message: str) -> None:
        """Warn, but do not fill a log with the same."""
        self._told[code] += 1
        if self._told[code] <= MAX_TOLD:
            last = "; there may be more of the kind, not shown" if self._told[code] == MAX_TOLD else ""
            self._warn(code, message + last)

    def _count_failure(self, error: Exception) -> None:
        self._lone_failures += 1
        if self._lone_failures > MAX_LONE_FAILURES:
            raise error

    def _start_group(self) -> None:
        group = self._group = self._retries.pop()
        for i, flight in enumerate(group):
            try:
                self.engine.add(flight.batch)
            except Exception as error:
                self._isolate(group[i:], error, halve=True)
                return
            self._flights.append(flight)
            self._in_flights += len(flight.slots)

    def _prune(self, require_done: bool = False) -> None:
        """Forget requests that were answered; with `require_done`, a request the engine lost becomes a row error."""
        kept = []
        for flight in self._flights:
            missing = np.flatnonzero(~flight.live.spool.has(flight.slots))
            if len(missing) and not require_done:
                kept.append(Flight(flight.live, choose(flight.batch, missing), flight.slots[missing]))
            for slot in flight.slots[missing].tolist() if require_done else ():
                message = "the engine finished without an answer for this row"
                flight.live.record(failed_slot(flight.live.spool.schema, slot, "engine_error", message, 0))
        self._flights = kept
        self._in_flights = sum(len(flight.slots) for flight in kept)


def _halves(rows: list[Flight], count: int) -> list[list[Flight]]:
    """The same rows, in order, as two groups of about the same size."""
    left: list[Flight] = []
    right: list[Flight] = []
    room = count // 2
    for flight in rows:
        here = min(room, len(flight.slots))
        room -= here
        if here:
            left.append(Flight(flight.live, split(flight.batch, 0, here), flight.slots[:here]))
        if here < len(flight.slots):
            rest = split(flight.batch, here, len(flight.slots))
            right.append(Flight(flight.live, rest, flight.slots[here:]))
    return [left, right]


def pick(finished: FinishedRows, index: NDArray[np.int64]) -> FinishedRows:
    """Some of the finished rows."""
    tokens, token_offsets = take(finished.token_values, finished.token_offsets, index)
    text, text_offsets = take(finished.text_values, finished.text_offsets, index)
    arrays: dict[str, Any] = {
        name: getattr(finished, name)[index]
        for name in (
            "request_id",
            "finish_reason",
            "prompt_tokens",
            "completion_tokens",
            "steps",
            "drafted",
            "accepted",
            "wasted",
            "preemptions",
            "cached_tokens",
        )
    }
    logprobs = None if finished.logprobs is None else take(finished.logprobs, finished.token_offsets, index)[0]
    return FinishedRows(
        error=[finished.error[i] for i in index.tolist()],
        token_values=tokens,
        token_offsets=token_offsets,
        text_values=text,
        text_offsets=text_offsets,
        logprobs=logprobs,
        **arrays,
    )


def join_finished(parts: Sequence[FinishedRows]) -> FinishedRows:
    """Finished rows of several, one after the other."""
    joined: dict[str, Any] = {}
    for spec in fields(FinishedRows):
        values = [getattr(part, spec.name) for part in parts]
        if spec.name == "error":
            joined[spec.name] = [item for value in values for item in value]
        elif spec.name.endswith("_offsets"):
            lengths = np.concatenate([np.diff(value) for value in values])
            joined[spec.name] = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        elif spec.name == "logprobs":
            blank = [
                np.full(len(p.token_values), np.nan, np.float32) if v is None else v
                for p, v in zip(parts, values, strict=True)
            ]
            joined[spec.name] = None if all(v is None for v in values) else np.concatenate(blank)
        else:
            joined[spec.name] = np.concatenate(values)
    return FinishedRows(**joined)
