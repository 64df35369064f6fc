"""What comes before and around the choice: bias, penalties, held-back stop tokens, truncation, argmax.

Pure functions of packed logits [L, vocab] and the rows they belong to; knows nothing of random numbers. Static shapes
and no host sync.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specbatch.engine.row_params import RowParams


def adjust_logits(
    logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, prior_ids: Tensor | None = None
) -> Tensor:
    """Bias, penalties and stop tokens that min_tokens holds back: new logits, or the same tensor when no row has any.

    row_index int64 [L], positions [L] of the tokens that the logits came from, prior_ids as in `sampler.sample`.
    """
    if rows.any_bias:
        logits = _apply_bias(logits, rows, row_index, positions)
    if rows.any_penalty:
        logits = _apply_penalties(logits, rows, row_index, prior_ids)
    return logits


def _apply_bias(logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor) -> Tensor:
    slot = rows.bias_slot[row_index]
    output_index = positions + 1 - rows.prompt_len[row_index]
    holds = output_index[:, None] < rows.tables.bias_until[slot]
    values = torch.where(holds, rows.tables.bias_values[slot], 0.0)
    return logits.scatter_add(1, rows.tables.bias_ids[slot].to(torch.int64), values)


def _apply_penalties(logits: Tensor, rows: RowParams, row_index: Tensor, prior_ids: Tensor | None) -> Tensor:
    """Only tokens that a row has seen change: their new values are computed, however often listed, and put back."""
    tables, slot = rows.tables, rows.penalty_slot[row_index].to(torch.int64)[:, None]
    ids = tables.seen_ids[slot[:, 0]]
    if prior_ids is not None:
        ids = torch.cat((ids, prior_ids.clamp(0, rows.vocab - 1)), dim=1)
    index = ids.to(torch.int64)
    counts = tables.output_counts[slot, index]
    if prior_ids is not None:
        for column in prior_ids.unbind(dim=1):
            counts = counts + (ids == column[:, None])
    present = counts > 0
    values = logits.gather(1, index)
    repetition = rows.repetition_penalty[row_index][:, None]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(present | tables.prompt_seen[slot, index], repeated, values)
    values = values - counts * rows.frequency_penalty[row_index][:, None]
    values = values - present * rows.presence_penalty[row_index][:, None]
    return logits.scatter(1, index, values)


def argmax_finite(scores: Tensor) -> Tensor:
    """Lowest index of the largest value, int32 [L]; -1 where that value is NaN or infinite."""
    if type(scores) is Tensor and scores.device.type == "cpu" and scores.dtype == torch.float32:
        # NOTE: numpy's is several times faster than torch's here, with the same order: first NaN, first largest.
        indices = torch.from_numpy(np.argmax(scores.detach().numpy(), axis=-1))
        values = scores.gather(1, indices[:, None])[:, 0]
    else:
        values, indices = scores.max(dim=-1)
    return torch.where(torch.isfinite(values), indices, -1).to(torch.int32)


def temperature_of(rows: RowParams, row_index: Tensor) -> Tensor:
    """Float32 [L, 1] to divide by: 1 for greedy rows."""
    temperature = rows.temperature[row_index]
    return torch.where(temperature > 0, temperature, 1.0)[:, None]


def truncate(scaled: Tensor, rows: RowParams, row_index: Tensor) -> Tensor:
    """Minus infinity where top-k, top-p or min-p drop a token; scaled: logits [L, vocab] over the temperature."""
    if not rows.any_top_k_p:
        return scaled
    ordered = torch.sort(scaled, dim=-1, descending=True).values
    floor = truncation_floor(ordered, exp_sum(scaled, ordered[:, :1]), *truncations(rows, row_index))
    return scaled.masked_fill(scaled < floor[:, None], -torch.inf)


def truncations(rows: RowParams, row_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """top_k, top_p and min_p [L]."""
    return rows.top_k[row_index], rows.top_p[row_index], rows.min_p[row_index]


def exp_sum(scaled: Tensor, largest_logit: Tensor) -> Tensor:
    """Sum of exp(logit - largest) [L]."""
    return (scaled - largest_logit).exp_().sum(dim=-1)


def truncation_floor(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest scaled logit [n] that is kept, given enough of the largest ones.

    ordered [n, C]: the C largest, descending; total [n]: `exp_sum` over all of the vocabulary. The result is right
    where it is above ordered[:, -1], or C is the vocabulary; else more is needed. top_k is 0 or below the vocabulary.
    Top-k keeps what equals the k-th largest. Top-p works on what top-k left, and keeps a token while the tokens above
    it weigh less than top_p of that.
    """
    width = ordered.shape[1]
    largest_logit = ordered[:, :1]
    kth = top_k.clamp(1, width).to(torch.int64)[:, None] - 1
    floor_k = torch.where((top_k > 0)[:, None], ordered.gather(1, kth), -torch.inf)
    kept = ordered >= floor_k
    weight = (ordered - largest_logit).exp_() * kept
    cumulative = weight.cumsum(dim=-1)
    whole = torch.where(top_k > 0, cumulative[:, -1], total)[:, None]
    nucleus = kept & ((cumulative - weight) < top_p[:, None] * whole)
    last = nucleus.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    floor_p = torch.where((top_p < 1)[:, None], ordered.gather(1, last), floor_k)
    floor_m = largest_logit + min_p.log()[:, None]
    enough = (top_k <= width)[:, None]
    return torch.where(enough, torch.maximum(floor_p, floor_m), -torch.inf)[:, 0]
