"""What goes into a decision and what comes out: frozen records of plain numbers, and their JSON form.

Owns the words the engine and a policy share. Knows nothing of torch, the Rust core or any policy. The integer codes
are those of `specbatch._core` (a test holds them equal), repeated here so that a log can be replayed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

METHOD_NONE: Final = 0
METHOD_NGRAM: Final = 1
METHOD_DRAFT: Final = 2
METHOD_EXTERNAL: Final = 3
METHOD_NGRAM_SHADOW: Final = 4  # acceptance counts only: n-gram proposals scored on tokens committed anyway
METHOD_DRAFT_SHADOW: Final = 5  # acceptance counts only: the draft run teacher-forced over tokens produced already

STEP_PREFILL: Final = 1
STEP_DECODE: Final = 2
STEP_DRAFT_PREFILL: Final = 3

METHOD_NAMES: Final[Mapping[int, str]] = {
    METHOD_NONE: "ar",
    METHOD_NGRAM: "ngram",
    METHOD_DRAFT: "draft",
    METHOD_EXTERNAL: "external",
    METHOD_NGRAM_SHADOW: "ngram-shadow",
    METHOD_DRAFT_SHADOW: "draft-shadow",
}


@dataclass(frozen=True, slots=True)
class StepStats:
    """Sums over like steps (same kind, method, k and row tier) since the last observation; see StepTimer."""

    kind: int  # STEP_*
    method: int  # METHOD_* of the rows that drafted; METHOD_NONE when no row did
    k: int  # most drafts any row had
    steps: int
    rows: int
    tokens: int  # packed target tokens (STEP_DRAFT_PREFILL: draft tokens)
    context: int  # sum over rows of seq_lens: KV tokens attention read
    draft_rows: int  # row-steps with at least one draft
    draft_tokens: int  # drafts verified
    seconds: float  # wall time from the start of one engine step to the start of the next
    draft_seconds: float  # the part of it spent proposing; 0 where nothing was proposed or it is not known


@dataclass(frozen=True, slots=True)
class AcceptanceSample:
    """Acceptance counts of one (shard, method) since the last observation, as the core drains them.

    Position j (0-based) of `offered` counts rounds in which j drafts before it were accepted and one was proposed
    there.
    """

    shard: int
    method: int  # METHOD_NGRAM, METHOD_DRAFT, METHOD_EXTERNAL, or one of the two shadows
    rounds: int  # row-steps in which a proposal was asked for
    proposed: int  # row-steps in which there was one
    offered: tuple[int, ...]
    accepted: tuple[int, ...]
    committed: int = 0
    k: int = 0  # of a shadow and of rounds of fewer drafts within real ones: drafts a round; 0: the k in force


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that have drafted a little, by what a round brings them; see RowTally."""

    finished: bool  # since the last observation; otherwise running now
    rows: int
    rounds: int  # of these rows, over their lives
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows of one shard that run at the moment."""

    shard: int
    running: int
    waiting: int = 0  # known to the engine, not running yet


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything a policy may look at. Counters are "since the last observation", gauges are "now"."""

    step: int  # engine steps so far
    time: float  # seconds on a monotonic clock, zero at the start of the run
    running: int
    waiting: int
    shards: tuple[ShardRows, ...]
    mean_context: float  # tokens, over running rows
    mean_prompt: float  # tokens, over running rows
    mean_limit: float  # output tokens running rows may still produce (max_tokens - produced), a mean
    free_pages: int  # cached pages of reference count 0 included
    total_pages: int
    target_pages: int  # owned by target tables
    draft_pages: int  # owned by draft tables
    max_num_seqs: int
    steps: tuple[StepStats, ...] = ()
    acceptance: tuple[AcceptanceSample, ...] = ()
    row_groups: tuple[RowGroup, ...] = ()
    finished_rows: int = 0
    finished_prompt_tokens: int = 0
    finished_output_tokens: int = 0
    preempted: int = 0
    draft_dropped: int = 0
    policy_seconds: float = 0.0  # that the last decision took, from observing to putting it into force

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers; floats survive exactly."""
        return _fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Observation:
        """The inverse of to_json. Raises KeyError on a missing field, TypeError on an unknown one."""
        values = dict(data)
        values["shards"] = tuple(ShardRows(**s) for s in values["shards"])
        values["row_groups"] = tuple(RowGroup(**g) for g in values["row_groups"])
        values["steps"] = tuple(StepStats(**s) for s in values["steps"])
        values["acceptance"] = tuple(
            AcceptanceSample(**{**a, "offered": tuple(a["offered"]), "accepted": tuple(a["accepted"])})
            for a in values["acceptance"]
        )
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One (method, k) a policy weighed for a shard."""

    method: int
    k: int
    rows: int  # rows it could run
    tokens_per_row: float  # expected committed tokens a row and step
    seconds: float  # predicted step time
    rate: float  # predicted tokens a second, switching cost included


