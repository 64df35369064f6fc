"""What the policy sees and what its decisions do: the engine's side of speculation control.

Owns the step timer, the tally of what drafts brought each row, the host's copy of each row's shard and limits, and the
modes in force. Knows no policy in particular (any object with `due` and `decide`), no tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specbatch import _core
from specbatch._core import FinishedBatch, Scheduler, StepInfo
from specbatch.control.records import (
    METHOD_DRAFT_SHADOW,
    METHOD_NAMES,
    STEP_DRAFT_PREFILL,
    AcceptanceSample,
    Decision,
    Observation,
    ShardRows,
    StepTimer,
)
from specbatch.control.row_groups import RowTally


class SpeculationPolicy(Protocol):
    """The part of specbatch.control.Policy that the engine calls."""

    def due(self, step: int, running: int, waiting: int) -> bool: ...
    def decide(self, observation: Observation) -> Decision: ...


class ProbeResult(Protocol):
    """What a teacher-forced pass of the draft found; see engine.draft_probe.Probe."""

    @property
    def samples(self) -> tuple[AcceptanceSample, ...]: ...
    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class Prober(Protocol):
    """Runs the draft over what rows have produced; see engine.draft_probe.DraftProbe."""

    def run(self, rows: int, k: int, prompt: NDArray[np.int32], shard: NDArray[np.int32]) -> ProbeResult | None: ...


class PolicyDriver:
    """Calls the policy when it is due and puts its decisions into force."""

    def __init__(self, policy: SpeculationPolicy, core: Scheduler, probe: Prober | None = None) -> None:
        self.policy = policy
        self.core = core
        self.probe = probe
        self.timer = StepTimer()
        self.tally = RowTally()
        self.steps = 0
        self.default_mode = "ar"
        self.modes: dict[int, tuple[int, int]] = {}  # shard -> (method, k), where the policy said so
        self._start = time.perf_counter()
        self._shard = np.zeros(64, np.int32)  # by handle
        self._prompt = np.zeros(64, np.int32)
        self._limit = np.zeros(64, np.int32)  # prompt + max_tokens
        self._waiting: dict[int, int] = {}  # shard -> rows added and not finished
        self._since: dict[str, int] = dict.fromkeys(_SINCE, 0)
        self._probed: tuple[AcceptanceSample, ...] = ()
        self._policy_seconds = 0.0  # of the last decision
        self._target_pages = self._draft_pages = 0
        self._free_pages = core.num_pages - 1

    def note_added(
        self, handles: NDArray[np.int32], shard: int, prompt: NDArray[np.int32], max_tokens: NDArray[np.int32]
    ) -> None:
        if len(handles) == 0:
            return
        top = int(handles.max())
        while top >= len(self._shard):
            self._shard, self._prompt, self._limit = (
                np.concatenate([a, np.zeros_like(a)]) for a in (self._shard, self._prompt, self._limit)
            )
        self._shard[handles] = shard
        self._prompt[handles] = prompt
        self._limit[handles] = np.minimum(prompt.astype(np.int64) + max_tokens, 2**31 - 1)
        self._waiting[shard] = self._waiting.get(shard, 0) + len(handles)

    def note_finished(self, batch: FinishedBatch) -> None:
        for shard, count in Counter(batch.shard.tolist()).items():
            self._waiting[shard] -= count
            if self._waiting[shard] == 0:
                del self._waiting[shard]
                self.modes.pop(shard, None)
        self.tally.finish(batch.handle)
        self._since["finished_rows"] += len(batch)
        self._since["finished_prompt_tokens"] += int(batch.num_prompt_tokens.sum())
        self._since["finished_output_tokens"] += int(batch.num_output_tokens.sum())

    def note_step(self, info: StepInfo, seconds: float, draft_seconds: float, draft_rows: int) -> None:
        """One step's shape and wall time."""
        self.steps += 1
        self._since["preempted"] += info.num_preempted
        self._since["draft_dropped"] += info.num_draft_dropped
        self._free_pages = info.free_pages + info.cached_pages
        self._target_pages, self._draft_pages = info.target_pages, info.draft_pages
        catch_up = info.kind == _core.STEP_DRAFT_PREFILL
        self.timer.add(
            info.kind,
            info.method,
            info.max_draft_tokens,
            rows=info.num_rows,
            tokens=info.draft_num_tokens if catch_up else info.num_tokens,
            context=info.draft_num_tokens if catch_up else info.total_seq_len,
            seconds=seconds,
            draft_rows=draft_rows,
            draft_tokens=info.num_draft_tokens,
            draft_seconds=draft_seconds,
        )

    def note_drafts(
        self, method: int, handles: NDArray[np.int32], num_draft: NDArray[np.int32], num_sampled: NDArray[np.int32]
    ) -> None:
        """What a decode step's drafts brought its rows [n]."""
        if method == _core.METHOD_NONE:
            return
        handles = handles[: len(num_draft)]
        # A model drafts for every row that is asked for; a look-up may find nothing, and that is its result.
        asked = slice(None) if method == _core.METHOD_NGRAM or num_draft.all() else num_draft > 0
        self.tally.add(handles[asked], num_draft[asked], np.maximum(num_sampled[asked] - 1, 0))

    def decide(self, seq_index: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> float:
        """Ask the policy if it is due; `seq_index`, `seq_lens` are the last step's rows. Returns the seconds that a pass of
        the draft over produced tokens took, if the policy wanted one."""
        core = self.core
        if not self.policy.due(self.steps, core.num_running, core.num_waiting):
            return 0.0
        start = time.perf_counter()
        decision = self.policy.decide(self._observe(seq_index, seq_lens))
        if decision.changed:
            self._apply(decision)
        self._policy_seconds = time.perf_counter() - start
        if not decision.probe_draft_rows or self.probe is None:
            return 0.0
        found = self.probe.run(decision.probe_draft_rows, decision.probe_draft_k, self._prompt, self._shard)
        if found is None:
            return 0.0
        self._probed += found.samples
        self.timer.add(
            STEP_DRAFT_PREFILL,
            METHOD_DRAFT_SHADOW,
            decision.probe_draft_k,
            rows=found.rows,
            tokens=found.tokens,
            context=found.context,
            seconds=found.seconds,
        )
        return found.seconds

    def _apply(self, decision: Decision) -> None:
        core = self.core
        self.default_mode = mode_name(decision.method, decision.k)
        core.set_speculation(decision.method, decision.k)
        self.modes.clear()
        for shard in decision.shards:
            self.modes[shard.shard] = (shard.method, shard.k)
            if (shard.method, shard.k) != (decision.method, decision.k):
                core.set_speculation(shard.method, shard.k, shard.shard)
        core.set_shadow_ngram(decision.shadow_ngram)
        core.set_score_fewer(decision.score_fewer)
        core.set_least_acceptance(*decision.least_acceptance)
        if decision.max_rows:
            core.set_max_num_seqs(decision.max_rows)

    def _observe(self, seq_index: NDArray[np.int32], seq_lens: NDArray[np.int32]) -> Observation:
        core = self.core
        rows = len(seq_index)
        running = Counter(self._shard[seq_index].tolist())
        prompt = self._prompt[seq_index]
        shards = tuple(
            ShardRows(shard, running.get(shard, 0), max(total - running.get(shard, 0), 0))
            for shard, total in self._waiting.items()
        )
        since, self._since = self._since, dict.fromkeys(_SINCE, 0)
        return Observation(
            step=self.steps,
            time=time.perf_counter() - self._start,
            running=core.num_running,
            waiting=core.num_waiting,
            shards=shards,
            mean_context=float(seq_lens.sum()) / rows if rows else 0.0,
            mean_prompt=float(prompt.sum()) / rows if rows else 0.0,
            mean_limit=float(self._limit[seq_index].sum() - seq_lens.sum()) / rows if rows else 0.0,
            free_pages=self._free_pages,
            total_pages=core.num_pages,
            target_pages=self._target_pages,
            draft_pages=self._draft_pages,
            max_num_seqs=core.max_num_seqs,
            steps=self.timer.drain(),
            acceptance=self._acceptance(),
            row_groups=self.tally.groups(seq_index, finished=False) + self.tally.finished_groups(),
            finished_rows=since["finished_rows"],
            finished_prompt_tokens=since["finished_prompt_tokens"],
            finished_output_tokens=since["finished_output_tokens"],
            preempted=since["preempted"],
            draft_dropped=since["draft_dropped"],
            policy_seconds=self._policy_seconds,
        )

    def _acceptance(self) -> tuple[AcceptanceSample, ...]:
        counts = self.core.take_acceptance()
        probed, self._probed = self._probed, ()
        return probed + tuple(
            AcceptanceSample(
                shard, method, rounds, proposed, tuple(offered[: k or None]), tuple(accepted[: k or None]), committed, k
            )
            for shard, method, rounds, proposed, offered, accepted, committed, k in zip(
                counts.shard.tolist(),
                counts.method.tolist(),
                counts.rounds.tolist(),
                counts.proposed.tolist(),
                counts.offered.tolist(),
                counts.accepted.tolist(),
                counts.committed.tolist(),
                counts.k.tolist(),
                strict=True,
            )
        )

    def mode_names(self) -> dict[int, str]:
        """Mode of every shard that has unfinished rows."""
        return {
            shard: mode_name(*self.modes[shard]) if shard in self.modes else self.default_mode
            for shard in self._waiting
        }


_SINCE = ("finished_rows", "finished_prompt_tokens", "finished_output_tokens", "preempted", "draft_dropped")


def mode_name(method: int, k: int) -> str:
    """ "ar", "ngram k=4", "draft k=3"."""
    return "ar" if k == 0 else f"{METHOD_NAMES[method]} k={k}"
