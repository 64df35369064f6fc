"""One run at a time on an output directory: the kernel's file lock, which a crash frees. Knows no manifest."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from specbatch.errors import OutputLocked
from specbatch.job.durable import writing

_POLL_SECONDS = 0.1


class OutputLock:
    """Exclusive flock(2) on a file; its content (process and host) is only for people.

    The file stays after release: removing it would let two runs lock two different files of one name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, wait: float = 0.0, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Take the lock, waiting up to `wait` seconds. Raises OutputLocked naming the holder, DiskFull."""
        with writing(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    os.close(descriptor)
                    raise
            if time.monotonic() >= deadline or cancelled():
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                waited = f" after waiting {wait:g} s" if wait else ""
                raise OutputLocked(
                    f"{self.path.parent.parent} is locked by {holder}{waited}",
                    hint="wait for it, or give --wait-lock 10m",
                )
            time.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # a full disk shows itself where it matters
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
