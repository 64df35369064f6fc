"""Verification: how many drafts of each row are accepted, and which tokens a step commits.

Knows tokens and distributions, not models: what was sampled, what was proposed. Everything is vectorised over packed,
ragged rows with static shapes and no host sync. Padded rows commit nothing.

Coupled: the target's own sample at each position is the answer, and a draft is accepted while it equals it, so the
output is the one without speculation, token for token. Rejection (Leviathan et al., 2022, arXiv:2211.17192;
Chen et al., 2023, arXiv:2302.01318): accepted with min(1, p / q), else resampled from the residual; more is accepted,
with the same distribution, but which tokens come out depends on the drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.engine.rng import Purpose, stream_keys, uniform
from specbatch.engine.sampler import sample_probs


def verify_coupled(
    sampled: Tensor, input_ids: Tensor, query_start_loc: Tensor, num_draft: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Accept each row's drafts while they equal the target's samples.

    sampled int32 [T]: the target's token after each packed token; input_ids [T]: a row's last committed token, then
    its drafts; query_start_loc [R + 1]; num_draft [R]: drafts really proposed (tokens past them are ignored);
    width: the most tokens a row may commit, its drafts + 1. Returns token_ids int32 [R, width] (-1 past the row's
    count) and num_sampled int32 [R]: accepted drafts + 1, 0 for a padded row. A failed sample (-1) ends its row's
    run and is part of it; see `failed_rows`.
    """
    start, end = query_start_loc[:-1].to(torch.int64)[:, None], query_start_loc[1:].to(torch.int64)[:, None]
    column = torch.arange(width, device=sampled.device)
    drafts = torch.minimum(num_draft.to(torch.int64)[:, None], end - start - 1)
    last = sampled.shape[0] - 1
    tokens = sampled[(start + column).clamp(max=last)]
    proposed = input_ids[(start + column + 1).clamp(max=last)]
    matches = (tokens == proposed) & (tokens >= 0) & (column < drafts)
    accepted = torch.cumprod(matches.to(torch.int32), dim=1).sum(dim=1, keepdim=True).clamp(max=width - 1)
    num_sampled = torch.where(end > start, accepted + 1, 0)
    token_ids = torch.where(column < num_sampled, tokens, -1)
    return token_ids.to(torch.int32), num_sampled[:, 0].to(torch.int32)


def verify_tree(
    sampled: Tensor, input_ids: Tensor, parents: Tensor, query_start_loc: Tensor, max_nodes: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Coupled verification of a draft tree: from the root, go to the child whose token is the one sampled.

    sampled and input_ids [T] as in `verify_coupled`, one packed token a node; parents int32 [T]: index of the parent
    within the row, -1 for the root, which is the row's first token; max_nodes: the most nodes a row may have; width:
    the most tokens a row may commit. Returns token_ids int32 [R, width], num_sampled int32 [R] and path int32
    [R, width]: the node (index within the row) that each token was sampled at, root first, -1 past the count. The KV
    to keep is that of path[:, :num_sampled]. Equal siblings: the first one is taken.
    """
    start, end = query_start_loc[:-1].to(torch.int64)[:, None], query_start_loc[1:].to(torch.int64)[:, None]
    node = torch.arange(max_nodes, device=sampled.device)
    packed = start + node
    last = sampled.shape[0] - 1
    inside = packed < end
    node_parent = torch.where(inside, parents[packed.clamp(max=last)].to(torch.int64), -2)
    node_token = input_ids[packed.clamp(max=last)]
    current = torch.zeros_like(start)
    alive = end > start
    tokens, path = [], []
    for _ in range(width):
        token = sampled[(start + current).clamp(max=last)]
        tokens.append(torch.where(alive, token, -1))
        path.append(torch.where(alive, current, -1))
        child = (node_parent == current) & (node_token == token) & (token >= 0)
        current = torch.where(child, node, max_nodes).amin(dim=1, keepdim=True)
        alive = alive & (current < max_nodes)
        current = current.clamp(max=max_nodes - 1)
    visited = torch.cat(path, dim=1).to(torch.int32)
    num_sampled = (visited >= 0).sum(dim=1).to(torch.int32)
    return torch.cat(tokens, dim=1).to(torch.int32), num_sampled, visited


def verify_rejection(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    input_ids: Tensor,
    query_start_loc: Tensor,
    num_draft: Tensor,
    seed: Tensor,
    positions: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Accept draft x with probability min(1, p(x) / q(x)), else sample norm(max(0, p - q)); after all, a bonus token.

    target_probs float32 [T, vocab] after each packed token; draft_probs float32 [R, width - 1, vocab]: what
    draft j of each row was drawn from, after the same processing, or None for drafts without probabilities (one-hot);
    seed int64 [R]; positions [T] of the packed tokens; the rest and the result as in `verify_coupled`. ValueError when
    draft_probs has another shape.
    """
    expected = (num_draft.shape[0], width - 1, target_probs.shape[1])
    if draft_probs is not None and tuple(draft_probs.shape) != expected:
        raise ValueError(f"draft_probs must have shape {list(expected)}, got {list(draft_probs.shape)}")
    start, end = query_start_loc[:-1].to(torch.int64)[:, None], query_start_loc[1:].to(torch.int64)[:, None]
    last = input_ids.shape[0] - 1
    draft_column = torch.arange(width - 1, device=input_ids.device)
    drafts = torch.minimum(num_draft.to(torch.int64)[:, None], end - start - 1)
    source = (start + draft_column).clamp(max=last)  # packed token whose logits judge draft j
    proposed = input_ids[(source + 1).clamp(max=last)].to(torch.int64)
    valid = (proposed >= 0) & (proposed < target_probs.shape[1])
    proposed = proposed.clamp(0, target_probs.shape[1] - 1)

    target = target_probs[source, proposed]
    draft = torch.ones_like(target) if draft_probs is None else draft_probs.gather(2, proposed[:, :, None])[:, :, 0]
    chance = uniform(
        seed[:, None].expand_as(source).reshape(-1), positions[source].reshape(-1) + 1, Purpose.ACCEPT
    ).view_as(target)
    passes = (chance * draft < target) & (draft_column < drafts) & valid
    accepted = torch.cumprod(passes.to(torch.int32), dim=1).sum(dim=1, keepdim=True)

    final = (start + accepted).clamp(max=last)[:, 0]
    p = target_probs[final]
    rejected = accepted < drafts
    if width > 1:
        at = accepted.clamp(max=width - 2)
        if draft_probs is None:
            q = torch.zeros_like(p).scatter_(1, proposed.gather(1, at), 1.0)
        else:
            q = draft_probs.gather(1, at[:, :, None].expand(-1, -1, p.shape[1]))[:, 0]
        residual = torch.where(rejected, (p - q).clamp_(min=0.0), p)
        p = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, p)
    extra = sample_probs(p, stream_keys(seed, positions[final] + 1, Purpose.RESIDUAL))

    num_sampled = torch.where(end > start, accepted + 1, 0)
    column = torch.arange(width, device=input_ids.device)
    drafted = torch.cat((proposed, torch.zeros_like(start)), dim=1).to(torch.int32)
    tokens = torch.where(column == accepted, extra[:, None], drafted)
    token_ids = torch.where(column < num_sampled, tokens, -1)
    return token_ids, num_sampled[:, 0].to(torch.int32)


def failed_rows(token_ids: Tensor, num_sampled: Tensor) -> Tensor:
    """Rows bool [R] in whose committed run a token could not be sampled (NaN logits): fail them, not the run."""
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    return ((token_ids < 0) & (column < num_sampled[:, None])).any(dim=1)
