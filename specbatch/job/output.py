"""An output directory: what is in it, whether its parts are whole, and its leftovers. Only used under its lock.

Knows files and the manifest; knows nothing of prompts or engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from specbatch.errors import OutputMismatch, ResourceError, UsageError
from specbatch.job import keys
from specbatch.job.durable import remove_leftovers, write_atomic, writing
from specbatch.job.manifest import DIRECTORY, SUCCESS, Manifest, PartEntry, path_of
from specbatch.job.part_writer import read_note
from specbatch.job.shards import Shard

SUFFIXES: Final = {"parquet": ".parquet", "openai-batch": ".jsonl"}
SPOOLS: Final = "spool"
DECISIONS: Final = "decisions.jsonl"


def create(output: Path) -> None:
    """Make the directory. Raises UsageError for a file of that name, OutputMismatch for a directory of others."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"output {output} is a file", hint="give a directory")
    if output.is_symlink() and not output.exists():
        raise UsageError(f"output {output} is a link to {os.readlink(output)}, which is not there")
    with writing(output):
        if output.exists() and not (output / DIRECTORY).exists():
            found = sorted(path.name for path in output.iterdir() if path.name != "lost+found")
            if found:
                raise OutputMismatch(
                    f"{output} is not empty ({', '.join(found[:3])}{' ...' if len(found) > 3 else ''}) "
                    "and not an output of specbatch",
                    field="output",
                    hint="give a new directory",
                )
        (output / DIRECTORY / SPOOLS).mkdir(parents=True, exist_ok=True)


def part_path(output: Path, shard: Shard, format_name: str) -> Path:
    return output / f"{shard.part_stem}{SUFFIXES[format_name]}"


def spool_path(output: Path, shard: Shard) -> Path:
    return output / DIRECTORY / SPOOLS / f"{shard.part_stem}.spool"


def clean(output: Path) -> None:
    """Remove temporary files of runs that died."""
    for directory in (output, output / DIRECTORY, output / DIRECTORY / keys.DIRECTORY):
        with writing(directory):
            remove_leftovers(directory)


def drop_spools(output: Path, wanted: set[str]) -> None:
    """Remove the spools of shards that are done: a start died between the manifest entry and their removal."""
    for path in (output / DIRECTORY / SPOOLS).glob("*.spool"):
        if path.stem not in wanted:
            path.unlink(missing_ok=True)


def discard(output: Path) -> None:
    """Remove what an earlier run made, the manifest last: a crash in between leaves parts that count as missing."""
    manifest: Manifest | None = None
    with contextlib.suppress(OutputMismatch):
        manifest = Manifest.load(output)
    with writing(output):
        (output / SUCCESS).unlink(missing_ok=True)
        for shard in manifest.shards if manifest is not None else ():
            for suffix in SUFFIXES.values():
                (output / f"{shard.part_stem}{suffix}").unlink(missing_ok=True)
        for name in (SPOOLS, keys.DIRECTORY):
            shutil.rmtree(output / DIRECTORY / name, ignore_errors=True)
        (output / DIRECTORY / DECISIONS).unlink(missing_ok=True)
        path_of(output).unlink(missing_ok=True)
        (output / DIRECTORY / SPOOLS).mkdir(exist_ok=True)


def verified_parts(output: Path, manifest: Manifest, run_id: str) -> tuple[list[PartEntry | None], list[str]]:
    """Entries whose part is really there and whole, and what was wrong with the others."""
    parts: list[PartEntry | None] = []
    problems = []
    for shard, entry in zip(manifest.shards, manifest.parts, strict=True):
        found = _verify(output, manifest.format, shard, entry, run_id) if entry is not None else None
        if entry is not None and found is None:
            problems.append(f"{entry.name} is missing or not whole; it will be made again")
        parts.append(found)
    return parts, problems


def _verify(output: Path, format_name: str, shard: Shard, entry: PartEntry, run_id: str) -> PartEntry | None:
    path = part_path(output, shard, format_name)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return None
    except OSError as error:  # it may be whole: nothing is computed again because a disk does not answer
        raise ResourceError(f"cannot read {path}: {error.strerror}") from error
    if format_name != "parquet":
        return entry if path.is_file() and path.stat().st_size == entry.bytes else None
    found = read_note(path)
    if found is None:
        return None
    rows, note = found
    if rows != shard.rows or note.get("run") != run_id or note.get("shard") != shard.index:
        return None
    size = path.stat().st_size
    if size == entry.bytes:
        return entry
    # A part that replaced another one (--retry-failed) just before a crash: its footer has the figures.
    try:
        return replace(PartEntry(**note["entry"]), bytes=size)
    except (KeyError, TypeError):
        return None


def mark_success(output: Path) -> None:
    """Nothing is written where it is marked already: a finished output may be read-only."""
    if not (output / SUCCESS).exists():
        write_atomic(output / SUCCESS, b"")


def unmark_success(output: Path) -> None:
    with writing(output):
        (output / SUCCESS).unlink(missing_ok=True)


class DecisionLog:
    """Lines of _specbatch/decisions.jsonl. Never raises: the evidence must not end the work."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._next = 0.0
        self._dead = False

    def write(self, record: Mapping[str, object]) -> None:
        if self._dead:
            return
        try:
            self._lines.append(json.dumps(record, default=str))
        except (TypeError, ValueError):
            return
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        self._next = time.monotonic() + 1.0
        if not self._lines or self._dead:
            return
        data = ("\n".join(self._lines) + "\n").encode()
        self._lines = []
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError:
            self._dead = True


def as_json(value: Any) -> Any:
    """Whatever an engine describes, in JSON types."""
    return json.loads(json.dumps(value, default=str))
