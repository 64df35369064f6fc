"""The job's main loop: rows from the feeder into the engine, complete shards to the committer, and when to stop.

Knows no files and no formats. One thread; reading, tokenising and writing happen on others.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from specbatch.errors import ExitCode
from specbatch.job.committer import Committed, Committer
from specbatch.job.driver import EngineDriver
from specbatch.job.feeder import Closed, Feeder, Opened
from specbatch.job.intake import Work, split
from specbatch.job.live import AnswerStore, LiveShard
from specbatch.job.options import JobEvents, JobOptions, JobProgress
from specbatch.job.signals import Interrupts, Watchdog
from specbatch.requests import EngineProgress

_IDLE_SECONDS: Final = 0.02
_TICK_SECONDS: Final = 0.1
_FLUSH_SECONDS: Final = 0.25
_COMMIT_SECONDS: Final = 4.0  # for parts being written when the grace period is over
_RATE_ROWS: Final = 100


@dataclass(slots=True)
class Stop:
    """Why nothing new is admitted, and until when what runs may run."""

    reason: str
    exit_code: ExitCode
    until: float  # time.monotonic()


@dataclass(slots=True)
class Tally:
    """Figures of this start."""

    samples: int = 0  # answered
    first_request: float | None = None
    last_finished: float = 0.0
    failed_shards: dict[int, str] = field(default_factory=dict)


class JobLoop:
    """See `run`. `make_driver` is called when the first row needs an engine."""

    def __init__(
        self,
        options: JobOptions,
        feeder: Feeder,
        committer: Committer,
        store: AnswerStore,
        make_driver: Callable[[], EngineDriver],
        events: JobEvents,
        interrupts: Interrupts,
        progress: JobProgress,
        started: float,
    ) -> None:
        """`progress`: figures of earlier starts, kept up to date here. `started`: of the job, time.monotonic()."""
        self._options = options
        self._feeder = feeder
        self._committer = committer
        self._store = store
        self._make_driver = make_driver
        self._events = events
        self._interrupts = interrupts
        self.progress = progress
        self._started = started
        self.driver: EngineDriver | None = None
        self.tally = Tally()
        self.stop: Stop | None = None
        self._backlog: deque[tuple[Work, int]] = deque()  # work and how many of its requests were given
        self._lives: deque[LiveShard] = deque()  # in input order, not submitted yet
        self._writing: set[int] = set()
        self._rows_before = self._base_rows = progress.rows_done
        self._base_errors = progress.row_errors  # rows, as in _base_rows
        self._recovered = 0  # rows whose answers a killed start left behind
        self._items = 0  # taken from the feeder
        self._closing = False  # stopping, and the feeder's next rows would need the engine
        self._next_tick = self._next_flush = 0.0
        self._watchdog = Watchdog(options.stall_timeout, self._describe, events.ending, end=interrupts.active)

    def run(self) -> None:
        """Until everything is committed, or `stop` says why not. Raises SpecbatchError."""
        self._feeder.start()
        self._committer.start()
        try:
            while not self._turn():
                pass
        finally:
            self._watchdog.close()
            self._feeder.stop()
            if self.driver is not None:
                with contextlib.suppress(Exception):  # an engine that is broken already
                    self.driver.abort()
            for live in self._lives:
                live.spool.sync()
            self._finish_parts()
            self._tick(force=True)

    # -- one turn

    def _turn(self) -> bool:
        """True when the loop is over."""
        now = time.monotonic()
        self._look_outside(now)
        if self.stop is None:
            self._take_items()
            self._admit()
        else:
            self._take_closing()
        moved = False
        if self.driver is not None and self.driver.unfinished:
            moved = self.driver.step()
            self.tally.last_finished = time.monotonic()
        self._watchdog.look(self._signs_of_life())
        self._submit()
        self._collect_parts()
        self._check_budget()
        self._flush(now)
        self._tick()
        if self.stop is not None:
            return not (self.driver is not None and self.driver.unfinished) or now >= self.stop.until
        if self._feeder.exhausted and not self._backlog and not (self.driver and self.driver.unfinished):
            if not self._lives:
                if self._committer.idle:
                    return True
                self._committer.hurry()
            self._committer.wait(_IDLE_SECONDS)
            return False
        if not moved and not self._backlog:
            self._wait()
        return False

    def _signs_of_life(self) -> tuple[int, ...]:
        """Counters of which one at least moves while anything works."""
        engine = self.driver.engine.progress if self.driver is not None else EngineProgress()
        tokens = (engine.prompt_tokens, engine.completion_tokens)
        return (*tokens, self._answered(), self._items, self._committer.rows, self._committer.finished)

    def _wait(self) -> None:
        """Nothing to do for the engine: until the feeder has something, or the committer may have."""
        if self._feeder.exhausted:
            self._committer.wait(_IDLE_SECONDS)
        else:
            item = self._feeder.next(_IDLE_SECONDS)
            if item is not None:
                self._take(item)

    def _take_items(self) -> None:
        """Keep the backlog at one piece of work; what needs no engine goes through at once."""
        for _ in range(64):
            if self._backlog:
                return
            item = self._feeder.next(None)
            if item is None:
                return
            self._take(item)

    def _take_closing(self) -> None:
        """While stopping: what is ready and needs no engine, so that whole shards are committed."""
        while not self._closing:
            item = self._feeder.next(None)
            if item is None:
                return
            if isinstance(item, Work) and len(item.slots):
                self._closing = True
            else:
                self._take(item)

    def _take(self, item: Opened | Work | Closed) -> None:
        self._items += 1
        if isinstance(item, Opened):
            live = item.live
            self._lives.append(live)
            self._recovered += live.rows_done
            if self.driver is not None:
                self.driver.open(live)
            self._events.shard_started(live.shard.index, live.shard.rows)
        elif isinstance(item, Work):
            live = item.live
            live.needed += len(item.slots) + item.settled_rows
            self._recovered += live.look(item.start, item.start + item.rows)
            if item.settled_rows:
                live.record(item.settled)
            if len(item.slots):
                self._backlog.append((item, 0))
        else:
            item.live.prepared = True
            if item.failed is not None:
                self._fail(item.live, item.failed)

    def _fail(self, live: LiveShard, reason: str) -> None:
        live.failed = reason
        self.tally.failed_shards[live.shard.index] = reason
        self._events.warning("input_unreadable", f"shard {live.shard.index} is left out: {reason}")

    def _admit(self) -> None:
        while self._backlog:
            if self.driver is None:
                self._watchdog.rest()  # loading takes as long as it takes
                self.driver = self._make_driver()
                for live in self._lives:
                    self.driver.open(live)
                self._events.stage("generating")
                if self._interrupts.received is not None:
                    return
            room = self.driver.room(self.driver.engine.progress.running)
            if room <= 0:
                return
            work, given = self._backlog[0]
            last = min(given + room, len(work.slots))
            if self.tally.first_request is None:
                self.tally.first_request = time.monotonic()
            self.driver.add(work.live, split(work.requests, given, last), work.slots[given:last])
            self._backlog[0] = (work, last)
            if last == len(work.slots):
                self._backlog.popleft()
                self._take_items()

    # -- shards that are whole

    def _submit(self) -> None:
        """Hand complete shards over in input order; an unreadable one lets others pass once its rows are done."""
        while self._lives:
            live = self._lives[0]
            if live.failed is not None and live.prepared and not live.outstanding:
                live.spool.sync()
                self._store.unreadable[live.shard.index] = live
            elif live.complete:
                self._committer.submit(live)
                self._writing.add(live.shard.index)
            else:
                return
            self._lives.popleft()
            if self.driver is not None:
                self.driver.close(live)
            self.tally.samples += live.answered
            self._base_rows += live.rows_done
            self._base_errors += live.row_errors
            self._feeder.retire()

    def _collect_parts(self) -> None:
        for result in self._committer.results():
            live = result.live
            self._writing.discard(live.shard.index)
            if isinstance(result, Committed):
                entry = result.entry
                self._base_errors += entry.errors - live.row_errors  # copies of failed rows
                self.progress.shards_done += 1
                self.progress.reused += entry.reused
                self.progress.deduplicated += entry.deduplicated
                self.progress.skipped += entry.skipped
                self._events.shard_committed(live.shard.index, entry.rows, entry.errors, entry.name)
            else:
                self._fail(live, result.reason)
                self._base_rows -= live.rows_done
                self._base_errors -= live.row_errors

    def _finish_parts(self) -> None:
        """Wait for parts being written: all of them, or (when stopping) a few seconds past the end."""
        if self.stop is not None:
            self._submit()
            self._committer.hurry()
            deadline = max(self.stop.until, time.monotonic()) + _COMMIT_SECONDS
            while not self._committer.idle and time.monotonic() < deadline:
                self._collect_parts()
                time.sleep(_IDLE_SECONDS)
        self._committer.stop(cancel=True)
        self._collect_parts()

    # -- when to stop

    def _look_outside(self, now: float) -> None:
        options = self._options
        if self._interrupts.take_report():
            self._update(now)
            self._events.report(self.progress)
        if self.stop is not None:
            return
        if self._interrupts.received is not None:
            signal = self._interrupts.received
            self._stop(signal.name, ExitCode(128 + signal), now + options.grace)
        elif options.max_duration is not None:
            end = self._started + options.max_duration
            if now >= end - min(options.grace, options.max_duration / 10):
                self._stop("max-duration", ExitCode.DEADLINE, end)

    def _check_budget(self) -> None:
        options = self._options
        if self.stop is not None or (options.max_errors is None and options.max_error_rate is None):
            return
        errors, done = self._errors(), self._rows_done()
        over = options.max_errors is not None and errors > options.max_errors
        if options.max_error_rate is not None and done >= _RATE_ROWS:
            over |= errors > options.max_error_rate * done
        if over:
            self._stop("error budget", ExitCode.ERROR_BUDGET, time.monotonic())

    def _stop(self, reason: str, code: ExitCode, until: float) -> None:
        self.stop = Stop(reason, code, until)
        self._backlog.clear()
        if self.driver is not None:
            self.driver.abort_waiting()
        self._events.stopping(reason, max(0.0, until - time.monotonic()))

    # -- figures

    def _answered(self) -> int:
        return self.tally.samples + sum(live.answered for live in self._lives)

    def _rows_done(self) -> int:
        return self._base_rows + sum(live.rows_done for live in list(self._lives))  # the watchdog's thread asks too

    def _errors(self) -> int:
        return self._base_errors + sum(live.row_errors for live in self._lives)

    def _flush(self, now: float) -> None:
        if now >= self._next_flush:
            self._next_flush = now + _FLUSH_SECONDS
            for live in self._lives:
                live.spool.flush_if_old(now)

    def _tick(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            self._update(now)
            self._events.tick(self.progress)

    def _update(self, now: float) -> None:
        progress = self.progress
        progress.rows_done = self._rows_done()
        progress.rows_this_start = progress.rows_done - self._rows_before - self._recovered
        progress.row_errors = self._errors()
        progress.shards_live = tuple(live.shard.index for live in self._lives) + tuple(self._writing)
        progress.elapsed = now - self._started
        progress.stopping = self.stop.reason if self.stop is not None else None
        progress.engine = self.driver.engine.progress if self.driver is not None else None

    def _describe(self) -> str:
        """For the watchdog, from another thread."""
        engine: Any = self.driver.engine.progress if self.driver is not None else None
        shards = [(live.shard.index, live.outstanding) for live in list(self._lives)[:8]]
        return f"rows {self._rows_done()}/{self.progress.rows_total}, (shard, rows open) {shards}, engine {engine}"
