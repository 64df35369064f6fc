"""Answers of earlier outputs: which outputs may serve, and the table of their rows' keys.

In memory: 48 bytes or so a row of the earlier outputs, never a text. Knows keys and manifests; reads parts only when
an answer is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbatch.errors import InputMissing, OutputMismatch, UsageError
from specbatch.job.columns import added_fields
from specbatch.job.keys import MAX_SOURCES, OWN, PREVIOUS, Keys, KeyTable, key_path, place, read_keys
from specbatch.job.manifest import Manifest, PartEntry, differing_fields
from specbatch.job.options import JobOptions
from specbatch.job.output import part_path
from specbatch.job.part_answers import PartAnswers
from specbatch.job.part_writer import read_note
from specbatch.job.plan import Plan, answer_fingerprint, run_id, sampling_fields
from specbatch.job.shards import Shard


@dataclass(frozen=True, slots=True)
class Earlier:
    """One output whose rows may be taken."""

    path: Path
    manifest: Manifest
    run_id: str
    prefix: str


class EarlierOutputs:
    """The outputs of --reuse as sources 1, 2, ...; this run's own output is source 0."""

    def __init__(self) -> None:
        self.outputs: list[Earlier] = []
        self.table: KeyTable | None = None
        self.problems: list[str] = []  # why an output, or a part of one, does not serve

    @property
    def resolved(self) -> dict[str, Any]:
        """Run-time choices that every answer taken was made with; all outputs agree."""
        return self.outputs[0].manifest.resolved if self.outputs else {}


def open_earlier(plan: Plan, resolved: Mapping[str, Any]) -> EarlierOutputs:
    """Load the keys of every output of --reuse that was made with the same model and settings.

    `resolved`: choices this run has already made (a resumed one), {} when there are none yet.
    """
    found = EarlierOutputs()
    options = plan.options
    if len(options.reuse) > MAX_SOURCES:
        raise UsageError(f"--reuse names {len(options.reuse)} outputs, at most {MAX_SOURCES} are possible")
    chosen: list[Earlier] = []
    for path in options.reuse:
        if path.resolve() == options.output.resolve():
            raise UsageError(f"--reuse {path} is the output itself", hint="finished rows are kept anyway")
        try:
            manifest = Manifest.load(path)
        except (OutputMismatch, OSError) as error:
            what = error.message if isinstance(error, OutputMismatch) else f"cannot read {path}: {error.strerror}"
            found.problems.append(f"{what}; nothing is taken from it")
            continue
        if manifest is None:
            found.problems.append(f"{path} is no output of specbatch; nothing is taken from it")
            continue
        wanted = dict(resolved) or (chosen[0].manifest.resolved if chosen else manifest.resolved)
        reason = _why_not(plan, manifest, wanted)
        if reason is not None:
            found.problems.append(f"nothing is taken from {path}: {reason}")
            continue
        if (difference := _other_defaults(plan, manifest)) is not None:
            found.problems.append(f"{path}: {difference}; only rows whose own parameters say otherwise can be taken")
        prefix = str(manifest.columns.get("prefix", ""))
        chosen.append(Earlier(path, manifest, run_id(manifest.fingerprint), prefix))
    found.outputs = chosen
    loaded = [
        (i + 1, part, _keys(e, part, found)) for i, e in enumerate(chosen) for part in range(len(e.manifest.parts))
    ]
    rows = sum(len(keys) for _, _, keys in loaded if keys is not None)
    if rows:
        found.table = KeyTable(rows, expected=rows)
        for source, part, keys in loaded:
            if keys is not None:
                insert_part(found.table, keys, source, part)
    return found


def insert_part(table: KeyTable, keys: Keys, source: int, part: int) -> None:
    """Add the rows of a part that have a key."""
    rows = np.flatnonzero(keys.any(axis=1))
    for start in range(0, len(rows), 65_536):
        piece = rows[start : start + 65_536]
        table.insert(keys[piece], place(source, part, piece))


def _why_not(plan: Plan, manifest: Manifest, resolved: Mapping[str, Any]) -> str | None:
    """What makes the answers of an earlier output others than this run's; None when nothing does."""
    if manifest.format != "parquet":
        return f"its format is {manifest.format}, which cannot be read back"
    wanted = answer_fingerprint(plan)
    earlier = {name: manifest.fingerprint[name] for name in wanted if name in manifest.fingerprint}
    fields = differing_fields(earlier, wanted)
    if fields:
        name = fields[0]
        return f"its {name} is {earlier.get(name)!r}, here it is {wanted[name]!r}"
    fields = differing_fields(manifest.resolved, resolved)
    if fields:
        return f"its {fields[0]} became {manifest.resolved.get(fields[0])!r}, here it is {resolved.get(fields[0])!r}"
    prefix, added = manifest.columns.get("prefix", ""), manifest.columns.get("added", [])
    missing = [field.name for field in added_fields(plan.options) if prefix + field.name not in added]
    return f"it has no column {missing[0]}" if missing else None


def _other_defaults(plan: Plan, manifest: Manifest) -> str | None:
    """The first of the run's sampling defaults that was another then: worth knowing before the night, not after it."""
    wanted = json.loads(json.dumps(sampling_fields(plan)))
    for name, value in wanted.items():
        before = manifest.fingerprint.get(name)
        idle = name == "logprobs" or (name == "seed" and plan.sampling.is_greedy)  # changes no answer
        if before != value and not idle:
            return f"its {name} was {before!r}, here it is {value!r}"
    return None


def _keys(earlier: Earlier, part: int, found: EarlierOutputs) -> Keys | None:
    shard, entry = earlier.manifest.shards[part], earlier.manifest.parts[part]
    if entry is None:
        return None
    path = part_path(earlier.path, shard, "parquet")
    if not path.is_file() or path.stat().st_size != entry.bytes:
        found.problems.append(f"{path} is gone or was replaced; its rows are not taken")
        return None
    keys = read_keys(key_path(earlier.path, shard.part_stem), shard.rows)
    if keys is None:
        found.problems.append(
            f"{earlier.path}: the keys of {entry.name} are missing or damaged; its rows are not taken"
        )
    return keys


def own_keys(output: Path, shards: Sequence[Shard], parts: Sequence[PartEntry | None], limit: int) -> KeyTable:
    """Table of the rows in this output's committed parts, so that a resumed run knows their duplicates."""
    table = KeyTable(limit)
    for shard, entry in zip(shards, parts, strict=True):
        keys = read_keys(key_path(output, shard.part_stem), shard.rows) if entry is not None else None
        if keys is not None:
            insert_part(table, keys, OWN, shard.index)
    return table


class PartOpener:
    """Opens the part that a place names, and makes sure that it is still the part whose keys were loaded."""

    def __init__(
        self, options: JobOptions, manifest: Manifest, own_id: str, earlier: EarlierOutputs, schema: Any
    ) -> None:
        own = Earlier(options.output, manifest, own_id, options.output_prefix)
        self._sources = {OWN: own, PREVIOUS: own} | {i + 1: item for i, item in enumerate(earlier.outputs)}
        self._n = options.n
        self._schema = schema

    def __call__(self, source: int, part: int) -> PartAnswers:
        """Raises InputMissing when the part is gone or another one."""
        item = self._sources[source]
        path = part_path(item.path, item.manifest.shards[part], "parquet")
        note = read_note(path)
        if note is None or note[1].get("run") != item.run_id or note[0] != item.manifest.shards[part].rows:
            raise InputMissing(
                f"{path}, whose answers are reused, is gone or was replaced",
                hint="run again: what is missing is computed",
            )
        return PartAnswers(path, self._schema, self._n, item.prefix)
