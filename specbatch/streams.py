"""Text out to streams that may be closed, full, or unable to show a character: writing never ends the job.

Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TextIO

_REPLACEMENTS = {0x2014: "-", 0x2013: "-", 0x2026: "...", 0xB7: "-", 0x2192: "->", 0xD7: "x"}


def ascii_only(stream: TextIO) -> bool:
    """Whether the stream's encoding has only ASCII to show glyphs with (LANG=C, or nothing known of it)."""
    return not (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "").startswith("utf")


class SafeStream:
    """A text stream that swallows its own failures: broken pipe, closed descriptor, full disk, missing glyphs.

    After the first failure it stays silent (`failed` says so). Enough of a file for rich and for print.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.failed = stream is None or stream.closed
        self.encoding: str = getattr(stream, "encoding", None) or "ascii"
        self.plain = stream is None or ascii_only(stream)

    def write(self, text: str) -> int:
        if not self.failed and self._stream is not None:
            with self._lock:
                try:
                    self._stream.write(self._encodable(text))
                except (OSError, ValueError):
                    self.failed = True
        return len(text)

    def flush(self) -> None:
        if not self.failed and self._stream is not None:
            with self._lock:
                try:
                    self._stream.flush()
                except (OSError, ValueError):
                    self.failed = True

    def line(self, text: str) -> None:
        """One whole line in one write, so that lines of several processes in one log do not mix."""
        self.write(text + "\n")
        self.flush()

    def isatty(self) -> bool:
        try:
            return self._stream is not None and not self.failed and self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    def _encodable(self, text: str) -> str:
        if self.plain:
            text = text.translate(_REPLACEMENTS)
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)


def is_smart(stream: SafeStream, environ: dict[str, str] | os._Environ[str]) -> bool:
    """A terminal that can redraw lines: not a file, not TERM=dumb or unknown."""
    return stream.isatty() and environ.get("TERM", "") not in ("", "dumb", "unknown")


def silence_broken_streams() -> None:
    """At the end of the process: flush what can be, and keep the interpreter from complaining about what cannot."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
