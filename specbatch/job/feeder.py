"""Reads, prepares and hands over rows ahead of the engine: one thread that keeps the order, a pool that tokenises.

Bounded: so many rows and so many open shards ahead, then it waits. Knows no engine and writes nothing.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.errors import InputUnreadable
from specbatch.job.intake import Intake, Work
from specbatch.job.live import LiveShard
from specbatch.job.prepare import Prepared, Preparer
from specbatch.job.reader import InputSet
from specbatch.job.shards import Shard

MAX_LIVE_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class Opened:
    """A shard comes into work."""

    live: LiveShard


@dataclass(frozen=True, slots=True)
class Closed:
    """All rows of a shard were handed over, or (reason given) its input cannot be read."""

    live: LiveShard
    failed: str | None = None


Item = Opened | Work | Closed
PreviousGood = NDArray[np.bool_] | None


class Feeder:
    """Items of all shards in order: Opened, Work ..., Closed. `next` raises what went wrong while reading."""

    def __init__(
        self,
        shards: Sequence[Shard],
        inputs: InputSet,
        columns: Sequence[str],
        preparer: Preparer,
        intake: Intake,
        open_shard: Callable[[Shard], tuple[LiveShard, PreviousGood]],
        *,
        threads: int,
        rows_ahead: int,
    ) -> None:
        self._shards = shards
        self._inputs = inputs
        self._columns = columns
        self._preparer = preparer
        self._intake = intake
        self._open_shard = open_shard
        self._rows_ahead = rows_ahead
        self._items: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._rows = 0  # handed over and not taken
        self._live = 0  # opened and not retired
        self._stopped = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
        self._depth = threads + 1  # slices in preparation at once
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self.exhausted = False  # every item was taken

    def start(self) -> None:
        self._thread.start()

    def next(self, timeout: float | None) -> Item | None:
        """The next item; None when there is none within `timeout` seconds (None: do not wait) or none is left."""
        if self.exhausted:
            return None
        try:
            item = self._items.get(block=timeout is not None, timeout=timeout)
        except queue.Empty:
            return None
        if item is None:
            self.exhausted = True
            return None
        if isinstance(item, BaseException):
            self.exhausted = True
            raise item
        if isinstance(item, Work):
            with self._room:
                self._rows -= item.rows
                self._room.notify()
        return item

    def retire(self) -> None:
        """One of the opened shards is done with."""
        with self._room:
            self._live -= 1
            self._room.notify()

    def stop(self) -> None:
        """Hand over nothing more; waits for slices in preparation."""
        with self._room:
            self._stopped = True
            self._room.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    # -- the thread

    def _run(self) -> None:
        try:
            for shard in self._shards:
                if not self._wait(lambda: self._live < MAX_LIVE_SHARDS):
                    return
                self._feed(shard)
                if self._stopped:
                    return
            self._items.put(None)
        except BaseException as error:
            self._items.put(error)

    def _feed(self, shard: Shard) -> None:
        live, previous_good = self._open_shard(shard)
        with self._room:
            self._live += 1
        self._items.put(Opened(live))
        try:
            for prepared in self._prepared(shard):
                if not self._wait(lambda: self._rows < self._rows_ahead):
                    return
                work = self._intake.accept(live, prepared, previous_good)
                with self._room:
                    self._rows += work.rows
                self._items.put(work)
            self._items.put(Closed(live))
        except InputUnreadable as error:
            self._items.put(Closed(live, error.message))

    def _prepared(self, shard: Shard) -> Iterator[Prepared]:
        """Prepared slices in order, a few at once in the pool."""
        pending: deque[Future[Prepared]] = deque()
        start = 0
        try:
            for piece in self._inputs.read(shard, self._columns):
                pending.append(self._pool.submit(self._preparer.prepare, shard, start, piece))
                start += piece.rows
                if len(pending) >= self._depth:
                    yield pending.popleft().result()
        except InputUnreadable:
            while pending:  # what was read before the damage is still worth doing
                yield pending.popleft().result()
            raise
        while pending:
            yield pending.popleft().result()

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Wait until `ready`; False when stopped."""
        with self._room:
            self._room.wait_for(lambda: self._stopped or ready())
            return not self._stopped
