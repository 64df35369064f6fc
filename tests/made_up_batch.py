"""A made-up batch for tests of the choice: rows in decode, all of one kind, under costs and acceptance that a test sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specbatch.control.controller import Controller, ControllerOptions
from specbatch.control.cost_model import Affine, AffineCost
from specbatch.control.records import (
    METHOD_DRAFT,
    METHOD_NGRAM,
    METHOD_NGRAM_SHADOW,
    METHOD_NONE,
    STEP_DECODE,
    AcceptanceSample,
    Decision,
    Observation,
    ShardRows,
    StepTimer,
)
from specbatch.control.simulate import EVALUATION_SECONDS

COST = AffineCost(Affine(7e-3, 4e-5, 4e-8), Affine(0.7e-3, 1e-6, 1e-9))


@dataclass
class World:
    """Draws observations: rows in decode, all of one kind, with true costs and acceptance that a test may change."""

    running: int
    accept: float = 0.7
    match: float = 0.0
    waiting: int = 1000
    cost: AffineCost = COST
    limit: float = 200.0
    shards: tuple[int, ...] = (0,)
    shadow: bool = True
    step: int = 0
    clock: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.timer = StepTimer()
        self.counts: dict[tuple[int, int, int], list[Any]] = {}  # by shard, method and k of a shadow
        self.decision: Decision | None = None

    def observe(self) -> Observation:
        each, rest = divmod(self.running, len(self.shards))
        samples = tuple(
            AcceptanceSample(s, m, c[0], c[1], tuple(c[2]), tuple(c[3]), k=k) for (s, m, k), c in self.counts.items()
        )
        self.counts.clear()
        return Observation(
            step=self.step,
            time=self.clock,
            running=self.running,
            waiting=self.waiting,
            shards=tuple(
                ShardRows(s, each + (i < rest), self.waiting // len(self.shards)) for i, s in enumerate(self.shards)
            ),
            mean_context=400.0,
            mean_prompt=400.0 - self.limit // 2,
            mean_limit=self.limit - self.limit // 2,
            free_pages=10_000,
            total_pages=100_000,
            target_pages=self.running * 25,
            draft_pages=0,
            max_num_seqs=4096,
            steps=self.timer.drain(),
            acceptance=samples,
            policy_seconds=EVALUATION_SECONDS if self.decision is not None else 0.0,
        )

    def run(self, policy: Any, steps: int) -> list[Decision]:
        decisions = []
        for _ in range(steps):
            if policy.due(self.step, self.running, self.waiting):
                self.decision = policy.decide(self.observe())
                decisions.append(self.decision)
            self._step()
        return decisions

    def _step(self) -> None:
        assert self.decision is not None
        method, k = self.mode()
        drafts = np.zeros(self.running, dtype=int)
        if method == METHOD_DRAFT:
            drafts[:] = k
        elif method == METHOD_NGRAM:
            drafts[self.rng.random(self.running) < self.match] = k
        rows, tokens = self.running, self.running + int(drafts.sum())
        context = rows * 400
        draft = k * self.cost.draft(rows, rows, context) if method == METHOD_DRAFT else 0.0
        seconds = (self.cost.target(rows, tokens, context) + draft) * float(np.exp(self.rng.normal(0, 0.03)))
        self.timer.add(
            STEP_DECODE, method if drafts.any() else METHOD_NONE, int(drafts.max(initial=0)), rows=rows, tokens=tokens,
            context=context, seconds=seconds, draft_rows=int((drafts > 0).sum()), draft_tokens=int(drafts.sum()),
        )  # fmt: skip
        if k:
            self._count(method, k, drafts)
        for most in range(1, self.decision.shadow_ngram + 1) if self.shadow else ():
            self._count(METHOD_NGRAM_SHADOW, most, np.where(self.rng.random(rows) < self.match, most, 0))
        self.step += 1
        self.clock += seconds

    def _count(self, method: int, k: int, drafts: Any) -> None:
        shadow = k if method == METHOD_NGRAM_SHADOW else 0
        line = self.counts.setdefault((self.shards[0], method, shadow), [0, 0, [0] * 8, [0] * 8])
        line[0] += len(drafts)
        live = int((drafts > 0).sum())
        line[1] += live
        for j in range(k):
            line[2][j] += live
            live = int(self.rng.binomial(live, self.accept))
            line[3][j] += live

    def mode(self) -> tuple[int, int]:
        assert self.decision is not None
        if self.decision.shards:
            return self.decision.shards[0].method, self.decision.shards[0].k
        return self.decision.method, self.decision.k

    def rate(self, method: int, k: int) -> float:
        """True tokens a second of a mode in steady state."""
        share = {METHOD_NONE: 0.0, METHOD_NGRAM: self.match, METHOD_DRAFT: 1.0}[method]
        gain = share * sum(self.accept**j for j in range(1, k + 1))
        context = self.running * 400
        seconds = self.cost.target(self.running, self.running * (1 + share * k), context)
        seconds += k * self.cost.draft(self.running, self.running, context) if method == METHOD_DRAFT else 0.0
        return self.running * (1 + gain) / seconds


def controller(*methods: int, **options: Any) -> Controller:
    return Controller(ControllerOptions(methods=methods, max_num_seqs=4096, can_probe_draft=False, **options), COST)
