"""A device that exists only as a cost model, and the loop that drives a policy over it at GPU scale in seconds.

Owns the clock of a simulated run, the workloads and what an engine would observe. Knows neither torch nor the Rust
core: rows come from anything that behaves like a scheduler (`Rows`): a plain one in row_model.py, or the real one.

Whether a draft is right is a property of the row and the position, drawn once for the workload: two policies see the
same luck, so their times differ by what they decided and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbatch.control.cost_model import Affine, AffineCost, StepCost
from specbatch.control.records import (
    METHOD_DRAFT_SHADOW,
    METHOD_NONE,
    STEP_DECODE,
    STEP_DRAFT_PREFILL,
    AcceptanceSample,
    Decision,
    Observation,
    Policy,
    StepTimer,
)

# An 8B model on one H100 in bfloat16, as published: 5.886 ms + 3.926e-8 s a KV token + 2.101e-5 s a token + 1.2 ms of
# host time a step; an EAGLE-like draft takes 0.71 ms a token.
H100_8B = Affine(base=5.886e-3 + 1.2e-3, per_token=2.101e-5, per_kv_token=3.926e-8)
EAGLE_LIKE = Affine(base=0.71e-3, per_token=6.0e-7, per_kv_token=1.1e-9)
# An independent 0.6B draft with 78 % of the target's KV a token (Qwen3-0.6B for Qwen3-8B: 112 and 144 KiB).
KV_HEAVY_DRAFT = Affine(base=0.71e-3, per_token=1.6e-6, per_kv_token=0.78 * 3.926e-8)


EVALUATION_SECONDS = 1e-3  # of the host, for a decision
TEACHER_FORCED = "teacher-forced"  # in SimResult.seconds_by_mode: passes of the draft over produced tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows to run, and what is true of them. N rows, L = longest output."""

    prompt: NDArray[np.int64]  # [N] tokens
    output: NDArray[np.int64]  # [N] tokens each row will produce
    shard: NDArray[np.int64]  # [N]
    draft_hits: NDArray[np.bool_]  # [N, L] the draft model, given the true tokens before, proposes the true one
    ngram_hits: NDArray[np.bool_]  # [N, L] so does the n-gram proposer ...
    ngram_match: NDArray[np.bool_]  # [N, L] ... where it proposes at all
    max_tokens: int  # what the rows were allowed

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def tokens(self) -> int:
        return int(self.output.sum())


