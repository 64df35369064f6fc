"""Where what was measured or proved on this machine is kept between runs, and how it is written. Losing it costs time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/specbatch, by default ~/.cache/specbatch; need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "specbatch"


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
