"""Counters of a running job as the figures people read: recent rates, shares, time left. Pure; the clock is given.

Knows nothing of how they are shown.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from specbatch.job.options import JobProgress
from specbatch.requests import EngineProgress

RECENT = 15.0  # seconds that "now" means in rates
LEAST_HISTORY = 60.0  # seconds of history the time left is estimated from, more as the run gets longer
RESOLUTION = 0.25  # seconds between two remembered points


@dataclass(frozen=True, slots=True)
class Reading:
    """What a display shows at one moment. None: not known (yet)."""

    rows_done: int
    rows_total: int
    row_errors: int
    skipped: int
    reused: int
    deduplicated: int
    shards_done: int
    shards_total: int
    elapsed: float
    seconds_left: float | None
    tokens_per_second: float | None  # completion tokens, recent
    prompt_tokens: int
    completion_tokens: int
    acceptance_rate: float | None  # recent; None: nothing drafted lately
    running: int
    waiting: int
    kv_share: float | None
    preemptions: int
    modes: Mapping[int, str]  # live shard -> "ar", "ngram k=4", ...
    stopping: str | None

    @property
    def share(self) -> float:
        return self.rows_done / self.rows_total if self.rows_total else 1.0

    @property
    def mode_counts(self) -> list[tuple[str, int]]:
        """Modes of the live shards, most common first."""
        return Counter(self.modes.values()).most_common()

    def as_dict(self) -> dict[str, object]:
        """JSON types; unknown figures are null."""
        values = asdict(self)
        values["modes"] = {str(shard): mode for shard, mode in self.modes.items()}
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}


@dataclass(frozen=True, slots=True)
class _Point:
    time: float
    rows: int
    tokens: int
    drafted: int
    accepted: int


class Meter:
    """Remembers a few counters over time and reads rates off them."""

    def __init__(self) -> None:
        self._points: deque[_Point] = deque()
        self._loading = True  # no step of an engine was seen yet

    def read(self, progress: JobProgress, now: float) -> Reading:
        """The figures at time `now` (seconds, monotonic)."""
        engine = progress.engine or EngineProgress()
        point = _Point(now, progress.rows_done, engine.completion_tokens, engine.drafted, engine.accepted)
        if progress.engine is not None and self._loading:
            self._points.clear()  # rates are of generation: the time before the first step does not count
            self._loading = engine.steps == 0 and engine.completion_tokens == 0
        self._remember(point, progress.elapsed)
        recent = self._since(now - RECENT)
        seconds = now - recent.time
        drafted = point.drafted - recent.drafted
        return Reading(
            rows_done=progress.rows_done,
            rows_total=progress.rows_total,
            row_errors=progress.row_errors,
            skipped=progress.skipped,
            reused=progress.reused,
            deduplicated=progress.deduplicated,
            shards_done=progress.shards_done,
            shards_total=progress.shards_total,
            elapsed=progress.elapsed,
            seconds_left=self._seconds_left(progress, now),
            tokens_per_second=(point.tokens - recent.tokens) / seconds if seconds >= 0.5 else None,
            prompt_tokens=engine.prompt_tokens,
            completion_tokens=engine.completion_tokens,
            acceptance_rate=(point.accepted - recent.accepted) / drafted if drafted > 0 else None,
            running=engine.running,
            waiting=engine.waiting,
            kv_share=engine.pages_used / engine.pages_total if engine.pages_total else None,
            preemptions=engine.preemptions,
            modes=dict(engine.mode),
            stopping=progress.stopping,
        )

    def _remember(self, point: _Point, elapsed: float) -> None:
        points = self._points
        if points and point.tokens < points[-1].tokens:
            points.clear()  # another engine: its counters began again
        if len(points) < 2 or point.time - points[-2].time >= max(RESOLUTION, elapsed / 400):
            points.append(point)
        else:
            points[-1] = point
        horizon = point.time - max(LEAST_HISTORY, elapsed / 4)
        while len(points) > 2 and points[1].time <= horizon:
            points.popleft()

    def _since(self, time: float) -> _Point:
        """The latest point not after `time`, else the first there is."""
        best = self._points[0]
        for point in self._points:
            if point.time > time:
                break
            best = point
        return best

    def _seconds_left(self, progress: JobProgress, now: float) -> float | None:
        first = self._points[0]
        rows, seconds = progress.rows_done - first.rows, now - first.time
        left = progress.rows_total - progress.rows_done
        if left <= 0:
            return 0.0
        return left * seconds / rows if rows > 0 and seconds >= 2.0 else None
