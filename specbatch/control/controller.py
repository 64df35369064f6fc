"""Policies: what each shard does next. FixedPolicy does as it is told; Controller chooses.

Pure Python: no torch, no Rust core, no clock of its own, so a log of observations replays to the same decisions.

The engine loop:

    timer.add(...)                                         # every step
    if policy.due(step, running, waiting):                 # every step, under a microsecond
        decision = policy.decide(Observation(..., steps=timer.drain(), acceptance=...))
        if decision.changed:
            ...                                            # set_speculation, set_shadow_ngram, set_max_num_seqs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specbatch.control.choice import Limits, ShardState, expected_improvement, name
from specbatch.control.correction import Arm
from specbatch.control.cost_model import StepCost
from specbatch.control.fixed import FixedPolicy
from specbatch.control.learning import Learner
from specbatch.control.records import (
    METHOD_DRAFT,
    METHOD_DRAFT_SHADOW,
    METHOD_EXTERNAL,
    METHOD_NGRAM,
    AcceptanceSample,
    Candidate,
    Decision,
    Observation,
    Policy,
    ShardDecision,
    ShardRows,
    StepStats,
    StepTimer,
)
from specbatch.control.scoring import (
    AR,
    CATCH_UP_CHUNK,
    Score,
    Scorer,
    Situation,
    arms,
    draft_prefill_seconds,
    situation,
)

__all__ = [
    "AcceptanceSample",
    "Candidate",
    "Controller",
    "ControllerOptions",
    "Decision",
    "FixedPolicy",
    "Limits",
    "Observation",
    "Policy",
    "ShardDecision",
    "ShardRows",
    "StepStats",
    "StepTimer",
]


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """What a controller may choose from, and the sizes it needs. Raises ValueError naming the option."""

    methods: tuple[int, ...]  # METHOD_* besides AR that the engine can run
    max_num_seqs: int
    ks: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    allow_ar: bool = True
    draft_kv_ratio: float = 0.0  # pages of draft KV a page of target KV; 0: the draft keeps none of its own
    block_size: int = 16
    can_probe_draft: bool = True  # the engine answers Decision.probe_draft_rows
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        known = (METHOD_NGRAM, METHOD_DRAFT, METHOD_EXTERNAL)
        if any(m not in known for m in self.methods):
            raise ValueError(f"methods must be among {known}, got {self.methods}")
        if not self.ks or min(self.ks) < 1 or list(self.ks) != sorted(set(self.ks)):
            raise ValueError(f"ks must be ascending and at least 1, got {self.ks}")
        if not self.allow_ar and not self.methods:
            raise ValueError("without AR at least one method is needed")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.draft_kv_ratio < 0:
            raise ValueError(f"draft_kv_ratio must not be negative, got {self.draft_kv_ratio}")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "methods": list(self.methods), "ks": list(self.ks)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ControllerOptions:
        values = dict(data)
        values.update(methods=tuple(data["methods"]), ks=tuple(data["ks"]), limits=Limits(**data["limits"]))
        return cls(**values)


MIN_INTERVAL, MAX_INTERVAL = 4, 32  # steps between evaluations
CALM_SECONDS, BUSY_SECONDS = 0.15, 0.02  # and at least so long: an evaluation takes about a millisecond


class Controller:
    """`--speculate auto`: for each shard AR or one of the speculators, and k, by expected tokens a second.

    cost: step times, measured or assumed; they are corrected by the steps that run. prior: AcceptanceBook.to_json of
    an earlier run with the same models, or None.
    """

    def __init__(
        self,
        options: ControllerOptions,
        cost: StepCost,
        *,
        prior: dict[str, Any] | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.options = options
        self.log = log
        self.known = Learner(cost, prior)
        self.states: dict[int, ShardState] = {}
        self.probe_spent = 0.0  # seconds that trying modes out is expected to have cost
        self.shadow_spent = 0.0  # seconds of teacher-forced draft passes
        self._prior = prior
        self._default: Arm = AR if options.allow_ar else (options.methods[0], options.ks[0])
        self._shadow_k = 0
        self._shadow_since = 0
        self._probe_k = self._probe_rows = 0
        self._unanswered = 0  # teacher-forced probes asked for and not answered
        self._wanted_rows = 0
        self._probe_after: dict[int, int] = {}  # shard -> step before which no teacher-forced probe is asked for
        self._interval = 4
        self._next = self._soonest = 0
        self._low = self._high = -1.0
        self._settled = False  # no shard near a change at the last evaluation
        self._last: tuple[Any, ...] | None = None
        self._evaluations = 0

    def start_event(self) -> dict[str, Any]:
        """The first line of the log: all that a replay needs besides the observations."""
        return {
            "event": "start",
            "options": self.options.to_json(),
            "cost": self.known.cost.to_json(),
            "prior": self._prior,
        }

    # -- the policy ------------------------------------------------------------------------------------------------

    def due(self, step: int, running: int, waiting: int) -> bool:
        if step >= self._next:
            return True
        return step >= self._soonest and not self._low <= running <= self._high

    def decide(self, observation: Observation) -> Decision:
        """Learn from the observation, then choose. Deterministic."""
        if self.log is not None and self._evaluations == 0:
            self.log(self.start_event())
        self._evaluations += 1
        modes = {shard: state.arm for shard, state in self.states.items()}
        self.known.learn(observation, self._shadow_k, self._probe_k, self._probe_rows, modes)
        now = situation(
            observation, self.known.gauges, self.known.lengths, self.options.block_size, self.options.max_num_seqs
        )
        order = [line[0] for line in sorted(now.shards, key=lambda line: (-line[1], line[0]))]
        for shard in [s for s in self.states if s not in order]:
            del self.states[shard]
            self._probe_after.pop(shard, None)
            self.known.book.forget(shard)
        if any(sample.method == METHOD_DRAFT_SHADOW for sample in observation.acceptance):
            self._unanswered = 0
        self._settled, self._wanted_rows = True, 0
        shards = tuple(self._decide_shard(shard, observation.step, now) for shard in order)
        decision = self._compose(observation, now, shards)
        self._schedule(observation)
        if self.log is not None:
            self.log({"event": "decision", "observation": observation.to_json(), "decision": decision.to_json()})
        return decision

    # -- one shard -------------------------------------------------------------------------------------------------

    def _decide_shard(self, shard: int, step: int, now: Situation) -> ShardDecision:
        limits = self.options.limits
        state = self.states.get(shard)
        fresh = state is None
        if state is None:
            state = self.states[shard] = ShardState(self._default, step, limits.dwell)
        before = state.arm
        scorer = self._scorer(now)
        modes = {s: t.arm for s, t in self.states.items()}
        done = self.known.arm_steps.get(state.arm, 0)
        if state.home is not None and done < state.probe_goal and step < state.probe_ends:
            self._settled = False
            return self._answer(shard, state, before, f"probing {name(state.arm)}", {})
        scores = {
            arm: scorer.score(shard, arm, modes)
            for arm in {*arms(self.options.methods, self.options.ks, self.options.allow_ar, now.limit), state.base}
        }
        tried = state.arm if state.home is not None else None
        incumbent = scores[state.base]
        best = max(scores.values(), key=lambda s: (s.rate, -s.arm[1]))
        gain, _ = scorer.gain(best, incumbent)
        reason = ""
        if fresh:
            state.arm = self._first(scores)
            reason = f"first choice: {self._words(scores[state.arm], scores)}"
        elif tried is not None:
            state.end_probe()
            here = (
                best.arm == tried or best.arm[0] == tried[0] != state.arm[0]
            )  # the method is in force: only k is open
            if here and gain >= math.log1p(limits.steady_gain):
                state.switch(step, best.arm, limits)
                reason = f"the probe paid: {self._words(best, scores)}"
            else:
                reason = f"{name(tried)} tried: {self._ratio(scores[tried], incumbent)} of {name(state.arm)}"
        elif best.arm != state.arm:
            if state.wants(step, best.arm, gain, limits):
                state.switch(step, best.arm, limits)
                reason = f"{self._words(best, scores)}"
            elif state.strong:
                self._settled = False
        else:
            state.strong = state.steady = 0
        if not reason:
            self._want_teacher_forced(shard, state, step, now, scorer, scores)
            reason = self._consider_probe(shard, state, step, now, scorer, scores) or self._words(incumbent, scores)
        return self._answer(shard, state, before, reason, scores)

    def _first(self, scores: Mapping[Arm, Score]) -> Arm:
        """What a new shard starts with: AR, unless what is known already speaks clearly for another mode."""
        limits = self.options.limits
        if AR not in scores:
            return max(scores.values(), key=lambda s: s.rate).arm
        bar = {METHOD_DRAFT: 1.0 + limits.first_draft_gain}
        fit = [s for s in scores.values() if s.rate > scores[AR].rate * bar.get(s.arm[0], 1.0 + limits.first_gain)]
        return max(fit, key=lambda s: s.rate).arm if fit else AR

    def _consider_probe(
        self, shard: int, state: ShardState, step: int, now: Situation, scorer: Scorer, scores: dict[Arm, Score]
    ) -> str:
        """Try the mode that is most worth knowing more about, if any is worth what trying costs."""
        limits, known = self.options.limits, self.known
        if any(s.home is not None for s in self.states.values()) or not known.step_seconds or not now.running:
            return ""
        rows = next((line[1] for line in now.shards if line[0] == shard), 0.0)
        if rows < 1.0 or step - state.since < 2:
            return ""
        incumbent = scores[state.arm]
        left = self._seconds_left(now, incumbent)
        horizon = min(left, limits.horizon_steps * incumbent.seconds)
        budget = limits.probe_share * (known.seconds + left) - self.probe_spent
        steps = int(min(max(math.ceil(limits.probe_rounds / rows), 2), limits.max_probe_steps))
        best: Score | None = None
        best_worth = best_loss = 0.0
        for score in scores.values():
            if score.arm == state.arm or not state.may_probe(step, score.arm):
                continue
            if score.arm[0] == METHOD_DRAFT and known.coverage < 0.3:  # no page to draft with: nothing would be learned
                continue
            gain, sd = scorer.gain(score, incumbent, trying=True)
            ways = 0.0  # filling the draft's KV, on the way there or on the way back
            if (score.arm[0] == METHOD_DRAFT) != (state.arm[0] == METHOD_DRAFT):
                ways = draft_prefill_seconds(known.cost) * known.draft_prefill_factor * rows * now.context
            loss = max(1.0 - math.exp(gain), 0.0) * steps * incumbent.seconds + ways
            worth = expected_improvement(gain, sd) - max(gain, 0.0)
            worth = worth * horizon - loss
            if worth > best_worth and loss <= budget:
                best, best_worth, best_loss = score, worth, loss
        if best is None:
            return ""
        self.probe_spent += best_loss
        self._settled = False
        patience = 4 * steps
        if best.arm[0] == METHOD_DRAFT:
            patience += math.ceil(rows * now.context / CATCH_UP_CHUNK)
        state.probe(step, best.arm, steps, known.arm_steps.get(best.arm, 0), patience)
        return f"probing {name(best.arm)} for {steps} steps: {self._ratio(best, incumbent)} expected, not sure"

    def _answer(
        self, shard: int, state: ShardState, before: Arm, reason: str, scores: Mapping[Arm, Score]
    ) -> ShardDecision:
        self.known.in_force(shard, state.arm)
        changed = state.arm != before
        candidates = tuple(
            Candidate(s.arm[0], s.arm[1], round(s.rows), s.tokens_per_row, s.seconds, s.rate)
            for s in sorted(scores.values(), key=lambda s: s.arm)
        )
        return ShardDecision(
            shard=shard,
            method=state.arm[0],
            k=state.arm[1],
            reason=reason,
            switched=changed and state.home is None and state.since != 0,
            probe=state.home is not None,
            candidates=candidates if changed or self._evaluations % 8 == 1 else (),
        )

    # -- the whole batch -------------------------------------------------------------------------------------------

    def _compose(self, observation: Observation, now: Situation, shards: tuple[ShardDecision, ...]) -> Decision:
        if shards:
            newest = max(self.states, key=lambda s: s)
            self._default = self.states[newest].base
        probe_rows = self._wanted_rows
        if probe_rows:
            self._probe_k = max(k for k in self.options.ks if k <= 4 or k == self.options.ks[0])
            self._probe_rows = probe_rows
            self._unanswered += 1
        self._rotate_shadow(observation.step)
        key = (self._default, tuple((s.shard, s.method, s.k) for s in shards), self._shadow_k, probe_rows)
        changed = key != self._last
        self._last = key
        return Decision(
            step=observation.step,
            method=self._default[0],
            k=self._default[1],
            shards=shards,
            shadow_ngram=self._shadow_k,
            probe_draft_rows=probe_rows,
            probe_draft_k=self._probe_k if probe_rows else 0,
            max_rows=0,
            changed=changed,
            reason=shards[0].reason if shards else "nothing to run yet",
        )

    def _want_teacher_forced(
        self, shard: int, state: ShardState, step: int, now: Situation, scorer: Scorer, scores: dict[Arm, Score]
    ) -> None:
        """Ask for the draft to be run over produced tokens, when that may change the mode and costs next to nothing."""
        options, known = self.options, self.known
        drafts = [s for s in scores.values() if s.arm[0] == METHOD_DRAFT]
        rows = min(32.0, next((line[1] for line in now.shards if line[0] == shard), 0.0))
        produced = now.context - now.prompt
        if not drafts or not options.can_probe_draft or self._unanswered >= 3 or state.arm[0] == METHOD_DRAFT:
            return
        if rows < 1 or produced < 6 or not known.step_seconds or step < self._probe_after.get(shard, 0):
            return
        price = draft_prefill_seconds(known.cost) * known.draft_prefill_factor * now.context
        left = self._seconds_left(now, scores[state.arm])
        budget = options.limits.shadow_share * (known.seconds + left) - self.shadow_spent
        rows = min(rows, budget // price) if price > 0 else rows
        if rows < 1:
            return
        horizon = min(left, options.limits.horizon_steps * scores[state.arm].seconds)
        worth = 0.0
        for score in drafts:
            gain, sd = scorer.gain(score, scores[state.arm])
            worth = max(worth, expected_improvement(gain, sd) - max(gain, 0.0))
        if worth * horizon > price * rows:
            self._probe_after[shard] = step + 24
            self.shadow_spent += price * rows
            self._wanted_rows = max(self._wanted_rows, int(rows))

    def _seconds_left(self, now: Situation, score: Score) -> float:
        """What the known rows still take at the rate of a score."""
        return (now.running * now.remaining + now.waiting * now.output) / score.rate

    def _rotate_shadow(self, step: int) -> None:
        """Score n-gram on what is committed anyway, one k after another: each k has its own rounds."""
        if METHOD_NGRAM not in self.options.methods:
            return
        if self._shadow_k == 0 or step - self._shadow_since >= 16:
            ks = self.options.ks
            at = ks.index(self._shadow_k) + 1 if self._shadow_k in ks else min(1, len(ks) - 1)
            self._shadow_k, self._shadow_since = ks[at % len(ks)], step

    def _schedule(self, observation: Observation) -> None:
        """When to look again: soon while young or near a change, else ever less often; at once if the batch shrinks."""
        step, known = observation.step, self.known
        ends = [
            step + max(s.probe_goal - known.arm_steps.get(s.arm, 0), 1)
            for s in self.states.values()
            if s.home is not None
        ]
        young = known.decode_steps < 48
        calm = self._settled and not young
        self._interval = min(self._interval * 2, MAX_INTERVAL) if calm else MIN_INTERVAL
        least = (CALM_SECONDS if calm else BUSY_SECONDS) / known.step_seconds if known.step_seconds else 1.0
        wait = max(self._interval, min(math.ceil(least), 4 * MAX_INTERVAL)) if known.decode_steps else 2
        self._next = min([step + wait, *ends])
        self._soonest = step + 2
        running = max(observation.running, 1)
        self._low, self._high = running / 1.4, running * 1.4 + 1

    def _scorer(self, now: Situation) -> Scorer:
        return Scorer(
            book=self.known.book,
            cost=self.known.cost,
            correction=self.known.correction,
            draft_kv_ratio=self.options.draft_kv_ratio,
            draft_prefill=draft_prefill_seconds(self.known.cost) * self.known.draft_prefill_factor,
            mix=self.known.mix,
            coverage=self.known.coverage,
            reference_k=self._probe_k or 4,
            now=now,
            in_force={shard: state.arm for shard, state in self.states.items()},
        )

    # -- words -----------------------------------------------------------------------------------------------------

    def _ratio(self, score: Score, other: Score) -> str:
        return f"{score.rate / other.rate:.2f}x"

    def _words(self, best: Score, scores: Mapping[Arm, Score]) -> str:
        others = [s for s in scores.values() if s.arm != best.arm]
        if not others:
            return f"{name(best.arm)} is all there is"
        rival = scores.get(AR) if best.arm != AR else None
        rival = rival or max(others, key=lambda s: s.rate)
        accept = f", {best.tokens_per_row:.2f} tokens a row and step" if best.arm[1] else ""
        return f"{name(best.arm)}: {best.rate:.0f} tokens/s, {self._ratio(best, rival)} of {name(rival.arm)}{accept}"
