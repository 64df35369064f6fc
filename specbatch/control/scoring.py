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
from specbatch.control.records import METHOD_DRAFT, METHOD_NONE, STEP_DECODE, Observation
from specbatch.control.row_groups import RowMix

AR: Arm = (METHOD_NONE, 0)
CATCH_UP_CHUNK = 512  # draft tokens a pass when a gap is filled, for its price
DEFAULT_PROMPT, DEFAULT_LIMIT = 256.0, 128.0  # before anything runs


@dataclass(frozen=True, slots=True)
class Situation:
    """The live batch in the numbers a score needs."""

    shards: tuple[tuple[int, float, float], ...]  # (shard, rows running, rows waiting)
    running: float
    waiting: float
    cap: int  # rows the arrays hold
    context: float  # mean tokens a running row
    prompt: float  # mean
    limit: float  # output tokens a row may have in all, mean
    output: float  # output tokens a row is expected to have
    remaining: float  # output tokens a running row is expected to have left
    pages: float
    pages_per_row: float  # target pages a row takes when the batch is in its stride
    saturated: bool = True  # rows wait for room, so what runs is what fits

    @property
    def future_share(self) -> float:
        """Share of the known work that is in rows still waiting."""
        come = self.waiting * self.output
        return come / max(come + self.running * self.remaining, 1.0)

    def rows(self, draft_share: float, draft_kv_ratio: float) -> float:
        """Rows that could run at once if a share of them kept draft KV too."""
        wanted = self.running + self.waiting
        fit = self.pages / (self.pages_per_row * (1.0 + draft_kv_ratio * draft_share))
        return max(1.0, min(wanted, float(self.cap), fit))

    def shortfall(self, draft_share: float, draft_kv_ratio: float) -> float:
        """Rows that run over rows that should, at most 1: something else may limit them (chunks, prefixes, limits)."""
        return min(1.0, self.running / self.rows(draft_share, draft_kv_ratio)) if self.saturated else 1.0


@dataclass(slots=True)
class OutputLengths:
    """How long rows turn out, learned from those that finished; decays so that a new kind of row is noticed."""

    rows: float = 0.0
    tokens: float = 0.0

    def add(self, rows: int, tokens: int) -> None:
        keep = 0.5 ** (rows / 256.0)
        self.rows, self.tokens = self.rows * keep + rows, self.tokens * keep + tokens

    def expect(self, produced: float, limit: float) -> tuple[float, float]:
        """Expected output of a new row and expected rest of a running one (which has outlived the short ones)."""
        prior = 4.0
        output = (self.tokens + prior * 0.6 * limit) / (self.rows + prior)
        rest = max(output - produced, 0.3 * produced, 0.25 * output)
        return max(output, 1.0), max(min(rest, limit - produced), 1.0)


@dataclass(slots=True)
class Gauges:
    """Mean sizes of running rows, smoothed: an observation shows the rows of one step, which may be a prefill step."""

    context: float = 0.0
    prompt: float = 0.0
    limit: float = 0.0  # output tokens in all

    def update(self, observation: Observation) -> None:
        o = observation
        if o.mean_prompt > 0.0:
            limit = o.mean_limit + max(o.mean_context - o.mean_prompt, 0.0)
            weight = 0.3 if self.prompt else 1.0
            self.prompt += weight * (o.mean_prompt - self.prompt)
            self.limit += weight * (limit - self.limit)
        decode = [s for s in o.steps if s.kind == STEP_DECODE and s.rows]
        if decode:
            last = decode[-1]
            self.context = (last.context - last.draft_tokens) / last.rows
        elif o.mean_context > 0.0 and not self.context:
            self.context = o.mean_context


def situation(observation: Observation, gauges: Gauges, lengths: OutputLengths, block_size: int, cap: int) -> Situation:
    """What an observation means for the score. Before anything runs, the waiting rows stand for the batch."""
    o = observation
    prompt = gauges.prompt or DEFAULT_PROMPT
    context = max(gauges.context, prompt)
    produced = context - prompt
    limit = gauges.limit or DEFAULT_LIMIT
    output, remaining = lengths.expect(produced, max(limit, 1.0))
    cap = max(cap, 1)
    running = float(o.running)
    waiting = float(o.waiting)
    shards: list[tuple[int, float, float]] = [(s.shard, float(s.running), float(s.waiting)) for s in o.shards]
    seen = sum(line[1] for line in shards)
    saturated = o.running > 0
    if not running:  # nothing runs yet: the first rows of the queue
        running = min(waiting, cap) or 1.0
        waiting = max(waiting - running, 0.0)
    if seen:  # counted at another moment of the step, maybe
        shards = [(s, r * running / seen, w) for s, r, w in shards]
    else:
        queued = sum(line[2] for line in shards) or 1.0
        shards = [(s, w * running / queued, w * waiting / queued) for s, _, w in shards]
    now = context / block_size + 0.5
    stride = max(now, (prompt + output / 2.0) / block_size + 0.5) if waiting else now
    shared = min(o.target_pages / (o.running * now), 1.0) if o.running and o.target_pages else 1.0
    return Situation(
        shards=tuple(shards),
        running=running,
        waiting=waiting,
        cap=cap,
        context=context,
        prompt=prompt,
        limit=limit,
        output=output,
        remaining=remaining,
        pages=float(max(o.total_pages, 1)),
        pages_per_row=max(stride * shared, 1e-3),
        saturated=saturated,
    )


