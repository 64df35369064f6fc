"""A scheduler in plain Python: slow, obvious, no arrays. The Rust core must decide exactly as it does.

It keeps whole token lists as the names of pages, sorts the whole queue when it looks at it, and scans for n-grams. It
knows the policy and nothing of slots, block tables or buffers (tests/paged_device.py checks those).
"""

from __future__ import annotations

from tests.reference_books import (
    DECODE,
    DRAFT,
    DRAFT_PREFILL,
    ERROR,
    EXTERNAL,
    IDLE,
    NGRAM,
    NONE,
    PREFILL,
    ReferenceBooks,
    RowStep,
    Step,
)
from tests.reference_pool import Row, pages_of

LOOK_AHEAD = 256


class ReferenceScheduler(ReferenceBooks):
    """What runs next."""

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
            pages = min(pages_of(count + part.num_drafts, self.block_size), len(row.pages) + self.available)
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
