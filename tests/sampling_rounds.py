"""Draft and verify rounds over a model that is a table: the next token's logits depend on the last token alone.

Small enough that the exact distribution of a whole output is known, and thousands of rows run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.engine.rejection import verify_coupled, verify_rejection
from specbatch.engine.sampler import draft_prefix, processed_probs, row_of_logit, sample, sample_draft
from specbatch.engine.sampling_state import RowParams, SamplingState
from specbatch.sampling_params import SamplingParams

START = 0  # the one prompt token of every row


def random_table(vocab: int, seed: int, spread: float = 1.5) -> Tensor:
    """Logits float32 [vocab, vocab]: row t follows token t."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@dataclass
class Rounds:
    """A target, a draft and how they work together. The last four fields are where a twin can be broken."""

    target: Tensor
    draft: Tensor | None = None  # None: no drafts (k = 0), or `propose`
    k: int = 0
    method: str = "coupled"
    static: bool = False
    propose: Callable[[Tensor], Tensor] | None = None  # last tokens [n] -> drafts without probabilities [n, k]
    draw_from: Tensor | None = None  # drafts are drawn from this table, the other one is reported
    noise_position: Callable[[Tensor], Tensor] = lambda position: position
    accepts: Callable[[Tensor, Tensor], Tensor] | None = None  # (drafts, target samples) [n, k] -> accepted
    with_prior: bool = True

    def run(
        self,
        params: SamplingParams | list[SamplingParams],
        rows: int,
        length: int,
        *,
        request_id: NDArray[np.int64] | None = None,
        run_seed: int = 0,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [rows, length] and the drafts accepted in each row's first round [rows]."""
        state = SamplingState(rows, self.target.shape[0], run_seed=run_seed)
        handles = np.arange(rows, dtype=np.int32)
        state.set(
            handles,
            params,
            request_id=np.arange(rows) if request_id is None else request_id,
            prompt_values=np.full(rows, START, np.int32),
            prompt_offsets=np.arange(rows + 1),
        )
        buffers = state.new_rows(rows)
        tokens = torch.full((rows, length + self.k + 1), START, dtype=torch.int32)
        count = torch.zeros(rows, dtype=torch.int64)  # committed output tokens
        first_accepted: Tensor | None = None
        while int(count.min()) < length:
            live = (count < length).nonzero()[:, 0]
            gathered = state.gather(live.numpy().astype(np.int32), buffers)
            last = torch.where(count[live] > 0, tokens[live, (count[live] - 1).clamp(min=0)], START)
            committed, num_sampled = self._round(gathered, last, count[live].to(torch.int32))
            state.commit(gathered, committed, num_sampled)
            if first_accepted is None:
                first_accepted = num_sampled - 1
            for column in range(self.k + 1):
                takes = column < num_sampled
                tokens[live[takes], count[live[takes]] + column] = committed[takes, column]
            count[live] += num_sampled
        assert first_accepted is not None
        return tokens[:, :length].numpy().astype(np.int64), first_accepted.numpy()

    def _round(self, params: RowParams, last: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = len(last), self.k + 1
        ids = torch.zeros((rows, width), dtype=torch.int32)
        ids[:, 0] = last
        row = torch.arange(rows)
        probs = []
        for j in range(self.k if self.draft is not None else 0):
            assert self.draft is not None
            at = (
                self.draft[ids[:, j].long()],
                params,
                row,
                self.noise_position(position + j),
            )
            prior = ids[:, 1 : j + 1] if self.with_prior else None
            drafted, q = sample_draft(
                *at, prior_ids=prior, with_probs=self.method == "rejection", static=self.static or None
            )
            if self.draw_from is not None:
                drafted, _ = sample_draft(self.draw_from[ids[:, j].long()], *at[1:], prior_ids=prior, with_probs=True)
            ids[:, j + 1] = drafted
            probs.append(q)
        if self.propose is not None:
            ids[:, 1:] = self.propose(last)
        starts = torch.arange(0, rows * width + 1, width, dtype=torch.int32)
        num_draft = torch.full((rows,), self.k, dtype=torch.int32)
        packed = ids.flatten()
        row_index = row_of_logit(starts, len(packed))
        positions = (position[:, None] + torch.arange(width, dtype=torch.int32)).flatten()
        prior = draft_prefix(packed, starts, row_index, width) if self.with_prior else None
        logits = self.target[packed.long()]
        if self.method == "rejection":
            p = processed_probs(logits, params, row_index, positions, prior_ids=prior)
            q = torch.stack([q for q in probs if q is not None], dim=1) if probs else None
            return verify_rejection(p, q, packed, starts, num_draft, params.seed(row), positions, width)
        sampled = sample(
            logits,
            params,
            row_index,
            self.noise_position(positions),
            prior_ids=prior,
            static=self.static or None,
        ).token_ids
        if self.accepts is None:
            return verify_coupled(sampled, packed, starts, num_draft, width)
        samples, drafts = sampled.view(rows, width), ids[:, 1:]
        accepted = self.accepts(drafts, samples[:, :-1]).to(torch.int32).cumprod(dim=1).sum(dim=1, keepdim=True)
        column = torch.arange(width)
        shifted = torch.cat((drafts, torch.zeros((rows, 1), dtype=torch.int32)), dim=1)
        committed = torch.where(column < accepted, shifted, samples)
        return committed, (accepted[:, 0] + 1).to(torch.int32)


def reference_probs(logits: Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """Softmax of logits [n, vocab] after temperature, top-k, top-p and min-p, in float64 and one row at a time."""
    result = []
    for row in logits.double().numpy():
        scaled = row / params.temperature
        kept = np.ones(len(row), bool)
        if params.top_k:
            kept &= scaled >= np.sort(scaled)[::-1][: params.top_k][-1]
        if params.top_p < 1:
            weight = np.where(kept, np.exp(scaled - scaled.max()), 0)
            weight /= weight.sum()
            kept &= np.array([weight[weight > w].sum() < params.top_p for w in weight])
        weight = np.where(kept, np.exp(scaled - scaled.max()), 0)
        kept &= weight >= params.min_p * weight.max()
        weight = np.where(kept, weight, 0)
        result.append(weight / weight.sum())
    return np.array(result)


def exact_joint(target: Tensor, params: SamplingParams, length: int) -> NDArray[np.float64]:
    """Probability of every output of `length` tokens, shape (vocab,) * length."""
    step = reference_probs(target, params)
    joint = step[START]
    for _ in range(length - 1):
        joint = joint[..., None] * step
    return joint
