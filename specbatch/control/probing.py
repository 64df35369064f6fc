"""Learning what is not in force: a mode tried out for a few steps, the draft run over produced tokens, n-gram in the shadow.

Owns what each may cost, what it has cost, and when it is worth it. Knows nothing of what is chosen from what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specbatch.control.choice import Limits, ShardState, expected_improvement
from specbatch.control.correction import Arm
from specbatch.control.learning import Learner
from specbatch.control.records import METHOD_DRAFT, METHOD_DRAFT_SHADOW, METHOD_NGRAM, METHOD_NONE, Observation
from specbatch.control.scoring import CATCH_UP_CHUNK, Score, Scorer, draft_prefill_seconds
from specbatch.control.situation import Situation

MOST_PROBED_ROWS = 32
COST_STEPS = 3  # steps that tell what a mode costs
LOOKS = 2.0  # evaluations that a trial takes beside those there would be
LOOK_SECONDS = 1e-3  # of the host, for each step of a look-up's trial: it takes several until one has drafts
PASS_FIRST = 0.5  # rounds known of a draft, below which a pass comes before a trial ...
LONG_STEP = 0.003  # ... where steps take at least these seconds
LEAST_PRODUCED = 6.0  # mean output tokens of the rows, below which a pass over them says too little
PROBE_EVERY = 24  # steps between two passes over a shard's tokens; doubles with each that found nothing to read


@dataclass(frozen=True, slots=True)
class Trial:
    """A mode worth trying."""

    score: Score
    steps: int  # decode steps
    patience: int  # engine steps beyond which it ends in any case


class Prober:
    """The budgets of one run."""

    def __init__(
        self, limits: Limits, ks: tuple[int, ...], methods: tuple[int, ...], can_pass: bool, known: Learner
    ) -> None:
        self.limits, self.can_pass, self.known = limits, can_pass, known
        self.probe_spent = 0.0  # seconds that trying modes out is expected to have cost
        self.shadow_spent = 0.0  # seconds of teacher-forced draft passes, asked for ones at their expected price
        self.shadow_k = max(ks) if METHOD_NGRAM in methods else 0  # most drafts of the n-gram shadow's rounds
        self.draft_k = max(ks)  # most drafts of the rounds counted in a pass over produced tokens
        self.wanted_rows = 0  # that the draft is to be run over after this evaluation
        self._asked = 0.0  # expected price of the pass not answered yet
        self._unanswered = 0
        self._after: dict[int, int] = {}  # shard -> step before which no pass over its tokens is asked for

    def begin(self, observation: Observation) -> None:
        """A new evaluation: see whether the pass asked for last was made, and at what price."""
        self.wanted_rows = 0
        if not self._asked:
            return
        took = sum(s.seconds for s in observation.steps if s.method == METHOD_DRAFT_SHADOW)
        self.shadow_spent += took - self._asked
        answered = any(sample.method == METHOD_DRAFT_SHADOW for sample in observation.acceptance)
        self._unanswered = 0 if answered else self._unanswered + 1
        self._asked = 0.0

    def forget(self, shard: int) -> None:
        self._after.pop(shard, None)

    def worth_trying(
        self, rows: float, state: ShardState, step: int, now: Situation, scorer: Scorer, scores: Mapping[Arm, Score]
    ) -> Trial | None:
        """The mode of a shard with `rows` running rows that is most worth knowing more about, if any is worth what trying
        it costs. Books the cost."""
        limits, known = self.limits, self.known
        if not known.step_seconds or not now.running or rows < 1.0 or step - state.since < 2:
            return None
        incumbent = scores[state.arm]
        left = seconds_left(now, incumbent)
        horizon = min(left, limits.horizon_steps * incumbent.seconds)
        budget = limits.probe_share * (known.seconds + left) - self.probe_spent
        most = int(min(max(math.ceil(limits.probe_rounds / rows), 2), limits.max_probe_steps))
        # A pass over what rows produce tells for less than a trial, and soon, unless steps are so short that many go by
        # between two looks.
        pass_first = self.can_pass and state.arm[0] != METHOD_DRAFT and known.step_seconds >= LONG_STEP
        best: Score | None = None
        best_worth = best_loss = 0.0
        best_steps = 0
        # What more drafts teach of fewer: rounds of fewer are scored within theirs. Hence fewest first.
        taught: dict[int, float] = {}
        for score in sorted(scores.values(), key=lambda score: score.arm[1]):
            method = score.arm[0]
            if score.arm == state.arm:
                continue
            # Acceptance that is counted whatever is in force, or within the rounds that are.
            within = method == state.arm[0] and score.arm[1] < state.arm[1]
            cost_only = method in (METHOD_NONE, *scorer.watched) or within
            gain, sd = scorer.gain(score, incumbent, trying=True, cost_only=cost_only)
            improvement = expected_improvement(gain, sd) - max(gain, 0.0)
            if not cost_only:
                improvement = taught[method] = max(improvement, taught.get(method, 0.0))
            if not state.may_probe(step, score.arm):
                continue
            if method == METHOD_DRAFT and known.coverage < 0.3:  # no page to draft with: nothing would be learned
                continue
            if pass_first and method == METHOD_DRAFT and score.estimate.evidence < PASS_FIRST:
                continue
            ways = 0.0  # filling the draft's KV, on the way there or on the way back
            if (method == METHOD_DRAFT) != (state.arm[0] == METHOD_DRAFT):
                ways = draft_prefill_seconds(known.cost) * known.draft_prefill_factor * rows * now.context
            steps = min(most, COST_STEPS) if cost_only else most
            loss = max(1.0 - math.exp(gain), 0.0) * steps * incumbent.seconds + ways + LOOKS * known.evaluation_seconds
            if method in scorer.watched:
                loss += steps * LOOK_SECONDS
            worth = improvement * horizon - loss
            if worth > best_worth and loss <= budget:
                best, best_worth, best_loss, best_steps = score, worth, loss, steps
        if best is None:
            return None
        self.probe_spent += best_loss
        patience = 4 * best_steps
        if best.arm[0] == METHOD_DRAFT != state.arm[0]:
            patience += math.ceil(rows * now.context / CATCH_UP_CHUNK)
        return Trial(best, best_steps, patience)

    def consider_pass(
        self,
        shard: int,
        rows: float,
        state: ShardState,
        step: int,
        now: Situation,
        scorer: Scorer,
        scores: Mapping[Arm, Score],
    ) -> None:
        """Ask for the draft to be run over produced tokens, when that may change the mode and costs next to nothing."""
        known, limits = self.known, self.limits
        drafts = [s for s in scores.values() if s.arm[0] == METHOD_DRAFT]
        rows = min(float(MOST_PROBED_ROWS), rows)
        produced = now.context - now.prompt
        if not drafts or state.arm[0] == METHOD_DRAFT or self._asked:
            return
        if rows < 1 or produced < LEAST_PRODUCED or not known.step_seconds or step < self._after.get(shard, 0):
            return
        price = draft_prefill_seconds(known.cost) * known.draft_probe_factor * now.context
        left = seconds_left(now, scores[state.arm])
        budget = limits.shadow_share * (known.seconds + left) - self.shadow_spent
        rows = min(rows, budget // price) if price > 0 else rows
        if rows < 1:
            return
        horizon = min(left, limits.horizon_steps * scores[state.arm].seconds)
        worth = 0.0
        for score in drafts:
            gain, sd = scorer.gain(score, scores[state.arm])
            worth = max(worth, expected_improvement(gain, sd) - max(gain, 0.0))
        if worth * horizon > price * rows:
            self._after[shard] = step + (PROBE_EVERY << min(self._unanswered, 6))
            self._asked = price * rows
            self.shadow_spent += self._asked
            self.wanted_rows = int(rows)


def seconds_left(now: Situation, score: Score) -> float:
    """What the known rows still take at the rate of a score."""
    return (now.running * now.remaining + now.waiting * now.output) / score.rate