@dataclass(frozen=True, slots=True)
class ShardDecision:
    """What one shard does from the next step on."""

    shard: int
    method: int
    k: int
    reason: str
    switched: bool  # differs from the shard's last decision
    probe: bool = False  # runs for a few steps to learn, not because it is thought best
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer to one observation.

    The engine applies `method`, `k` with set_speculation(None) for all and for shards to come, then each of `shards`
    whose mode differs; `max_rows` (0: leave as it is) with set_max_num_seqs.
    """

    step: int
    method: int
    k: int
    shards: tuple[ShardDecision, ...]
    shadow_ngram: int  # score n-gram rounds of 1 ... this many drafts (set_shadow_ngram); 0 is off
    probe_draft_rows: int  # run the draft, teacher-forced, over what this many rows (running or finished) produced
    probe_draft_k: int  # and count rounds of 1 ... this many drafts (chain_counts), as METHOD_DRAFT_SHADOW
    max_rows: int
    changed: bool  # anything above differs from the last decision: the engine may skip an unchanged one
    reason: str
    least_acceptance: tuple[float, float, float] = (0.0, 0.0, 0.0)  # arguments of set_least_acceptance
    score_fewer: bool = False  # score rounds of fewer drafts within real ones (set_score_fewer)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers; floats survive exactly."""
        return _fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """The inverse of to_json."""
        values = dict(data)
        values["shards"] = tuple(
            ShardDecision(**{**s, "candidates": tuple(Candidate(**c) for c in s["candidates"])})
            for s in values["shards"]
        )
        values["least_acceptance"] = tuple(values.get("least_acceptance", (0.0, 0.0, 0.0)))
        return cls(**values)


class Policy(Protocol):
    """What the engine loop calls. Deterministic: the same observations give the same decisions."""

    log: Callable[[dict[str, Any]], None] | None  # gets one JSON-able dict for the start and for each decision

    def due(self, step: int, running: int, waiting: int) -> bool:
        """Whether an observation should be made now. Called once a step; under a microsecond."""
        ...

    def decide(self, observation: Observation) -> Decision: ...


class StepTimer:
    """Sums step timings by like steps, so that a step costs a dictionary look-up and an observation stays short."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, int, int], list[float]] = {}  # counts stay ints, seconds are floats

    def add(
        self,
        kind: int,
        method: int,
        k: int,
        *,
        rows: int,
        tokens: int,
        context: int,
        seconds: float,
        draft_rows: int = 0,
        draft_tokens: int = 0,
        draft_seconds: float = 0.0,
    ) -> None:
        """One engine step; see StepStats for the fields."""
        sums = self._sums.setdefault((kind, method, k, rows.bit_length()), [0] * 6 + [0.0, 0.0])
        for i, value in enumerate((1, rows, tokens, context, draft_rows, draft_tokens, seconds, draft_seconds)):
            sums[i] += value

    def drain(self) -> tuple[StepStats, ...]:
        """The sums since the last call, in the order the groups were first seen."""
        stats = tuple(
            StepStats(
                kind=kind,
                method=method,
                k=k,
                steps=int(sums[0]),
                rows=int(sums[1]),
                tokens=int(sums[2]),
                context=int(sums[3]),
                draft_rows=int(sums[4]),
                draft_tokens=int(sums[5]),
                seconds=sums[6],
                draft_seconds=sums[7],
            )
            for (kind, method, k, _), sums in self._sums.items()
        )
        self._sums.clear()
        return stats


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(record, f.name)) for f in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _fields(value) if hasattr(value, "__dataclass_fields__") else value
