"""Prepared rows, in input order, as work for an engine: leaves out what is answered already or can be taken over.

Owns the tables of keys (earlier outputs, and greedy rows of this run). Single-threaded: order decides who owns a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.job.answers import from_outcomes
from specbatch.job.keys import MISSING, OWN, PREVIOUS, Keys, KeyTable, place
from specbatch.job.live import LiveShard
from specbatch.job.prepare import GREEDY_SEED, Prepared, sample_seeds
from specbatch.job.prompts import Outcomes
from specbatch.job.ragged import take
from specbatch.job.shards import SAMPLE_BITS
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams

MAX_OWN_KEYS = 8_000_000  # distinct greedy prompts remembered in one run: about 400 MB


@dataclass(slots=True)
class Work:
    """What one slice asks of the engine, and what it settles without one."""

    live: LiveShard
    start: int  # of the slice's rows in the shard
    rows: int  # of the slice
    requests: RequestBatch
    slots: NDArray[np.int64]  # of the requests
    settled: object  # answers (Arrow batch) of rows that ended without an engine
    settled_rows: int


class Intake:
    """Turns Prepared into Work. `reuse`: keys of earlier outputs; `own`: keys of this output's committed parts."""

    def __init__(self, *, n: int, reuse: KeyTable | None, own: KeyTable | None, own_per_shard: bool) -> None:
        """`own` None: no deduplication. `own_per_shard`: only within a shard (parts cannot be read back)."""
        self._n = n
        self._reuse = reuse
        self._own = own
        self._per_shard = own_per_shard
        self._shard = -1

    def accept(self, live: LiveShard, work: Prepared, previous_good: NDArray[np.bool_] | None) -> Work:
        """`previous_good`: [rows of the shard] rows whose answer in the part being replaced is kept."""
        if self._per_shard and self._own is not None and live.shard.index != self._shard:
            self._own = KeyTable(MAX_OWN_KEYS)
        self._shard = live.shard.index
        live.keys[work.rows] = work.keys
        rows = work.rows
        free = ~live.spool.has(rows * self._n) if self._n == 1 else self._any_missing(live, work)
        if previous_good is not None:
            window = np.arange(work.start, work.start + work.count)
            good = window[previous_good[window]]
            live.places[good] = place(PREVIOUS, live.shard.index, good)
            free &= ~previous_good[rows]
        if self._reuse is not None:
            self._take_over(live, rows, free, self._reuse.find(work.keys))
        greedy = work.seeds == GREEDY_SEED
        if self._own is not None:
            self._deduplicate(live, rows, work.keys, greedy, free, previous_good)
        if self._n > 1:  # what an earlier start left in the spool included
            live.single[rows[greedy]] = True
            live.single[work.start + np.array(work.outcomes.rows, np.int64)] = True
        outcomes, outcome_rows = self._new_outcomes(live, work, previous_good)
        slots, index = self._missing_slots(live, rows, np.flatnonzero(free))
        return Work(
            live,
            work.start,
            work.count,
            self._requests(live, work, slots, index),
            slots,
            from_outcomes(live.spool.schema, outcomes, outcome_rows * self._n),
            len(outcome_rows),
        )

    def _any_missing(self, live: LiveShard, work: Prepared) -> NDArray[np.bool_]:
        first = live.spool.has(work.rows * self._n)
        whole = live.spool.has(_all_slots(work.rows, self._n)).reshape(-1, self._n).all(axis=1)
        return np.where(work.seeds == GREEDY_SEED, ~first, ~whole)

    def _take_over(
        self, live: LiveShard, rows: NDArray[np.int64], free: NDArray[np.bool_], found: NDArray[np.int64]
    ) -> None:
        hit = free & (found != MISSING)
        live.places[rows[hit]] = found[hit]
        free &= ~hit

    def _deduplicate(
        self,
        live: LiveShard,
        rows: NDArray[np.int64],
        keys: Keys,
        greedy: NDArray[np.bool_],
        free: NDArray[np.bool_],
        previous_good: NDArray[np.bool_] | None,
    ) -> None:
        """Give later equal greedy rows the place of the first. A row whose answer is elsewhere owns no key."""
        assert self._own is not None
        may = greedy & (live.places[rows] == MISSING)
        if previous_good is not None:
            may &= ~previous_good[rows]
        candidates = np.flatnonzero(may)
        own = place(OWN, live.shard.index, rows[candidates])
        owners = self._own.insert(keys[candidates], own)
        double = (owners != own) & free[candidates]
        index = candidates[double]
        live.places[rows[index]] = owners[double]
        free[index] = False

    def _new_outcomes(
        self, live: LiveShard, work: Prepared, previous_good: NDArray[np.bool_] | None
    ) -> tuple[Outcomes, NDArray[np.int64]]:
        """Outcomes of rows that have none yet (of an earlier start)."""
        rows = work.start + np.array(work.outcomes.rows, np.int64)
        new = ~live.spool.has(rows * self._n)
        if previous_good is not None:
            new &= ~previous_good[rows]
        if new.all():
            return work.outcomes, rows
        fresh = Outcomes()
        for name in ("rows", "reasons", "codes", "messages", "prompt_tokens"):
            values = getattr(work.outcomes, name)
            setattr(fresh, name, [values[i] for i in np.flatnonzero(new).tolist()])
        return fresh, rows[new]

    def _missing_slots(
        self, live: LiveShard, rows: NDArray[np.int64], index: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots to compute of rows[index], and which entry of `rows` each belongs to."""
        if self._n == 1:
            return rows[index], index
        samples = np.where(live.single[rows[index]], 1, self._n)
        owner = np.repeat(index, samples)
        ends = np.cumsum(samples)
        sample = np.arange(len(owner)) - np.repeat(ends - samples, samples)
        slots = rows[owner] * self._n + sample
        missing = ~live.spool.has(slots)
        return slots[missing], owner[missing]

    def _requests(
        self, live: LiveShard, work: Prepared, slots: NDArray[np.int64], index: NDArray[np.int64]
    ) -> RequestBatch:
        rows, samples = np.divmod(slots, self._n)
        ids = (live.shard.first_key + rows) << SAMPLE_BITS | samples
        params = work.params if isinstance(work.params, SamplingParams) else [work.params[i] for i in index.tolist()]
        values, offsets = take(work.values, work.offsets, index)
        seeds = work.seeds[index]
        needed = None if bool((seeds == GREEDY_SEED).all()) else sample_seeds(seeds, samples)
        return RequestBatch(ids, live.shard.index, values, offsets, params, needed)


def split(batch: RequestBatch, first: int, last: int) -> RequestBatch:
    """Requests [first, last) of a batch."""
    begin, end = int(batch.prompt_offsets[first]), int(batch.prompt_offsets[last])
    return RequestBatch(
        batch.request_id[first:last],
        batch.shard,
        batch.prompt_values[begin:end],
        batch.prompt_offsets[first : last + 1] - begin,
        batch.params if isinstance(batch.params, SamplingParams) else batch.params[first:last],
        None if batch.seeds is None else batch.seeds[first:last],
    )


def choose(batch: RequestBatch, index: NDArray[np.int64]) -> RequestBatch:
    """Requests at `index` of a batch."""
    values, offsets = take(batch.prompt_values, batch.prompt_offsets, index)
    params = batch.params if isinstance(batch.params, SamplingParams) else [batch.params[i] for i in index.tolist()]
    seeds = None if batch.seeds is None else batch.seeds[index]
    return RequestBatch(batch.request_id[index], batch.shard, values, offsets, params, seeds)


def _all_slots(rows: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    return np.asarray(rows[:, None] * n + np.arange(n)).ravel()
