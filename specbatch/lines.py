"""A run as lines on stderr, for cron and for programs: plain text or JSON, one line an event and one an interval.

No control codes, no rich. Knows the events of a job, not what caused them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Literal

from specbatch import wording
from specbatch.errors import SpecbatchError
from specbatch.job.options import JobEvents, JobPlan, JobProgress
from specbatch.meter import Meter
from specbatch.streams import SafeStream, printable


class Log:
    """Timestamped lines of one stream. Text for people, JSON for programs; never raises.

    Every JSON line has "time" (ISO 8601 with offset), "event" and, in words, "message"; the rest depends on the event.
    """

    def __init__(
        self,
        stream: SafeStream,
        format: Literal["text", "json"] = "text",
        *,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
        timestamps: bool = True,
    ) -> None:
        self.stream = stream
        self.format = format
        self._now = now
        self._timestamps = timestamps

    def say(self, event: str, message: str, **fields: object) -> None:
        """One event, one line."""
        if self.format == "json":
            line = {"time": self._now().isoformat(timespec="milliseconds"), "event": event, "message": message}
            self.stream.line(json.dumps(line | fields, default=str))
        else:
            stamp = self._now().strftime("%Y-%m-%d %H:%M:%S ") if self._timestamps else ""
            self.stream.line(stamp + printable(message))


class LineEvents(JobEvents):
    """JobEvents as log lines. `show_progress` False: only what happens once."""

    is_live = False

    def __init__(
        self,
        log: Log,
        *,
        interval: float = 60.0,
        show_progress: bool = True,
        ending: Callable[[SpecbatchError], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ending`: what to do when the process is about to end, besides nothing but saying it."""
        self._log = log
        self._interval = interval
        self._show_progress = show_progress
        self._ending = ending
        self._clock = clock
        self._meter = Meter()
        self._next: float | None = None
        self._json = log.format == "json"

    def say(self, event: str, message: str, **fields: object) -> None:
        """One line of the caller's."""
        self._log.say(event, message, **fields)

    def plan(self, plan: JobPlan) -> None:
        lines = wording.plan_lines(plan)
        for line in lines[: 1 if self._json else None]:
            fields = {"rows": plan.rows, "shards": plan.shards, "rows_done": plan.rows_done, "output": str(plan.output)}
            self._log.say("plan", line, **fields)
        for warning in plan.warnings:
            self.warning("plan", warning)

    def stage(self, name: str) -> None:
        self._log.say("stage", name, stage=name)

    def engine_ready(self, description: Mapping[str, object]) -> None:
        lines = wording.engine_lines(description)
        if self._json:
            self._log.say("engine", "; ".join(lines), engine=dict(description))
        else:
            for line in lines:
                self._log.say("engine", line)

    def shard_started(self, shard: int, rows: int) -> None:
        if self._json:
            self._log.say("shard_started", f"shard {shard}: {wording.plural(rows, 'row')}", shard=shard, rows=rows)

    def shard_committed(self, shard: int, rows: int, errors: int, part: str) -> None:
        if self._json:
            message = f"shard {shard} written: {part}"
            self._log.say("shard_committed", message, shard=shard, rows=rows, row_errors=errors, part=part)

    def tick(self, progress: JobProgress) -> None:
        now = self._clock()
        if not self._show_progress:
            return
        if self._next is None:
            self._next = now + self._interval
        reading = self._meter.read(progress, now)
        if now >= self._next:
            self._log.say("progress", wording.progress_line(reading), **reading.as_dict())
            missed = int((now - self._next) / self._interval) if self._interval > 0 else 0
            self._next += (missed + 1) * self._interval

    def report(self, progress: JobProgress) -> None:
        reading = self._meter.read(progress, self._clock())
        self._log.say("progress", wording.progress_line(reading), **reading.as_dict())

    def warning(self, code: str, message: str) -> None:
        self._log.say("warning", f"warning: {message}", code=code)

    def stopping(self, reason: str, seconds: float) -> None:
        self._log.say("stopping", wording.stopping_line(reason, seconds), reason=reason, seconds=seconds)

    def ending(self, error: SpecbatchError) -> None:
        (self._ending or super().ending)(error)
