"""Signals and the stall watchdog: what ends a job from outside. Knows no rows; touches no files.

First INT or TERM: noted, the job drains. Second: the process ends at once, even while the main thread is inside a
long call, because a thread reads the signals from a pipe that the kernel's handler writes to.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Hashable
from types import FrameType, TracebackType
from typing import Any, Final

from specbatch.errors import Interrupted, SpecbatchError, Stalled

_LAST_WORDS: Final = 5.0  # seconds for them
_HARD_MARGIN: Final = 8.0  # seconds after the grace period in which a drained job must have ended


class Interrupts:
    """Takes INT, TERM and USR1 over while active (main thread only); else it is only a place to ask."""

    def __init__(
        self, *, active: bool, grace: float, ending: Callable[[SpecbatchError], object] = lambda error: None
    ) -> None:
        """`ending` is called, on another thread, before a process is ended that could not drain."""
        self.active = active
        self._grace = grace
        self._ending = ending
        self._handlers: dict[signal.Signals, Any] = {}
        self._report = False
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._old_wakeup = -1
        self.received: signal.Signals | None = None  # the first INT or TERM

    def take_report(self) -> bool:
        """Whether USR1 came since the last call."""
        asked, self._report = self._report, False
        return asked

    def __enter__(self) -> Interrupts:
        if self.active:
            self._pair = socket.socketpair()
            self._pair[1].setblocking(False)
            self._old_wakeup = signal.set_wakeup_fd(self._pair[1].fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._handlers[number] = signal.signal(number, self._handle)
            threading.Thread(target=self._watch, args=(self._pair[0],), name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active and self._pair is not None:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_wakeup)
            for end in self._pair[::-1]:  # closing the writing end ends the thread
                end.close()
            self._pair = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread when it gets to it; the thread below does not wait for that."""
        self._note(number)

    def _note(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._report = True
        elif self.received is None:
            self.received = signal.Signals(number)

    def _watch(self, pipe: socket.socket) -> None:
        stopping = 0
        while True:
            try:
                numbers = pipe.recv(64)
            except OSError:
                return
            if not numbers:
                return
            for number in numbers:
                self._note(number)
                if number in (signal.SIGINT, signal.SIGTERM):
                    stopping += 1
                    if stopping > 1:
                        os._exit(128 + number)
                    threading.Thread(target=self._end_late, args=(number,), daemon=True).start()

    def _end_late(self, number: int) -> None:
        """A job that cannot drain (a model that is loading, a hung device) is ended all the same."""
        late = self._grace + _HARD_MARGIN
        time.sleep(late)
        if self._pair is not None:
            threading.Timer(_LAST_WORDS, os._exit, (128 + number,)).start()  # should they not come out
            with contextlib.suppress(Exception):
                self._ending(Interrupted(number, f", but a call did not return for {late:.0f} s"))
            os._exit(128 + number)


class Watchdog:
    """Speaks up when nothing changes for `timeout` seconds while it is armed (0: never).

    Every thread's stack goes to stderr; then `ending(Stalled)` is called on the watchdog's thread; then, with `end`,
    the process ends with exit 1. Should a call hold the interpreter, the faulthandler's own timer does that a little
    later, without `ending`. Without `end` (the process is not the job's own, such as a notebook) it only tells.
    """

    def __init__(
        self, timeout: float, state: Callable[[], str], ending: Callable[[SpecbatchError], object], *, end: bool
    ) -> None:
        self._timeout = timeout
        self._state = state
        self._ending = ending
        self._end = end
        self._signature: Hashable = None
        self._since = time.monotonic()
        self._armed = False
        self._rearmed = 0.0
        self._done = threading.Event()
        if timeout > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def look(self, signature: Hashable) -> None:
        """Call it often, with whatever changes when there is progress."""
        now = time.monotonic()
        if signature != self._signature or not self._armed:
            self._signature, self._since, self._armed = signature, now, True
            if self._end and self._timeout > 0 and now - self._rearmed > 1.0:
                self._rearmed = now
                with contextlib.suppress(Exception):  # no stderr: then without
                    faulthandler.dump_traceback_later(1.25 * self._timeout + 5.0, exit=True)

    def rest(self) -> None:
        """Nothing is expected to move for now."""
        if self._armed:
            self._armed = False
            if self._end:
                faulthandler.cancel_dump_traceback_later()
            self._rearmed = 0.0

    def close(self) -> None:
        self.rest()
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._timeout / 4)):
            waited = time.monotonic() - self._since
            if self._armed and waited >= self._timeout:
                with contextlib.suppress(Exception):
                    faulthandler.dump_traceback(all_threads=True)
                with contextlib.suppress(Exception):  # last, so that it is what the end of a log shows
                    message = f"no progress for {waited:.0f} s (--stall-timeout): {self._state()}"
                    self._ending(Stalled(message, hint="the stacks above say where; run it again to continue"))
                if self._end:
                    os._exit(1)
                self._since = time.monotonic()  # say it again after as long
