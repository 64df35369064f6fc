"""Rows differ: how much a round brings each, and what that means for the batch in the long run.

Owns the per-row tally the engine keeps and the correction it allows. Knows nothing of scores.

What is counted in a step weighs rows equally, but a batch job is done when its rows are. Rows that accept much leave
early and rows that accept little stay, so the batch of a speculating run drifts towards the latter, and a large k that
looks good on the fresh mix is paid by those who gain nothing from it. A row needs L / E steps, hence in the long run
rows progress at the harmonic mean of their E, not at the mean that is seen at the moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.control.records import RowGroup

EDGES = (0.15, 0.4, 0.8, 1.5)  # accepted drafts a round that separate the groups
LEAST_DRAFTED = 8
LEAST_ROWS = 6.0
LIGHTEST, HEAVIEST = 2.0, 1024.0  # what all rows are like, in drafts of one row
MOST_ENDED = 4096  # batches of rows that ended, kept until they are asked for
FINISHED_MEMORY = 4.0  # rows finished are remembered for this many batches


class RowTally:
    """Rounds, drafts and accepted drafts of each row, by handle. Adding a step's result takes a few microseconds."""

    def __init__(self, size: int = 64) -> None:
        self._counts: NDArray[np.int64] = np.zeros((3, size), dtype=np.int64)
        # Steps of the same rows are summed by their place in the step, which is far quicker than by handle.
        self._rows = b""
        self._handles: NDArray[np.integer] = np.zeros(0, dtype=np.int32)
        self._rounds = 0
        self._ended: list[NDArray[np.int64]] = []
        self._pending: NDArray[np.int32] = np.zeros((2, 0), dtype=np.int32)

    def add(self, handles: NDArray[np.integer], drafted: NDArray[np.integer], accepted: NDArray[np.integer]) -> None:
        """[n] rows for which a proposal was asked for in a step (each once), drafts verified and accepted."""
        rows = handles.tobytes()
        if rows != self._rows:
            self._settle()
            self._rows, self._handles = rows, handles.copy()
            self._pending = np.zeros((2, len(handles)), dtype=np.int32)
        self._rounds += 1
        self._pending[0] += drafted
        self._pending[1] += accepted

    def _settle(self) -> None:
        """Count what is pending under its handles."""
        if self._rounds and len(self._handles):
            missing = int(self._handles.max()) + 1 - self._counts.shape[1]
            if missing > 0:
                more = np.zeros((3, missing + self._counts.shape[1]), dtype=np.int64)
                self._counts = np.concatenate([self._counts, more], axis=1)
            self._counts[0, self._handles] += self._rounds
            self._counts[1:, self._handles] += self._pending
            self._rounds = 0
            self._pending[:] = 0

    def groups(self, handles: NDArray[np.integer], *, finished: bool) -> tuple[RowGroup, ...]:
        """Rows [n] that drafted at least LEAST_DRAFTED tokens, by accepted drafts a round; empty groups left out."""
        self._settle()
        return _grouped(self._counts[:, self._known(handles)], finished)

    def finish(self, handles: NDArray[np.integer]) -> None:
        """Rows that ended: their counts are kept for `finished_groups`, the handles are free again."""
        self._settle()
        handles = self._known(handles)
        if self._counts[:, handles].any():  # rows that never drafted say nothing
            self._ended.append(self._counts[:, handles])
            self._counts[:, handles] = 0
        if len(self._ended) > MOST_ENDED:  # nobody asks: a fixed policy
            del self._ended[: MOST_ENDED // 2]

    def finished_groups(self) -> tuple[RowGroup, ...]:
        """As `groups`, of the rows that ended since the last call."""
        if not self._ended:
            return ()
        ended, self._ended = np.concatenate(self._ended, axis=1), []
        return _grouped(ended, finished=True)

    def reset(self, handles: NDArray[np.integer]) -> None:
        """Handles that are free again."""
        self._settle()
        self._counts[:, self._known(handles)] = 0

    def _known(self, handles: NDArray[np.integer]) -> NDArray[np.integer]:
        """Those that were ever counted."""
        known: NDArray[np.integer] = handles[handles < self._counts.shape[1]]
        return known


def _grouped(counts: NDArray[np.int64], finished: bool) -> tuple[RowGroup, ...]:
    """Rounds, drafts and accepted drafts [3, n] of rows, summed by group."""
    rounds, drafted, accepted = counts[:, counts[1] >= LEAST_DRAFTED]
    if len(rounds) == 0:
        return ()
    group = np.searchsorted(EDGES, accepted / rounds, side="right")
    sums = [np.bincount(group, weights=v, minlength=len(EDGES) + 1) for v in (None, rounds, drafted, accepted)]
    return tuple(RowGroup(finished, *(int(s[g]) for s in sums)) for g in range(len(EDGES) + 1) if sums[0][g])


@dataclass(slots=True)
class _Kind:
    """One group: rows, rounds and what they brought."""

    rows: float = 0.0
    rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    def add(self, group: RowGroup) -> None:
        self.rows += group.rows
        self.rounds += group.rounds
        self.drafted += group.drafted
        self.accepted += group.accepted


class RowMix:
    """Kinds of rows among those running and among all that came so far."""

    def __init__(self) -> None:
        self._running: list[tuple[float, float]] = []  # (rows, alpha), sampling noise taken out
        self._all: list[tuple[float, float]] = []
        self._known: dict[tuple[int, bool], tuple[float, float, float]] = {}
        self._finished = [_Kind() for _ in range(len(EDGES) + 1)]
        self._k = 1.0  # mean drafts a round behind the counts

    def add(self, groups: Sequence[RowGroup], running: int) -> None:
        """One observation's groups. Finished rows are remembered for a few batches, running rows for now."""
        done = sum(g.rows for g in groups if g.finished)
        if done:
            keep = 0.5 ** (done / max(FINISHED_MEMORY * running, 64.0))
            for kind in self._finished:
                kind.rows, kind.rounds = kind.rows * keep, kind.rounds * keep
                kind.drafted, kind.accepted = kind.drafted * keep, kind.accepted * keep
        now = [_Kind() for _ in self._finished]
        for group in groups:
            at = int(np.searchsorted(EDGES, group.accepted / max(group.rounds, 1), side="right"))
            (self._finished if group.finished else now)[at].add(group)
        everyone = [_Kind() for _ in now]
        for total, live, gone in zip(everyone, now, self._finished, strict=True):
            for part in (live, gone):
                total.rows += part.rows
                total.rounds += part.rounds
                total.drafted += part.drafted
                total.accepted += part.accepted
        rounds = sum(kind.rounds for kind in everyone)
        if rounds:
            self._k = max(sum(kind.drafted for kind in everyone) / rounds, 0.1)
        self._running = [(rows, _alpha(gain, self._k)) for rows, gain in _without_noise(now)]
        self._all = [(rows, _alpha(gain, self._k)) for rows, gain in _without_noise(everyone)]
        self._known.clear()

    def spread(self) -> tuple[float, float]:
        """Chance of a draft over all rows, and the number of a row's own drafts that say as much about the row: the weight of
        a Beta prior whose variance is that between rows. (0, 0): not known."""
        rows = sum(r for r, _ in self._all)
        if not rows:
            return 0.0, 0.0
        mean = sum(r * alpha for r, alpha in self._all) / rows
        variance = sum(r * (alpha - mean) ** 2 for r, alpha in self._all) / rows
        weight = mean * (1.0 - mean) / max(variance, 1e-6) - 1.0
        return mean, min(max(weight, LIGHTEST), HEAVIEST)

    def correction(self, k: int, drafting: bool, future: float) -> float:
        """What to multiply an E_k by that was worked out from counts of rounds of k drafts.

        drafting: those counts come from the running rows as they are; otherwise every row brought in as many rounds as it
        needs (counts over produced tokens). future: share of the work that is in rows still to come.
        """
        if k < 1 or not self._all:
            return 1.0
        parts = self._known.get((k, drafting))
        if parts is None:
            parts = self._known[k, drafting] = self._parts(k, drafting)
        here, everyone, seen = parts
        # Never above 1: that the running rows are slower than most is luck more often than not, when they are few, and
        # a batch that has drifted to the slow ones is what a long run has anyway.
        return min(1.0 / (((1.0 - future) * here + future * everyone) * seen), 1.0)

    def _parts(self, k: int, drafting: bool) -> tuple[float, float, float]:
        """Steps a token of running rows and of all, and the E_k that the counts show."""
        everyone = [(rows, _speed(alpha, k)) for rows, alpha in self._all]
        here = [(rows, _speed(alpha, k)) for rows, alpha in self._running]
        if drafting and here:
            seen = here
        else:
            seen = [
                (rows / _speed(alpha, k), speed) for (rows, alpha), (_, speed) in zip(self._all, everyone, strict=True)
            ]
        here = here or everyone
        return _mean([(r, 1.0 / s) for r, s in here]), _mean([(r, 1.0 / s) for r, s in everyone]), _mean(seen)


def _speed(alpha: float, k: int) -> float:
    """E_k of a row that accepts each draft with chance alpha."""
    return k + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def _mean(pairs: list[tuple[float, float]]) -> float:
    return sum(w * v for w, v in pairs) / sum(w for w, _ in pairs)


def _alpha(gain: float, k: float) -> float:
    """alpha with alpha + ... + alpha^k = gain, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(24):
        alpha = (low + high) / 2
        total = alpha * (1.0 - alpha**k) / (1.0 - alpha) if alpha < 1.0 else k
        low, high = (alpha, high) if total < gain else (low, alpha)
    return (low + high) / 2


def _without_noise(kinds: list[_Kind]) -> list[tuple[float, float]]:
    """(rows, gain) of each kind, pulled together by as much as luck alone would have spread equal rows."""
    some = [k for k in kinds if k.rows > 0 and k.rounds > 0]
    rows = sum(k.rows for k in some)
    if rows < LEAST_ROWS:
        return []
    gains = [k.accepted / k.rounds for k in some]
    mean = sum(k.rows * g for k, g in zip(some, gains, strict=True)) / rows
    spread = sum(k.rows * (g - mean) ** 2 for k, g in zip(some, gains, strict=True)) / rows
    luck = sum(k.rows * mean * (1.0 + mean) / (k.rounds / k.rows) for k in some) / rows
    real = max(spread - luck, 0.0) / spread if spread > 0 else 0.0
    shrink = real**0.5
    return [(k.rows, max(mean + shrink * (g - mean), 0.0)) for k, g in zip(some, gains, strict=True)]
