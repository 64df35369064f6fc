"""Which files a run reads, and what identifies them: expansion of globs and directories, digests of the content.

Knows nothing of what is inside a file.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from specbatch.errors import InputMissing, UsageError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq", ".parq")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One file to read. `hive`: values of its key=value directories, below the directory or in the glob given."""

    path: Path
    hive: dict[str, str | None] = field(default_factory=dict)

    @property
    def is_jsonl(self) -> bool:
        return self.path.suffix.lower() in JSONL_SUFFIXES


def expand_inputs(patterns: Sequence[str], output: Path) -> list[InputSpec]:
    """Files of all patterns, each pattern's in sorted order; nothing below `output`.

    In directories, names that begin with "_" or "." are left out, as everyone who reads Parquet directories does, and
    so are the outputs of earlier runs, unless they are given themselves.
    Raises InputMissing for a pattern without a file, UsageError for a file given twice or one that is no file.
    """
    found: list[InputSpec] = []
    for pattern in patterns:
        specs = list(_expand(pattern, output.resolve()))
        if not specs:
            hint = (
                "outputs of other runs, and names that begin with _ or ., are read only when they are given themselves"
            )
            message = f"no input: {pattern} matches no Parquet or JSON-lines file"
            raise InputMissing(message, hint=hint if Path(pattern).is_dir() else None)
        found.extend(specs)
    seen: dict[Path, Path] = {}
    for spec in found:
        if not _is_utf8(str(spec.path)):
            raise UsageError(f"the name of {str(spec.path)!r} is not valid UTF-8", hint="rename it")
        real = spec.path.resolve()
        if real in seen:
            raise UsageError(
                f"input file given twice: {spec.path}" + (f" is {seen[real]}" if seen[real] != spec.path else ""),
                hint="its rows would be done twice; make the patterns disjoint",
            )
        seen[real] = spec.path
    return found


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expand(pattern: str, output: Path, base: Path | None = None) -> Iterator[InputSpec]:
    """`base`: the fixed beginning of the glob that gave `pattern`; partitions are looked for below it."""
    path = Path(pattern)
    try:
        if path.is_dir():
            yield from _walk(path, output, base or path)
        elif path.is_file():
            yield InputSpec(path, _partitions(path, base) if base is not None else {})
        elif path.exists():
            raise UsageError(f"{pattern} is not a regular file", hint="write it to a file first: rows are read twice")
        elif glob.has_magic(pattern):
            fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
            for name in sorted(glob.glob(pattern, recursive=True)):
                yield from _expand(name, output, fixed)
        else:
            raise InputMissing(f"no input: {pattern} does not exist")
    except OSError as error:
        raise InputMissing(f"cannot read {pattern}: {error.strerror}") from error


def _partitions(path: Path, base: Path) -> dict[str, str | None]:
    """Values of the key=value directories between `base` and the file."""
    pairs = (part.split("=", 1) for part in path.relative_to(base).parts[:-1] if "=" in part)
    return {unquote(key): None if value == _HIVE_NULL else unquote(value) for key, value in pairs}


def _is_output(directory: Path, output: Path) -> bool:
    """This run's output or an earlier one's: never meant when a directory above it is given."""
    return directory.resolve() == output or (directory / "_specbatch" / "manifest.json").exists()


def _walk(root: Path, output: Path, base: Path) -> Iterator[InputSpec]:
    def refuse(error: OSError) -> None:
        raise error

    files: list[Path] = []
    for directory, names, leaves in os.walk(root, followlinks=True, onerror=refuse):
        here = Path(directory)
        names[:] = [n for n in names if n[0] not in "._" and not _is_output(here / n, output)]
        files.extend(
            here / leaf
            for leaf in leaves
            if leaf[0] not in "._" and leaf.lower().endswith(PARQUET_SUFFIXES + JSONL_SUFFIXES[:2])
        )
    if root.resolve() == output:
        files = []
    for path in sorted(files):
        yield InputSpec(path, _partitions(path, base))


@dataclass(frozen=True, slots=True)
class FileState:
    """Cheap identity of a file: when it is unchanged, so is the content (short of clocks turned back)."""

    size: int
    mtime_ns: int

    @staticmethod
    def of(path: Path) -> FileState:
        """Raises InputMissing."""
        try:
            stat = path.stat()
        except OSError as error:
            raise InputMissing(f"cannot read {path}: {error.strerror}") from error
        return FileState(stat.st_size, stat.st_mtime_ns)


def digest(path: Path) -> str:
    """BLAKE2b of the whole content, 128 bits in hex. Raises InputMissing."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise InputMissing(f"cannot read {path}: {error.strerror}") from error


def digests(paths: Sequence[Path], known: Sequence[str | None], threads: int = 4) -> list[str]:
    """Digest of each path; `known` ones are taken as they are."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda path, value: value or digest(path), paths, known))
