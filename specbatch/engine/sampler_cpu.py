"""Choosing tokens on a CPU, where shapes may depend on data: greedy, truncated and open rows apart.

Chooses the very tokens that the static way of `sampler` chooses. What is done for a row depends on its own logits and
options only, so its token does not depend on its neighbours.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from torch import Tensor

from specbatch.engine.logits import (
    adjust_logits,
    argmax_finite,
    exp_sum,
    temperature_of,
    truncation_floor,
    truncations,
)
from specbatch.engine.rng import Purpose, gumbel_at, gumbel_from_bits, keyed_bits, scatter_index, stream_keys
from specbatch.engine.row_params import RowParams

_CHUNK = 1 << 18  # noise made at once: what fits the cache
_CANDIDATES = (64, 512)  # how many of the largest logits to look at before taking all
_WIDE_TOP_P = 0.5  # from here on a nucleus wider than that is searched from the noise


def choose_by_group(
    logits: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor, prior_ids: Tensor | None
) -> Tensor:
    """Token ids int32 [L], -1 where none can be chosen. Arguments as in `sampler.sample`, logits float32."""
    altered = (rows.penalty_slot[row_index] > 0) | (rows.bias_slot[row_index] > 0)
    sampled = rows.temperature[row_index] > 0
    top_k, top_p, min_p = truncations(rows, row_index)
    truncated = sampled & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    token_ids = torch.empty(logits.shape[0], dtype=torch.int32)
    groups = ((~sampled, _choose_greedy), (truncated, _choose_truncated), (sampled & ~truncated, _choose_open))
    for (members, choose), change in product(groups, (False, True)):
        index = (members & (altered == change)).nonzero()[:, 0]
        if len(index) == 0:
            continue
        group = logits if len(index) == len(logits) else logits[index]
        row, position = row_index[index], positions[index]
        if change:
            group = adjust_logits(group, rows, row, position, None if prior_ids is None else prior_ids[index])
        token_ids[index] = choose(group, rows, row, position)
    return token_ids


def _choose_greedy(adjusted: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor) -> Tensor:
    return argmax_finite(adjusted)


def _choose_open(adjusted: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor) -> Tensor:
    """From the whole vocabulary."""
    temperature = temperature_of(rows, row_index)
    keys = stream_keys(rows.seed(row_index), positions + 1, Purpose.SAMPLE)
    scattered = scatter_index(torch.arange(rows.vocab, dtype=torch.int32))
    return torch.cat(
        [
            _best_score(adjusted[part] / temperature[part], keyed_bits(keys[:, part], scattered))
            for part in _parts(len(adjusted), rows.vocab)
        ]
    )


def _parts(rows: int, vocab: int) -> list[slice]:
    step = max(1, _CHUNK // vocab)
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def _best_score(scaled: Tensor, bits: Tensor) -> Tensor:
    """Where logit + Gumbel noise is largest, int32 [n]; -1 where it is not finite.

    -log(-log(1 - u)) is at most -log(u), and a float's exponent and mantissa, read as an integer, are its logarithm
    up to 6 %: a bound on every score without a logarithm. The exact score is needed only for the token of the largest
    bound, then of the next, while a bound reaches the best exact score: seldom more than twice.
    """
    log_bits = bits.to(torch.float32).view(torch.int32).to(torch.float32)
    bound = torch.sub(scaled, log_bits, alpha=math.log(2) / 2**23)
    best = torch.full((len(scaled), 1), -torch.inf)
    token = torch.full((len(scaled), 1), -1)
    open_rows = torch.ones((len(scaled), 1), dtype=torch.bool)
    while True:
        likely = torch.from_numpy(np.argmax(bound.numpy(), axis=-1))[:, None]
        highest = bound.gather(1, likely)
        # (127 + 31) log 2: exponent bias, and 31 bits to the unit interval. The slack covers float32's rounding.
        reach = highest + ((127 + 31) * math.log(2) + 1e-3) + 1e-6 * highest.abs()
        open_rows &= ~(reach < best) & ~torch.isneginf(highest)
        if not bool(open_rows.any()):
            return torch.where(torch.isfinite(best), token, -1)[:, 0].to(torch.int32)
        score = scaled.gather(1, likely) + gumbel_from_bits(bits.gather(1, likely))
        better = open_rows & ((score > best) | ((score == best) & (likely < token)) | score.isnan())
        best, token = torch.where(better, score, best), torch.where(better, likely, token)
        open_rows &= torch.isfinite(best)
        bound.scatter_(1, likely, -torch.inf)


def _choose_truncated(adjusted: Tensor, rows: RowParams, row_index: Tensor, positions: Tensor) -> Tensor:
    """From what top-k, top-p and min-p leave: look at a few of the largest logits first, at more where needed."""
    scaled = adjusted / temperature_of(rows, row_index)
    keys = stream_keys(rows.seed(row_index), positions + 1, Purpose.SAMPLE)
    top_k, top_p, min_p = truncations(rows, row_index)
    total = _nucleus_totals(scaled, (top_k == 0) & (top_p < 1))
    token_ids = torch.empty(len(scaled), dtype=torch.int32)
    undecided = torch.arange(len(scaled))
    for width in (*(c for c in _CANDIDATES if c < rows.vocab), rows.vocab):
        values, ids = largest(scaled if len(undecided) == len(scaled) else scaled[undecided], width)
        floor = truncation_floor(values, total[undecided], top_k[undecided], top_p[undecided], min_p[undecided])
        scores = gumbel_at(keys[:, undecided], ids.to(torch.int32)).add_(values)
        scores.masked_fill_(values < floor[:, None], -torch.inf)
        best = scores.amax(dim=-1, keepdim=True)
        token = torch.where(scores == best, ids, rows.vocab).amin(dim=-1)
        token_ids[undecided] = torch.where(torch.isfinite(best[:, 0]), token, -1).to(torch.int32)
        if width == rows.vocab:
            break
        unsettled = ~(values[:, -1] < floor)
        undecided, least = undecided[unsettled], values[unsettled, -1]
        wide = (top_k[undecided] == 0) & (top_p[undecided] >= _WIDE_TOP_P)
        chosen, inside = undecided[wide], least[wide]
        for part in _parts(len(chosen), rows.vocab):
            row = chosen[part]
            token_ids[row] = _choose_wide(scaled[row], keys[:, row], total[row], top_p[row], min_p[row], inside[part])
        undecided = undecided[~wide]
        if len(undecided) == 0:
            break
    return token_ids


def _nucleus_totals(scaled: Tensor, wanted: Tensor) -> Tensor:
    """`exp_sum` [n] of the wanted rows, 0 for the others."""
    total = torch.zeros(len(scaled))
    index = wanted.nonzero()[:, 0]
    for part in _parts(len(index), scaled.shape[1]):
        rows = scaled[index[part]]
        total[index[part]] = exp_sum(rows, rows.amax(dim=-1, keepdim=True))
    return total


def _choose_wide(scaled: Tensor, keys: Tensor, total: Tensor, top_p: Tensor, min_p: Tensor, inside: Tensor) -> Tensor:
    """From what top-p and min-p leave where that is many tokens, unsorted; all logits from `inside` up are left.

    The best score of all is the answer if its token is left, which takes one sum over the tokens above it to know. It
    is with probability top_p; else the next best is looked at.
    """
    top = scaled.amax(dim=-1, keepdim=True)
    scaled = scaled.masked_fill(scaled < top + min_p.log()[:, None], -torch.inf)
    bits = keyed_bits(keys, scatter_index(torch.arange(scaled.shape[1], dtype=torch.int32)))
    token_ids = torch.empty(len(scaled), dtype=torch.int32)
    undecided = torch.arange(len(scaled))
    while len(undecided):
        token = _best_score(scaled, bits)
        token_ids[undecided] = token
        at = token.clamp(min=0).to(torch.int64)[:, None]
        logit = scaled.gather(1, at)
        far = (token >= 0) & (top_p[undecided] < 1) & (logit[:, 0] < inside[undecided])
        scaled, bits, logit, at, undecided = scaled[far], bits[far], logit[far], at[far], undecided[far]
        above = ((scaled - top[undecided]).exp_() * (scaled > logit)).sum(dim=-1)
        outside = above >= top_p[undecided] * total[undecided]
        # NOTE: what is taken out here lies below all that may still be chosen, so it is missing in no later sum.
        scaled.scatter_(1, at, -torch.inf)
        scaled, bits, undecided = scaled[outside], bits[outside], undecided[outside]
    return token_ids


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, descending, and their columns int64 (which of equal values: undefined).

    Each of them lies in one of the `count` groups of columns with the largest maxima, so the selection runs over the
    maxima and then over the members of those groups, a small part of the vocabulary.
    """
    rows, columns = values.shape
    group = int((columns / count) ** 0.5)  # members of a group: as many groups to search as members to search then
    if group < 4:
        return torch.topk(values, count, dim=-1)
    stride = columns // group  # group g: columns g, g + stride, ...; a remainder is searched with the members
    grouped = values[:, : group * stride].reshape(rows, group, stride)
    chosen = torch.topk(grouped.amax(dim=1), count, dim=-1, sorted=False).indices[:, None, :].expand(-1, group, -1)
    offset = torch.arange(group, device=values.device)[None, :, None] * stride
    rest = torch.arange(group * stride, columns, device=values.device).expand(rows, -1)
    members = torch.cat(((chosen + offset).flatten(1), rest), dim=1)
    found = torch.topk(values.gather(1, members), count, dim=-1)
    return found.values, members.gather(1, found.indices)