def runs(hits: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[N, L + 1] how many hits in a row start at each position."""
    lengths = np.zeros((hits.shape[0], hits.shape[1] + 1), dtype=np.int32)
    for t in range(hits.shape[1] - 1, -1, -1):
        lengths[:, t] = np.where(hits[:, t], lengths[:, t + 1] + 1, 0)
    return lengths


@dataclass(slots=True)
class SimStep:
    """One scheduler step, in numbers only."""

    kind: int
    method: int = METHOD_NONE
    k: int = 0
    rows: int = 0
    tokens: int = 0
    context: int = 0
    draft_rows: int = 0
    draft_tokens: int = 0
    draft_context: int = 0  # KV tokens of the drafting rows
    draft_passes: list[int] = field(default_factory=list)  # rows in the first, second ... pass of the draft


class Rows(Protocol):
    """A scheduler with rows whose tokens are known."""

    def step(self) -> SimStep | None:
        """Run one step to its end; None when nothing is left."""
        ...

    def apply(self, decision: Decision) -> None: ...

    def load(self) -> tuple[int, int]:
        """Rows running and waiting."""
        ...

    def observe(self) -> dict[str, Any]:
        """Fields of Observation except step, time, steps and acceptance; counters start again."""
        ...

    def take_acceptance(self) -> tuple[AcceptanceSample, ...]: ...

    def probe_draft(self, rows: int, k: int) -> tuple[tuple[AcceptanceSample, ...], int, int]:
        """Counts of the draft run teacher-forced over a few rows, how many those were, and the tokens that took."""
        ...


@dataclass(frozen=True, slots=True)
class SimDevice:
    """True step times, whatever the controller believes."""

    cost: StepCost = field(default_factory=lambda: AffineCost(H100_8B, EAGLE_LIKE, "H100, 8B, EAGLE-like draft"))
    jitter: float = 0.0  # relative standard deviation of a step
    extra_verify: float = 1.0  # factor on steps that verify drafts: what a profile might miss

    def seconds(self, step: SimStep) -> tuple[float, float]:
        """Seconds of a step and the part of it spent in the draft."""
        if step.kind == STEP_DRAFT_PREFILL:
            seconds = self.cost.draft(step.rows, step.tokens, step.context)
            return seconds, seconds
        target = self.cost.target(step.rows, step.tokens, step.context)
        if step.k:
            target *= self.extra_verify
        draft = sum(
            self.cost.draft(rows, rows, step.draft_context * rows / step.draft_rows) for rows in step.draft_passes
        )
        return target + draft, draft


@dataclass(slots=True)
class SimResult:
    """What a simulated run came to."""

    seconds: float
    tokens: int
    steps: int
    decode_steps: int
    decisions: list[Decision]
    seconds_by_mode: dict[str, float]
    preempted: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def switches(self) -> int:
        """Changes of what the shards do, the first choice and probes not counted."""
        return sum(1 for d in self.decisions[1:] for s in d.shards if s.switched)


def simulate(
    rows: Rows,
    policy: Policy,
    device: SimDevice,
    tokens: int,
    *,
    seed: int = 0,
    on_step: Callable[[int, SimStep, float], None] | None = None,
) -> SimResult:
    """Run all rows under a policy. tokens: how many the rows produce in total, for the rate."""
    rng = np.random.default_rng(seed)
    timer, clock, step, decode_steps, preempted = StepTimer(), 0.0, 0, 0, 0
    decisions: list[Decision] = []
    by_mode: dict[str, float] = {}
    probed: tuple[AcceptanceSample, ...] = ()
    took = 0.0  # by the last decision
    while True:
        if policy.due(step, *rows.load()):
            acceptance = rows.take_acceptance() + probed
            observation = Observation(
                step=step,
                time=clock,
                steps=timer.drain(),
                acceptance=acceptance,
                policy_seconds=took,
                **rows.observe(),
            )
            took = EVALUATION_SECONDS
            clock += took
            probed = ()
            preempted += observation.preempted
            decision = policy.decide(observation)
            decisions.append(decision)
            if decision.changed:
                rows.apply(decision)
            if decision.probe_draft_rows:
                probed, count, read = rows.probe_draft(decision.probe_draft_rows, decision.probe_draft_k)
                if count:
                    seconds = device.cost.draft(count, read, read / 2)
                    clock += seconds
                    by_mode[TEACHER_FORCED] = by_mode.get(TEACHER_FORCED, 0.0) + seconds
                    shape = {"rows": count, "tokens": read, "context": read}
                    timer.add(STEP_DRAFT_PREFILL, METHOD_DRAFT_SHADOW, decision.probe_draft_k, **shape, seconds=seconds)
        done = rows.step()
        if done is None:
            break
        seconds, draft_seconds = device.seconds(done)
        if device.jitter:
            factor = float(np.exp(rng.normal(0.0, device.jitter)))
            seconds, draft_seconds = seconds * factor, draft_seconds * factor
        clock += seconds
        timer.add(
            done.kind,
            done.method,
            done.k,
            rows=done.rows,
            tokens=done.tokens,
            context=done.context,
            draft_rows=done.draft_rows,
            draft_tokens=done.draft_tokens,
            seconds=seconds,
            draft_seconds=draft_seconds,
        )
        mode = f"{done.kind}:{done.method}:{done.k}"
        by_mode[mode] = by_mode.get(mode, 0.0) + seconds
        decode_steps += done.kind == STEP_DECODE
        if on_step is not None:
            on_step(step, done, clock)
        step += 1
    return SimResult(clock, tokens, step, decode_steps, decisions, by_mode, preempted)
