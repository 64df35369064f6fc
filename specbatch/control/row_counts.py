"""Acceptance counts of rows whose tokens are known: what real rounds brought, and what n-gram rounds would have.

Owns the counting that the real scheduler does in the core. Knows nothing of admission, pages or steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM_SHADOW, METHOD_NONE, AcceptanceSample
from specbatch.control.simulate import Workload, runs

MAX_K = 16

Ints = NDArray[np.int64]


class RowCounts:
    """Counts since they were last taken."""

    def __init__(self, workload: Workload) -> None:
        self.work = workload
        self.ngram_runs = runs(workload.ngram_hits)
        # [k, row] the output position at which the row's next shadow round of k drafts starts
        self._open = np.zeros((MAX_K + 1, len(workload)), dtype=np.int64)
        self._lines: dict[tuple[int, int, int], list[Any]] = {}  # by shard, method, k of a shadow

    def restart(self, rows: Ints, produced: Ints) -> None:
        """Rows that come (back) in: no round of theirs is open."""
        self._open[:, rows] = produced

    def add(
        self, shard: int, method: int, k: int, mine: NDArray[np.bool_], drafts: Ints, accepted: Ints, committed: Ints
    ) -> None:
        """One step's rounds of the shard's rows (`mine`), which was in mode (method, k). All [rows of the step]."""
        if method == METHOD_DRAFT:
            mine = mine & (drafts > 0)
        if method == METHOD_NONE or not k or not mine.any():
            return
        accepted = np.minimum(accepted, committed)
        line = self._lines.setdefault((shard, method, 0), _line())
        line[0] += int(mine.sum())
        line[1] += int((drafts[mine] > 0).sum())
        for j in range(k):
            # a row that ended inside its accepted run was not offered the next position
            reached = (drafts[mine] > j) & (accepted[mine] >= j) & (committed[mine] > j)
            line[2][j] += int(reached.sum())
            line[3][j] += int((reached & (accepted[mine] > j)).sum())
        line[4] += int(committed[mine].sum())

    def score_ngram(self, rows: Ints, at: Ints, committed: Ints, most: int) -> None:
        """Score n-gram rounds of 1 to `most` drafts over the tokens that rows commit from position `at` on, as real rounds
        would have gone."""
        shards, end = self.work.shard[rows], at + committed
        for k in range(1, most + 1):
            start = np.maximum(self._open[k, rows], at)
            while (open_ := start < end).any():
                mine, where = rows[open_], start[open_]
                match = self.work.ngram_match[mine, where]
                hits = np.where(match, np.minimum(k, self.ngram_runs[mine, where]), 0)
                for shard in np.unique(shards[open_]):
                    line = self._lines.setdefault((int(shard), METHOD_NGRAM_SHADOW, k), _line())
                    own = shards[open_] == shard
                    line[0] += int(own.sum())
                    line[1] += int(match[own].sum())
                    for j in range(k):
                        line[2][j] += int((match & (hits >= j))[own].sum())
                        line[3][j] += int((match & (hits > j))[own].sum())
                start[open_] = where + hits + 1
            self._open[k, rows] = start

    def take(self) -> tuple[AcceptanceSample, ...]:
        samples = tuple(
            AcceptanceSample(shard, method, c[0], c[1], tuple(map(int, c[2])), tuple(map(int, c[3])), c[4], k)
            for (shard, method, k), c in self._lines.items()
        )
        self._lines.clear()
        return samples


def _line() -> list[Any]:
    return [0, 0, np.zeros(MAX_K, dtype=np.int64), np.zeros(MAX_K, dtype=np.int64), 0]
