"""Files that survive a crash: temporary name, fsync, rename, fsync of the directory. Knows no format.

What cannot be written becomes DiskFull (exit 13) with the path and the system's reason.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from specbatch.errors import DiskFull

_NOT_WRITABLE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
)
_TEMPORARY: Final = ".tmp-"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError that says `path` cannot be written into DiskFull; let all others through."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise DiskFull(
                f"cannot write {path}: {os.strerror(error.errno)}",
                hint="free some space and run again: finished rows are kept" if full else None,
            ) from error
        raise


def temporary(path: Path) -> Path:
    """The name under which `path` is written: hidden, in the same directory, recognised by `remove_leftovers`."""
    return path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make renames in `path` durable. File systems that cannot do it (some network ones) are left alone."""
    try:
        fsync_file(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def promote(source: Path, path: Path) -> None:
    """Give a complete temporary file its final name, durably."""
    fsync_file(source)
    os.replace(source, path)
    fsync_directory(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader sees the old content or the new, never a part of it. Raises DiskFull."""
    source = temporary(path)
    with writing(path):
        try:
            with open(source, "wb") as file:
                file.write(data)
            promote(source, path)
        except BaseException:
            source.unlink(missing_ok=True)
            raise


def remove_leftovers(directory: Path) -> int:
    """Remove temporary files of runs that died. Only call it under the output's lock. Returns how many."""
    removed = 0
    for path in directory.glob(f".*{_TEMPORARY}*"):
        path.unlink(missing_ok=True)
        removed += 1
    return removed
