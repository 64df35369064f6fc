"""A scheduler in plain Python: slow, obvious, no arrays. The Rust core must decide exactly as it does.

It keeps whole token lists as the names of pages, sorts the whole queue when it looks at it, and scans for n-grams. It
knows the policy and nothing of slots, block tables or buffers (tests/paged_device.py checks those).
"""

from __future__ import annotations

from dataclasses import dataclass, field

IDLE, PREFILL, DECODE, DRAFT_PREFILL = range(4)
NONE, NGRAM, DRAFT, EXTERNAL = range(4)
STOP, LENGTH, ERROR, ABORTED = 1, 2, 3, 4
WINDOW = 4096
LOOK_AHEAD = 256


def pages_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) if block_size else 0


@dataclass(eq=False)
class Page:
    owners: int = 0
    tokens: tuple[int, ...] = ()  # all tokens up to its end, when it is in the prefix cache


@dataclass(eq=False)
class Row:
    request_id: int
    shard: int
    tokens: list[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    may_draft: bool = True
    stop_tokens: tuple[int, ...] = ()
    num_prompt: int = 0
    prefilling: bool = False
    computed: int = 0
    published: int = 0
    pages: list[Page] = field(default_factory=list)
    draft_pages: int = 0
    draft_seen: int = 0
    resume_at: int = 0
    drops: int = 0
    seniority: int = 0
    ticket: tuple[int, int, int] = (0, 0, 0)  # window, group, arrival
    in_flight: int = 0
    finish: tuple[int, int] | None = None  # reason, error
    cached: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    wasted: int = 0
    preempted: int = 0

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def gap(self) -> int:
        return len(self.tokens) - self.draft_seen


@dataclass
class RowStep:
    """A row's part of a step."""

    row: Row
    start: int = 0
    length: int = 0
    drafts: list[int] | int = 0  # n-gram: the proposal; else how many are reserved
    logits: bool = False
    draft_start: int = 0
    draft_length: int = 0

    @property
    def num_drafts(self) -> int:
        return self.drafts if isinstance(self.drafts, int) else len(self.drafts)


@dataclass
class Step:
    kind: int = IDLE
    method: int = NONE
    rows: list[RowStep] = field(default_factory=list)
    preempted: int = 0
    draft_dropped: int = 0


class ReferenceScheduler:
    def __init__(
        self,
        *,
        num_pages: int,
        block_size: int,
        draft_block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        draft_max_model_len: int,
        token_room: int,  # T and L of the step's arrays
        logits_room: int,
        eos: tuple[int, ...],
        prefix_cache: bool,
        ngram_min: int = 2,
        ngram_max: int = 4,
    ) -> None:
        self.num_pages, self.block_size, self.draft_block_size = num_pages, block_size, draft_block_size
        self.max_num_seqs, self.budget, self.max_model_len = max_num_seqs, max_num_batched_tokens, max_model_len
        self.draft_max_model_len = draft_max_model_len or max_model_len
        self.token_room, self.logits_room, self.eos, self.prefix_cache = token_room, logits_room, eos, prefix_cache
        self.ngram_min, self.ngram_max = ngram_min, ngram_max
        self.free = num_pages - 1
        self.named: dict[tuple[int, ...], Page] = {}
        self.idle: dict[Page, None] = {}  # cached pages nobody owns, least recently used first
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.finished: list[Row] = []
        self.speculation: dict[int, tuple[int, int]] = {}
        self.default = (NONE, 0)
        self.step = Step()
        self.outstanding = False
        self.decode_steps = self.arrivals = self.window = self.window_used = self.admissions = 0
        self.window_shard: int | None = None
        self.num_preempted = self.num_dropped = 0

    # -- pages -----------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        return self.free + len(self.idle)

    @property
    def target_pages(self) -> int:
        return len({page for row in self.running for page in row.pages})

    @property
    def draft_pages(self) -> int:
        return sum(row.draft_pages for row in self.running)

    def take_page(self) -> Page:
        if self.free:
            self.free -= 1
        else:
            page = next(iter(self.idle))
            del self.idle[page], self.named[page.tokens]
        return Page(owners=1)

    def give_page(self, page: Page) -> None:
        page.owners -= 1
        if page.owners == 0 and page.tokens:
            self.idle[page] = None
        elif page.owners == 0:
            self.free += 1

    def resize(self, row: Row, count: int) -> bool:
        if count - len(row.pages) > self.available:
            return False
        while len(row.pages) > count:
            self.give_page(row.pages.pop())
        while len(row.pages) < count:
            row.pages.append(self.take_page())
        return True

    def resize_draft(self, row: Row, count: int, spare: int = 0) -> bool:
        missing = count - row.draft_pages
        if missing > 0 and missing + spare > self.available:
            return False
        for _ in range(missing):
            self.take_page()
        self.free += max(-missing, 0)
        row.draft_pages = count
        return True

    def publish(self, row: Row) -> None:
        if not self.prefix_cache:
            return
        full = row.computed // self.block_size
        for i in range(row.published, full):
            name = tuple(row.tokens[: (i + 1) * self.block_size])
            if not row.pages[i].tokens and name not in self.named:
                row.pages[i].tokens = name
                self.named[name] = row.pages[i]
        row.published = max(row.published, full)

    def clear_prefix_cache(self) -> None:
        self.free += len(self.idle)
        for page in self.named.values():
            page.tokens = ()
        self.named.clear()
        self.idle.clear()

    # -- what callers do -------------------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        row.num_prompt = len(row.tokens)
        if not row.tokens:
            self.end(row, ERROR, 3)
        elif len(row.tokens) >= self.max_model_len:
            self.end(row, ERROR, 1)
        elif pages_of(len(row.tokens), self.block_size) > self.num_pages - 1:
            self.end(row, ERROR, 2)
        else:
            if self.window_used == WINDOW or self.window_shard != row.shard:
                self.window, self.window_used, self.window_shard = self.window + 1, 0, row.shard
            self.window_used += 1
            first = row.tokens[: self.block_size]
            kin = [
                other.ticket[1]
                for other in self.waiting
                if other.seniority == 0 and other.ticket[0] == self.window and other.tokens[: self.block_size] == first
            ]
            group = kin[0] if kin and len(first) == self.block_size else self.arrivals
            row.ticket = (self.window, group, self.arrivals)
            self.arrivals += 1
            self.waiting.append(row)

    def queue(self) -> list[Row]:
        def place(row: Row) -> tuple[object, ...]:
            window, group, arrival = row.ticket
            return (0, row.seniority) if row.seniority else (1, window, group, row.tokens, arrival)

        return sorted(self.waiting, key=place)

    def mode(self, row: Row) -> tuple[int, int]:
        return self.speculation.get(row.shard, self.default)

    def set_speculation(self, method: int, k: int, shard: int | None) -> None:
        choice = (method, k) if k and method else (NONE, 0)
        if shard is None:
            self.default = choice
            self.speculation.clear()
        else:
            self.speculation[shard] = choice
        for row in self.running:
            if self.mode(row)[0] != DRAFT:
                self.drop_draft(row)

    def drop_draft(self, row: Row) -> None:
        self.resize_draft(row, 0)
        row.draft_seen = 0

    def release(self, row: Row) -> None:
        self.drop_draft(row)
        self.resize(row, 0)
        row.computed = row.published = 0
        row.wasted += row.in_flight
        row.in_flight = 0
        if row in self.running:
            self.running.remove(row)

    def preempt(self, row: Row) -> None:
        self.publish(row)
        self.release(row)
        row.preempted += 1
        self.num_preempted += 1
        self.waiting.append(row)

    def end(self, row: Row, reason: int, error: int = 0) -> None:
        if row in self.waiting:
            self.waiting.remove(row)
        self.release(row)
        row.finish = (reason, error)
        self.finished.append(row)

    def set_max_num_seqs(self, n: int) -> None:
        self.max_num_seqs = n
        while len(self.running) > n:
            self.preempt(max(self.running, key=lambda row: row.seniority))

    def trim(self, row: Row) -> None:
        self.resize(row, min(len(row.pages), pages_of(len(row.tokens), self.block_size)))
        self.resize_draft(row, min(row.draft_pages, pages_of(row.draft_seen, self.draft_block_size)))

    def abort_step(self) -> None:
        if self.outstanding:
            for part in self.step.rows:
                if part.row in self.running:
                    part.row.wasted += part.row.in_flight
                    part.row.in_flight = 0
                    self.trim(part.row)
        self.outstanding = False

    # -- apply -----------------------------------------------------------------------------------------------------

    def apply(self, results: dict[int, tuple[list[int], int]]) -> None:
        """Results by request id: tokens found, drafts verified. Rows that were preempted meanwhile are not there."""
        if not self.outstanding:
            return
        self.outstanding = False
        for part in self.step.rows:
            row = part.row
            if row.request_id not in results:
                continue
            tokens, num_draft = results[row.request_id]
            if self.step.kind == DRAFT_PREFILL:
                if row.draft_pages:
                    row.draft_seen = part.draft_start + part.draft_length
                continue
            before = len(row.tokens)
            if self.step.kind == PREFILL:
                row.computed = part.start + part.length
                row.prefilling = not part.logits
                self.publish(row)
            reason = None
            committed = 0
            for token in tokens:
                row.tokens.append(token)
                committed += 1
                stops = (token in self.eos and not row.ignore_eos) or token in row.stop_tokens
                if stops and row.outputs >= row.min_tokens:
                    reason = STOP
                elif row.outputs == row.max_tokens or len(row.tokens) == self.max_model_len:
                    reason = LENGTH
                if reason:
                    break
            if self.step.kind == DECODE:
                accepted = min(committed, len(tokens) - 1)
                row.in_flight = 0
                row.steps += 1
                row.drafted += num_draft
                row.accepted += accepted
                row.computed = before + accepted
                if part.draft_length and num_draft and row.draft_pages:
                    row.draft_seen = before + min(accepted, num_draft - 1)
            if reason:
                self.end(row, reason)
            else:
                self.trim(row)

    # -- schedule --------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        while True:
            self.step = Step()
            self.plan_prefill()
            if not self.step.rows and not self.running:
                if not self.waiting:
                    break
                self.end(self.queue()[0], ERROR, 2)
                continue
            if not self.step.rows:
                method = self.step_method()
                if method == DRAFT:
                    self.plan_draft_prefill()
                if not self.step.rows:
                    self.plan_decode(method)
            if self.step.rows:
                break
        self.outstanding = self.step.kind != IDLE
        self.step.preempted, self.step.draft_dropped = self.num_preempted, self.num_dropped
        self.num_preempted = self.num_dropped = 0
        return self.step

    def watermark(self) -> int:
        return max(-(-len(self.running) // 8), self.num_pages // 100, 1) if self.running else 0

    def future_draft_pages(self, row: Row) -> int:
        method, k = self.mode(row)
        context = len(row.tokens) + k
        drafts = method == DRAFT and row.may_draft and row.resume_at <= self.decode_steps
        return pages_of(context, self.draft_block_size) if drafts and context <= self.draft_max_model_len else 0

    def plan_prefill(self) -> None:
        budget = min(self.budget, self.token_room)
        pending: set[tuple[int, ...]] = set()

        def chunk(row: Row) -> int:
            for i in range(row.computed // self.block_size, len(row.tokens) // self.block_size):
                if self.prefix_cache:
                    pending.add(tuple(row.tokens[: (i + 1) * self.block_size]))
            left = len(row.tokens) - row.computed
            length = min(left, budget)
            if length:
                self.step.kind = PREFILL
                self.step.rows.append(RowStep(row, row.computed, length, logits=length == left))
            return length

        for row in self.running:
            if row.prefilling:
                budget -= chunk(row)
        spoken_for = sum(max(self.future_draft_pages(row) - row.draft_pages, 0) for row in self.running)
        for row in self.queue()[:LOOK_AHEAD]:
            if budget == 0 or len(self.running) >= self.max_num_seqs:
                return
            shareable = (len(row.tokens) - 1) // self.block_size if self.prefix_cache else 0
            names = [tuple(row.tokens[: (i + 1) * self.block_size]) for i in range(shareable)]
            hits = []
            for name in names:
                if name not in self.named:
                    break
                hits.append(self.named[name])
            total = pages_of(len(row.tokens), self.block_size)
            if len(hits) < shareable and names[len(hits)] in pending:
                spoken_for += total - len(hits)
                continue
            unowned = sum(page.owners == 0 for page in hits)
            own_draft = self.future_draft_pages(row) if self.running else 0
            need = total - len(hits) + unowned + own_draft
            if need + self.watermark() + spoken_for > self.available:
                return
            for page in hits:
                self.idle.pop(page, None)
                page.owners += 1
                row.pages.append(page)
            self.resize(row, total)
            self.waiting.remove(row)
            if not row.seniority:
                self.admissions += 1
                row.seniority = self.admissions
                row.cached = len(hits) * self.block_size
            row.prefilling = True
            row.published = len(hits)
            row.computed = len(hits) * self.block_size
            self.running.append(row)
            spoken_for += max(self.future_draft_pages(row) - row.draft_pages, 0)
            budget -= chunk(row)

    def step_method(self) -> int:
        votes = {NGRAM: 0, DRAFT: 0, EXTERNAL: 0}
        for row in self.running:
            if row.may_draft and self.mode(row)[0] != NONE:
                votes[self.mode(row)[0]] += 1
        best = max(votes, key=lambda method: votes[method])
        return best if votes[best] else NONE

    def draft_limit(self, row: Row, method: int) -> int:
        its_method, k = self.mode(row)
        if its_method != method or not row.may_draft or method == NONE:
            return 0
        k = min(k, row.max_tokens - row.outputs - 1, self.max_model_len - len(row.tokens) - 1)
        if method == DRAFT:
            if row.resume_at > self.decode_steps:
                return 0
            k = min(k, max(self.draft_max_model_len + 1 - len(row.tokens), 0))
        return k

    def back_off(self, row: Row) -> None:
        row.resume_at = self.decode_steps + min(16 << min(row.drops, 16), 1024)
        row.drops += 1

    def plan_draft_prefill(self) -> None:
        budget = min(self.budget, self.token_room)
        for row in self.running:
            if budget == 0:
                return
            if row.gap <= 2 or self.draft_limit(row, DRAFT) == 0:
                continue
            until = len(row.tokens) - 1
            count = max(pages_of(until, self.draft_block_size), row.draft_pages)
            if not self.resize_draft(row, count, self.watermark()):
                self.back_off(row)
                continue
            length = min(budget, until - row.draft_seen)
            budget -= length
            self.step.kind, self.step.method = DRAFT_PREFILL, DRAFT
            self.step.rows.append(RowStep(row, draft_start=row.draft_seen, draft_length=length))

    def plan_decode(self, method: int) -> None:
        self.decode_steps += 1
        for row in list(self.running):
            if row in self.running:
                if len(row.tokens) > self.draft_max_model_len:
                    self.drop_draft(row)
                self.reserve_last_token(row)
        wanted = [self.draft_limit(row, method) for row in self.running]
        most = max(wanted, default=0)
        while sum(min(k, most) for k in wanted) > min(self.token_room, self.logits_room) - len(self.running):
            most -= 1
        for row, k in zip(self.running, wanted, strict=True):
            self.step.rows.append(self.plan_row(row, method, min(k, most)))
            self.step.kind, self.step.method = DECODE, method
        if not any(part.num_drafts for part in self.step.rows):
            self.step.method = NONE

    def reserve_last_token(self, row: Row) -> None:
        while not self.resize(row, max(pages_of(len(row.tokens), self.block_size), len(row.pages))):
            drafting = [other for other in self.running if other.draft_pages]
            if drafting:
                loser = min(
                    drafting,
                    key=lambda r: (r.resume_at <= self.decode_steps, (r.accepted + 1) / (r.drafted + 2)),
                )
                self.drop_draft(loser)
                self.back_off(loser)
                self.num_dropped += 1
            elif len(self.running) == 1:
                self.end(row, ERROR, 2)
                return
            else:
                youngest = max(self.running, key=lambda other: other.seniority)
                self.preempt(youngest)
                if youngest is row:
                    return

    def plan_row(self, row: Row, method: int, k: int) -> RowStep:
        count = len(row.tokens)
        drafts: list[int] | int = k
        if k and method == NGRAM:
            drafts = scan_ngram(row.tokens, k, self.ngram_min, self.ngram_max)
        elif k and method == DRAFT:
            drafts = self.reserve_draft(row, k)
        part = RowStep(row, count - 1, 1, drafts, logits=True)
        if part.num_drafts:
            pages = min(
                pages_of(count + part.num_drafts, self.block_size), len(row.pages) + self.available
            )
            self.resize(row, max(pages, len(row.pages)))
            room = pages * self.block_size - count
            part.drafts = min(drafts, room) if isinstance(drafts, int) else drafts[:room]
        part.length = 1 + part.num_drafts
        row.in_flight = part.num_drafts
        if method == DRAFT and part.num_drafts:
            part.draft_start, part.draft_length = row.draft_seen, row.gap
        return part

    def reserve_draft(self, row: Row, k: int) -> int:
        if row.gap > 2:
            return 0
        count = len(row.tokens)
        if self.resize_draft(row, max(pages_of(count + k - 1, self.draft_block_size), row.draft_pages)):
            return k
        k = min(k, max(row.draft_pages * self.draft_block_size + 1 - count, 0))
        if k == 0:
            self.back_off(row)
        return k


def scan_ngram(tokens: list[int], k: int, shortest: int, longest: int) -> list[int]:
    """The definition of the n-gram proposal, by scanning."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                extended = list(tokens)
                for j in range(k):
                    extended.append(extended[end + j])
                return extended[len(tokens) :]
    return []
