"""Steps run as they come, one operation after the other: prefill, catch-up, and decode where graphs do not serve.

Owns the passes of a step and the fetching of what they sampled. Knows nothing of when a step runs or what becomes of its tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch import _core
from specbatch._core import StepInfo
from specbatch.engine.parts import EngineParts
from specbatch.engine.rejection import verify_coupled, verify_rejection
from specbatch.engine.sampler import draft_prefix, processed_probs, row_of_logit, sample
from specbatch.engine.sampling_state import RowParams
from specbatch.speculators.base import Proposal


@dataclass(slots=True)
class StepOutcome:
    """What a step found for its rows, on the host. Arrays may be views that the next step overwrites."""

    token_ids: NDArray[np.int32]  # [R, w] contiguous; -1: no token could be sampled; past a row's count anything
    num_sampled: NDArray[np.int32]  # [R]
    num_draft: NDArray[np.int32]  # [R] drafts verified
    logprobs: NDArray[np.float32] | None = None  # [L] of the step's logits, as packed
    draft_seconds: float = 0.0


class EagerSteps:
    """Runs the steps of one engine over its parts."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.arrays = parts.arrays

    def catch_up(self, info: StepInfo) -> None:
        """The draft model over committed tokens that it has not seen."""
        assert self.parts.speculator is not None
        self.arrays.to_device(info)
        self.parts.speculator.prefill(info, self.arrays)

    def prefill(self, info: StepInfo, params: RowParams) -> StepOutcome:
        """Chunks of prompts; a token for each row whose prompt is through."""
        arrays, count = self.arrays, info.num_rows
        arrays.to_device(info)
        ids = arrays.device["input_ids"][: info.num_tokens]
        metadata = arrays.metadata(info)
        num_sampled = np.diff(arrays.host["logits_start_loc"][: count + 1])
        outcome = StepOutcome(np.zeros((count, 1), np.int32), num_sampled, np.zeros(count, np.int32))
        if info.num_logits == 0:
            self.parts.runner.forward_hidden(ids, metadata)
            return outcome
        indices = arrays.device["logits_indices"][: info.num_logits]
        runner = self.parts.runner
        if params.is_plain_greedy and runner.can_choose:
            best = runner.greedy(ids, metadata, indices, params.vocab)
            outcome.token_ids[np.flatnonzero(num_sampled), 0] = best.numpy()
            return outcome
        logits = runner.forward(ids, metadata, indices)
        rows = row_of_logit(arrays.device["logits_start_loc"][: count + 1], info.num_logits)
        samples = sample(logits, params, rows, metadata.positions[indices.long()])
        outcome.token_ids[np.flatnonzero(num_sampled), 0] = samples.token_ids.cpu().numpy()
        if params.any_penalty:
            device = ids.device
            tokens, counts = torch.from_numpy(outcome.token_ids), torch.from_numpy(num_sampled)
            self.parts.sampling.commit(params, tokens.to(device), counts.to(device))
        outcome.logprobs = _on_host(samples.logprobs)
        return outcome

    def decode(self, info: StepInfo, params: RowParams) -> StepOutcome:
        """One committed token a row and its drafts: propose, run, verify."""
        arrays, count = self.arrays, info.num_rows
        arrays.to_device(info)
        proposal, draft_seconds = None, 0.0
        if info.method in (_core.METHOD_DRAFT, _core.METHOD_EXTERNAL) and info.num_draft_tokens:
            assert self.parts.speculator is not None
            begin = time.perf_counter()
            proposal = self.parts.speculator.propose(info, arrays, params)
            draft_seconds = time.perf_counter() - begin
        ids = arrays.device["input_ids"][: info.num_tokens]
        metadata = arrays.metadata(info)
        num_draft = proposal.num_draft if proposal else arrays.device["num_draft_tokens"][:count]
        indices, runner = arrays.device["logits_indices"][: info.num_logits], self.parts.runner
        if params.is_plain_greedy and runner.can_choose:
            best = runner.greedy(ids, metadata, indices, params.vocab)
            return self._accept(info, best, num_draft, draft_seconds)
        logits = runner.forward(ids, metadata, indices)
        tokens, num_sampled, logprobs = self._verify(info, logits, params, proposal, num_draft)
        if params.any_penalty:
            self.parts.sampling.commit(params, tokens, num_sampled)
        return StepOutcome(
            token_ids=tokens.cpu().numpy(),
            num_sampled=num_sampled.cpu().numpy(),
            num_draft=num_draft.cpu().numpy() if proposal else arrays.host["num_draft_tokens"][:count],
            logprobs=_on_host(logprobs),
            draft_seconds=draft_seconds,
        )

    def _accept(self, info: StepInfo, best: Tensor, num_draft: Tensor, draft_seconds: float) -> StepOutcome:
        """Coupled verification of greedy rows from their best tokens [T] alone."""
        count = info.num_rows
        if info.num_draft_tokens == 0 and info.num_tokens == count:
            ones = np.ones(count, np.int32)
            return StepOutcome(best.numpy()[:, None], ones, np.zeros(count, np.int32), draft_seconds=draft_seconds)
        host, drafted = self.arrays.host, num_draft.numpy()  # models that choose run on a CPU: host and device are one
        tokens, num_sampled = _core.accept_drafts(
            best.numpy(),
            host["input_ids"][: info.num_tokens],
            host["query_start_loc"][: count + 1],
            drafted,
            info.max_draft_tokens + 1,
        )
        return StepOutcome(tokens, num_sampled, drafted, draft_seconds=draft_seconds)

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


def _on_host(values: Tensor | None) -> NDArray[np.float32] | None:
    return None if values is None else np.asarray(values.float().cpu().numpy())


def _packed_logprobs(logprobs: Tensor, tokens: Tensor, starts: Tensor, num_sampled: Tensor) -> Tensor:
    """Log probabilities [T] of the committed tokens at the packed place they were sampled at."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    packed = (starts[:-1, None].long() + column).clamp(max=logprobs.shape[0] - 1)
    inside = column < num_sampled[:, None]
    result = logprobs.new_zeros(logprobs.shape[0])
    result[packed[inside]] = logprobs[packed[inside], tokens[inside].long()]
    return result
