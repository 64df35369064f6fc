"""Drafting with an independent, smaller model that keeps its keys and values in the draft tenant of the page pool.

Owns the draft's passes of a step: one over the committed tokens it has not seen (1 or 2 a row), then one a further
draft. Which tokens those are, and every page, comes from the scheduler. (Leviathan et al., 2022, arXiv:2211.17192.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specbatch._core import StepInfo
from specbatch.attention.backend import AttentionMetadata
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.sampler import draft_prefix, row_of_logit, sample_draft
from specbatch.engine.sampling_state import RowParams
from specbatch.engine.step_buffers import StepArrays
from specbatch.speculators.base import KVNeed, Proposal

Pass = Callable[[Tensor, AttentionMetadata, Tensor], Tensor]  # ids [T], metadata, indices [L] to logits or tokens [L]


class DraftModelSpeculator:
    """A batched draft model. Rows may ask for different numbers of drafts, and for none."""

    name = "draft"
    kv = KVNeed.DRAFT

    def __init__(self, runner: ModelRunner, block_size: int, *, with_probs: bool = False) -> None:
        """`block_size`: draft tokens a page; `with_probs`: report what drafts were drawn from (rejection verification)."""
        self.runner = runner
        self.block_size = block_size
        self.with_probs = with_probs

    def prefill(self, info: StepInfo, arrays: StepArrays) -> None:
        tokens = info.draft_num_tokens
        self.runner.forward_hidden(arrays.device["draft_input_ids"][:tokens], arrays.metadata(info, draft=True))

    @torch.inference_mode()
    def propose(self, info: StepInfo, arrays: StepArrays, params: RowParams) -> Proposal:
        packed = self.runner.model.packed
        if packed is not None and params.is_plain_greedy and not self.with_probs:
            packed.draft(info, arrays.host, params.vocab)  # on a CPU, where host and device are one
            return Proposal(arrays.device["num_draft_tokens"][: info.num_rows])
        return self.pass_by_pass(info, arrays, params)

    @torch.inference_mode()
    def pass_by_pass(self, info: StepInfo, arrays: StepArrays, params: RowParams) -> Proposal:
        """`propose` with any sampling, on any device."""
        count = info.num_rows
        wanted = arrays.host["num_draft_tokens"][:count]
        rows_host = np.flatnonzero(wanted > 0)
        device = arrays.device["input_ids"].device
        rows = torch.from_numpy(rows_host).to(device)
        starts = arrays.device["query_start_loc"][:count][rows].long()
        width = info.max_draft_tokens + 1
        probs: Tensor | None = None

        # The first pass feeds what each row committed since the draft last saw it; its last token gives draft 1.
        last = arrays.device["draft_query_start_loc"][1 : count + 1][rows].long() - 1
        choose, straight = self._choice(params)
        chosen = choose(
            arrays.device["draft_input_ids"][: info.draft_num_tokens], arrays.metadata(info, draft=True), last
        )
        positions = arrays.device["draft_positions"][last]
        tables = arrays.device["draft_block_tables"]
        for j in range(info.max_draft_tokens):
            if straight:
                drafted, q = chosen, None
            else:
                drafted, q = sample_draft(
                    as_wide_as(chosen, params.vocab),
                    params,
                    rows,
                    positions,
                    prior_ids=self._prior_ids(info, arrays, starts + j, width) if params.any_penalty else None,
                    with_probs=self.with_probs,
                )
            drafted = drafted.clamp(min=0)  # a failed sample is just a poor draft
            arrays.device["input_ids"][starts + 1 + j] = drafted
            if q is not None:
                if probs is None:
                    probs = q.new_zeros((count, info.max_draft_tokens, q.shape[1]))
                probs[rows, j] = q
            if j + 1 == info.max_draft_tokens:
                break
            keep_host = np.flatnonzero(wanted[rows_host] > j + 1)
            if len(keep_host) < len(rows_host):
                rows_host = rows_host[keep_host]
                keep = torch.from_numpy(keep_host).to(device)
                rows, starts, positions, drafted = rows[keep], starts[keep], positions[keep], drafted[keep]
            positions = positions + 1
            chosen = self._one_token(choose, info, drafted, positions, tables[rows], j + 1)
        return Proposal(arrays.device["num_draft_tokens"][:count], probs)

    def _choice(self, params: RowParams) -> tuple[Pass, bool]:
        """How to run the model: to logits, or, where argmax is all that is wanted, straight to the best tokens (true)."""
        runner = self.runner
        if params.is_plain_greedy and not self.with_probs and runner.can_choose:
            return lambda ids, metadata, indices: runner.greedy(ids, metadata, indices, params.vocab), True
        return runner.forward, False

    def _one_token(
        self, choose: Pass, info: StepInfo, ids: Tensor, positions: Tensor, tables: Tensor, ahead: int
    ) -> Tensor:
        """Feed one drafted token a row at `positions`; returns what `choose` makes of it."""
        rows = ids.shape[0]
        page = (positions // self.block_size).long()
        slots = tables.gather(1, page[:, None])[:, 0] * self.block_size + positions % self.block_size
        steps = torch.arange(rows + 1, dtype=torch.int32, device=ids.device)
        metadata = AttentionMetadata(
            query_start_loc=steps,
            seq_lens=positions + 1,
            positions=positions,
            slot_mapping=slots,
            block_tables=tables,
            num_rows=rows,
            num_tokens=rows,
            max_query_len=1,
            max_seq_len=info.draft_max_seq_len + ahead,
        )
        return choose(ids, metadata, steps[:-1])

    def _prior_ids(self, info: StepInfo, arrays: StepArrays, token_index: Tensor, width: int) -> Tensor:
        """Drafts of this step that stand before the next one, for penalties: int32 [rows, width - 1], padded with -1."""
        starts = arrays.device["query_start_loc"][: info.num_rows + 1]
        row_index = row_of_logit(starts, info.num_tokens)
        prefix = draft_prefix(arrays.device["input_ids"][: info.num_tokens], starts, row_index, width)
        return prefix[token_index]


def as_wide_as(logits: Tensor, vocab: int) -> Tensor:
    """A draft with fewer ids than the target never proposes the rest. (More ids are cut by the sampler.)"""
    missing = vocab - logits.shape[1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits
