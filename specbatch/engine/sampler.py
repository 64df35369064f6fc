"""Logits to token ids: greedy choice and keyed Gumbel sampling over packed logits [L, vocab].

Knows nothing of drafts, KV or scheduling: a logit belongs to a row and stands at a position, no more. Two ways
choose the same tokens: a static one (any device, fixed shapes, no host sync: fit for a CUDA graph), and on a CPU
one that treats greedy, truncated and open rows apart (`sampler_cpu`).

Order of processing: logit bias; repetition, then presence and frequency penalties; stop tokens held back by
min_tokens; temperature; top-k, top-p and min-p, each over what the one before left. A truncation keeps or drops equal
logits together, so nothing hangs on the order of the vocabulary. Ties of the choice itself go to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.engine.logits import adjust_logits, argmax_finite, temperature_of, truncate
from specbatch.engine.rng import Purpose, gumbel_at, stream_keys
from specbatch.engine.row_params import RowParams
from specbatch.engine.sampler_cpu import choose_by_group

_PART_ELEMENTS = 1 << 26  # logits that are worked on at once where shapes are fixed: 256 MiB


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
    """The row's own drafts that stand before each packed token's logits: int32 [T, width - 1], padded with -1.

    Token 0 of a decode row is the last committed one, counted already; the logits at token j come after drafts 1..j.
    input_ids [T], row_index int64 [T] from `row_of_logit`; width: the most tokens a row may have.
    """
    start = query_start_loc[:-1].to(torch.int64)[row_index][:, None]
    token = torch.arange(input_ids.shape[0], device=input_ids.device)[:, None]
    source = start + 1 + torch.arange(width - 1, device=input_ids.device)
    ids = input_ids[source.clamp(max=input_ids.shape[0] - 1)]
    return torch.where(source <= token, ids, -1)


def tree_prefix(input_ids: Tensor, query_start_loc: Tensor, row_index: Tensor, parents: Tensor, width: int) -> Tensor:
    """As `draft_prefix` for trees: each node and its ancestors, without the root; in no order that matters.

    parents int32 [T]: index of a node's parent within its row, -1 for the root; width: most nodes from root to leaf.
    """
    start = query_start_loc[:-1].to(torch.int64)[row_index]
    node = torch.arange(input_ids.shape[0], device=input_ids.device)
    prefix = input_ids.new_full((input_ids.shape[0], width - 1), -1)
    for column in range(width - 1):
        parent = parents[node].to(torch.int64)
        prefix[:, column] = torch.where(parent >= 0, input_ids[node], -1)
        node = torch.where(parent >= 0, start + parent, node)
    return prefix


def sample(
    logits: Tensor,
    rows: RowParams,
    row_index: Tensor,
    positions: Tensor,
    *,
    prior_ids: Tensor | None = None,
    static: bool | None = None,
) -> Samples:
    """One token for each of L logits; the logits are left as they are.

    logits [L, >= vocab] (columns past the vocabulary are padding of the model's head and never chosen),
    row_index int64 [L] into `rows`, positions [L]: of the token that the logits came from. The token
    chosen stands at positions + 1, and that keys its noise, so no batch, draft or preemption changes it.
    prior_ids int32 [L, W], padded with -1: tokens between the committed ones and each logit, for
    penalties (`draft_prefix`). static: None takes the data-dependent way on a CPU and only there.
    """
    logits = logits[:, : rows.vocab]
    if rows.is_plain_greedy:
        return Samples(argmax_finite(logits))
    logits = logits.float()
    if static is None:
        static = logits.device.type != "cpu"
    choose = _choose_in_parts if static else choose_by_group
    token_ids = choose(logits, rows, row_index, positions, prior_ids)
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
        return sample(logits, rows, row_index, positions, prior_ids=prior_ids, static=static).token_ids, None
    probs = processed_probs(logits, rows, row_index, positions, prior_ids=prior_ids)
    return sample_probs(probs, stream_keys(rows.seed(row_index), positions + 1, Purpose.DRAFT)), probs


def processed_probs(
    logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, *, prior_ids: Tensor | None = None
) -> Tensor:
    """What `sample` draws from: float32 [L, vocab], one-hot for greedy rows; NaN where nothing can be chosen.

    Static. Arguments as in `sample`.
    """
    adjusted = adjust_logits(logits[:, : rows.vocab].float(), rows, row_index, positions, prior_ids)
    best = adjusted.argmax(dim=-1, keepdim=True)
    one_hot = torch.zeros_like(adjusted).scatter_(1, best, 1.0)
    one_hot = torch.where(torch.isfinite(adjusted.gather(1, best)), one_hot, torch.nan)
    if rows.all_greedy:
        return one_hot
    probs = torch.softmax(truncate(adjusted / temperature_of(rows, row_index), rows, row_index), dim=-1)
    return torch.where((rows.temperature[row_index] == 0)[:, None], one_hot, probs)


def sample_probs(weights: Tensor, keys: Tensor) -> Tensor:
    """One token int32 [n] from each row of weights [n, vocab] (any positive sum), with the noise of keys [4, n]."""
    index = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    return argmax_finite(gumbel_at(keys, index).add_(weights.log()))


def _choose_in_parts(
    logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, prior_ids: Tensor | None
) -> Tensor:
    """A few logits at a time: noise, sorted copies and what else is as wide as the vocabulary would take several times the
    memory of the logits themselves."""
    step = max(1, _PART_ELEMENTS // rows.vocab)
    if row_index.shape[0] <= step:
        return _choose_static(logits, rows, row_index, positions, prior_ids)
    parts = [slice(begin, begin + step) for begin in range(0, row_index.shape[0], step)]
    return torch.cat(
        [
            _choose_static(
                logits[part], rows, row_index[part], positions[part], None if prior_ids is None else prior_ids[part]
            )
            for part in parts
        ]
    )


def _choose_static(
    logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, prior_ids: Tensor | None
) -> Tensor:
    adjusted = adjust_logits(logits, rows, row_index, positions, prior_ids)
    if rows.all_greedy:
        return argmax_finite(adjusted)
    scaled = truncate(adjusted / temperature_of(rows, row_index), rows, row_index)
    keys = stream_keys(rows.seed(row_index), positions + 1, Purpose.SAMPLE)
    noise = gumbel_at(keys, torch.arange(rows.vocab, dtype=torch.int32, device=logits.device))
    sampled = (rows.temperature[row_index] > 0)[:, None]
    return argmax_finite(torch.where(sampled, scaled + noise, adjusted))
