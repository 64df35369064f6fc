"""One device: the step loop. Schedule (Rust), propose, run the target, sample or verify, hand the result back.

Owns the models, their pages and the outstanding step. Knows nothing of Parquet, prompts as text or where results go.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specbatch import _core
from specbatch._core import Scheduler, StepInfo
from specbatch.engine.device import is_lost
from specbatch.engine.draft_probe import draft_probe
from specbatch.engine.eager import EagerSteps, StepOutcome
from specbatch.engine.observe import PolicyDriver, SpeculationPolicy
from specbatch.engine.parts import EngineParts
from specbatch.engine.request_arrays import core_arrays
from specbatch.engine.results import ResultCollector
from specbatch.errors import OutOfMemory, panic_as_error
from specbatch.requests import DeviceLost, EngineProgress, FinishedRows, RequestBatch
from specbatch.sampling_params import SamplingParams

_NO_STEP = 0
_NOTHING = np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)


class Engine:
    """A BatchEngine (specbatch.requests) over one target model and, if there is one, a draft model.

    Not thread-safe. `step()` raises OutOfMemory when the device ran out of memory: nothing of that step was committed, and
    after `reduce_batch()` the same rows go on. Any other exception leaves the engine consistent too: the step is
    forgotten and may be tried again. InternalError: Rust code panicked; was it the core, every later call raises too.
    """

    def __init__(self, parts: EngineParts, policy: SpeculationPolicy) -> None:
        self.parts = parts
        self.plan = parts.plan
        self.max_model_len = parts.plan.max_model_len
        self.core: Scheduler = parts.core
        self.arrays = parts.arrays
        self.sampling = parts.sampling
        self._rows = parts.rows
        self._graphs = parts.graphs
        self._eager = EagerSteps(parts)
        self._policy = PolicyDriver(policy, self.core, draft_probe(parts))
        self._results = ResultCollector(
            max_model_len=self.max_model_len, num_pages=self.plan.num_pages, block_size=self.plan.layout.block_size
        )
        self._progress = EngineProgress(pages_total=self.plan.num_pages - 1)
        self._info: StepInfo | None = None
        self._step_id = _NO_STEP
        self._result = _NOTHING
        self._launched: tuple[StepInfo, float] | None = None  # a step on the device, and the host's seconds for it
        self._row_ends: dict[int, NDArray[np.int64]] = {}
        self._num_rows = 0  # of the last step, for the policy
        self._live: set[int] = set()  # handles that nobody took yet
        self._may_have_finished = False  # since the core was asked last
        self.on_step: Callable[[StepInfo, float], None] | None = None  # profiling hook: shape and seconds of a step

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, batch: RequestBatch) -> None:
        """Queue requests. Raises ValueError (nothing changes) for token ids outside the vocabulary, in the prompt, the
        logit bias or the stop tokens that min_tokens holds back."""
        count = len(batch)
        if count == 0:
            return
        many = [batch.params] * count if isinstance(batch.params, SamplingParams) else list(batch.params)
        if len(batch.prompt_values) and not 0 <= int(batch.prompt_values.min()) <= int(batch.prompt_values.max()) < (
            self.sampling.vocab
        ):
            raise ValueError(f"prompt token ids must be in 0..{self.sampling.vocab - 1}")
        for params in {id(p): p for p in many}.values():
            self.sampling.check(params)
        arrays = core_arrays(batch, many)
        handles = self.core.add_requests(**arrays)
        self.sampling.set(
            handles,
            batch.params if isinstance(batch.params, SamplingParams) else many,
            request_id=batch.request_id,
            prompt_values=batch.prompt_values,
            prompt_offsets=batch.prompt_offsets,
            request_seeds=batch.seeds,
        )
        self._live.update(handles.tolist())
        self._may_have_finished = True  # those that can never run are finished at once
        lengths = np.diff(batch.prompt_offsets).astype(np.int32)
        self._policy.note_added(handles, batch.shard, lengths, arrays["max_tokens"])

    def take_finished(self) -> FinishedRows | None:
        """Rows that ended; their handles are free from then on."""
        if not self._may_have_finished:
            return None
        self._may_have_finished = False
        batch = self.core.take_finished()
        if len(batch) == 0:
            return None
        rows = self._results.collect(batch)
        self.sampling.release(batch.handle)
        self._live.difference_update(batch.handle.tolist())
        self._policy.note_finished(batch)
        return rows

    def abort_all(self) -> None:
        """Drop every unfinished row."""
        self._forget_step()
        for handle in list(self._live):
            self.core.abort(handle)
        self._may_have_finished = True
        self.take_finished()

    def use_policy(self, policy: SpeculationPolicy, max_num_seqs: int | None = None) -> None:
        """Go on under another policy and with another limit of running rows, as if new: for comparisons. Raises ValueError
        while rows are unfinished."""
        if self._live:
            raise ValueError(f"{len(self._live)} rows are unfinished: the policy can be changed between jobs only")
        self._forget_step()
        self.core.clear_prefix_cache()
        self.core.set_speculation(_core.METHOD_NONE, 0)
        self.core.set_shadow_ngram(0)
        self.core.set_score_fewer(False)
        self.core.set_least_acceptance(0.0, 0.0, 0.0)
        self.core.set_max_num_seqs(max_num_seqs or self.plan.max_num_seqs)
        self.core.take_acceptance()
        self._num_rows = 0
        self._policy = PolicyDriver(policy, self.core, draft_probe(self.parts))

    @property
    def num_unfinished(self) -> int:
        """Rows that still run or wait, and those that nobody took yet."""
        return len(self._live)

    # -- the loop --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step. False when there is nothing to run: everything is finished.

        A decode step that graphs serve is only launched: its result is awaited by the next call, so that what the caller
        does in between costs the device nothing.
        """
        try:
            self._settle()
            self.arrays.await_copy()
            probing = self._policy.decide(*self._last_rows())
            self._progress.busy_seconds += probing  # but no part of a step
            start = time.perf_counter()
            info = self._advance()
            if info.kind == _core.STEP_IDLE:
                return False
            self._run(info, start)
        except torch.OutOfMemoryError as error:
            self._forget_step()
            raise OutOfMemory(f"the device ran out of memory with {self._rows_at_work()} rows: {error}") from error
        except RuntimeError as error:
            self._forget_step()
            if "allocate memory" in str(error):  # the CPU allocator's words
                raise OutOfMemory(f"out of memory with {self._rows_at_work()} rows: {error}") from error
            if is_lost(self.plan.device):
                raise DeviceLost(f"{self.plan.device} no longer works: {error}") from error
            raise
        except BaseException as error:
            panic = panic_as_error(error)
            if panic is None:
                self._forget_step()
                raise
            with contextlib.suppress(RuntimeError):  # of a core that refuses every call after its panic
                self._forget_step()
            raise panic from error
        return True

    def _advance(self) -> StepInfo:
        """Give the last step's result to the core and get the next step."""
        token_ids, num_sampled, num_draft = self._result
        info = self.core.step(self._step_id, token_ids, num_sampled, num_draft, self.arrays.core)
        self._no_result()
        self._info = info
        self._may_have_finished |= info.num_finished > 0
        self._step_id = info.step_id if info.kind != _core.STEP_IDLE else _NO_STEP
        return info

    def _run(self, info: StepInfo, start: float) -> None:
        """Do a step, or launch it. `start`: when its work on the host began."""
        if info.kind == _core.STEP_DRAFT_PREFILL:
            self._eager.catch_up(info)
            self._note(info, self._result[1], time.perf_counter() - start, 0.0)
            return
        params = self.sampling.gather(self.arrays.host["seq_index"][: info.num_rows], self._rows)
        if info.kind == _core.STEP_PREFILL:
            self._take(info, self._eager.prefill(info, params), start)
        elif self._graphs is None or not self._graphs.runner.enabled or info.method == _core.METHOD_EXTERNAL:
            self._take(info, self._eager.decode(info, params), start)
        else:
            captured = self._graphs.runner.capture_seconds
            bucket = self._graphs.launch(info, draft=info.method == _core.METHOD_DRAFT)
            if params.any_penalty:
                step = self._graphs.step
                self.sampling.commit(params, step.tokens(bucket), step.num_sampled(bucket))
            captured = self._graphs.runner.capture_seconds - captured
            self._launched = info, time.perf_counter() - start - captured

    def _settle(self) -> None:
        """Take the result of a launched step, if there is one."""
        if self._launched is None:
            return
        assert self._graphs is not None
        info, seconds = self._launched
        self._launched = None
        start = time.perf_counter()
        result = self._graphs.wait()
        outcome = StepOutcome(
            token_ids=result.token_ids,
            num_sampled=np.ascontiguousarray(result.num_sampled),
            num_draft=self.arrays.host["num_draft_tokens"][: info.num_rows],
            logprobs=result.logprobs,
            draft_seconds=result.draft_seconds,
        )
        waited = time.perf_counter() - start
        self._take(info, outcome, time.perf_counter() - seconds - result.seconds)
        self._progress.busy_seconds += waited - result.seconds  # the caller's own work hid the rest

    # -- results ---------------------------------------------------------------------------------------------------

    def _take(self, info: StepInfo, outcome: StepOutcome, start: float) -> None:
        """File what a step found; the core hears of it at the next step."""
        if outcome.logprobs is not None:
            self._note_logprobs(outcome)
        num_sampled = outcome.num_sampled
        # A failed sample ends its row's run: look at each row's last token (of rows without one, at any).
        width = outcome.token_ids.shape[1]
        ends = self._row_ends.get(width)
        if ends is None:  # before the first token of each row
            ends = self._row_ends[width] = np.arange(self.plan.max_num_seqs) * width - 1
        last = outcome.token_ids.ravel().take(ends[: len(num_sampled)] + num_sampled, mode="wrap")
        if last.min(initial=0) < 0:
            self._fail_rows(np.flatnonzero((last < 0) & (num_sampled > 0)))
        # A copy: the array it comes from is refilled by the very call that reads it.
        self._result = outcome.token_ids, num_sampled, outcome.num_draft.copy()
        self._note(info, num_sampled, time.perf_counter() - start, outcome.draft_seconds)

    def _note_logprobs(self, outcome: StepOutcome) -> None:
        assert outcome.logprobs is not None
        host, num_sampled = self.arrays.host, outcome.num_sampled
        handles, starts = host["seq_index"][: len(num_sampled)], host["logits_start_loc"]
        for row in np.flatnonzero(self.sampling.wants_logprobs(handles) & (num_sampled > 0)).tolist():
            handle, begin = int(handles[row]), int(starts[row])
            position = int(host["positions"][host["logits_indices"][begin]])
            values = outcome.logprobs[begin : begin + int(num_sampled[row])].copy()
            self._results.note_logprobs(handle, position + 1 - self.sampling.prompt_len(handle), values)

    def _fail_rows(self, rows: NDArray[np.int64]) -> None:
        for row in rows.tolist():
            handle = int(self.arrays.host["seq_index"][row])
            self._results.note_error(handle, "engine_error", "the model gave no finite logits for the next token")
            self.core.abort(handle)
        self._may_have_finished = True

    def _no_result(self) -> None:
        self._result = _NOTHING

    def _forget_step(self) -> None:
        """The outstanding step is dropped: nothing of it is committed, its pages are as before."""
        self._launched = None
        if self._graphs is not None:
            with contextlib.suppress(RuntimeError):  # of a device that is lost
                self._graphs.drop()
        if self._step_id != _NO_STEP:
            self.core.abort_step(self._step_id)
            self._step_id = _NO_STEP
            self._no_result()

    def _rows_at_work(self) -> int:
        return self._info.num_rows if self._info is not None else 0

    def _last_rows(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        host = self.arrays.host
        return host["seq_index"][: self._num_rows], host["seq_lens"][: self._num_rows]

    def _note(self, info: StepInfo, num_sampled: NDArray[np.int32], seconds: float, draft_seconds: float) -> None:
        self._num_rows = info.num_rows if info.kind != _core.STEP_DRAFT_PREFILL else 0
        draft_rows = int(np.count_nonzero(self.arrays.host["num_draft_tokens"][: info.num_rows]))
        num_draft = self._result[2]
        self._policy.note_step(info, seconds, draft_seconds, draft_rows)
        if info.kind == _core.STEP_DECODE:
            self._policy.note_drafts(info.method, self.arrays.host["seq_index"], num_draft, num_sampled)
        progress = self._progress
        progress.steps += 1
        progress.busy_seconds += seconds
        progress.preemptions += info.num_preempted
        tokens = int(num_sampled.sum())
        progress.completion_tokens += tokens
        if info.kind == _core.STEP_PREFILL:
            progress.prompt_tokens += info.num_tokens
        else:
            progress.drafted += int(num_draft.sum())
            progress.accepted += tokens - len(num_sampled)  # each row commits one token more than it accepts
        progress.running, progress.waiting = info.num_running, info.num_waiting
        progress.pages_used = self.plan.num_pages - 1 - info.free_pages - info.cached_pages
        if self.on_step is not None:
            self.on_step(info, seconds)

    # -- the rest of BatchEngine -----------------------------------------------------------------------------------

    def reduce_batch(self) -> int:
        """Halve the rows that run at once (after OutOfMemory). At 1 already: the running row ends with an error, 0."""
        self._forget_step()
        rows = min(self.core.max_num_seqs, max(self.core.num_running, 1))
        if rows > 1:
            self.core.set_max_num_seqs(rows // 2)
            return rows // 2
        assert self._info is not None
        for handle in self.arrays.host["seq_index"][: self._info.num_rows].tolist():
            self._results.note_error(handle, "out_of_memory", "the device ran out of memory with this row alone")
            self.core.abort(handle)
        self._may_have_finished = True
        return 0

    @property
    def progress(self) -> EngineProgress:
        self._progress.mode = self._policy.mode_names()
        return self._progress

    def describe(self) -> dict[str, Any]:
        return self.parts.describe()

    def close(self) -> None:
        """Free the models and the pages; check that no page was lost."""
        self._forget_step()
        self.core.check_integrity()
        self.parts.free()
