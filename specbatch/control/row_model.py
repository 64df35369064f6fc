"""Rows of a workload behind a plain scheduler, in numpy: admission, a two-tenant pool, ragged steps, preemption.

A stand-in for the real scheduler that needs no compiled code. It keeps the rules that matter to a policy (draft pages
are a cache that leaves first, a gap in the draft's KV is filled before it drafts, k is cut near a row's end) and none
of those that do not (page identities, prefix sharing, token ids).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.control.counts import draft_shadow
from specbatch.control.records import (
    METHOD_DRAFT,
    METHOD_EXTERNAL,
    METHOD_NGRAM,
    METHOD_NONE,
    STEP_DECODE,
    STEP_DRAFT_PREFILL,
    STEP_PREFILL,
    AcceptanceSample,
    Decision,
    ShardRows,
)
from specbatch.control.row_counts import RowCounts
from specbatch.control.row_groups import RowTally
from specbatch.control.simulate import SimStep, Workload, runs

FED_GAP = 2  # tokens the first draft pass of a step can feed


class PlainRows:
    """See Rows. Sizes in tokens; `pages` counts pages of block_size target tokens."""

    def __init__(
        self,
        workload: Workload,
        *,
        pages: int,
        max_num_seqs: int,
        block_size: int = 16,
        draft_kv_ratio: float = 0.0,  # draft KV bytes a token over target KV bytes a token
        token_budget: int = 8192,
        static_draft_share: bool = False,  # the draft's pages are set aside for good, as engines without tenants do
        feed: int = 1 << 30,  # rows queued at a time, as a job feeds an engine
    ) -> None:
        self.work = workload
        self.block_size = block_size
        self.ratio = draft_kv_ratio
        self.pages = int(pages / (1.0 + draft_kv_ratio)) if static_draft_share else pages
        self.static = static_draft_share
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.feed = feed
        self.draft_runs = runs(workload.draft_hits)
        count = len(workload)
        self.produced = np.zeros(count, dtype=np.int64)
        self.draft_seen = np.full(count, -1, dtype=np.int64)  # tokens in the draft's KV; -1: no table
        self.resume_at = np.zeros(count, dtype=np.int64)  # decode step before which the row does not draft
        self.drops = np.zeros(count, dtype=np.int64)
        self.decode_steps = 0
        self.waiting: deque[int] = deque(range(count))
        self.running: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.default = (METHOD_NONE, 0)
        self.modes: dict[int, tuple[int, int]] = {}
        self.shadow_k = 0
        self.tally = RowTally(count)
        self.gone: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # finished since the last observation
        self.counts = RowCounts(workload)
        self.finished = [0, 0, 0]
        self.preempted = self.dropped = 0

    # -- what a policy sees and does ------------------------------------------------------------------------------

    def load(self) -> tuple[int, int]:
        return len(self.running), min(len(self.waiting), self.feed)

    def apply(self, decision: Decision) -> None:
        self.default = (decision.method, decision.k)
        self.modes = {s.shard: (s.method, s.k) for s in decision.shards}
        self.shadow_k = decision.shadow_ngram
        shards = self.work.shard[self.running]
        for shard in np.unique(shards):
            if self._mode(int(shard))[0] != METHOD_DRAFT:
                self.draft_seen[self.running[shards == shard]] = -1

    def observe(self) -> dict[str, Any]:
        rows = self.running
        waiting = np.fromiter(self.waiting, dtype=np.int64, count=len(self.waiting))[: self.feed]
        shards = tuple(
            ShardRows(int(s), int((self.work.shard[rows] == s).sum()), int((self.work.shard[waiting] == s).sum()))
            for s in np.unique(np.concatenate([self.work.shard[rows], self.work.shard[waiting]]))
        )
        some = rows if len(rows) else waiting
        context = self.work.prompt[some] + self.produced[some]
        target, draft = self._pages_in_use()
        values: dict[str, Any] = {
            "running": len(rows),
            "waiting": len(waiting),
            "shards": shards,
            "mean_context": float(context.mean()) if len(some) else 0.0,
            "mean_prompt": float(self.work.prompt[some].mean()) if len(some) else 0.0,
            "mean_limit": float(self.work.max_tokens - self.produced[some].mean()) if len(some) else 0.0,
            "free_pages": self.pages - target - draft,
            "total_pages": self.pages,
            "target_pages": target,
            "draft_pages": draft,
            "max_num_seqs": self.max_num_seqs,
            "finished_rows": self.finished[0],
            "finished_prompt_tokens": self.finished[1],
            "finished_output_tokens": self.finished[2],
            "preempted": self.preempted,
            "draft_dropped": self.dropped,
        }
        values["row_groups"] = self.tally.groups(rows, finished=False) + self.tally.groups(self.gone, finished=True)
        self.tally.reset(self.gone)
        self.gone = np.zeros(0, dtype=np.int64)
        self.finished, self.preempted, self.dropped = [0, 0, 0], 0, 0
        return values

    def take_acceptance(self) -> tuple[AcceptanceSample, ...]:
        return self.counts.take()

    def probe_draft(self, rows: int, k: int) -> tuple[tuple[AcceptanceSample, ...], int, int]:
        found, tokens = [], 0
        for row in self.running[-rows:]:
            done = int(self.produced[row])
            if done:
                found.append((int(self.work.shard[row]), self.work.draft_hits[row, :done].tolist()))
                tokens += int(self.work.prompt[row]) + done
        return draft_shadow(found, k), len(found), tokens

    # -- the scheduler --------------------------------------------------------------------------------------------

    def step(self) -> SimStep | None:
        admitted = self._admit()
        if admitted is not None:
            return admitted
        if not len(self.running):
            return None
        return self._catch_up() or self._decode()

    def _mode(self, shard: int) -> tuple[int, int]:
        return self.modes.get(shard, self.default)

    def _blocks(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-tokens // self.block_size)

    def _pages_in_use(self) -> tuple[int, int]:
        rows = self.running
        target = int(self._blocks(self.work.prompt[rows] + self.produced[rows] + 1).sum())
        if self.static or not self.ratio:
            return target, 0
        seen = self.draft_seen[rows]
        return target, int(self._blocks(np.ceil(np.maximum(seen, 0) * self.ratio).astype(np.int64)).sum())

    def _admit(self) -> SimStep | None:
        """Prefill waiting rows, one step of at most token_budget tokens; None when none fits. Draft pages that rows
        are about to ask for are spoken for."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        target, draft = self._pages_in_use()
        free = self.pages - target - draft - int(self._owed(self.running).sum())
        if len(self.running):
            free -= max(-(-len(self.running) // 8), self.pages // 100, 1)
        rows: list[int] = []
        tokens = 0
        while self.waiting and len(self.running) + len(rows) < self.max_num_seqs:
            row = self.waiting[0]
            length = int(self.work.prompt[row] + self.produced[row])
            need = -(-length // self.block_size) + int(self._owed(np.array([row]))[0])
            if need > free or (rows and tokens + length > self.token_budget):
                break
            free -= need
            tokens += length
            rows.append(self.waiting.popleft())
        if not rows:
            return None
        self.running = np.concatenate([self.running, np.array(rows, dtype=np.int64)])
        self.counts.restart(np.array(rows), self.produced[rows])
        return SimStep(STEP_PREFILL, rows=len(rows), tokens=tokens, context=tokens)

    def _owed(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draft pages rows will want and do not have."""
        if self.static or not self.ratio:
            return np.zeros(len(rows), dtype=np.int64)
        wants = (self.draft_seen[rows] < 0) & (self.resume_at[rows] <= self.decode_steps)
        for shard in np.unique(self.work.shard[rows]):
            if self._mode(int(shard))[0] != METHOD_DRAFT:
                wants &= self.work.shard[rows] != shard
        length = self.work.prompt[rows] + self.produced[rows]
        return np.where(wants, self._blocks(np.ceil(length * self.ratio).astype(np.int64)), 0)

    def _step_method(self) -> int:
        """The one method of the next decode step: that of most rows."""
        votes = np.zeros(METHOD_EXTERNAL + 1, dtype=np.int64)
        for shard, count in zip(*np.unique(self.work.shard[self.running], return_counts=True), strict=True):
            votes[self._mode(int(shard))[0]] += count
        votes[METHOD_NONE] = 0
        return int(votes.argmax()) if votes.any() else METHOD_NONE

    def _drafting(self) -> NDArray[np.bool_]:
        """[running] rows whose shard is in draft mode and that have room to draft."""
        rows = self.running
        wanted = np.zeros(len(rows), dtype=np.bool_)
        for shard in np.unique(self.work.shard[rows]):
            method, k = self._mode(int(shard))
            if method == METHOD_DRAFT and k:
                wanted |= self.work.shard[rows] == shard
        return wanted & (self.work.max_tokens - self.produced[rows] > 1) & (self.resume_at[rows] <= self.decode_steps)

    def _catch_up(self) -> SimStep | None:
        """Give rows that should draft a table and fill the gap in their draft KV, as far as pages and budget go."""
        rows = self.running
        length = self.work.prompt[rows] + self.produced[rows]
        seen = np.maximum(self.draft_seen[rows], 0)
        behind = self._drafting() & (length - seen > FED_GAP)
        if self._step_method() != METHOD_DRAFT or not behind.any():
            return None
        target, draft = self._pages_in_use()
        free = self.pages - target - draft - max(-(-len(rows) // 8), self.pages // 100, 1)
        chosen: list[int] = []
        tokens = 0
        need = self._blocks(np.ceil(length * self.ratio).astype(np.int64))
        need -= self._blocks(np.ceil(seen * self.ratio).astype(np.int64))
        if self.static:
            need[:] = 0
        for i in np.flatnonzero(behind):
            if need[i] > free:
                self._back_off(rows[[i]])
                continue
            gap = int(length[i] - seen[i])
            if chosen and tokens + gap > self.token_budget:
                break
            free -= int(need[i])
            tokens += gap
            chosen.append(int(i))
        if not chosen:
            return None
        picked = rows[chosen]
        self.draft_seen[picked] = self.work.prompt[picked] + self.produced[picked]
        return SimStep(STEP_DRAFT_PREFILL, METHOD_DRAFT, 0, len(chosen), tokens, int(length[chosen].sum()))

    def _back_off(self, rows: NDArray[np.int64]) -> None:
        """Rows that found no page do not draft for a while, longer each time."""
        self.resume_at[rows] = self.decode_steps + np.minimum(16 << np.minimum(self.drops[rows], 6), 1024)
        self.drops[rows] += 1

    def _reserve(self) -> None:
        """Room for this step's tokens: drop draft tables first, youngest row first, then preempt the youngest."""
        while len(self.running) > 1:
            target, draft = self._pages_in_use()
            if target + draft <= self.pages:
                return
            tables = np.flatnonzero(self.draft_seen[self.running] >= 0)
            if self.ratio and not self.static and len(tables):
                gone = self.running[tables[-1:]]
                self.draft_seen[gone] = -1
                self._back_off(gone)
                self.dropped += 1
                continue
            row = int(self.running[-1])
            self.running = self.running[:-1]
            self.draft_seen[row] = -1
            self.waiting.appendleft(row)
            self.preempted += 1

    def _decode(self) -> SimStep:
        self.decode_steps += 1
        self._reserve()
        rows = self.running
        work, at = self.work, self.produced[rows]
        shards = work.shard[rows]
        left = work.max_tokens - at
        drafts = np.zeros(len(rows), dtype=np.int64)
        hits = np.zeros(len(rows), dtype=np.int64)
        method_of = np.zeros(len(rows), dtype=np.int64)
        chosen = self._step_method()
        for shard in np.unique(shards):
            method, k = self._mode(int(shard))
            mine = shards == shard
            if method != chosen:
                continue
            method_of[mine] = method
            if method == METHOD_DRAFT:
                caught_up = work.prompt[rows] + at - self.draft_seen[rows] <= FED_GAP
                usable = mine & caught_up & (self.resume_at[rows] <= self.decode_steps)
                drafts[usable] = np.minimum(k, left[usable] - 1)
                hits[usable] = self.draft_runs[rows[usable], at[usable]]
            elif method == METHOD_NGRAM:
                usable = mine & work.ngram_match[rows, at]
                drafts[usable] = np.minimum(k, left[usable] - 1)
                hits[usable] = self.counts.ngram_runs[rows[usable], at[usable]]
        accepted = np.minimum(drafts, hits)
        committed = np.minimum(accepted + 1, work.output[rows] - at)
        context = work.prompt[rows] + at
        drafting = (method_of == METHOD_DRAFT) & (drafts > 0)
        most = int(drafts.max())
        step = SimStep(
            STEP_DECODE,
            int(method_of[drafts.argmax()]) if most else METHOD_NONE,
            most,
            rows=len(rows),
            tokens=int(len(rows) + drafts.sum()),
            context=int((context + 1 + drafts).sum()),
            draft_rows=int((drafts > 0).sum()),
            draft_tokens=int(drafts.sum()),
            draft_context=int(context[drafting].sum()),
            draft_passes=[int(((drafts > j) & drafting).sum()) for j in range(most) if drafting.any()],
        )
        asked = (drafts > 0) | (method_of == METHOD_NGRAM)
        self.tally.add(rows[asked], drafts[asked], accepted[asked])
        for shard in np.unique(shards):
            method, k = self._mode(int(shard))
            self.counts.add(
                int(shard), method, k, (shards == shard) & (method_of == method), drafts, accepted, committed
            )
        self.counts.score_ngram(rows, at, committed, self.shadow_k)
        self.produced[rows] += committed
        self.draft_seen[rows[drafting]] = (context + committed)[drafting]
        ended = self.produced[rows] >= work.output[rows]
        if ended.any():
            gone = rows[ended]
            self.gone = np.concatenate([self.gone, gone])
            self.finished[0] += len(gone)
            self.finished[1] += int(work.prompt[gone].sum())
            self.finished[2] += int(work.output[gone].sum())
            self.running = rows[~ended]
        return step
