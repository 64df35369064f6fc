"""What a run did, put together from its output directory: manifest, parts and decision log. Data only, no rendering."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from specbatch.errors import InputMissing
from specbatch.job.evidence import Evidence, ShardEvidence, read_evidence
from specbatch.job.manifest import SUCCESS, Manifest, PartEntry
from specbatch.job.shards import Shard

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ShardReport:
    """One shard: where it is, what it cost, which mode it ran in and why. Rates are None where nothing is known."""

    shard: int
    file: str
    first_row: int
    rows: int
    part: str | None  # None: not committed yet
    row_errors: int
    skipped: int
    reused: int
    prompt_tokens: int
    completion_tokens: int
    tokens_per_second: float | None  # of the engine while the shard was in work
    modes: dict[str, int]  # rows by decoding.mode
    mode: str  # last decided, else what most rows did
    reason: str
    changes: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    acceptance_by_position: dict[str, list[float]]  # by method
    predicted_tokens_per_second: dict[str, float]  # what each mode was thought to reach when last weighed
    preemptions: int


@dataclass(frozen=True, slots=True)
class RunReport:
    """An output directory as a whole. Counts are of committed parts."""

    output: str
    complete: bool
    version: str
    created: str
    model: str
    format: str
    rows: int
    rows_done: int
    row_errors: int
    row_errors_by_code: dict[str, int]
    skipped: int
    reused: int
    deduplicated: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafted: int
    accepted: int
    wasted: int
    acceptance_rate: float | None
    preemptions: int
    output_bytes: int
    inputs: list[dict[str, Any]]
    columns: dict[str, Any]
    fingerprint: dict[str, Any]
    engine: dict[str, Any]
    starts: list[dict[str, Any]]
    shards: list[ShardReport]
    evidence: Evidence = field(repr=False)

    def to_dict(self, *, decisions: bool = False) -> dict[str, Any]:
        """JSON types, schema_version first; `decisions` adds every change of mode."""
        values = {"schema_version": SCHEMA_VERSION} | asdict(self)
        del values["evidence"]
        if decisions:
            values["decisions"] = [change.as_dict() for change in self.evidence.changes]
        return values


def report(output: Path) -> RunReport:
    """The report of an output directory. Raises InputMissing without a manifest, OutputMismatch for a broken one."""
    manifest = Manifest.load(output) if output.is_dir() else None
    if manifest is None:
        what = "no run has written here (no _specbatch/manifest.json)" if output.is_dir() else "no such directory"
        raise InputMissing(f"{output}: {what}")
    evidence = read_evidence(output)
    parts = [part for part in manifest.parts if part is not None]
    codes: Counter[str] = Counter()
    for part in parts:
        codes.update(part.row_errors)

    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    drafted, accepted = total("drafted"), total("accepted")
    return RunReport(
        output=str(output),
        complete=manifest.complete and (output / SUCCESS).exists(),
        version=manifest.version,
        created=manifest.created,
        model=manifest.target,
        format=manifest.format,
        rows=manifest.rows,
        rows_done=total("rows"),
        row_errors=total("errors"),
        row_errors_by_code=dict(codes.most_common()),
        skipped=total("skipped"),
        reused=total("reused"),
        deduplicated=total("deduplicated"),
        prompt_tokens=total("prompt_tokens"),
        completion_tokens=total("completion_tokens"),
        cached_tokens=total("cached_tokens"),
        drafted=drafted,
        accepted=accepted,
        wasted=total("wasted"),
        acceptance_rate=accepted / drafted if drafted else None,
        preemptions=total("preemptions"),
        output_bytes=total("bytes"),
        inputs=[asdict(entry) for entry in manifest.inputs],
        columns=manifest.columns,
        fingerprint=manifest.fingerprint,
        engine=manifest.engine,
        starts=manifest.starts,
        shards=[
            _shard(manifest, shard, part, evidence.shards.get(shard.index, ShardEvidence()))
            for shard, part in zip(manifest.shards, manifest.parts, strict=True)
        ],
        evidence=evidence,
    )


def _shard(manifest: Manifest, shard: Shard, part: PartEntry | None, evidence: ShardEvidence) -> ShardReport:
    file = manifest.inputs[shard.file].path if manifest.inputs else ""
    done = part or PartEntry("", 0, 0)
    most = max(done.modes, key=lambda mode: done.modes[mode]) if done.modes else ""
    methods = [method for method in evidence.offered if sum(evidence.offered[method])]
    return ShardReport(
        shard=shard.index,
        file=file,
        first_row=shard.first_row,
        rows=shard.rows,
        part=part.name if part else None,
        row_errors=done.errors,
        skipped=done.skipped,
        reused=done.reused,
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.completion_tokens,
        tokens_per_second=done.tokens_per_second,
        modes=done.modes,
        mode=evidence.mode or most,
        reason=evidence.reason,
        changes=evidence.changes,
        drafted=done.drafted,
        accepted=done.accepted,
        acceptance_rate=done.accepted / done.drafted if done.drafted else None,
        acceptance_by_position={m: [round(p, 4) for p in evidence.by_position(m)] for m in methods},
        predicted_tokens_per_second={mode: round(rate, 2) for mode, rate in evidence.rates.items()},
        preemptions=done.preemptions,
    )
