"""What speculation did, shard by shard, read back from `_specbatch/decisions.jsonl`.

Knows the JSON form of decisions (specbatch.control.records), not the policies that made them. Bounded memory: sums a
shard, and the changes of mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbatch.control.records import METHOD_DRAFT_SHADOW, METHOD_NAMES, METHOD_NGRAM_SHADOW, METHOD_NONE
from specbatch.job.manifest import DIRECTORY

DECISIONS = "decisions.jsonl"


def mode_name(method: int, k: int) -> str:
    """ "ar", "ngram k=4": the words of the `decoding` column."""
    return METHOD_NAMES[METHOD_NONE] if method == METHOD_NONE else f"{METHOD_NAMES.get(method, method)} k={k}"


@dataclass(slots=True)
class ShardEvidence:
    """Sums of one shard over the log."""

    offered: dict[str, list[int]] = field(default_factory=dict)  # method -> by draft position
    accepted: dict[str, list[int]] = field(default_factory=dict)
    now: tuple[str, bool] = ("", False)  # last decided, and whether only as a probe
    mode: str = ""  # last decided, probes apart
    reason: str = ""
    changes: int = 0  # of mode, probes not counted
    rates: dict[str, float] = field(default_factory=dict)  # predicted tokens/s: the best of AR and of each method

    def by_position(self, method: str) -> list[float]:
        """Share accepted at each draft position, given that those before it were; positions never offered left out."""
        pairs = zip(self.offered.get(method, []), self.accepted.get(method, []), strict=False)
        return [accepted / offered for offered, accepted in pairs if offered]


@dataclass(frozen=True, slots=True)
class Change:
    """One decision that changed a mode (or began a probe), for some shards."""

    time: float  # seconds since the start of that run
    step: int
    shards: tuple[int, ...]
    mode: str
    reason: str
    probe: bool
    running: int  # rows running when it was taken

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__} | {"shards": list(self.shards)}


@dataclass(slots=True)
class Evidence:
    """Everything read from one log."""

    shards: dict[int, ShardEvidence] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    decisions: int = 0
    unreadable_lines: int = 0  # a line cut off by a crash, or of a later version


def read_evidence(output: Path) -> Evidence:
    """Sums and changes of an output directory's decision log; empty when there is none."""
    evidence = Evidence()
    for entry in _entries(output / DIRECTORY / DECISIONS, evidence):
        try:
            _count(entry, evidence)
        except (KeyError, TypeError, ValueError, AttributeError):
            evidence.unreadable_lines += 1
    return evidence


def _entries(path: Path, evidence: Evidence) -> Iterator[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    evidence.unreadable_lines += 1
                    continue
                if isinstance(entry, dict) and entry.get("event") == "decision":
                    yield entry
    except OSError:
        return


def _count(entry: dict[str, Any], evidence: Evidence) -> None:
    observation, decision = entry["observation"], entry["decision"]
    evidence.decisions += 1
    for sample in observation["acceptance"]:
        if sample["k"] or sample["method"] in (METHOD_NGRAM_SHADOW, METHOD_DRAFT_SHADOW):
            continue  # rounds that nobody had
        shard = evidence.shards.setdefault(sample["shard"], ShardEvidence())
        method = METHOD_NAMES[sample["method"]]
        _add(shard.offered.setdefault(method, []), sample["offered"])
        _add(shard.accepted.setdefault(method, []), sample["accepted"])
    moved: dict[tuple[str, str, bool], list[int]] = {}
    for choice in decision["shards"]:
        shard = evidence.shards.setdefault(choice["shard"], ShardEvidence())
        mode, probe = mode_name(choice["method"], choice["k"]), bool(choice["probe"])
        if (mode, probe) != shard.now:
            moved.setdefault((mode, choice["reason"], probe), []).append(choice["shard"])
            shard.now = (mode, probe)
        if not probe:
            shard.changes += 1 if shard.mode and mode != shard.mode else 0
            shard.mode, shard.reason = mode, choice["reason"]
        best: dict[int, dict[str, Any]] = {}
        for candidate in choice["candidates"]:
            method = candidate["method"]
            if method not in best or candidate["rate"] > best[method]["rate"]:
                best[method] = candidate
        if best:
            shard.rates = {mode_name(c["method"], c["k"]): c["rate"] for c in best.values()}
    for (mode, reason, probe), shards in moved.items():
        evidence.changes.append(
            Change(observation["time"], decision["step"], tuple(shards), mode, reason, probe, observation["running"])
        )


def _add(sums: list[int], values: list[int]) -> None:
    sums.extend([0] * (len(values) - len(sums)))
    for position, value in enumerate(values):
        sums[position] += value
