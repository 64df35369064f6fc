"""Turns complete shards into parts on a thread of its own: stream input and answers, promote, then the manifest entry.

Knows the output's files. Shards are written in the order given, so a row may take its answer from any earlier shard.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from specbatch.errors import InputUnreadable
from specbatch.job.keys import key_path, write_keys
from specbatch.job.live import AnswerStore, LiveShard
from specbatch.job.manifest import Manifest, PartEntry
from specbatch.job.part_writer import PartWriter
from specbatch.job.reader import InputSet, Slice
from specbatch.job.table import count, failed_rows

_GATHER_SAMPLES = 8192
_GATHER_BYTES = 256 * 2**20
_SAVE_SHARE, _SAVE_SECONDS = 5, 2.0  # saving the manifest may take a fifth of the time; entries wait no longer


class Cancelled(Exception):
    """The part in work is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Durable: the part and its manifest entry."""

    live: LiveShard
    entry: PartEntry


@dataclass(frozen=True, slots=True)
class Unwritable:
    """A column of the input could not be read while the part was written."""

    live: LiveShard
    reason: str


class Committer:
    """Owns the manifest while it runs: change it only under `lock`."""

    def __init__(
        self,
        output: Path,
        manifest: Manifest,
        inputs: InputSet,
        columns: tuple[str, ...],
        store: AnswerStore,
        open_writer: Callable[[LiveShard], PartWriter],
        run_id: str,
    ) -> None:
        """`columns`: of the input, for the part. `run_id` goes into each part's footer."""
        self._output = output
        self._manifest = manifest
        self._inputs = inputs
        self._columns = columns
        self._store = store
        self._open_writer = open_writer
        self._run_id = run_id
        self.lock = threading.Lock()
        self._jobs: queue.SimpleQueue[LiveShard | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Committed | Unwritable | BaseException] = queue.SimpleQueue()
        self._written: list[Committed] = []  # parts in place, entries not saved yet
        self._next_save = 0.0
        self._cancelled = self._stopping = self._hurried = False
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._news = threading.Event()
        self.rows = 0  # written so far, also into parts that are not whole yet: a sign of life
        self.submitted = 0
        self.finished = 0

    def start(self) -> None:
        self._thread.start()

    def submit(self, live: LiveShard) -> None:
        """Write this complete shard; nothing is appended to it any more."""
        self.submitted += 1
        self._jobs.put(live)

    def results(self) -> list[Committed | Unwritable]:
        """What was finished since the last call. Raises what made the thread stop."""
        found: list[Committed | Unwritable] = []
        while not self._results.empty():
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        self.finished += len(found)
        return found

    def hurry(self) -> None:
        """Nothing more will be submitted: save every entry at once."""
        if not self._hurried:
            self._hurried = True
            self._jobs.put(None)

    def wait(self, timeout: float) -> None:
        """Until there is a result, or `timeout` seconds."""
        if self._news.wait(timeout):
            self._news.clear()

    @property
    def idle(self) -> bool:
        return self.finished == self.submitted

    def save(self) -> None:
        """Make the manifest durable as it is. Raises DiskFull."""
        with self.lock:
            self._manifest.save(self._output)

    def stop(self, cancel: bool) -> None:
        """Finish what was submitted, or (cancel) drop it, the part in work too."""
        self._cancelled |= cancel
        self._stopping = True
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    # -- the thread

    def _run(self) -> None:
        try:
            while True:
                try:
                    due = max(0.0, self._next_save - time.monotonic()) if self._written else None
                    live = self._jobs.get(timeout=due)
                except queue.Empty:
                    self._save_entries()
                    continue
                if live is None:
                    self._save_entries()
                    if self._stopping:
                        return
                    continue
                if self._cancelled:
                    continue
                self._commit(live)
                if self._hurried or time.monotonic() >= self._next_save:
                    self._save_entries()
        except Cancelled:
            self._save_entries()
        except BaseException as error:
            self._report(error)

    def _report(self, result: Committed | Unwritable | BaseException) -> None:
        self._results.put(result)
        self._news.set()

    def _commit(self, live: LiveShard) -> None:
        try:
            entry = self._write(live)
        except InputUnreadable as error:
            live.failed = error.message
            self._store.unreadable[live.shard.index] = live  # shards behind it may take answers from its spool
            self._report(Unwritable(live, error.message))
            return
        self._store.forget(live.shard.index)
        self._written.append(Committed(live, entry))

    def _save_entries(self) -> None:
        """One save for all parts since the last: with thousands of small shards the manifest is what costs."""
        if not self._written:
            return
        start = time.monotonic()
        with self.lock:
            for item in self._written:
                self._manifest.parts[item.live.shard.index] = item.entry
            self._manifest.save(self._output)
        now = time.monotonic()
        self._next_save = now + min(_SAVE_SECONDS, (_SAVE_SHARE - 1) * (now - start))
        for item in self._written:
            item.live.spool.discard()
            self._report(item)
        self._written = []

    def _write(self, live: LiveShard) -> PartEntry:
        """Write and promote the part. Raises DiskFull, InputUnreadable, InputMissing, OutputMismatch, Cancelled."""
        live.spool.flush()
        writer = self._open_writer(live)
        entry = PartEntry(name=writer.path.name, rows=0, bytes=0, tokens_per_second=live.tokens_per_second)
        done = 0
        try:
            for piece in self._inputs.read(live.shard, self._columns):
                for part, answers in self._pieces(live, piece, done):
                    if self._cancelled:
                        raise Cancelled
                    writer.write(part, answers, live.shard.first_row + done)
                    count(answers, live.n, entry)
                    failed = np.flatnonzero(failed_rows(answers, live.n))
                    live.keys[done + failed] = 0  # what has no answer is nobody's earlier answer
                    done += part.rows
                    self.rows += part.rows
            if done != live.shard.rows:
                raise AssertionError(f"shard {live.shard.index}: {live.shard.rows} rows in, {done} rows out")
            entry.committed = datetime.now(UTC).isoformat(timespec="seconds")
            write_keys(key_path(self._output, live.shard.part_stem), live.keys)
            entry.bytes = writer.close({"run": self._run_id, "shard": live.shard.index, "entry": asdict(entry)})
        except BaseException:
            writer.abandon()
            raise
        return entry

    def _pieces(self, live: LiveShard, piece: Slice, first: int) -> Iterator[tuple[Slice, Any]]:
        """The slice with its answers, in steps that keep the texts of one step small."""
        step = max(1, _GATHER_SAMPLES // live.n)
        start = 0
        while start < piece.rows:
            rows = min(step, piece.rows - start)
            answers = self._store.rows(live, first + start, first + start + rows)
            if answers.nbytes > _GATHER_BYTES and rows > 1:
                step = max(1, rows // 2)
                continue
            columns = {name: column.slice(start, rows) for name, column in piece.columns.items()}
            yield Slice(rows, columns), answers
            start += rows
