"""Several engines, one a device, as one: rows are dealt out so that all are equally loaded, and what a lost device had goes
on elsewhere.

Each engine is made and driven by a thread of its own. Knows no devices by kind and nothing of shards but their number.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specbatch.errors import OutOfMemory, ResourceError, SpecbatchError
from specbatch.job.driver import join_finished
from specbatch.job.intake import choose, split
from specbatch.requests import BatchEngine, DeviceLost, EngineProgress, FinishedRows, RequestBatch

Maker = Callable[[Mapping[str, object]], BatchEngine]  # from describe()["resolved"] of the first engine ({} for itself)
NEWS_SECONDS = 0.05  # a step waits this long for anything to happen
MAX_FAULTS = 3  # failures of an engine with rows that another one then finished


@dataclass(slots=True)
class _Dealt:
    """Requests that one engine has."""

    batch: RequestBatch
    failed_at: _Member | None = None  # where they were when an engine raised


class _Call:
    """Something to do on an engine's own thread."""

    def __init__(self, function: Callable[[BatchEngine], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self, engine: BatchEngine) -> None:
        try:
            self._value = self._function(engine)
        except BaseException as error:
            self._error = error
        self._done.set()

    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


@dataclass(eq=False, slots=True)
class _Member:
    """One engine and its thread."""

    name: str
    commands: queue.SimpleQueue[_Call | RequestBatch | None] = field(default_factory=queue.SimpleQueue)
    dealt: list[_Dealt] = field(default_factory=list)
    open: set[int] = field(default_factory=set)  # request ids without an answer
    progress: EngineProgress = field(default_factory=EngineProgress)  # as of its last step
    alive: bool = True
    faults: int = 0

    def call(self, function: Callable[[BatchEngine], Any]) -> Any:
        """Do something on the engine's thread, between two steps, and return what it gives."""
        call = _Call(function)
        self.commands.put(call)
        return call.result()

    def take_back(self) -> list[_Dealt]:
        """Requests without an answer; they are no longer this engine's."""
        found = []
        for dealt in self.dealt:
            index = np.flatnonzero([i in self.open for i in dealt.batch.request_id.tolist()])
            if len(index):
                found.append(_Dealt(choose(dealt.batch, index), dealt.failed_at))
        self.dealt, self.open = [], set()
        return found


class Fleet:
    """Implements BatchEngine over several. Used from one thread.

    An engine that raises DeviceLost is left out from then on; the last one's loss is a ResourceError. Another exception is put to
    the proof: the rows go to another engine, and only if they fail there too it is raised. OutOfMemory concerns the
    engine that raised it alone.
    """

    def __init__(self, makers: Sequence[tuple[str, Maker]]) -> None:
        """Make the engines, one after the other. Raises what the first failure was when none can be made, and always a
        usage error, which would be that of all."""
        self.on_warning: Callable[[str, str], None] = lambda code, message: None
        self._news: queue.SimpleQueue[tuple[_Member, FinishedRows | BaseException | None]] = queue.SimpleQueue()
        self._ready: list[FinishedRows] = []
        self._out_of_memory: _Member | None = None
        self._members: list[_Member] = []
        self._troubles: list[str] = []
        self._gone = EngineProgress()  # counters of engines that were lost
        resolved: Mapping[str, object] = {}
        first: BaseException | None = None
        for name, make in makers:
            try:
                member = self._start(name, make, resolved)
            except (ResourceError, RuntimeError, MemoryError, OSError) as error:
                first = first or error
                self._troubles.append(f"{name} is left out: {type(error).__name__}: {error}")
                continue
            if not self._members:
                found = member.call(lambda engine: engine.describe()).get("resolved")
                resolved = found if isinstance(found, Mapping) else {}
            self._members.append(member)
        if not self._members:
            assert first is not None
            raise first
        self.max_model_len = min(m.call(lambda engine: engine.max_model_len) for m in self._members)
        self.num_engines = len(self._members)

    def _start(self, name: str, make: Maker, resolved: Mapping[str, object]) -> _Member:
        member = _Member(name)
        made: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._drive, args=(member, make, resolved, made), name=name, daemon=True)
        thread.start()
        error = made.get()
        if error is not None:
            raise error
        return member

    def _drive(
        self,
        member: _Member,
        make: Maker,
        resolved: Mapping[str, object],
        made: queue.SimpleQueue[BaseException | None],
    ) -> None:
        """The life of an engine, on its own thread. After an exception it rests until it is told what to do."""
        try:
            engine = make(resolved)
        except BaseException as error:
            made.put(error)
            return
        made.put(None)
        busy = False
        while True:
            try:
                command = member.commands.get(block=not busy)
            except queue.Empty:
                busy = self._step(member, engine)
                continue
            if command is None:
                with contextlib.suppress(Exception):  # of a device that is gone nothing more is expected
                    engine.close()
                return
            if isinstance(command, _Call):
                command.run(engine)
                busy = member.alive and engine.num_unfinished > 0
            else:
                try:
                    engine.add(command)
                    busy = True
                except BaseException as error:
                    self._news.put((member, error))
                    busy = False

    def _step(self, member: _Member, engine: BatchEngine) -> bool:
        """One step; whether there is more to do."""
        try:
            engine.step()
            rows = engine.take_finished()
            member.progress = replace(engine.progress)
        except BaseException as error:
            self._news.put((member, error))
            return False
        if rows is not None:
            self._news.put((member, rows))
        return engine.num_unfinished > 0

    # -- BatchEngine

    def add(self, batch: RequestBatch) -> None:
        """Deal a batch out. What an engine has against it is raised by a later step()."""
        self._deal(_Dealt(batch), self._alive())

    def _deal(self, dealt: _Dealt, members: list[_Member]) -> None:
        """Give each engine a piece, so that all have as many rows as each other."""
        first, count = 0, len(dealt.batch)
        loads = sorted(members, key=lambda member: len(member.open))
        for i, member in enumerate(loads):
            rest = loads[i:]
            fair = -(-(sum(len(m.open) for m in rest) + count - first) // len(rest))
            last = min(first + max(fair - len(member.open), 0), count)
            if last > first:
                piece = dealt.batch if last - first == count else split(dealt.batch, first, last)
                member.dealt.append(_Dealt(piece, dealt.failed_at))
                member.open.update(piece.request_id.tolist())
                member.commands.put(piece)
            first = last

    def step(self) -> bool:
        """Wait a moment for news of any engine. False when nothing is left."""
        while self._troubles:
            self.on_warning("device", self._troubles.pop(0))
        if self.num_unfinished == 0:
            return False
        try:
            news = self._news.get(timeout=NEWS_SECONDS)
            while True:
                self._hear(*news)
                news = self._news.get_nowait()
        except queue.Empty:
            return True

    def _hear(self, member: _Member, news: FinishedRows | BaseException | None) -> None:
        if isinstance(news, FinishedRows):
            ids = set(news.request_id.tolist())
            member.open -= ids
            if not member.open:
                for fault in {dealt.failed_at for dealt in member.dealt if dealt.failed_at is not None}:
                    fault.faults += 1  # the rows were not at fault
                    if fault.faults >= MAX_FAULTS and fault.alive and len(self._alive()) > 1:
                        self._lose(fault, RuntimeError(f"raised {MAX_FAULTS} times with rows that others finished"))
                member.dealt = []
            self._ready.append(news)
        elif isinstance(news, DeviceLost):
            self._lose(member, news)
        elif isinstance(news, OutOfMemory):
            self._out_of_memory = member
            raise news
        elif news is not None:
            self._put_to_the_proof(member, news)

    def _put_to_the_proof(self, member: _Member, error: BaseException) -> None:
        """Rows with which an engine raised are tried on another one, once."""
        others = [m for m in self._alive() if m is not member]
        if isinstance(error, SpecbatchError) or not others or any(d.failed_at is not None for d in member.dealt):
            raise error
        try:
            member.call(lambda engine: engine.abort_all())
        except Exception as second:
            self._lose(member, second)
            return
        rows = member.take_back()
        self.on_warning(
            "engine_error", f"{member.name} raised, its rows go on on another device: {type(error).__name__}: {error}"
        )
        for dealt in rows:
            self._deal(_Dealt(dealt.batch, failed_at=member), others[:1])

    def _lose(self, member: _Member, error: BaseException) -> None:
        member.alive = False
        member.commands.put(None)
        _add_counters(self._gone, member.progress)
        rows = member.take_back()
        alive = self._alive()
        if not alive:
            raise ResourceError(f"{member.name} was lost, and no device is left: {error}")
        count = sum(len(dealt.batch) for dealt in rows)
        names = ", ".join(m.name for m in alive)
        self.on_warning("device_lost", f"{member.name} is lost ({error}); its {count} rows go on on {names}")
        for dealt in rows:
            self._deal(dealt, alive)

    def take_finished(self) -> FinishedRows | None:
        ready, self._ready = self._ready, []
        return None if not ready else ready[0] if len(ready) == 1 else join_finished(ready)

    def abort_all(self) -> None:
        for member in self._alive():
            try:
                member.call(lambda engine: engine.abort_all())
            except Exception as error:
                member.dealt, member.open = [], set()
                self._lose(member, error)
            member.dealt, member.open = [], set()
        self._ready = []
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()

    def reduce_batch(self) -> int:
        """As the engine's own, of the one that ran out of memory."""
        member, self._out_of_memory = self._out_of_memory, None
        assert member is not None
        return int(member.call(lambda engine: engine.reduce_batch()))  # type: ignore[attr-defined]

    @property
    def num_unfinished(self) -> int:
        return sum(len(member.open) for member in self._members) + sum(map(len, self._ready))

    @property
    def progress(self) -> EngineProgress:
        total = replace(self._gone, mode={})
        for member in self._alive():
            _add_counters(total, member.progress)
            for name in ("running", "waiting", "pages_used", "pages_total"):
                setattr(total, name, getattr(total, name) + getattr(member.progress, name))
            total.mode |= member.progress.mode
        return total

    def describe(self) -> dict[str, object]:
        """The first engine's plan, and the names of all."""
        first = self._alive()[0].call(lambda engine: engine.describe())
        return {**first, "devices": [member.name for member in self._alive()]}

    def close(self) -> None:
        failure: Exception | None = None
        for member in self._alive():
            member.alive = False
            try:
                member.call(lambda engine: engine.close())
            except Exception as error:
                failure = failure or error
            member.commands.put(None)
        if failure is not None:
            raise failure

    def _alive(self) -> list[_Member]:
        return [member for member in self._members if member.alive]


def _add_counters(total: EngineProgress, more: EngineProgress) -> None:
    """Counters add up; busy seconds pass on all devices at once."""
    for name in ("prompt_tokens", "completion_tokens", "steps", "drafted", "accepted", "preemptions"):
        setattr(total, name, getattr(total, name) + getattr(more, name))
    total.busy_seconds = max(total.busy_seconds, more.busy_seconds)
