"""One request's sampling parameters as a packed row of 32-bit columns, and the rows of a step as tensors.

Knows the layout, not where rows come from: `sampling_state` keeps them by handle and fills these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.sampling_params import SamplingParams

# Columns of a packed row: 32 bits each, floats stored as their bits.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
TOP_K, SEED_LOW, SEED_HIGH, PENALTY_SLOT, BIAS_SLOT, PROMPT_LEN = range(6, 12)
NUM_COLUMNS = 12

# What a row asks for beyond argmax (host only).
SAMPLED, TRUNCATED, PENALISED, BIASED, LOGPROBS = 1, 2, 4, 8, 16

_LOWEST_TEMPERATURE = 1e-5  # keeps scaled logits finite; colder than this is an argmax in any case


@dataclass(slots=True)
class Tables:
    """What rows point into by slot; owned by the SamplingState. Addresses change when its `generation` does."""

    output_counts: Tensor  # [slots, vocab] int32: committed output tokens
    prompt_seen: Tensor  # [slots, vocab] bool
    seen_ids: Tensor  # [slots, H] int32: prompt tokens, then committed ones, repeats included; padded with 0
    num_seen: Tensor  # [slots, 1] int32: how many of them are in use
    bias_ids: Tensor  # [slots, W] int32, padded with 0
    bias_values: Tensor  # [slots, W] float32, padded with 0
    bias_until: Tensor  # [slots, W] int32: the entry holds while fewer output tokens than this are out

    @classmethod
    def empty(cls, vocab: int, device: torch.device) -> Tables:
        """Only the null slot."""

        def zeros(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((1, columns), dtype=dtype, device=device)

        return cls(
            output_counts=zeros(vocab, torch.int32),
            prompt_seen=zeros(vocab, torch.bool),
            seen_ids=zeros(1, torch.int32),
            num_seen=zeros(1, torch.int32),
            bias_ids=zeros(1, torch.int32),
            bias_values=zeros(1, torch.float32),
            bias_until=zeros(1, torch.int32),
        )


@dataclass(slots=True)
class RowParams:
    """Sampling parameters of one step's rows: [R] device tensors (views of one buffer, never moved) and host flags.

    The flags are exact for the rows in use, so a step that needs nothing but argmax is known before it is launched.
    """

    packed: Tensor  # [R, 12] int32: the buffer that the following view
    temperature: Tensor  # [R] float32; 0 is greedy
    top_p: Tensor  # [R] float32; 1: off
    min_p: Tensor  # [R] float32; 0: off
    repetition_penalty: Tensor  # [R] float32; 1: off
    presence_penalty: Tensor  # [R] float32; 0: off
    frequency_penalty: Tensor  # [R] float32; 0: off
    top_k: Tensor  # [R] int32; 0: off
    seed_low: Tensor  # [R] int32
    seed_high: Tensor  # [R] int32
    penalty_slot: Tensor  # [R] int32 into output_counts and prompt_seen; 0: none
    bias_slot: Tensor  # [R] int32 into the bias tables; 0: none
    prompt_len: Tensor  # [R] int32
    tables: Tables
    host: NDArray[np.int32]  # [R, 12] what was copied to the device
    num_rows: int = 0
    kind: int = 0  # what the rows in use ask for beyond argmax, as bits; the key of a captured graph
    gathered: object = None  # whose parameters these are

    @property
    def vocab(self) -> int:
        return self.tables.output_counts.shape[1]

    @property
    def is_plain_greedy(self) -> bool:
        """Argmax of the raw logits is the answer; the tensors may be those of an earlier step then."""
        return self.kind == 0

    @property
    def all_greedy(self) -> bool:
        """No row has a temperature."""
        return not self.kind & SAMPLED

    @property
    def any_top_k_p(self) -> bool:
        """Some sampled row has top-k, top-p or min-p."""
        return bool(self.kind & TRUNCATED)

    @property
    def any_penalty(self) -> bool:
        return bool(self.kind & PENALISED)

    @property
    def any_bias(self) -> bool:
        """Some row has a logit bias, or min_tokens (a bias of minus infinity on its stop tokens)."""
        return bool(self.kind & BIASED)

    @property
    def any_logprobs(self) -> bool:
        return bool(self.kind & LOGPROBS)

    def seed(self, row_index: Tensor) -> Tensor:
        """Int64 seeds of the given rows."""
        low = self.seed_low[row_index].to(torch.int64) & 0xFFFFFFFF
        return (self.seed_high[row_index].to(torch.int64) << 32) | low


def rows_over(packed: Tensor, host: NDArray[np.int32], tables: Tables) -> RowParams:
    """The columns of packed rows [R, 12] as views of their own types."""
    floats = packed.view(torch.float32)
    return RowParams(
        packed=packed,
        temperature=floats[:, TEMPERATURE],
        top_p=floats[:, TOP_P],
        min_p=floats[:, MIN_P],
        repetition_penalty=floats[:, REPETITION],
        presence_penalty=floats[:, PRESENCE],
        frequency_penalty=floats[:, FREQUENCY],
        top_k=packed[:, TOP_K],
        seed_low=packed[:, SEED_LOW],
        seed_high=packed[:, SEED_HIGH],
        penalty_slot=packed[:, PENALTY_SLOT],
        bias_slot=packed[:, BIAS_SLOT],
        prompt_len=packed[:, PROMPT_LEN],
        tables=tables,
        host=host,
    )


def packed_rows(params: Sequence[SamplingParams], vocab: int) -> NDArray[np.int32]:
    """One packed row [n, 12] for each; slots, seeds and prompt lengths are left 0."""
    rows = np.zeros((len(params), NUM_COLUMNS), np.int32)
    # A truncation cannot change an argmax: greedy rows have none.
    rows[:, : FREQUENCY + 1] = np.array(
        [
            (
                0.0 if p.is_greedy else max(p.temperature, _LOWEST_TEMPERATURE),
                1.0 if p.is_greedy else p.top_p,
                0.0 if p.is_greedy else p.min_p,
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
            for p in params
        ],
        np.float32,
    ).view(np.int32)
    rows[:, TOP_K] = [0 if p.is_greedy or p.top_k >= vocab else p.top_k for p in params]
    return rows


def null_row() -> NDArray[np.int32]:
    [row] = packed_rows([SamplingParams()], 1)
    return np.asarray(row, np.int32)


def kind_of(params: SamplingParams) -> int:
    """What a request asks for beyond argmax, its bias left out."""
    truncated = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return (
        (SAMPLED if not params.is_greedy else 0)
        | (TRUNCATED if truncated and not params.is_greedy else 0)
        | (PENALISED if params.has_penalties else 0)
        | (LOGPROBS if params.logprobs else 0)
    )
