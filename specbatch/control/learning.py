"""What a run has taught so far: acceptance, true step times, output lengths, seconds by mode.

Owns the state that grows out of observations, and the order they are taken in. Decides nothing.
"""

from __future__ import annotations

import math
from typing import Any

from specbatch.control.acceptance import SHADOWS, AcceptanceBook
from specbatch.control.correction import Arm, CostCorrection
from specbatch.control.cost_model import StepCost
from specbatch.control.records import (
    METHOD_DRAFT,
    METHOD_DRAFT_SHADOW,
    METHOD_NGRAM,
    STEP_DECODE,
    STEP_DRAFT_PREFILL,
    AcceptanceSample,
    Observation,
    StepStats,
)
from specbatch.control.row_groups import RowMix
from specbatch.control.scoring import CATCH_UP_CHUNK, step_parts
from specbatch.control.situation import Gauges, OutputLengths

MEMORY_STEPS = 24.0  # decode steps after which acceptance counts weigh half
MEMORY_ROUNDS = 256.0  # but never fewer rounds than this
COVERAGE_STEPS = 64.0  # without drafts, in which what was learned of the share that drafts halves
ROW_ALIKE = 0.3  # correlation of rounds of one row: many rounds of few rows say less than the same rounds of many


class Learner:
    """Takes observations in; everything it holds is public to read."""

    def __init__(self, cost: StepCost, prior: dict[str, Any] | None = None, ks: tuple[int, ...] = ()) -> None:
        """ks: those a choice is made from, all if empty; scored rounds of others are left out."""
        self.cost = cost
        self._ks = frozenset(ks)
        self.book = AcceptanceBook.from_json(prior) if prior else AcceptanceBook()
        self.correction = CostCorrection()
        self.lengths = OutputLengths()
        self.gauges = Gauges()
        self.mix: dict[int, RowMix] = {}  # by method
        self.seconds = 0.0  # of all steps
        self.decode_steps = 0
        self.arm_steps: dict[Arm, int] = {}  # decode steps by method and k
        self.step_seconds = 0.0  # of a recent decode step
        self.evaluation_seconds = 0.0  # that a decision takes
        self.coverage = 1.0  # share of rows in draft mode that had a draft
        self.draft_prefill_factor = 1.0  # real over predicted seconds of catching up
        self.draft_probe_factor = 1.0  # the same of running the draft over produced tokens, logits and all
        self._last_k: dict[tuple[int, int], int] = {}
        self._tier = -1

    def in_force(self, shard: int, arm: Arm) -> None:
        """Remember under which k the counts to come were made."""
        if arm[1]:
            self._last_k[shard, arm[0]] = arm[1]

    def learn(self, observation: Observation, shadowed: bool, modes: dict[int, Arm]) -> None:
        """One observation. modes: what each shard was doing; shadowed: n-gram rounds were scored on all tokens."""
        self.gauges.update(observation)
        self.lengths.add(observation.finished_rows, observation.finished_output_tokens)
        self.lengths.drain(observation)
        self.correction.advance()
        if observation.policy_seconds > 0.0:
            known = self.evaluation_seconds or observation.policy_seconds
            self.evaluation_seconds = known + 0.3 * (min(observation.policy_seconds, 3.0 * known) - known)
        for stats in observation.steps:
            self._learn_steps(stats)
        self._learn_coverage(observation, modes)
        drafting = {arm[0] for arm in modes.values() if arm[1]}
        if len(drafting) == 1 and observation.row_groups:
            self.mix.setdefault(drafting.pop(), RowMix()).add(observation.row_groups, observation.running)
        self._learn_acceptance(observation, shadowed)

    def _learn_steps(self, stats: StepStats) -> None:
        self.seconds += stats.seconds
        steps = max(stats.steps, 1)
        seconds = stats.seconds / steps
        if stats.kind == STEP_DRAFT_PREFILL:
            self._learn_draft_prefill(stats, steps)
        if stats.kind != STEP_DECODE or stats.rows <= 0:
            return
        self.decode_steps += stats.steps
        self.step_seconds = seconds
        rows = stats.rows / steps
        tier = int(2.0 * math.log2(max(rows, 1.0)))
        if tier != self._tier:
            if self._tier >= 0:
                self.correction.new_tier()
            self._tier = tier
        arm: Arm = (stats.method, stats.k) if stats.k else (0, 0)
        self.arm_steps[arm] = self.arm_steps.get(arm, 0) + stats.steps
        passes = {stats.k: stats.draft_tokens / steps / stats.k} if stats.k and stats.method == METHOD_DRAFT else {}
        parts = step_parts(self.cost, rows, stats.tokens / steps, stats.context / steps, passes)
        self.correction.observe(arm, parts, seconds, stats.steps, stats.draft_seconds / steps)

    def _learn_draft_prefill(self, stats: StepStats, steps: int) -> None:
        """What reading tokens with the draft really takes. Steps of a few tokens say little of what many cost."""
        predicted = steps * self.cost.draft(stats.rows / steps, stats.tokens / steps, stats.context / steps)
        if predicted <= 0.0 or stats.seconds <= 0.0:
            return
        ratio = min(max(stats.seconds / predicted, 0.1), 10.0)
        weight = 1.0 - 0.5 ** (stats.tokens / CATCH_UP_CHUNK)
        if stats.method == METHOD_DRAFT_SHADOW:
            self.draft_probe_factor *= (ratio / self.draft_probe_factor) ** weight
        else:
            self.draft_prefill_factor *= (ratio / self.draft_prefill_factor) ** weight

    def _learn_coverage(self, observation: Observation, modes: dict[int, Arm]) -> None:
        """Rows that drafted over rows that should have; drifts back to 1 while nobody drafts."""
        live = sum(s.running for s in observation.shards)
        wanted = sum(s.running for s in observation.shards if modes.get(s.shard, (0, 0))[0] == METHOD_DRAFT)
        stats = [s for s in observation.steps if s.kind == STEP_DECODE and s.method == METHOD_DRAFT]
        rows = sum(s.rows for s in stats)
        if wanted and rows and live:
            seen = min(sum(s.draft_rows for s in stats) / (rows * wanted / live), 1.0)
            weight = 1.0 - 0.5 ** (sum(s.steps for s in stats) / 16.0)
        else:
            seen, weight = 1.0, 1.0 - 0.5 ** (sum(s.steps for s in observation.steps) / COVERAGE_STEPS)
        self.coverage += weight * (seen - self.coverage)

    def _learn_acceptance(self, observation: Observation, shadowed: bool) -> None:
        refreshed = set()
        running = {s.shard: s.running for s in observation.shards}
        probed_rows = sum(s.rows for s in observation.steps if s.method == METHOD_DRAFT_SHADOW)
        batches: dict[tuple[int, int], dict[int, AcceptanceSample]] = {}
        for sample in observation.acceptance:
            if sample.method == METHOD_NGRAM and shadowed:
                continue  # the same rounds are among those scored on all tokens, beside those of the other k
            if sample.k and self._ks and sample.k not in self._ks:
                continue
            k = sample.k or self._last_k.get((sample.shard, sample.method), len(sample.offered))
            batches.setdefault((sample.shard, sample.method), {})[k] = sample
        for (shard, method), samples in batches.items():
            weight = 1.0
            if method == METHOD_DRAFT_SHADOW:
                rounds = max(sample.rounds for sample in samples.values()) / max(probed_rows, 1)
                weight = 1.0 / (1.0 + ROW_ALIKE * max(rounds - 1.0, 0.0))
            self.book.add_each(samples, max(MEMORY_STEPS * running.get(shard, 1), MEMORY_ROUNDS), weight)
            refreshed.add((shard, SHADOWS.get(method, method)))
        steps = sum(s.steps for s in observation.steps if s.kind == STEP_DECODE)
        if steps:
            self.book.fade_idle(refreshed, steps)
