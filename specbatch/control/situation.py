"""The live batch in the numbers a score needs, and how long its rows are expected to go on.

Owns sizes: rows, pages, contexts, output lengths. Knows nothing of acceptance, step times or modes.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.control.records import STEP_DECODE, Observation

DEFAULT_PROMPT, DEFAULT_LIMIT = 256.0, 128.0  # before anything runs
DRAIN_MEMORY = 16.0  # rows ended that halve what is remembered of a drain


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
        """Rows that could run at once if a share of them kept draft KV too.

        Draft KV is a cache: it keeps rows from coming in, and never drives out one that runs. So the fewer rows there are
        to come, the more of the running ones stay, some without a draft (see `coverage`).
        """
        most = max(1.0, min(self.running + self.waiting, float(self.cap)))
        fit = self.pages / (self.pages_per_row * (1.0 + draft_kv_ratio * draft_share))
        if fit < most:
            stay = min(most, self.running, self.pages / self.pages_per_row)
            most = fit + max(stay - fit, 0.0) * (1.0 - self.future_share)
        return max(1.0, most)

    def coverage(self, draft_kv_ratio: float) -> float:
        """Share of the rows that find room for their draft KV when all of them want to draft."""
        if draft_kv_ratio <= 0.0:
            return 1.0
        spare = self.pages / (self.rows(1.0, draft_kv_ratio) * self.pages_per_row) - 1.0
        return min(max(spare / draft_kv_ratio, 0.0), 1.0)

    def shortfall(self, draft_share: float, draft_kv_ratio: float) -> float:
        """Rows that run over rows that should, at most 1: something else may limit them (chunks, prefixes, limits)."""
        return min(1.0, self.running / self.rows(draft_share, draft_kv_ratio)) if self.saturated else 1.0


@dataclass(slots=True)
class OutputLengths:
    """How long rows turn out, learned from those that finished; decays so that a new kind of row is noticed.

    While a run drains, the rows that are left are not like those that finished: what they have before them shows in how
    many tokens all of them produce for each one that ends.
    """

    rows: float = 0.0
    tokens: float = 0.0
    ended: float = 0.0  # rows that ended while none waited, decayed
    brought: float = 0.0  # output tokens produced meanwhile
    _live: float = -1.0  # output tokens in running rows at the last observation; -1: rows waited

    def add(self, rows: int, tokens: int) -> None:
        keep = 0.5 ** (rows / 256.0)
        self.rows, self.tokens = self.rows * keep + rows, self.tokens * keep + tokens

    def drain(self, observation: Observation) -> None:
        """One observation. Its running rows hold running x (context - prompt) output tokens."""
        o = observation
        live = o.running * (o.mean_context - o.mean_prompt) if o.running and not o.waiting and o.mean_prompt else -1.0
        if live >= 0.0 and self._live >= 0.0:
            keep = 0.5 ** (o.finished_rows / DRAIN_MEMORY)
            self.ended = self.ended * keep + o.finished_rows
            self.brought = self.brought * keep + max(live - self._live + o.finished_output_tokens, 0.0)
        elif live < 0.0:
            self.ended = self.brought = 0.0
        self._live = live

    def expect(self, produced: float, limit: float) -> tuple[float, float]:
        """Expected output of a new row and expected rest of a running one (which has outlived the short ones)."""
        prior = 4.0
        output = (self.tokens + prior * 0.6 * limit) / (self.rows + prior)
        rest = max(output - produced, 0.3 * produced, 0.25 * output)
        rest = (self.brought + prior * rest) / (self.ended + prior)
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
