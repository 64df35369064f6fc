"""Where what was measured or proved on this machine is kept between runs, and how it is written. Losing it costs time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

NOWHERE = Path(os.devnull) / "specbatch"  # nothing is there, and nothing can be made there


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/specbatch, by default ~/.cache/specbatch; need not exist. A user without a home has none."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "specbatch"
    try:
        return Path.home() / ".cache" / "specbatch"
    except RuntimeError:
        return NOWHERE


def write_whole(file: Path, content: bytes) -> None:
    """Whole or not at all: a temporary file in the same folder, flushed, then renamed. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.stem[:8]}-", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
