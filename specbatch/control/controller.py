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
from specbatch.control.scoring import AR, Score, Scorer, Situation, arms, draft_prefill_seconds, situation

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
        self.probe_spent = 0.0  # seconds that probing is expected to have cost
        self._prior = prior
        self._default: Arm = AR
        self._shadow_k = 0
        self._shadow_since = 0
        self._probe_k = 0
        self._unanswered = 0  # teacher-forced probes asked for and not answered
        self._probe_after: dict[int, tuple[int, int]] = {}  # shard -> (step of the next teacher-forced probe, gap)
        self._max_rows = 0
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
        self.known.learn(
            observation, self._shadow_k, self._probe_k, {shard: state.arm for shard, state in self.states.items()}
        )
        now = situation(observation, self.known.lengths, self.options.block_size, self.options.max_num_seqs)
        order = [line[0] for line in sorted(now.shards, key=lambda line: (-line[1], line[0]))]
        for shard in [s for s in self.states if s not in order]:
            del self.states[shard]
            self._probe_after.pop(shard, None)
            self.known.book.forget(shard)
        self._settled = True
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
        if state.home is not None and step < state.probe_ends:
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
        if fresh or state.since == step:
            state.arm = best.arm
            reason = f"first choice: {self._words(best, scores)}"
        elif tried is not None:
            state.end_probe()
            if best.arm == tried and gain >= math.log1p(limits.steady_gain):
                state.switch(step, best.arm, limits)
                reason = f"the probe paid: {self._words(best, scores)}"
            else:
                reason = f"{name(tried)} tried: {self._ratio(scores[tried], incumbent)} of {name(state.arm)}"
        elif best.arm != state.arm:
            if state.wants(step, gain, limits):
                state.switch(step, best.arm, limits)
                reason = f"{self._words(best, scores)}"
            elif state.strong:
                self._settled = False
        else:
            state.strong = state.steady = 0
        if not reason:
            reason = self._consider_probe(shard, state, step, now, scorer, scores) or self._words(incumbent, scores)
        self._remember(shard, scores, state, reason)
        return self._answer(shard, state, before, reason, scores)

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
        left = (now.running * now.remaining + now.waiting * now.output) / incumbent.rate
        horizon = min(left, limits.horizon_steps * incumbent.seconds)
        budget = limits.probe_share * (known.seconds + left) - self.probe_spent
        steps = int(min(max(math.ceil(limits.probe_rounds / rows), 2), limits.max_probe_steps))
        best: Score | None = None
        best_worth = best_loss = 0.0
        for score in scores.values():
            if score.arm == state.arm or not state.may_probe(step, score.arm):
                continue
            gain, sd = scorer.gain(score, incumbent)
            ways = 0.0
            if score.arm[0] == METHOD_DRAFT and state.arm[0] != METHOD_DRAFT:
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
        state.probe(step, best.arm, steps)
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
        probe_rows = self._teacher_forced(observation.step, now)
        self._rotate_shadow(observation.step)
        rows = self._rows_to_run(observation, now)
        key = (self._default, tuple((s.shard, s.method, s.k) for s in shards), self._shadow_k, probe_rows, rows)
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
            max_rows=rows,
            changed=changed,
            reason=shards[0].reason if shards else "nothing to run yet",
        )

    def _teacher_forced(self, step: int, now: Situation) -> int:
        """How many rows the draft should be run over: when a shard's draft acceptance is guesswork and matters."""
        options, known = self.options, self.known
        if METHOD_DRAFT not in options.methods or not options.can_probe_draft or self._unanswered >= 3:
            return 0
        produced = now.context - now.prompt
        if not now.running or produced < 6 or known.decode_steps < 6:
            return 0
        if self._probe_k and known.draft_shadow_seen:
            self._unanswered = 0
        for shard, running, _ in now.shards:
            state = self.states[shard]
            after, gap = self._probe_after.get(shard, (0, 32))
            if state.arm[0] == METHOD_DRAFT or running < 1 or step < after:
                continue
            if known.book.evidence(shard, METHOD_DRAFT) > 128:
                continue
            self._probe_after[shard] = (step + gap, min(gap * 2, 4096))
            rows = int(min(4, running))
            price = draft_prefill_seconds(known.cost) * known.draft_prefill_factor * rows * now.context
            left = (now.running * now.remaining + now.waiting * now.output) * known.step_seconds / now.running
            if self.probe_spent + price > options.limits.probe_share * (known.seconds + left):
                continue
            self.probe_spent += price
            self._probe_k = max(k for k in options.ks if k <= 4 or k == options.ks[0])
            self._unanswered += 1
            return rows
        return 0

    def _rotate_shadow(self, step: int) -> None:
        """Score n-gram on what is committed anyway, one k after another: each k has its own rounds."""
        if METHOD_NGRAM not in self.options.methods:
            return
        if self._shadow_k == 0 or step - self._shadow_since >= 16:
            ks = self.options.ks
            at = ks.index(self._shadow_k) + 1 if self._shadow_k in ks else min(1, len(ks) - 1)
            self._shadow_k, self._shadow_since = ks[at % len(ks)], step

    def _rows_to_run(self, observation: Observation, now: Situation) -> int:
        """Rows to admit: as many as keep their draft tables. Never fewer than run already."""
        ratio, cap = self.options.draft_kv_ratio, self.options.max_num_seqs
        if ratio <= 0.0:
            return 0
        live = sum(line[1] for line in now.shards) or 1.0
        share = sum(run for s, run, _ in now.shards if self.states[s].arm[0] == METHOD_DRAFT) / live
        rows = cap
        if share > 0.0 and observation.running:
            fit = now.pages / (now.pages_per_row * (1.0 + ratio * share))
            rows = max(min(cap, math.ceil(fit)), observation.running)
        if abs(rows - self._max_rows) > 0.03 * cap or observation.running > self._max_rows:
            self._max_rows = rows
        return self._max_rows

    def _schedule(self, observation: Observation) -> None:
        """When to look again: soon while young or near a change, else ever less often; at once if the batch shrinks."""
        step, known = observation.step, self.known
        ends = [s.probe_ends for s in self.states.values() if s.home is not None]
        young = known.decode_steps < 48
        self._interval = 4 if young or not self._settled else min(self._interval * 2, 32)
        quick = math.ceil(0.02 / known.step_seconds) if known.step_seconds else 1
        wait = max(self._interval, min(quick, 32)) if known.decode_steps else 2
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

    def _remember(self, shard: int, scores: Mapping[Arm, Score], state: ShardState, reason: str) -> None:
        history = self.known.history.get(shard)
        if history is None:
            return
        history.evaluations += 1
        history.reason = reason
        rate = scores[state.base].rate
        if AR in scores:
            history.gain_over_ar += math.log(rate / scores[AR].rate)
        others = [s.rate for s in scores.values() if s.arm[0] != state.base[0]]
        if others:
            history.gain_of_best_other += math.log(max(others) / rate)

    def report(self) -> list[dict[str, Any]]:
        """One line a shard seen so far: time by mode, acceptance by position, what the other mode would have done."""
        lines = []
        for shard, history in sorted(self.known.history.items()):
            count = max(history.evaluations, 1)
            lines.append(
                {
                    "shard": shard,
                    "seconds": {name(arm): seconds for arm, seconds in sorted(history.seconds.items())},
                    "over_ar": math.exp(history.gain_over_ar / count),
                    "best_other_mode": math.exp(history.gain_of_best_other / count),
                    "tokens_per_step": history.committed / history.row_steps if history.row_steps else 1.0,
                    "reason": history.reason,
                }
            )
        return lines
