"""The record of a run: what it reads, with which settings, its shards and the parts they became.

Owns `_specbatch/manifest.json` and the comparison of fingerprints. Knows no Parquet and no engine.

Layout (schema_version 1): `fingerprint` (flat, every field that changes results), `resolved` (choices an engine made
at run time that change results), `inputs` (path, size, mtime_ns, digest, rows), `shards` (file, first_group,
num_groups, first_row, rows, and `part`: None until committed), `starts` (one entry a start: time, host, exit code,
counts), `engine` (describe() of the last start that had one), `columns` (prompt source, kept, added).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specbatch.errors import OutputMismatch
from specbatch.job.durable import write_atomic
from specbatch.job.shards import Shard

SCHEMA_VERSION = 1
DIRECTORY = "_specbatch"
SUCCESS = "_SUCCESS"
_HINT = "use another output directory, or --restart to discard this one (--reuse can take over equal rows)"


@dataclass(slots=True)
class InputEntry:
    """One input file as it was at the first start."""

    path: str
    size: int
    mtime_ns: int
    digest: str  # of the whole content
    rows: int


@dataclass(slots=True)
class PartEntry:
    """A committed part: written, renamed and durable before this entry is."""

    name: str
    rows: int
    bytes: int
    row_errors: dict[str, int] = field(default_factory=dict)  # by code
    skipped: int = 0
    reused: int = 0
    deduplicated: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    wasted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    modes: dict[str, int] = field(default_factory=dict)  # rows by decoding.mode
    tokens_per_second: float | None = None  # of the engine, all shards together, while this one was in work
    committed: str = ""  # UTC, ISO 8601

    @property
    def errors(self) -> int:
        return sum(self.row_errors.values())


@dataclass(slots=True)
class Manifest:
    """See the module's docstring. `save` replaces the file atomically and durably."""

    version: str
    created: str
    target: str
    format: str
    n: int
    fingerprint: dict[str, Any]
    columns: dict[str, Any]
    inputs: list[InputEntry]
    shards: list[Shard]
    parts: list[PartEntry | None]
    resolved: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def complete(self) -> bool:
        return all(part is not None for part in self.parts)

    def save(self, output: Path) -> None:
        """Raises DiskFull."""
        shards = []
        for shard, part in zip(self.shards, self.parts, strict=True):
            entry = asdict(shard)
            entry["part"] = asdict(part) if part is not None else None
            shards.append(entry)
        content = {
            "schema_version": SCHEMA_VERSION,
            "version": self.version,
            "created": self.created,
            "target": self.target,
            "format": self.format,
            "n": self.n,
            "fingerprint": self.fingerprint,
            "resolved": self.resolved,
            "columns": self.columns,
            "engine": self.engine,
            "starts": self.starts,
            "inputs": [asdict(entry) for entry in self.inputs],
            "shards": shards,
        }
        write_atomic(path_of(output), _one_item_a_line(content))

    @staticmethod
    def load(output: Path) -> Manifest | None:
        """The manifest of an output directory; None when it has none. Raises OutputMismatch when it is unreadable."""
        path = path_of(output)
        try:
            content = json.loads(path.read_bytes())
            if content["schema_version"] != SCHEMA_VERSION:
                raise OutputMismatch(
                    f"{path} has schema version {content['schema_version']}, this version reads {SCHEMA_VERSION}",
                    field="schema_version",
                    hint=_HINT,
                )
            parts = [shard.pop("part") for shard in content["shards"]]
            return Manifest(
                version=content["version"],
                created=content["created"],
                target=content["target"],
                format=content["format"],
                n=content["n"],
                fingerprint=content["fingerprint"],
                columns=content["columns"],
                inputs=[InputEntry(**entry) for entry in content["inputs"]],
                shards=[Shard(**shard) for shard in content["shards"]],
                parts=[PartEntry(**part) if part is not None else None for part in parts],
                resolved=content["resolved"],
                engine=content["engine"],
                starts=content["starts"],
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OutputMismatch(f"{path} is not a manifest ({error})", field="manifest", hint=_HINT) from error


def path_of(output: Path) -> Path:
    return output / DIRECTORY / "manifest.json"


def differing_fields(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the fields whose values differ or that only one side has, the later side's order first."""
    return [name for name in [*now, *(n for n in earlier if n not in now)] if earlier.get(name) != now.get(name)]


def require_same(output: Path, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OutputMismatch naming the first differing field with both its values, and the number of others."""
    fields = differing_fields(earlier, now)
    if not fields:
        return
    name = fields[0]
    others = f" (and {', '.join(fields[1:4])}{' ...' if len(fields) > 4 else ''})" if len(fields) > 1 else ""
    what = _difference(name, earlier.get(name), now.get(name))
    raise OutputMismatch(f"{output} was started with {what}{others}", field=name, hint=_HINT)


def _difference(name: str, before: Any, after: Any) -> str:
    """Both values; of lists, which may be long, only the items that one side has."""
    if not (isinstance(before, list) and isinstance(after, list)):
        first, second = ("nothing" if value is None else json.dumps(value) for value in (before, after))
        return f"another {name}: {first}, now {second}"
    gone = [f"{item} is gone" for item in before if item not in after]
    new = [f"{item} is new" for item in after if item not in before]
    return f"other {name}: {', '.join([*gone, *new]) or 'their order was another'}"


def _one_item_a_line(content: Mapping[str, Any]) -> bytes:
    """JSON that is small to write and still readable with grep: one list item a line."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list) and value:
            text = "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
        else:
            text = json.dumps(value)
        lines.append(f"  {json.dumps(name)}: {text}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
