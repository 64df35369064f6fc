"""Expected tokens a second of each thing the shards could do, and how sure that is.

Owns the formula: rows x E / seconds, at the rows the memory allows each mode, with the cost of filling the draft's KV
spread over the tokens it will serve. Knows nothing of hysteresis, probing or what is in force for how long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from specbatch.control.acceptance import Acceptance, AcceptanceBook
from specbatch.control.correction import Arm, CostCorrection, Parts
from specbatch.control.cost_model import StepCost
from specbatch.control.records import METHOD_DRAFT, METHOD_NONE
from specbatch.control.row_groups import RowMix
from specbatch.control.situation import Situation

AR: Arm = (METHOD_NONE, 0)
CATCH_UP_CHUNK = 512  # draft tokens a pass when a gap is filled, for its price
TRIM = 0.2  # share of the drafts by which a step's price is compared with less
WHOLE_BATCH_CHUNK = 4096  # the same when the gaps of all rows are filled at once


Kind = tuple[float, Arm, Parts]  # of step: its share of the time, the arm it is booked under, its predicted parts


@dataclass(frozen=True, slots=True)
class Score:
    """One assignment of modes, judged."""

    arm: Arm  # of the shard in question
    rows: float
    tokens_per_row: float  # of the shard in question
    seconds: float  # a step, corrected
    rate: float  # tokens a second, catching up included
    drafts: float  # a step of the whole batch
    kinds: tuple[Kind, ...]  # of step, by their share of the time
    acceptance_sd: float  # of log(rate), from acceptance
    weight: float  # share of the committed tokens that are the shard's
    estimate: Acceptance  # of the shard in question

    @property
    def log_rate(self) -> float:
        return math.log(self.rate)


@dataclass(slots=True)
class Scorer:
    """Scores modes for one situation; estimates are looked up once each."""

    book: AcceptanceBook
    cost: StepCost
    correction: CostCorrection
    draft_kv_ratio: float
    draft_prefill: float  # seconds a token of filling the draft's KV, row by row as they come
    draft_prefill_together: float  # the same for all running rows at once
    mix: Mapping[int, RowMix]  # kinds of rows, by method
    coverage: float  # share of the rows in draft mode that have room for a draft table
    now: Situation
    in_force: Mapping[int, Arm]
    watched: tuple[int, ...] = ()  # methods whose acceptance is counted whatever is in force
    _short: float | None = None
    _plain: dict[float, Parts] = field(default_factory=dict)  # steps without drafts, by rows
    _seen: dict[tuple[int, Arm], tuple[float, float, Acceptance]] = field(default_factory=dict)

    def score(self, shard: int, arm: Arm, modes: Mapping[int, Arm]) -> Score:
        """`shard` in `arm`, every other shard as in `modes` (AR where absent)."""
        now = self.now
        lines = [(s, arm if s == shard else modes.get(s, AR), run, wait) for s, run, wait in now.shards]
        if not lines:
            lines = [(shard, arm, now.running, now.waiting)]
        live = sum(line[2] for line in lines) or 1.0
        lines = one_method(lines)
        draft_share = sum(line[2] for line in lines if line[1][0] == METHOD_DRAFT) / live
        rows = max(now.rows(draft_share, self.draft_kv_ratio) * self._shortfall(), 1.0)
        scale = rows / live
        tokens = drafts = committed = variance = 0.0
        unmatched = (
            0.0 if any(line[1][0] not in (METHOD_NONE, METHOD_DRAFT) for line in lines) else -math.inf
        )  # log chance
        catch_up = 0.0  # seconds a committed token
        passes: dict[int, float] = {}  # draft passes: rows by k
        own, share, seen, lead = 1.0, 1.0, _NOTHING, AR
        for s, (method, k), run, wait in lines:
            mine = run * scale
            per_row, sd, estimate = self._tokens(s, (method, k))
            committed += mine * per_row
            variance += (mine * sd) ** 2
            share_drafting = estimate.match if method != METHOD_DRAFT else self.coverage
            tokens += mine
            drafts += mine * share_drafting * k
            if method not in (METHOD_NONE, METHOD_DRAFT) and k:
                unmatched += mine * math.log1p(-min(share_drafting, 1.0 - 1e-9))
            if s == shard:
                own, share, seen = per_row, mine * per_row, estimate
            if k > lead[1]:
                lead = (method, k)
            if method == METHOD_DRAFT and k:
                passes[k] = passes.get(k, 0.0) + mine * share_drafting
                catch_up += mine * per_row * self._catch_up(s, run, wait)
        # A step in which no look-up found anything is one of AR. One in which some did has the drafts of all: at few rows
        # that is far from the mean step, and a pass over a few tokens more costs little or much as the machine has it.
        idle = math.exp(unmatched)
        parts = self._parts(rows, tokens + drafts / max(1.0 - idle, 1e-9), passes)
        seconds = busy = (1.0 - idle) * self.correction.predict(lead, parts)
        kinds: tuple[Kind, ...] = ((1.0, lead, parts),)
        if idle > 0.0:
            bare = self._parts(rows, tokens, {})
            seconds += idle * self.correction.predict(AR, bare)
            kinds = (busy / seconds, lead, parts), (1.0 - busy / seconds, AR, bare)
        rate = committed / (seconds + catch_up)
        spread = math.sqrt(variance) / committed
        return Score(arm, rows, own, seconds, rate, drafts, kinds, spread, share / committed, seen)

    def least_acceptance(self, score: Score) -> float:
        """The chance of being accepted from which a row's drafts pay: what they add to a step that others draft in, in seconds,
        at the rate at which seconds bring tokens."""
        share, lead, parts = score.kinds[0]
        drafts = score.drafts
        if share <= 0.0 or drafts <= 0.0:
            return 0.0
        less = self._parts(score.rows, score.rows + (1.0 - TRIM) * drafts, {lead[1]: (1.0 - TRIM) * drafts / lead[1]})
        saved = self.correction.predict(lead, parts) - self.correction.predict(lead, less)
        return max(saved / (TRIM * drafts), 0.0) * score.rate

    def _shortfall(self) -> float:
        if self._short is None:
            live = sum(line[1] for line in self.now.shards) or 1.0
            drafting = sum(run for s, run, _ in self.now.shards if self.in_force.get(s, AR)[0] == METHOD_DRAFT)
            self._short = self.now.shortfall(drafting / live, self.draft_kv_ratio)
        return self._short

    def gain(
        self, candidate: Score, incumbent: Score, *, trying: bool = False, cost_only: bool = False
    ) -> tuple[float, float]:
        """log(rate of candidate / rate of incumbent): expectation and standard deviation.

        trying: only the part of the doubt that running the candidate would settle; cost_only: its acceptance becomes known
        without running it.
        """
        time_sd = self.correction.spread(
            [*candidate.kinds, *((-share, arm, parts) for share, arm, parts in incumbent.kinds)]
        )
        doubts = [candidate.acceptance_sd, 0.0 if trying else incumbent.acceptance_sd]
        if candidate.arm[0] == incumbent.arm[0] != METHOD_NONE:
            both = min(candidate.arm[1], incumbent.arm[1])
            doubts = [s.weight * s.estimate.tokens_sd(both) / s.tokens_per_row for s in (candidate, incumbent)]
        if cost_only:
            doubts = []
        return candidate.log_rate - incumbent.log_rate, math.hypot(time_sd, *doubts)

    def _parts(self, rows: float, tokens: float, passes: Mapping[int, float]) -> Parts:
        if passes or tokens != rows:
            return step_parts(self.cost, rows, tokens, rows * self.now.context, passes)
        plain = self._plain.get(rows)
        if plain is None:
            plain = self._plain[rows] = step_parts(self.cost, rows, tokens, rows * self.now.context, passes)
        return plain

    def _tokens(self, shard: int, arm: Arm) -> tuple[float, float, Acceptance]:
        """Expected committed tokens a row and step, their sd, and the estimate they come from."""
        seen = self._seen.get((shard, arm))
        if seen is None:
            method, k = arm
            if k == 0:
                seen = 1.0, 0.0, _NOTHING
            else:
                estimate = self.book.estimate(shard, method, k)
                raw, sd = estimate.tokens(), estimate.tokens_sd()
                if method in self.mix:
                    live = self.in_force.get(shard, AR)
                    correction = self.mix[method].correction(k, live[0] == method, self.now.future_share)
                    raw = max(raw * correction, 1.0)
                if method == METHOD_DRAFT:  # counted over rows that drafted; some have no pages to
                    raw, sd = 1.0 + self.coverage * (raw - 1.0), sd * self.coverage
                # a row's last round runs past its end by half a round on average
                cut = self.now.output / (self.now.output + (raw - 1.0) / 2.0)
                seen = min(raw * cut, self.now.limit), sd * cut, estimate
            self._seen[shard, arm] = seen
        return seen

    def _catch_up(self, shard: int, running: float, waiting: float) -> float:
        """Seconds of draft prefill a committed token of the shard: rows to come, and live ones without draft KV."""
        now = self.now
        missing = 0.0 if self.in_force.get(shard, AR)[0] == METHOD_DRAFT else running * now.context
        tokens = running * now.remaining + waiting * now.output
        together = self.draft_prefill_together * missing
        return (together + self.draft_prefill * waiting * now.prompt) / max(tokens, 1.0)


_NOTHING = Acceptance(0.0, 1.0, (), (), 0.0)


Line = tuple[int, Arm, float, float]  # shard, mode, rows running, rows waiting


def one_method(lines: list[Line]) -> list[Line]:
    """A step has one method, that of most rows; rows of another run AR in it."""
    votes: dict[int, float] = {}
    for _, (method, _), running, _ in lines:
        if method != METHOD_NONE:
            votes[method] = votes.get(method, 0.0) + running
    if len(votes) < 2:
        return lines
    method = max(sorted(votes), key=lambda m: votes[m])
    return [(s, arm if arm[0] == method else AR, run, wait) for s, arm, run, wait in lines]


def step_parts(cost: StepCost, rows: float, tokens: float, context: float, passes: Mapping[int, float]) -> Parts:
    """A decode step's seconds by cause. passes: rows that draft, by how many drafts."""
    one = cost.target(1.0, 1.0, 1.0)
    bare = cost.target(rows, tokens, rows)
    full = cost.target(rows, tokens, max(context, rows))
    draft = 0.0
    if passes:
        per_row = context / max(rows, 1.0)
        done = 0
        for k in sorted(passes):  # passes over the same rows cost the same
            live = sum(r for many, r in passes.items() if many >= k)
            draft += (k - done) * cost.draft(live, live, live * per_row) if live else 0.0
            done = k
    fixed = min(one, bare)
    return Parts(fixed + cost.host(rows), max(bare - fixed, 0.0), max(full - bare, 0.0), draft)


def draft_prefill_seconds(cost: StepCost, rows: float = 1.0, context: float = 0.0) -> float:
    """Seconds of draft prefill a token: in chunks of one row, or of as many of `rows` rows of `context` tokens as fit."""
    if rows * context <= CATCH_UP_CHUNK:
        chunk = float(CATCH_UP_CHUNK)
        return cost.draft(1.0, chunk, chunk / 2.0) / chunk
    chunk = min(rows * context, float(WHOLE_BATCH_CHUNK))
    return cost.draft(max(chunk / context, 1.0), chunk, chunk / 2.0) / chunk


def arms(methods: tuple[int, ...], ks: tuple[int, ...], allow_ar: bool, limit: float) -> list[Arm]:
    """What a shard may do whose rows may produce `limit` tokens: the last token of a row is never drafted."""
    usable = [k for k in ks if k < limit] or ([] if allow_ar else [min(ks)])
    found = [AR] if allow_ar or not methods else []
    found += [(method, k) for method in methods if method != METHOD_NONE for k in usable]
    return found or [AR]