@dataclass(frozen=True, slots=True)
class Score:
    """One assignment of modes, judged."""

    arm: Arm  # of the shard in question
    rows: float
    tokens_per_row: float  # of the shard in question
    seconds: float  # a step, corrected
    rate: float  # tokens a second, catching up included
    parts: Parts
    lead: Arm  # the arm with the most drafts in the batch: what the step is booked under
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
    draft_prefill: float  # seconds a token of filling the draft's KV
    mix: Mapping[int, RowMix]  # kinds of rows, by method
    coverage: float  # share of the rows in draft mode that have room for a draft table
    reference_k: int  # k of the counts made over produced tokens
    now: Situation
    in_force: Mapping[int, Arm]
    _short: float | None = None
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
        tokens = committed = variance = 0.0
        catch_up = 0.0  # seconds a committed token
        passes: dict[int, float] = {}  # draft passes: rows by k
        own, share, seen, lead = 1.0, 1.0, _NOTHING, AR
        for s, (method, k), run, wait in lines:
            mine = run * scale
            per_row, sd, estimate = self._tokens(s, (method, k))
            committed += mine * per_row
            variance += (mine * sd) ** 2
            share_drafting = estimate.match if method != METHOD_DRAFT else self.coverage
            tokens += mine * (1.0 + share_drafting * k)
            if s == shard:
                own, share, seen = per_row, mine * per_row, estimate
            if k > lead[1]:
                lead = (method, k)
            if method == METHOD_DRAFT and k:
                passes[k] = passes.get(k, 0.0) + mine * share_drafting
                catch_up += mine * per_row * self._catch_up(s, run, wait)
        parts = self._parts(rows, tokens, passes)
        seconds = self.correction.predict(lead, parts)
        rate = committed / (seconds + catch_up)
        spread = math.sqrt(variance) / committed
        return Score(arm, rows, own, seconds, rate, parts, lead, spread, share / committed, seen)

    def _shortfall(self) -> float:
        if self._short is None:
            live = sum(line[1] for line in self.now.shards) or 1.0
            drafting = sum(run for s, run, _ in self.now.shards if self.in_force.get(s, AR)[0] == METHOD_DRAFT)
            self._short = self.now.shortfall(drafting / live, self.draft_kv_ratio)
        return self._short

    def gain(self, candidate: Score, incumbent: Score, *, trying: bool = False) -> tuple[float, float]:
        """log(rate of candidate / rate of incumbent): expectation and standard deviation.

        trying: only the part of the doubt that running the candidate would settle.
        """
        time_sd = self.correction.difference_sd(candidate.lead, candidate.parts, incumbent.lead, incumbent.parts)
        doubts = [candidate.acceptance_sd, 0.0 if trying else incumbent.acceptance_sd]
        if candidate.arm[0] == incumbent.arm[0] != METHOD_NONE:
            both = min(candidate.arm[1], incumbent.arm[1])
            doubts = [s.weight * s.estimate.tokens_sd(both) / s.tokens_per_row for s in (candidate, incumbent)]
        return candidate.log_rate - incumbent.log_rate, math.hypot(time_sd, *doubts)

    def decode_parts(self, rows: float, tokens: float, context: float, draft_rows: float, k: int) -> Parts:
        """Predicted parts of a step that ran: context and rows as they were."""
        return self._parts(rows, tokens, {k: draft_rows} if draft_rows and k else {}, context)

    def _parts(self, rows: float, tokens: float, passes: Mapping[int, float], context: float | None = None) -> Parts:
        return step_parts(self.cost, rows, tokens, rows * self.now.context if context is None else context, passes)

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
                    correction = self.mix[method].correction(
                        k, self.reference_k, live[0] == method, self.now.future_share
                    )
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
        return self.draft_prefill * (missing + waiting * now.prompt) / max(tokens, 1.0)


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
    drafting = sum(passes.values())
    draft = 0.0
    if drafting:
        per_row = context / max(rows, 1.0)
        for j in range(max(passes)):
            live = sum(r for k, r in passes.items() if k > j)
            draft += cost.draft(live, live, live * per_row)
    fixed = min(one, bare)
    return Parts(fixed, max(bare - fixed, 0.0), max(full - bare, 0.0), draft)


def draft_prefill_seconds(cost: StepCost) -> float:
    """Seconds of draft prefill a token, in chunks of one row."""
    chunk = float(CATCH_UP_CHUNK)
    return cost.draft(1.0, chunk, chunk / 2.0) / chunk


def arms(methods: tuple[int, ...], ks: tuple[int, ...], allow_ar: bool, limit: float) -> list[Arm]:
    """What a shard may do whose rows may produce `limit` tokens: the last token of a row is never drafted."""
    usable = [k for k in ks if k < limit] or ([] if allow_ar else [min(ks)])
    found = [AR] if allow_ar or not methods else []
    found += [(method, k) for method in methods if method != METHOD_NONE for k in usable]
    return found or [AR]
