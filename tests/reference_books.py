"""The reference scheduler's books: rows in and out, what each shard does, and the result of a step. Slow and obvious;
knows nothing of what runs next."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.reference_pool import ReferencePool, Row, pages_of

IDLE, PREFILL, DECODE, DRAFT_PREFILL = range(4)
NONE, NGRAM, DRAFT, EXTERNAL = range(4)
STOP, LENGTH, ERROR, ABORTED = 1, 2, 3, 4
WINDOW = 4096


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


class ReferenceBooks(ReferencePool):
    """Rows, their modes and the outstanding step, on the pages of ReferencePool."""

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
        super().__init__(num_pages, block_size, prefix_cache)
        self.draft_block_size = draft_block_size
        self.max_num_seqs, self.budget, self.max_model_len = max_num_seqs, max_num_batched_tokens, max_model_len
        self.draft_max_model_len = draft_max_model_len or max_model_len
        self.token_room, self.logits_room, self.eos = token_room, logits_room, eos
        self.ngram_min, self.ngram_max = ngram_min, ngram_max
        self.waiting: list[Row] = []
        self.finished: list[Row] = []
        self.speculation: dict[int, tuple[int, int]] = {}
        self.default = (NONE, 0)
        self.step = Step()
        self.outstanding = False
        self.decode_steps = self.arrivals = self.window = self.window_used = self.admissions = 0
        self.window_shard: int | None = None
        self.num_preempted = self.num_dropped = 0

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
