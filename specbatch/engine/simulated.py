"""Rows of a made-up workload run by the real Rust scheduler: everything of an engine but the models.

Owns the truth (which token each row would produce, where a draft is right) and plays the device. Imports no torch, so
policies can be tried at GPU scale anywhere. Use it with specbatch.control.simulate.simulate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch import _core
from specbatch.control.counts import draft_shadow
from specbatch.control.records import AcceptanceSample, Decision, ShardRows
from specbatch.control.row_groups import RowTally
from specbatch.control.simulate import SimStep, Workload, runs

EOS = 2
FIRST_TOKEN = 100
VOCABULARY = 1 << 20  # large, so that no n-gram repeats by accident


class CoreRows:
    """See specbatch.control.simulate.Rows."""

    def __init__(
        self,
        workload: Workload,
        *,
        pages: int,
        max_num_seqs: int,
        block_size: int = 16,
        draft_block_size: int = 0,
        token_budget: int = 8192,
        max_k: int = 8,
        feed: int = 1 << 30,  # rows in the scheduler at most, as a job feeds an engine
    ) -> None:
        self.work = workload
        self.max_num_seqs = max_num_seqs
        self.feed = feed
        self.truth = _tokens(workload)
        self.draft_runs = runs(workload.draft_hits)
        longest = int((workload.prompt + workload.max_tokens).max())
        self.core = _core.Scheduler(
            num_pages=pages + 1,
            block_size=block_size,
            draft_block_size=draft_block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            max_model_len=longest,
            max_speculative_tokens=max_k,
            eos_token_ids=np.array([EOS], dtype=np.int32),
            prefix_cache=False,
        )
        self._allocate(longest, block_size, draft_block_size, max(token_budget, max_num_seqs * (max_k + 1)), max_k)
        self._row = np.zeros(64, dtype=np.int64)  # by handle
        self._step_id = 0
        self._none()
        self._added = 0
        self._live: set[int] = set()  # rows in the scheduler
        self._at = np.zeros(len(workload), dtype=np.int64)  # output tokens committed, as last seen
        self._decoding: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # rows of the last decode step
        self._info: Any = None
        self.modes: dict[int, tuple[int, int]] = {}
        self.default = (0, 0)
        self.tally = RowTally()
        self._gone: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._finished = [0, 0, 0]
        self._preempted = self._dropped = 0
        self.completed = 0
        self._feed()

    def _allocate(self, longest: int, block: int, draft_block: int, tokens: int, max_k: int) -> None:
        rows = self.max_num_seqs

        def array(*shape: int) -> NDArray[np.int32]:
            return np.zeros(shape, dtype=np.int32)

        self.host = {
            "seq_index": array(rows),
            "query_start_loc": array(rows + 1),
            "seq_lens": array(rows),
            "num_draft_tokens": array(rows),
            "input_ids": array(tokens),
            "positions": array(tokens),
            "slot_mapping": array(tokens),
            "block_tables": array(rows, -(-longest // block) + 1),
            "logits_start_loc": array(rows + 1),
            "logits_indices": array(rows * (max_k + 1)),
            "draft_query_start_loc": array(rows + 1),
            "draft_seq_lens": array(rows),
            "draft_input_ids": array(tokens),
            "draft_positions": array(tokens),
            "draft_slot_mapping": array(tokens),
            "draft_block_tables": array(rows, -(-(longest + max_k) // draft_block) + 1 if draft_block else 1),
        }
        self.buffers = _core.StepBuffers(**self.host)

    # -- what a policy sees and does ------------------------------------------------------------------------------

    def load(self) -> tuple[int, int]:
        return self.core.num_running, self.core.num_waiting

    def apply(self, decision: Decision) -> None:
        if (decision.method, decision.k) != self.default:
            self.default = (decision.method, decision.k)
            self.core.set_speculation(decision.method, decision.k)
            self.modes.clear()
        for shard in decision.shards:
            mode = (shard.method, shard.k)
            if self.modes.get(shard.shard, self.default) != mode:
                self.core.set_speculation(*mode, shard.shard)
            self.modes[shard.shard] = mode
        self.core.set_shadow_ngram(decision.shadow_ngram)
        self.core.set_score_fewer(decision.score_fewer)
        self.core.set_least_acceptance(*decision.least_acceptance)

    def observe(self) -> dict[str, Any]:
        rows, info, work = self._decoding, self._info, self.work
        live = np.fromiter(self._live, dtype=np.int64, count=len(self._live))
        running = dict(zip(*(a.tolist() for a in np.unique(work.shard[rows], return_counts=True)), strict=True))
        total = dict(zip(*(a.tolist() for a in np.unique(work.shard[live], return_counts=True)), strict=True))
        prompt = float(work.prompt[rows].mean()) if len(rows) else 0.0
        produced = float(self._at[rows].mean()) if len(rows) else 0.0
        values: dict[str, Any] = {
            "running": self.core.num_running,
            "waiting": self.core.num_waiting,
            "shards": tuple(
                ShardRows(shard, running.get(shard, 0), count - running.get(shard, 0)) for shard, count in total.items()
            ),
            "mean_context": prompt + produced,
            "mean_prompt": prompt,
            "mean_limit": work.max_tokens - produced if len(rows) else 0.0,
            "free_pages": info.free_pages + info.cached_pages if info else self.core.num_pages - 1,
            "total_pages": self.core.num_pages - 1,
            "target_pages": info.target_pages if info else 0,
            "draft_pages": info.draft_pages if info else 0,
            "max_num_seqs": self.max_num_seqs,
            "row_groups": self.tally.groups(rows, finished=False) + self.tally.groups(self._gone, finished=True),
            "finished_rows": self._finished[0],
            "finished_prompt_tokens": self._finished[1],
            "finished_output_tokens": self._finished[2],
            "preempted": self._preempted,
            "draft_dropped": self._dropped,
        }
        self._gone = np.zeros(0, dtype=np.int64)
        self._finished, self._preempted, self._dropped = [0, 0, 0], 0, 0
        return values

    def take_acceptance(self) -> tuple[AcceptanceSample, ...]:
        counts = self.core.take_acceptance()
        return tuple(
            AcceptanceSample(shard, method, rounds, proposed, tuple(offered), tuple(accepted), committed, k)
            for shard, method, rounds, proposed, offered, accepted, committed, k in zip(
                *(a.tolist() for a in (counts.shard, counts.method, counts.rounds, counts.proposed)),
                *(a.tolist() for a in (counts.offered, counts.accepted, counts.committed, counts.k)),
                strict=True,
            )
        )

    def probe_draft(self, rows: int, k: int) -> tuple[tuple[AcceptanceSample, ...], int, int]:
        info = self.core.lend_draft(rows, self.buffers)
        handles = self.host["seq_index"][: info.num_rows].copy()
        found = []
        for handle, length in zip(handles.tolist(), self.host["draft_seq_lens"][: info.num_rows].tolist(), strict=True):
            row = int(self._row[handle])
            # Prefill gives the first token and the last one is not read: what is in between could have been drafted.
            hits = self.work.draft_hits[row, 1 : length - int(self.work.prompt[row])]
            found.append((int(self.work.shard[row]), hits.tolist()))
            self.core.drop_draft(handle)
        return draft_shadow(found, k), len(handles), info.draft_num_tokens

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> SimStep | None:
        info = self.core.step(self._step_id, *self._result, self.buffers)
        self._step_id, self._info = info.step_id, info
        self._preempted += info.num_preempted
        self._dropped += info.num_draft_dropped
        if info.num_finished:
            self._take_finished()
        if info.kind == _core.STEP_IDLE:
            self._none()
            return self.step() if self._feed() else None
        self._feed()
        drafts = self.host["num_draft_tokens"][: info.num_rows]
        if info.kind == _core.STEP_DRAFT_PREFILL:
            self._none()
            tokens = info.draft_num_tokens
        elif info.kind == _core.STEP_PREFILL:
            tokens = info.num_tokens
            self._prefill(info.num_rows)
        else:
            tokens = info.num_tokens
            self._decode(info, drafts)
        drafting = drafts > 0
        by_model = info.method == _core.METHOD_DRAFT and info.kind == _core.STEP_DECODE
        context = self.host["seq_lens"][: info.num_rows]
        return SimStep(
            info.kind,
            info.method if info.max_draft_tokens or info.kind != _core.STEP_DECODE else _core.METHOD_NONE,
            info.max_draft_tokens,
            rows=info.num_rows,
            tokens=tokens,
            context=info.total_seq_len if info.kind != _core.STEP_DRAFT_PREFILL else tokens,
            draft_rows=int(drafting.sum()),
            draft_tokens=info.num_draft_tokens,
            draft_context=int((context - drafts)[drafting].sum()) if by_model else 0,
            draft_passes=[int((drafts > j).sum()) for j in range(info.max_draft_tokens)] if by_model else [],
        )

    def _prefill(self, count: int) -> None:
        rows = self._row[self.host["seq_index"][:count]]
        wanted = np.diff(self.host["logits_start_loc"][: count + 1]) > 0
        # a preempted row comes back with what it had committed
        produced = self.host["seq_lens"][:count] - self.work.prompt[rows]
        tokens = self.truth[rows, np.clip(produced, 0, None)][:, None]
        self._set(tokens, wanted.astype(np.int32), np.zeros(count, dtype=np.int32))

    def _decode(self, info: Any, drafts: NDArray[np.int32]) -> None:
        count = info.num_rows
        rows = self._row[self.host["seq_index"][:count]]
        produced = self.host["seq_lens"][:count] - drafts - self.work.prompt[rows]
        self._at[rows], self._decoding = produced, rows
        width = info.max_draft_tokens + 1
        at = np.minimum(produced[:, None] + np.arange(width), self.truth.shape[1] - 1)
        tokens = self.truth[rows[:, None], at]
        if info.method == _core.METHOD_NGRAM:
            start = self.host["query_start_loc"][:count, None]
            where = np.minimum(start + 1 + np.arange(width), info.num_tokens - 1)
            same = (self.host["input_ids"][where] == tokens) & (np.arange(width) < drafts[:, None])
            hits = np.cumprod(same, axis=1).sum(axis=1)
        else:
            hits = self.draft_runs[rows, np.minimum(produced, self.draft_runs.shape[1] - 1)]
        accepted = np.minimum(drafts, hits)
        if info.method == _core.METHOD_DRAFT:
            asked = drafts > 0
            self.tally.add(rows[asked], drafts[asked], accepted[asked])
        elif info.method == _core.METHOD_NGRAM:
            self.tally.add(rows, drafts, accepted)
        self._set(tokens, (accepted + 1).astype(np.int32), drafts.copy())

    def _set(self, tokens: NDArray[Any], sampled: NDArray[np.int32], drafts: NDArray[np.int32]) -> None:
        self._result = (np.ascontiguousarray(tokens, dtype=np.int32), sampled, drafts)

    def _none(self) -> None:
        empty = np.zeros(0, dtype=np.int32)
        self._result = (np.zeros((0, 1), dtype=np.int32), empty, empty)

    def _take_finished(self) -> None:
        batch = self.core.take_finished()
        rows = self._row[batch.handle]
        if (batch.finish_reason > _core.FINISH_LENGTH).any():
            raise RuntimeError(f"rows {rows[batch.finish_reason > _core.FINISH_LENGTH].tolist()} ended with an error")
        if (batch.num_output_tokens != self.work.output[rows]).any():
            raise RuntimeError("a row ended with another number of tokens than it has")
        self._live.difference_update(rows.tolist())
        self._gone = np.concatenate([self._gone, rows])
        self._decoding = self._decoding[~np.isin(self._decoding, rows)]
        self._finished[0] += len(rows)
        self._finished[1] += int(batch.num_prompt_tokens.sum())
        self._finished[2] += int(batch.num_output_tokens.sum())
        self.completed += len(rows)

    def _feed(self) -> bool:
        """Hand the scheduler more rows, up to `feed` unfinished ones."""
        count = min(len(self.work) - self._added, self.feed - self.core.num_unfinished)
        if count <= 0:
            return False
        rows = np.arange(self._added, self._added + count)
        self._added += count
        self._live.update(rows.tolist())
        for shard in np.unique(self.work.shard[rows]):
            mine = rows[self.work.shard[rows] == shard]
            length = self.work.prompt[mine]
            offsets = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
            position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], length)
            values = FIRST_TOKEN + (np.repeat(mine, length) * 7919 + position * 104729) % (VOCABULARY - FIRST_TOKEN)
            handles = self.core.add_requests(
                request_id=mine.astype(np.int64),
                shard=np.full(len(mine), shard, dtype=np.int32),
                prompt_values=values.astype(np.int32),
                prompt_offsets=offsets,
                max_tokens=np.full(len(mine), self.work.max_tokens, dtype=np.int32),
            )
            top = int(handles.max())
            if top >= len(self._row):
                self._row = np.concatenate([self._row, np.zeros(top + 1, dtype=np.int64)])
            self._row[handles] = mine
        return True


def _tokens(workload: Workload) -> NDArray[np.int32]:
    """[N, L + 1] the tokens each row will produce, EOS last."""
    rows, longest = workload.draft_hits.shape
    n, t = np.arange(rows)[:, None], np.arange(longest + 1)[None, :]
    tokens: NDArray[np.int32] = np.asarray(
        FIRST_TOKEN + (n * 15485863 + t * 32452843) % (VOCABULARY - FIRST_TOKEN), dtype=np.int32
    )
    tokens[np.arange(rows), workload.output - 1] = EOS
    return tokens
