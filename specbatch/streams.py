"""Text out to streams that may be closed, full, or unable to show a character: writing never ends the job.

Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import TextIO

from specbatch.errors import ResourceError

_REPLACEMENTS = {0x2014: "-", 0x2013: "-", 0x2026: "...", 0xB7: "-", 0x2192: "->", 0xD7: "x"}


def ascii_only(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether only ASCII can be shown: by the stream's encoding, or by a locale of C (LANG=C).

    Python itself turns the C locale into C.UTF-8 (PEP 538) and leaves LC_CTYPE behind; the terminal did not change.
    """
    if not (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "").startswith("utf"):
        return True
    if environ.get("PYTHONIOENCODING") or environ.get("PYTHONUTF8") == "1":
        return False
    if environ.get("LC_ALL"):
        return environ["LC_ALL"] in ("C", "POSIX")
    coerced = environ.get("LC_CTYPE", "") in ("", "C", "POSIX", "C.UTF-8", "C.utf8", "UTF-8")
    return coerced and environ.get("LANG", "") in ("", "C", "POSIX")


class SafeStream:
    """A text stream that swallows its own failures: broken pipe, closed descriptor, full disk, missing glyphs.

    After the first failure it stays silent (`failed` says so). Enough of a file for rich and for print.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.failed = stream is None or stream.closed
        self._lost = "it is closed" if self.failed else ""  # why; a reader who has gone is no loss
        self.plain = stream is None or ascii_only(stream, os.environ)
        self.encoding: str = "ascii" if self.plain else getattr(stream, "encoding", "utf-8")

    def write(self, text: str) -> int:
        if not self.failed and self._stream is not None:
            with self._lock:
                try:
                    self._stream.write(self._encodable(text))
                except (OSError, ValueError) as error:
                    self._fail(error)
        return len(text)

    def flush(self) -> None:
        if not self.failed and self._stream is not None:
            with self._lock:
                try:
                    self._stream.flush()
                except (OSError, ValueError) as error:
                    self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        if not isinstance(error, BrokenPipeError):
            self._lost = getattr(error, "strerror", None) or str(error)

    def require_delivered(self) -> None:
        """For what was asked for: raises ResourceError (exit 13) when some of it could not be written."""
        if self._lost:
            raise ResourceError(f"cannot write to stdout: {self._lost}")

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


def printable(text: str) -> str:
    """The text on one line and without control codes, whatever a file name or a message brought in."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_smart(stream: SafeStream, environ: Mapping[str, str]) -> bool:
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
