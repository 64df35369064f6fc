"""A shard between its first read row and its commit: which rows are answered, and where the other answers are.

Owns the spool and the row's keys. Knows neither engines nor files of the output but the parts it takes answers from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specbatch.job.answers import DUPLICATE, REUSED, failed, in_order, taken_over
from specbatch.job.keys import MISSING, OWN, PREVIOUS, unplace
from specbatch.job.part_answers import PartAnswers
from specbatch.job.shards import Shard
from specbatch.job.spool import Spool

_OPEN_PARTS: Final = 4


class LiveShard:
    """One shard in work. Rows are counted from its first row; a slot is row * n + sample."""

    def __init__(self, shard: Shard, spool: Spool, n: int, recovered: Sequence[Any] = ()) -> None:
        """`recovered`: answers that the spool brought along from an earlier start."""
        self.shard = shard
        self.spool = spool
        self.n = n
        self.places: NDArray[np.int64] = np.full(shard.rows, MISSING, np.int64)  # of answers taken from elsewhere
        self.keys: NDArray[np.uint64] = np.zeros((shard.rows, 2), np.uint64)
        self.single: NDArray[np.bool_] = np.zeros(shard.rows, np.bool_)  # one answer serves all n samples
        self.prepared = False  # every row was looked at
        self.failed: str | None = None  # its input cannot be read: never committed by this start
        self.recovered = int(np.count_nonzero(spool.answered))
        self.needed = self.recovered  # slots that the spool must hold in the end, as far as rows were prepared
        self.answered = self.recovered  # slots the spool holds
        self.began: tuple[float, int] | None = None  # the engine's busy seconds and tokens at the first row given to it
        self.ended: tuple[float, int] | None = None  # and at the last row it finished
        self.rows_done = 0  # rows with all their answers; one whose answer is taken from elsewhere from `look` on
        self.row_errors = 0  # rows done of which a sample failed; what is taken from elsewhere is known at the commit
        self._done: NDArray[np.bool_] = np.zeros(shard.rows, np.bool_)
        self._failed: NDArray[np.bool_] = np.zeros(shard.rows * n, np.bool_)  # by slot
        for answers in recovered:
            self._failed[answers.column("slot").to_numpy()] = failed(answers)
        self._count(np.arange(shard.rows))

    @property
    def complete(self) -> bool:
        return self.prepared and self.answered == self.needed and self.failed is None

    @property
    def outstanding(self) -> int:
        """Slots given to an engine and not answered."""
        return self.needed - self.answered

    @property
    def tokens_per_second(self) -> float | None:
        """Completion tokens a second of the engine, all shards together, while this one was in work."""
        if self.began is None or self.ended is None or self.ended[0] <= self.began[0]:
            return None
        return (self.ended[1] - self.began[1]) / (self.ended[0] - self.began[0])

    def look(self, first: int, last: int) -> int:
        """Count rows [first, last), now that their places and `single` are known. Returns how many of them an earlier
        start had answered and nobody could tell until now."""
        rows = np.arange(first, last)
        direct = self.places[first:last] == MISSING
        self._count(rows[~direct])
        before = self.rows_done
        self._count(rows[direct])
        return self.rows_done - before

    def record(self, answers: Any) -> None:
        """Keep answers of slots that are needed, of rows that were looked at. Raises DiskFull."""
        slots = answers.column("slot").to_numpy()
        self._failed[slots] = failed(answers)
        self.answered += self.spool.append(answers)
        self._count(np.unique(slots // self.n))

    def _count(self, rows: NDArray[np.int64]) -> None:
        """Note which of these rows are done."""
        rows = rows[~self._done[rows]]
        slots = self.slots(rows)
        elsewhere = self.places[rows] != MISSING
        done = elsewhere | self.spool.has(slots).reshape(-1, self.n).all(axis=1)
        bad = done & ~elsewhere & self._failed[slots].reshape(-1, self.n).any(axis=1)
        self._done[rows[done]] = True
        self.rows_done += int(np.count_nonzero(done))
        self.row_errors += int(np.count_nonzero(bad))

    def slots(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the n answers of each row are in the spool [len(rows) * n]."""
        samples = np.where(self.single[rows][:, None], 0, np.arange(self.n))
        return np.asarray(rows[:, None] * self.n + samples).ravel()


class AnswerStore:
    """Answers of a live shard in row order, from its spool, from parts of this output and from earlier outputs."""

    def __init__(self, n: int, schema: Any, open_part: Callable[[int, int], PartAnswers]) -> None:
        """`open_part(source, part)`: see specbatch.job.keys for sources."""
        self._n = n
        self._schema = schema
        self._open_part = open_part
        self._parts: OrderedDict[tuple[int, int], PartAnswers] = OrderedDict()
        self.unreadable: dict[int, LiveShard] = {}  # failed shards, whose spools other shards may point into

    def rows(self, live: LiveShard, first: int, last: int) -> Any:
        """Answers of rows [first, last), n a row in slot order. Every row must have one."""
        index = np.arange(first, last)
        places = live.places[first:last]
        direct = np.flatnonzero(places == MISSING)
        pieces, positions = [], []
        if len(direct):
            pieces.append(live.spool.gather(live.slots(index[direct])))
            positions.append(_spread(direct, self._n))
        elsewhere = np.flatnonzero(places != MISSING)
        if len(elsewhere):
            source, part, row = unplace(places[elsewhere])
            owners = source << 24 | part
            for owner in np.unique(owners).tolist():
                chosen = np.flatnonzero(owners == owner)
                found = self._elsewhere(live, int(source[chosen[0]]), int(part[chosen[0]]), row[chosen])
                pieces.append(found)
                positions.append(_spread(elsewhere[chosen], self._n))
        return in_order(pieces, positions, self._schema)

    def _elsewhere(self, live: LiveShard, source: int, part: int, rows: NDArray[np.int64]) -> Any:
        if source == PREVIOUS:
            return self._part(source, part).take(rows)
        if source == OWN:
            owner = live if part == live.shard.index else self.unreadable.get(part)
            answers = (
                owner.spool.gather(owner.slots(rows)) if owner is not None else self._part(source, part).take(rows)
            )
            return taken_over(answers, DUPLICATE)
        return taken_over(self._part(source, part).take(rows), REUSED)

    def _part(self, source: int, part: int) -> PartAnswers:
        if (source, part) not in self._parts:
            self._parts[source, part] = self._open_part(source, part)
            while len(self._parts) > _OPEN_PARTS:
                self._parts.popitem(last=False)[1].close()
        self._parts.move_to_end((source, part))
        return self._parts[source, part]

    def forget(self, part: int) -> None:
        """A part of this output was replaced."""
        for source in (OWN, PREVIOUS):
            if (source, part) in self._parts:
                self._parts.pop((source, part)).close()


def _spread(rows: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    return np.asarray(rows[:, None] * n + np.arange(n)).ravel()
