"""Measures step times at start-up: few points, the ones that matter most first, within a time budget.

Owns which points to time. Knows nothing of models: `measure` runs and times one step.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Literal, Protocol

from specbatch.control.cost_model import GridCost, Surface, isotonic

Kind = Literal["target", "draft"]
Progress = Callable[[str], None]

REPEATS = 3
ROUNDS = 4  # over all points once more, at most, until the best times of all are found
FOUND = 0.02  # a round that brings no time down by more ends it
SMOOTH = 0.15  # neighbours closer than this (relative) need no point between them


class Measure(Protocol):
    def __call__(self, kind: Kind, rows: int, tokens_per_row: int, context: int) -> float:
        """Run one step of `rows` rows with `tokens_per_row` new tokens each, `context` tokens of context a row with
        them, and return its seconds, as the engine would wait for it."""
        ...


class _Points:
    """Times of one model, and the wall time they took."""

    def __init__(self, measure: Measure, kind: Kind, deadline: float, clock: Callable[[], float]) -> None:
        self.measure, self.kind, self.deadline, self.clock = measure, kind, deadline, clock
        self.times: dict[tuple[int, int, int], float] = {}

    def need(self, rows: int, q: int, context: int, *, force: bool = False) -> bool:
        """Time a point unless it is there or time is up; the best of a few runs.

        A first run may be the first to touch its pages, and then takes several times as long (the memory is zeroed): alone
        it counts only where there must be a time.
        """
        point = (rows, q, max(context, q))
        if point in self.times:
            return True
        started = self.clock()
        if not force and started >= self.deadline:
            return False
        best = self.measure(self.kind, *point)
        first, runs = self.clock() - started, 1
        for _ in range(REPEATS):
            if self.clock() + first > self.deadline and not (force and (first < 0.05 or runs == 1)):
                break
            best, runs = min(best, self.measure(self.kind, *point)), runs + 1
        if runs == 1 and not force:
            return False
        self.times[point] = best
        return True

    def again(self) -> None:
        """All points once more, round after round: what else runs on the machine comes and goes, and takes whole points of
        short steps with it. A round that finds no better time is the last."""
        for _ in range(ROUNDS):
            moved = 0.0
            for point, best in self.times.items():
                if self.clock() + best > self.deadline:
                    return
                taken = self.measure(self.kind, *point)
                if taken < best:
                    self.times[point] = taken
                    moved = max(moved, 1.0 - taken / best)
            if moved <= FOUND:
                return


def profile(
    measure: Measure,
    *,
    max_rows: int,
    max_k: int,
    with_draft: bool,
    base_context: int = 128,
    long_context: int = 1024,
    budget: float = 8.0,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> GridCost:
    """Step times of the target (and the draft) up to max_rows rows and max_k drafts, in about `budget` seconds.

    Each model is timed at its corners in any case; what is left of the budget goes where the surface bends.
    """
    started = clock()
    share = 0.65 if with_draft else 1.0
    say = progress or (lambda _: None)
    say(f"measuring step times of the target (up to {max_rows} rows x {max_k + 1} tokens)")
    target = _surface(
        _Points(measure, "target", started + budget * share, clock),
        max_rows,
        sorted({1, 2, 3, 5, 9, max_k + 1} & set(range(1, max_k + 2))),
        base_context,
        long_context,
    )
    draft = None
    if with_draft:
        say("measuring step times of the draft")
        chunk = max(32, min(256, base_context))  # catching up: long runs of one row
        draft = _surface(
            _Points(measure, "draft", started + budget, clock), max_rows, [1, 2, chunk], base_context, long_context
        )
    say(f"measured in {clock() - started:.1f} s")
    return GridCost(target, draft)


def _surface(points: _Points, max_rows: int, widths: list[int], base: int, long: int) -> Surface:
    axis = [1]
    while axis[-1] * 2 < max_rows:
        axis.append(axis[-1] * 2)
    if max_rows > 1:
        axis.append(max_rows)
    wide = widths[-1]
    tall = [r for r in axis if r * wide <= 4096] or [1]
    for rows, q in ((1, 1), (max_rows, 1), (1, wide), (tall[-1] if wide <= 16 else 1, wide)):
        points.need(rows, q, base, force=True)
    for rows in (1, max_rows):
        points.need(rows, 1, long, force=rows == 1)
    _refine(points, axis, 1, base)
    for q in widths[1:]:
        if q <= 16:
            for rows in (1, tall[-1], tall[len(tall) // 2]):
                points.need(rows, q, base)
    for q in widths[1:]:
        if q <= 16:
            _refine(points, tall, q, base)
    points.need(axis[len(axis) // 2], 1, long)
    points.again()
    return _fit(points.times, axis, widths, base, long)


def _refine(points: _Points, axis: list[int], q: int, base: int) -> None:
    """Bisect the rows axis where neighbouring times differ most, until they are close or the time is up."""
    while True:
        known = [r for r in axis if (r, q, max(base, q)) in points.times]
        best, gap = None, SMOOTH
        for low, high in itertools.pairwise(known):
            between = axis[axis.index(low) + 1 : axis.index(high)]
            ratio = points.times[high, q, max(base, q)] / max(points.times[low, q, max(base, q)], 1e-12)
            if between and abs(ratio - 1.0) > gap:
                best, gap = between[len(between) // 2], abs(ratio - 1.0)
        if best is None or not points.need(best, q, base):
            return


def _fit(times: dict[tuple[int, int, int], float], axis: list[int], widths: list[int], base: int, long: int) -> Surface:
    """Fill the grid: a monotone curve over tokens through all points, times how far nearby points stand from it."""
    flat = {(r, q): t for (r, q, c), t in times.items() if c == max(base, q)}
    tokens = sorted({r * q for r, q in flat})
    means = [sum(math.log(t) for (r, q), t in flat.items() if r * q == n) for n in tokens]
    counts = [sum(1 for r, q in flat if r * q == n) for n in tokens]
    curve = isotonic([m / c for m, c in zip(means, counts, strict=True)])

    def on_curve(n: float) -> float:  # log seconds; linear in seconds between points
        if n <= tokens[0]:
            return curve[0]
        for i in range(len(tokens) - 1):
            if n <= tokens[i + 1] or i == len(tokens) - 2:
                low, high = math.exp(curve[i]), math.exp(curve[i + 1])
                return math.log(low + (high - low) * (n - tokens[i]) / (tokens[i + 1] - tokens[i]))
        return curve[-1]

    def seconds(rows: int, q: int) -> float:
        if (rows, q) in flat:
            return flat[rows, q]
        total = weight = 0.0
        for (r, p), t in flat.items():
            distance = math.log2(r / rows) ** 2 + (2.0 * math.log2(p / q)) ** 2
            w = 1.0 / distance**2
            total += w * (math.log(t) - on_curve(r * p))
            weight += w
        return math.exp(on_curve(rows * q) + total / weight)

    slopes = {
        r: max((t - flat[r, 1]) / (r * (long - base)), 0.0)
        for (r, q, c), t in times.items()
        if q == 1 and c == long and long > base and (r, 1) in flat
    }

    def slope(rows: int) -> float:
        known = sorted(slopes)
        if not known:
            return 0.0
        below = max((r for r in known if r <= rows), default=known[0])
        above = min((r for r in known if r >= rows), default=known[-1])
        if below == above:
            return slopes[below]
        u = (math.log(rows) - math.log(below)) / (math.log(above) - math.log(below))
        return slopes[below] + u * (slopes[above] - slopes[below])

    return Surface(axis, widths, [[seconds(r, q) for q in widths] for r in axis], [slope(r) for r in axis], base)
