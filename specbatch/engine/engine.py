"""One device: the step loop. Schedule (Rust), propose, run the target, sample or verify, hand the result back.

Owns the models, their pages and the outstanding step. Knows nothing of Parquet, prompts as text or where results go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch import _core
from specbatch._core import Scheduler, StepInfo
from specbatch.engine.draft_probe import draft_probe
from specbatch.engine.observe import PolicyDriver, SpeculationPolicy
from specbatch.engine.parts import EngineParts
from specbatch.engine.rejection import failed_rows, verify_coupled, verify_rejection
from specbatch.engine.results import ResultCollector
from specbatch.engine.sampler import draft_prefix, processed_probs, row_of_logit, sample
from specbatch.engine.sampling_state import RowParams
from specbatch.errors import OutOfMemory
from specbatch.requests import EngineProgress, FinishedRows, RequestBatch
from specbatch.sampling_params import SamplingParams
from specbatch.speculators.base import Proposal

_NO_STEP = 0


class Engine:
    """A BatchEngine (specbatch.requests) over one target model and, if there is one, a draft model.

    Not thread-safe. `step()` raises OutOfMemory when the device ran out of memory: nothing of that step was committed, and
    after `reduce_batch()` the same rows go on. Any other exception leaves the engine consistent too: the step is
    forgotten and may be tried again.
    """

    def __init__(self, parts: EngineParts, policy: SpeculationPolicy) -> None:
        self.parts = parts
        self.plan = parts.plan
        self.max_model_len = parts.plan.max_model_len
        self.core: Scheduler = parts.core
        self.arrays = parts.arrays
        self.sampling = parts.sampling
        self._rows: RowParams = self.sampling.new_rows(self.plan.max_num_seqs)
        self._policy = PolicyDriver(policy, self.core, draft_probe(parts))
        self._results = ResultCollector(
            max_model_len=self.max_model_len, num_pages=self.plan.num_pages, block_size=self.plan.layout.block_size
        )
        self._progress = EngineProgress(pages_total=self.plan.num_pages - 1)
        self._info: StepInfo | None = None
        self._step_id = _NO_STEP
        self._no_result()
        self._num_rows = 0  # of the last step, for the policy
        self._live: set[int] = set()  # handles that nobody took yet
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
        lengths = np.diff(batch.prompt_offsets).astype(np.int32)
        max_tokens = np.fromiter((p.max_tokens for p in many), np.int32, count)
        handles = self.core.add_requests(
            request_id=batch.request_id,
            shard=np.full(count, batch.shard, np.int32),
            prompt_values=batch.prompt_values,
            prompt_offsets=batch.prompt_offsets,
            max_tokens=max_tokens,
            min_tokens=np.fromiter((p.min_tokens for p in many), np.int32, count),
            ignore_eos=np.fromiter((p.ignore_eos for p in many), np.bool_, count),
            **stop_arrays(many),
        )
        self.sampling.set(
            handles,
            batch.params if isinstance(batch.params, SamplingParams) else many,
            request_id=batch.request_id,
            prompt_values=batch.prompt_values,
            prompt_offsets=batch.prompt_offsets,
            request_seeds=batch.seeds,
        )
        self._live.update(handles.tolist())
        self._policy.note_added(handles, batch.shard, lengths, max_tokens)

    def take_finished(self) -> FinishedRows | None:
        """Rows that ended; their handles are free from then on."""
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
        """Run one step. False when there is nothing to run: everything is finished."""
        start = time.perf_counter()
        probing = self._policy.decide(*self._last_rows())  # counted by the driver, not as part of this step
        self._progress.busy_seconds += probing
        start += probing
        info = self._advance()
        if info.kind == _core.STEP_IDLE:
            return False
        draft_seconds = 0.0
        try:
            if info.kind == _core.STEP_DRAFT_PREFILL:
                self._catch_up(info)
            elif info.kind == _core.STEP_PREFILL:
                self._prefill(info)
            else:
                draft_seconds = self._decode(info)
        except torch.OutOfMemoryError as error:
            self._forget_step()
            raise OutOfMemory(f"the device ran out of memory with {info.num_rows} rows: {error}") from error
        except RuntimeError as error:
            self._forget_step()
            if "allocate memory" in str(error):  # the CPU allocator's words
                raise OutOfMemory(f"out of memory with {info.num_rows} rows: {error}") from error
            raise
        except BaseException:
            self._forget_step()
            raise
        self._note(info, time.perf_counter() - start, draft_seconds)
        return True

    def _advance(self) -> StepInfo:
        """Give the last step's result to the core and get the next step."""
        token_ids, num_sampled, num_draft = self._result
        info = self.core.step(self._step_id, token_ids, num_sampled, num_draft, self.arrays.core)
        self._no_result()
        self._info = info
        self._step_id = info.step_id if info.kind != _core.STEP_IDLE else _NO_STEP
        return info

    def _catch_up(self, info: StepInfo) -> None:
        assert self.parts.speculator is not None
        self.arrays.to_device()
        self.parts.speculator.prefill(info, self.arrays)

    def _prefill(self, info: StepInfo) -> None:
        arrays, count = self.arrays, info.num_rows
        arrays.to_device()
        ids = arrays.device["input_ids"][: info.num_tokens]
        metadata = arrays.metadata(info)
        starts = arrays.host["logits_start_loc"][: count + 1]
        num_sampled = np.diff(starts)
        tokens = np.zeros((count, 1), np.int32)
        if info.num_logits == 0:
            self.parts.runner.forward_hidden(ids, metadata)
        else:
            params = self._gather(count)
            indices = arrays.device["logits_indices"][: info.num_logits]
            logits = self.parts.runner.forward(ids, metadata, indices)
            rows = row_of_logit(arrays.device["logits_start_loc"][: count + 1], info.num_logits)
            samples = sample(logits, params, rows, metadata.positions[indices.long()])
            with_token = np.flatnonzero(num_sampled)
            tokens[with_token, 0] = samples.token_ids.cpu().numpy()
            self._commit(params, tokens, num_sampled, samples.logprobs, starts)
        self._set_result(tokens, num_sampled, np.zeros(count, np.int32))

    def _decode(self, info: StepInfo) -> float:
        """One committed token a row and its drafts: propose, run, verify. Returns the seconds spent proposing."""
        arrays, count = self.arrays, info.num_rows
        arrays.to_device()
        params = self._gather(count)
        proposal, draft_seconds = None, 0.0
        if info.method in (_core.METHOD_DRAFT, _core.METHOD_EXTERNAL) and info.num_draft_tokens:
            assert self.parts.speculator is not None
            begin = time.perf_counter()
            proposal = self.parts.speculator.propose(info, arrays, params)
            draft_seconds = time.perf_counter() - begin
        ids = arrays.device["input_ids"][: info.num_tokens]
        metadata = arrays.metadata(info)
        logits = self.parts.runner.forward(ids, metadata, arrays.device["logits_indices"][: info.num_logits])
        num_draft = proposal.num_draft if proposal else arrays.device["num_draft_tokens"][:count]
        tokens, num_sampled, logprobs = self._verify(info, logits, params, proposal, num_draft)
        tokens_host, num_sampled_host = tokens.cpu().numpy(), num_sampled.cpu().numpy()
        num_draft_host = num_draft.cpu().numpy() if proposal else arrays.host["num_draft_tokens"][:count]
        self._commit(params, tokens_host, num_sampled_host, logprobs, arrays.host["logits_start_loc"][: count + 1])
        self._set_result(np.maximum(tokens_host, 0), num_sampled_host, num_draft_host)
        return draft_seconds

    def _verify(
        self, info: StepInfo, logits: Tensor, params: RowParams, proposal: Proposal | None, num_draft: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Committed tokens [R, width], their number [R] and logprobs of the packed samples."""
        arrays, count = self.arrays, info.num_rows
        ids = arrays.device["input_ids"][: info.num_tokens]
        starts = arrays.device["query_start_loc"][: count + 1]
        positions = arrays.device["positions"][: info.num_tokens]
        width = info.max_draft_tokens + 1
        rows = row_of_logit(starts, info.num_tokens)
        prior = draft_prefix(ids, starts, rows, width) if params.any_penalty and width > 1 else None
        if self.parts.rejection and info.num_draft_tokens and not params.all_greedy:
            probs = processed_probs(logits, params, rows, positions, prior_ids=prior)
            seed = params.seed(torch.arange(count, device=ids.device))
            draft_probs = proposal.probs if proposal else None
            tokens, num_sampled = verify_rejection(probs, draft_probs, ids, starts, num_draft, seed, positions, width)
            logprobs = torch.log_softmax(logits, dim=-1) if params.any_logprobs else None
            if logprobs is not None:
                logprobs = _packed_logprobs(logprobs, tokens, starts, num_sampled)
            return tokens, num_sampled, logprobs
        samples = sample(logits, params, rows, positions, prior_ids=prior)
        tokens, num_sampled = verify_coupled(samples.token_ids, ids, starts, num_draft, width)
        return tokens, num_sampled, samples.logprobs

    # -- between the steps -----------------------------------------------------------------------------------------

    def _gather(self, count: int) -> RowParams:
        return self.sampling.gather(self.arrays.host["seq_index"][:count], self._rows)

    def _commit(
        self,
        params: RowParams,
        tokens: NDArray[np.int32],
        num_sampled: NDArray[np.int32],
        logprobs: Tensor | None,
        starts: NDArray[np.int32],
    ) -> None:
        """Penalty counts, logprobs, and rows whose token could not be sampled."""
        if params.any_penalty:
            device = self.arrays.device["input_ids"].device
            self.sampling.commit(params, torch.from_numpy(tokens).to(device), torch.from_numpy(num_sampled).to(device))
        handles = self.arrays.host["seq_index"]
        if logprobs is not None:
            values, positions = logprobs.float().cpu().numpy(), self.arrays.host["positions"]
            asked = self.sampling.wants_logprobs(handles[: len(num_sampled)]) & (num_sampled > 0)
            for row in np.flatnonzero(asked).tolist():
                handle, begin = int(handles[row]), int(starts[row])
                first = int(positions[self.arrays.host["logits_indices"][begin]]) + 1 - self.sampling.prompt_len(handle)
                self._results.note_logprobs(handle, first, values[begin : begin + int(num_sampled[row])].copy())
        if (tokens < 0).any():
            failed = failed_rows(torch.from_numpy(tokens), torch.from_numpy(num_sampled)).numpy()
            for row in np.flatnonzero(failed).tolist():
                handle = int(handles[row])
                self._results.note_error(handle, "engine_error", "the model gave no finite logits for the next token")
                self.core.abort(handle)

    def _set_result(
        self, tokens: NDArray[np.int32], num_sampled: NDArray[np.int32], num_draft: NDArray[np.int32]
    ) -> None:
        # Copies: the arrays they come from are refilled by the very call that reads them.
        self._result = (np.ascontiguousarray(np.maximum(tokens, 0)), num_sampled.astype(np.int32), num_draft.copy())

    def _no_result(self) -> None:
        self._result = (np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))

    def _forget_step(self) -> None:
        """The outstanding step is dropped: nothing of it is committed, its pages are as before."""
        if self._step_id != _NO_STEP:
            self.core.abort_step(self._step_id)
            self._step_id = _NO_STEP
            self._no_result()

    def _last_rows(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        host = self.arrays.host
        return host["seq_index"][: self._num_rows], host["seq_lens"][: self._num_rows]

    def _note(self, info: StepInfo, seconds: float, draft_seconds: float) -> None:
        self._num_rows = info.num_rows if info.kind != _core.STEP_DRAFT_PREFILL else 0
        draft_rows = int(np.count_nonzero(self.arrays.host["num_draft_tokens"][: info.num_rows]))
        _, num_sampled, num_draft = self._result
        self._policy.note_step(info, seconds, draft_seconds, draft_rows)
        if info.kind == _core.STEP_DECODE:
            self._policy.note_drafts(info.method, self.arrays.host["seq_index"], num_draft, num_sampled)
        progress = self._progress
        progress.steps += 1
        progress.busy_seconds += seconds
        progress.preemptions += info.num_preempted
        progress.completion_tokens += int(num_sampled.sum())
        if info.kind == _core.STEP_PREFILL:
            progress.prompt_tokens += info.num_tokens
        else:
            progress.drafted += int(num_draft.sum())
            progress.accepted += int(np.maximum(num_sampled - 1, 0).sum())
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


def stop_arrays(params: list[SamplingParams]) -> dict[str, Any]:
    """Stop tokens and stop strings of requests as the core takes them (values and offsets); {} when there are none."""
    arrays: dict[str, Any] = {}
    if any(p.stop_token_ids for p in params):
        arrays["stop_token_values"] = np.array([t for p in params for t in p.stop_token_ids], np.int32)
        arrays["stop_token_offsets"] = _offsets(len(p.stop_token_ids) for p in params)
    if any(p.stop for p in params):
        strings = [s.encode() for p in params for s in p.stop]
        arrays["stop_string_values"] = np.frombuffer(b"".join(strings), np.uint8)
        arrays["stop_string_offsets"] = _offsets(len(s) for s in strings)
        arrays["stop_string_rows"] = _offsets(len(p.stop) for p in params)
    return arrays


def _offsets(lengths: Any) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(np.fromiter(lengths, np.int64)))).astype(np.int64)


def _packed_logprobs(logprobs: Tensor, tokens: Tensor, starts: Tensor, num_sampled: Tensor) -> Tensor:
    """Log probabilities [T] of the committed tokens at the packed place they were sampled at."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    packed = (starts[:-1, None].long() + column).clamp(max=logprobs.shape[0] - 1)
    inside = column < num_sampled[:, None]
    result = logprobs.new_zeros(logprobs.shape[0])
    result[packed[inside]] = logprobs[packed[inside], tokens[inside].long()]
    return result
