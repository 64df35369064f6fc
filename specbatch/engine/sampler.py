"""Logits to token ids: processing, greedy choice and keyed Gumbel sampling of packed logits [L, vocab].

Knows nothing of drafts, KV or scheduling: a logit belongs to a row and stands at a position, no more. Two ways
compute the same: a static one (any device, fixed shapes, no host sync: fit for a CUDA graph) and, on a CPU, one
that works row group by row group and only on the candidates that top-k, top-p or min-p may leave.

Order of processing: logit bias; repetition, then presence and frequency penalties; stop tokens held back by
min_tokens; temperature; top-k, top-p and min-p, each over what the one before left. A truncation keeps or drops equal
logits together, so it does not depend on any order of the vocabulary. Greedy ties go to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbatch.engine.rng import Purpose, gumbel_at, stream_keys
from specbatch.engine.sampling_state import RowParams

_CHUNK = 8  # rows of noise made at once on a CPU: what fits its cache


@dataclass(slots=True)
class Samples:
    """Sampled tokens of L logits."""

    token_ids: Tensor  # [L] int32; -1 where no token can be chosen (NaN or infinite logits, or none left)
    logprobs: Tensor | None = None  # [L] float32: log-softmax of the model's own, unprocessed logits at token_ids


def row_of_logit(start_loc: Tensor, num_logits: int) -> Tensor:
    """Row int64 [num_logits] of each packed logit, from start locations int32 [R + 1]; padding gets the last row."""
    index = torch.arange(num_logits, dtype=start_loc.dtype, device=start_loc.device)
    last = start_loc.shape[0] - 2
    return torch.searchsorted(start_loc[1:].contiguous(), index, right=True).clamp_(max=last)


def draft_prefix(input_ids: Tensor, query_start_loc: Tensor, row_index: Tensor, width: int) -> Tensor:
    """The row's own drafts that stand before each packed token: int32 [T, width - 1], padded with -1.

    Token j of a decode row (0 is the last committed one, counted already) has drafts 1..j behind it, itself included:
    the logits at j come after all of them. input_ids [T], row_index int64 [T] from `row_of_logit`; width is
    the most tokens a row may have.
    """
    start = query_start_loc[:-1].to(torch.int64)[row_index][:, None]
    token = torch.arange(input_ids.shape[0], device=input_ids.device)[:, None]
    source = start + 1 + torch.arange(width - 1, device=input_ids.device)
    ids = input_ids[source.clamp(max=input_ids.shape[0] - 1)]
    return torch.where(source <= token, ids, -1)


def tree_prefix(input_ids: Tensor, query_start_loc: Tensor, row_index: Tensor, parents: Tensor, width: int) -> Tensor:
    """As `draft_prefix` for trees: the ancestors of each node, itself included, without the root.

    parents int32 [T]: index of a node's parent within its row, -1 for the root; width: most nodes from root to leaf.
    """
    start = query_start_loc[:-1].to(torch.int64)[row_index]
    node = torch.arange(input_ids.shape[0], device=input_ids.device)
    columns = []
    for _ in range(width - 1):
        parent = parents[node].to(torch.int64)
        inside = parent >= 0
        columns.append(torch.where(inside, input_ids[node], -1))
        node = torch.where(inside, start + parent, node)
    if not columns:
        return input_ids.new_zeros((input_ids.shape[0], 0))
    return torch.stack(columns, dim=1)


def sample(
    logits: Tensor,
    rows: RowParams,
    row_index: Tensor,
    positions: Tensor,
    *,
    prior_ids: Tensor | None = None,
    purpose: Purpose = Purpose.SAMPLE,
    static: bool | None = None,
) -> Samples:
    """One token for each of L logits; the logits are left as they are.

    logits float32 [L, >= vocab] (columns past the vocabulary are padding of the model's head and never chosen),
    row_index int64 [L] into `rows`, positions [L]: of the token that the logits came from. The token
    chosen stands at positions + 1, and that keys its noise, so no batch, draft or preemption changes it.
    prior_ids int32 [L, W], padded with -1: tokens between the committed ones and each logit, counted by
    penalties (`draft_prefix`). static: None takes the data-dependent way on a CPU only.
    """
    logits = logits[:, : rows.vocab]
    if rows.is_plain_greedy:
        return Samples(_argmax(logits))
    if logits.dtype != torch.float32:
        logits = logits.float()
    if static is None:
        static = logits.device.type != "cpu"
    adjusted = adjust_logits(logits, rows, row_index, positions, prior_ids)
    if rows.all_greedy:
        token_ids = _argmax(adjusted)
    elif static:
        token_ids = _sample_static(adjusted, rows, row_index, positions, purpose)
    else:
        token_ids = _sample_grouped(adjusted, rows, row_index, positions, purpose)
    if not rows.any_logprobs:
        return Samples(token_ids)
    chosen = logits.gather(1, token_ids.clamp(min=0).to(torch.int64)[:, None])[:, 0]
    return Samples(token_ids, chosen - torch.logsumexp(logits, dim=-1))


def sample_draft(
    logits: Tensor,
    rows: RowParams,
    row_index: Tensor,
    positions: Tensor,
    *,
    prior_ids: Tensor | None = None,
    with_probs: bool = False,
    static: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A draft model's proposal: token ids int32 [L] and, with_probs, what they were drawn from (float32 [L, vocab]).

    Without probabilities it is for coupled verification and draws with the target's own noise of that position
    (Gumbel coupling, Daliri et al., 2024, arXiv:2408.07978): where the two distributions agree, so do the tokens.
    With them it is for rejection verification and draws with noise of its own. Arguments as in `sample`.
    """
    if not with_probs:
        coupled = sample(logits, rows, row_index, positions, prior_ids=prior_ids, static=static)
        return coupled.token_ids, None
    probs = processed_probs(logits, rows, row_index, positions, prior_ids=prior_ids)
    keys = stream_keys(rows.seed(row_index), positions + 1, Purpose.DRAFT)
    return sample_probs(probs, keys), probs


def processed_probs(
    logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, *, prior_ids: Tensor | None = None
) -> Tensor:
    """What `sample` draws from: float32 [L, vocab], one-hot for greedy rows. Static. Arguments as in `sample`."""
    logits = logits[:, : rows.vocab].float()
    scaled = adjust_logits(logits, rows, row_index, positions, prior_ids)
    greedy = rows.temperature[row_index] == 0
    if not rows.all_greedy:
        scaled = _truncate(scaled / _temperature(rows, row_index)[:, None], rows, row_index)
    one_hot = torch.zeros_like(scaled).scatter_(1, scaled.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], one_hot, torch.softmax(scaled, dim=-1))


