"""Policies: what each shard does next. FixedPolicy does as it is told; Controller chooses.

Pure Python: no torch, no Rust core, no clock of its own, so a log of observations replays to the same decisions.

The engine loop:

    timer.add(...)                                         # every step
    if policy.due(step, running, waiting):                 # every step, under a microsecond
        decision = policy.decide(Observation(..., steps=timer.drain(), acceptance=...))
        if decision.changed:
            ...                                            # set_speculation, set_shadow_ngram, set_score_fewer ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specbatch.control.choice import SURE, Limits, ShardState, name
from specbatch.control.correction import Arm
from specbatch.control.cost_model import StepCost
from specbatch.control.fixed import FixedPolicy
from specbatch.control.learning import Learner
from specbatch.control.options import ControllerOptions
from specbatch.control.probing import Prober
from specbatch.control.records import (
    METHOD_DRAFT,
    METHOD_NGRAM,
    METHOD_NONE,
    STEP_DECODE,
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
    Score,
    Scorer,
    arms,
    draft_prefill_seconds,
)
from specbatch.control.situation import Situation, situation

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


MIN_INTERVAL, MAX_INTERVAL = 4, 32  # steps between evaluations
CALM_SHARE, BUSY_SHARE = 0.004, 0.01  # of the time, that evaluations may take: about a millisecond each
PROBE_LOOK = 3  # steps between two looks at a probe
NEAR = 0.2  # log of the ratio to the best mode, within which one is looked at each time
WIDE = 8  # evaluations of which one looks at every mode
LEAST_STEP, MOST_ASKED = 0.05, 0.9  # of the acceptance that is asked of a row's drafts
LONGEST = 512  # steps between evaluations, however short they are
LOG_FORMAT = 2
EARLY = 4  # evaluations that come at the shortest interval whatever they take


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
        self.known = Learner(cost, prior, options.ks)
        self.states: dict[int, ShardState] = {}
        self.prober = Prober(options.limits, options.ks, options.methods, options.can_probe_draft, self.known)
        self._prior = prior
        self._default: Arm = AR if options.allow_ar else (options.methods[0], options.ks[0])
        self._interval = 4
        self._next = self._soonest = 0
        self._low = self._high = -1.0
        self._settled = False  # no shard near a change at the last evaluation
        self._last: tuple[Any, ...] | None = None
        self._evaluations = 0
        self._asked = 0.0, 0.0, 0.0  # of each row's drafts
        self._news = True  # decode steps since the last evaluation
        self._wide = True  # all modes are scored, not those alone that may be the best

    def start_event(self) -> dict[str, Any]:
        """The first line of the log: all that a replay needs besides the observations."""
        return {
            "event": "start",
            "format": LOG_FORMAT,
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
        self._wide = self._evaluations % WIDE == 1
        modes = {shard: state.arm for shard, state in self.states.items()}
        self.known.learn(observation, self.prober.shadow_k > 0, modes)
        self._news = any(stats.kind == STEP_DECODE for stats in observation.steps)
        self.prober.begin(observation)
        now = situation(
            observation, self.known.gauges, self.known.lengths, self.options.block_size, self.options.max_num_seqs
        )
        order = [line[0] for line in sorted(now.shards, key=lambda line: (-line[1], line[0]))]
        for shard in [s for s in self.states if s not in order]:
            del self.states[shard]
            self.prober.forget(shard)
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
        before = state.arm, state.base
        same_size = state.contenders_at / 1.3 <= now.running <= state.contenders_at * 1.3
        if not fresh and not self._news and same_size:
            return self._answer(shard, state, before, "no step since the last look", {})
        scorer = self._scorer(now)
        modes = {s: t.arm for s, t in self.states.items()}
        done = self.known.arm_steps.get(state.arm, 0)
        if state.home is not None and done < state.probe_goal and step < state.probe_ends:
            self._settled = False
            return self._answer(shard, state, before, f"probing {name(state.arm)}", {})
        usable = {*arms(self.options.methods, self.options.ks, self.options.allow_ar, now.limit), state.base, state.arm}
        if not fresh and not self._wide and same_size:
            usable &= {AR, state.base, state.arm, *state.contenders}
        else:
            state.contenders_at = 0.0
        scores = {arm: scorer.score(shard, arm, modes) for arm in usable}
        tried = state.arm if state.home is not None else None
        incumbent = scores[state.base]
        best = max(scores.values(), key=lambda s: (s.rate, -s.arm[1]))
        if not state.contenders_at:
            state.contenders, state.contenders_at = contenders(scores.values(), best), now.running
        gain, sd = scorer.gain(best, incumbent)
        reason = ""
        if fresh:
            state.arm = self._first(scores)
            reason = f"first choice: {self._words(scores[state.arm], scores)}"
        elif tried is not None:
            state.end_probe()
            # The method was in force: another k of it may look better still. Or what needs no trial does.
            known = best.arm[0] in (METHOD_NONE, tried[0], *scorer.watched)
            paid = best if known else scores[tried]
            if scorer.gain(paid, incumbent)[0] >= math.log1p(limits.steady_gain):
                state.switch(step, paid.arm, limits)
                reason = f"the probe paid: {self._words(paid, scores)}"
            else:
                reason = f"{name(tried)} tried: {self._ratio(scores[tried], incumbent)} of {name(state.arm)}"
        elif best.arm != state.arm:
            if state.wants(step, best.arm, gain, limits, sd):
                state.switch(step, best.arm, limits)
                reason = f"{self._words(best, scores)}"
            elif state.strong:
                self._settled = False
        else:
            state.strong = state.steady = 0
        drafting = state.home is None and state.arm[0] == METHOD_DRAFT and AR in scores
        if not reason and drafting and state.tied(scorer.gain(best, scores[AR])[0], limits):
            state.switch(step, AR, limits)
            reason = f"{name(best.arm)} is no better than ar: {self._ratio(best, scores[AR])}"
        if not reason:
            if self.options.can_probe_draft:
                self.prober.consider_pass(shard, rows_of(shard, now), state, step, now, scorer, scores)
            reason = self._consider_probe(shard, state, step, now, scorer, scores) or self._words(incumbent, scores)
        if shard == max(self.states):
            drafting = state.arm[0] == state.base[0] == METHOD_DRAFT
            self._ask(scorer.least_acceptance(scores[state.base]) if drafting else 0.0)
        return self._answer(shard, state, before, reason, scores)

    def _ask(self, least: float) -> None:
        """What a row's own drafts must bring. In steps, since every change of it is a change of the decision."""
        mix = self.known.mix.get(METHOD_DRAFT)
        usual, weight = mix.spread() if mix is not None else (0.0, 0.0)
        if not usual or not least:
            self._asked = 0.0, 0.0, 0.0
            return
        least = min(round(least / LEAST_STEP) * LEAST_STEP, MOST_ASKED)
        self._asked = least, round(usual / LEAST_STEP) * LEAST_STEP, float(2 ** round(math.log2(weight)))

    def _first(self, scores: Mapping[Arm, Score]) -> Arm:
        """What a new shard starts with: AR, unless what is known already speaks clearly for another mode."""
        limits = self.options.limits
        if AR not in scores:
            return max(scores.values(), key=lambda s: s.rate).arm
        bar = {METHOD_DRAFT: 1.0 + limits.first_draft_gain}
        fit = [s for s in scores.values() if s.rate > scores[AR].rate * bar.get(s.arm[0], 1.0 + limits.first_gain)]
        return max(fit, key=lambda s: s.rate).arm if fit else AR

    def _consider_probe(
        self, shard: int, state: ShardState, step: int, now: Situation, scorer: Scorer, scores: Mapping[Arm, Score]
    ) -> str:
        """Try a mode out, if any is worth it and no other shard is at it. Returns the reason, "" for none."""
        if any(s.home is not None for s in self.states.values()):
            return ""
        trial = self.prober.worth_trying(rows_of(shard, now), state, step, now, scorer, scores)
        if trial is None:
            return ""
        arm = trial.score.arm
        self._settled = False
        state.probe(step, arm, trial.steps, self.known.arm_steps.get(arm, 0), trial.patience)
        ratio = self._ratio(trial.score, scores[state.base])
        return f"probing {name(arm)} for {trial.steps} steps: {ratio} expected, not sure"

    def _answer(
        self, shard: int, state: ShardState, before: tuple[Arm, Arm], reason: str, scores: Mapping[Arm, Score]
    ) -> ShardDecision:
        self.known.in_force(shard, state.arm)
        changed = state.arm != before[0]
        if changed:
            self._settled = False  # see soon what it brings
        candidates = tuple(
            Candidate(s.arm[0], s.arm[1], round(s.rows), s.tokens_per_row, s.seconds, s.rate)
            for s in sorted(scores.values(), key=lambda s: s.arm)
        )
        return ShardDecision(
            shard=shard,
            method=state.arm[0],
            k=state.arm[1],
            reason=reason,
            switched=state.base != before[1] and state.since != 0,  # the way into a probe and back is none
            probe=state.home is not None,
            candidates=candidates if changed or self._wide else (),
        )

    # -- the whole batch -------------------------------------------------------------------------------------------

    def _compose(self, observation: Observation, now: Situation, shards: tuple[ShardDecision, ...]) -> Decision:
        if shards:
            newest = max(self.states)
            self._default = self.states[newest].base
        probe_rows = self.prober.wanted_rows
        key = (
            self._asked,
            self._default,
            tuple((s.shard, s.method, s.k) for s in shards),
            self.prober.shadow_k,
            probe_rows,
        )
        changed = key != self._last
        self._last = key
        return Decision(
            step=observation.step,
            method=self._default[0],
            k=self._default[1],
            shards=shards,
            shadow_ngram=self.prober.shadow_k,
            probe_draft_rows=probe_rows,
            probe_draft_k=self.prober.draft_k if probe_rows else 0,
            max_rows=0,
            changed=changed,
            reason=shards[0].reason if shards else "nothing to run yet",
            least_acceptance=self._asked,
            score_fewer=any(method != METHOD_NGRAM for method in self.options.methods),
        )

    def _schedule(self, observation: Observation) -> None:
        """When to look again: soon while young or near a change, else ever less often; sooner if the batch shrinks."""
        step, known = observation.step, self.known
        ends = [  # of probes; steps of other kinds may come between
            step + max(s.probe_goal - known.arm_steps.get(s.arm, 0), PROBE_LOOK)
            for s in self.states.values()
            if s.home is not None
        ]
        young = known.decode_steps < 48
        calm = self._settled and not young
        self._interval = min(self._interval * 2, MAX_INTERVAL) if calm else MIN_INTERVAL
        price = known.evaluation_seconds / known.step_seconds if known.step_seconds else 0.0  # in steps
        least = 0 if self._evaluations <= EARLY else math.ceil(price / (CALM_SHARE if calm else BUSY_SHARE))
        wait = max(self._interval, min(least, LONGEST)) if known.decode_steps else 2
        self._next = min(ends) if ends else step + wait
        self._soonest = step + max(2, math.ceil(price / BUSY_SHARE / 2))
        running = max(observation.running, 1)
        self._low, self._high = running / 1.4, running * 1.4 + 1

    def _scorer(self, now: Situation) -> Scorer:
        coverage = self.known.coverage
        if not any(
            state.arm[0] == METHOD_DRAFT for state in self.states.values()
        ):  # not seen: as the pages would have it
            coverage = min(coverage, now.coverage(self.options.draft_kv_ratio))
        return Scorer(
            book=self.known.book,
            cost=self.known.cost,
            correction=self.known.correction,
            draft_kv_ratio=self.options.draft_kv_ratio,
            draft_prefill=draft_prefill_seconds(self.known.cost) * self.known.draft_prefill_factor,
            draft_prefill_together=draft_prefill_seconds(
                self.known.cost, now.running if now.saturated else 1.0, now.context
            )
            * self.known.draft_prefill_factor,
            mix=self.known.mix,
            coverage=coverage,
            now=now,
            in_force={shard: state.arm for shard, state in self.states.items()},
            watched=(METHOD_NGRAM,) if self.prober.shadow_k else (),
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


def contenders(scores: Iterable[Score], best: Score) -> frozenset[Arm]:
    """Modes that may be the best before all are looked at again."""
    return frozenset(s.arm for s in scores if s.log_rate > best.log_rate - max(NEAR, SURE * s.acceptance_sd))


def rows_of(shard: int, now: Situation) -> float:
    """Rows of a shard that run."""
    return next((line[1] for line in now.shards if line[0] == shard), 0.0)