def sample_probs(probs: Tensor, keys: Tensor) -> Tensor:
    """One token int32 [n] from each row of weights [n, vocab] (any positive sum), with the noise of keys [4, n]."""
    index = torch.arange(probs.shape[1], dtype=torch.int32, device=probs.device)
    return _argmax(gumbel_at(keys, index).add_(probs.log()))


# -- processing ------------------------------------------------------------------------------------------------------


def adjust_logits(
    logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, prior_ids: Tensor | None = None
) -> Tensor:
    """Bias, penalties and held-back stop tokens: new logits [L, vocab], or the same tensor when no row has any."""
    if rows.any_bias:
        logits = _apply_bias(logits, rows, row_index, positions)
    if rows.any_penalty:
        logits = _apply_penalties(logits, rows, row_index, prior_ids)
    return logits


def _apply_bias(logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor) -> Tensor:
    slot = rows.bias_slot[row_index]
    output_index = positions + 1 - rows.prompt_len[row_index]
    holds = output_index[:, None] < rows.bias_until[slot]
    values = torch.where(holds, rows.bias_values[slot], 0.0)
    return logits.scatter_add(1, rows.bias_ids[slot].to(torch.int64), values)


def _apply_penalties(logits: Tensor, rows: RowParams, row_index: Tensor, prior_ids: Tensor | None) -> Tensor:
    slot = rows.penalty_slot[row_index]
    counts = rows.output_counts[slot]
    if prior_ids is not None:
        inside = ((prior_ids >= 0) & (slot > 0)[:, None]).to(torch.int32)
        counts = counts.scatter_add(1, prior_ids.clamp(0, rows.vocab - 1).to(torch.int64), inside)
    present = counts > 0
    repetition = rows.repetition_penalty[row_index][:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(present | rows.prompt_seen[slot], repeated, logits)
    logits = logits - counts * rows.frequency_penalty[row_index][:, None]
    return logits - present * rows.presence_penalty[row_index][:, None]


def _temperature(rows: RowParams, row_index: Tensor) -> Tensor:
    """[L] float32 with 1 for greedy rows."""
    temperature = rows.temperature[row_index]
    return torch.where(temperature > 0, temperature, 1.0)


def _truncate(scaled: Tensor, rows: RowParams, row_index: Tensor) -> Tensor:
    """Minus infinity where top-k, top-p or min-p drop a token of the scaled logits [L, vocab]. Static."""
    if not rows.any_top_k_p:
        return scaled
    ordered = torch.sort(scaled, dim=-1, descending=True).values
    total = torch.exp(scaled - ordered[:, :1]).sum(dim=-1)
    floor = _floor(ordered, total, rows.top_k[row_index], rows.top_p[row_index], rows.min_p[row_index])
    return scaled.masked_fill(scaled < floor[:, None], -torch.inf)


def _floor(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit [n] that the truncations keep.

    ordered [n, C]: the C largest scaled logits, descending; total [n]: sum of exp(logit - largest) of
    all of them. A token stays in the nucleus while the tokens strictly above it weigh less than top_p.
    """
    largest = ordered[:, :1]
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    last = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp(max=ordered.shape[1]).to(torch.int64)[:, None] - 1
    floor_k = torch.where(top_k[:, None] > 0, ordered.gather(1, last), -torch.inf)
    weight = torch.exp(ordered - largest).masked_fill_(ordered < floor_k, 0.0)
    above = torch.cumsum(weight, dim=-1)
    total = torch.where(top_k > 0, above[:, -1], total)[:, None]
    in_nucleus = ((above - weight) < top_p[:, None] * total) | (top_p >= 1)[:, None]
    in_nucleus &= ordered >= floor_k
    last = torch.where(in_nucleus, rank, 0).amax(dim=-1, keepdim=True)
    floor_p = ordered.gather(1, last)
    floor = torch.where((top_p < 1)[:, None], floor_p, floor_k)
    return torch.maximum(floor, largest + torch.log(min_p)[:, None])[:, 0]


# -- choice ----------------------------------------------------------------------------------------------------------


def _argmax(scores: Tensor) -> Tensor:
    """Lowest index of the largest value, int32 [L]; -1 where that value is NaN or infinite."""
    if type(scores) is Tensor and scores.device.type == "cpu" and scores.dtype == torch.float32:
        indices = torch.from_numpy(np.argmax(scores.detach().numpy(), axis=-1))  # several times faster than torch's
        values = scores.gather(1, indices[:, None])[:, 0]
    else:
        values, indices = scores.max(dim=-1)
    return torch.where(torch.isfinite(values), indices, -1).to(torch.int32)


def _sample_static(
    adjusted: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, purpose: Purpose
) -> Tensor:
    scores = _truncate(adjusted / _temperature(rows, row_index)[:, None], rows, row_index)
    keys = stream_keys(rows.seed(row_index), positions + 1, purpose)
    noise = gumbel_at(keys, torch.arange(rows.vocab, dtype=torch.int32, device=scores.device))
    greedy = rows.temperature[row_index] == 0
    return _argmax(torch.where(greedy[:, None], adjusted, scores + noise))


def _sample_grouped(
    adjusted: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, purpose: Purpose
) -> Tensor:
    return _sample_static(adjusted, rows, row_index, positions, purpose)
