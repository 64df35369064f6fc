"""Verification against slow, obvious twins; the acceptance of Gumbel coupling against theory; edges of rejection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specbatch.engine.rejection import failed_rows, verify_coupled, verify_rejection, verify_tree
from specbatch.sampling_params import SamplingParams
from tests.sampling_rounds import START, Rounds, random_table, reference_probs


def packed_starts(lengths: list[int]) -> Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- coupled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_coupled_equals_a_loop_over_ragged_rows(seed: int) -> None:
    generator = np.random.default_rng(seed)
    width = int(generator.integers(1, 7))
    lengths = generator.integers(1, width + 1, int(generator.integers(1, 12))).tolist() + [0] * 3  # padded rows last
    total = sum(lengths)
    padding = int(generator.integers(0, 4))
    ids = generator.integers(0, 3, total + padding).astype(np.int32)
    sampled = generator.integers(0, 3, total + padding).astype(np.int32)
    num_draft = np.array([generator.integers(0, n) if n else 0 for n in lengths], np.int32)
    starts = packed_starts(lengths)
    tokens, num_sampled = verify_coupled(
        torch.from_numpy(sampled), torch.from_numpy(ids), starts, torch.from_numpy(num_draft), width
    )
    for row, (begin, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        run = []
        for j in range(num_draft[row] + 1 if length else 0):
            run.append(int(sampled[begin + j]))
            if j == num_draft[row] or sampled[begin + j] != ids[begin + j + 1]:
                break
        assert num_sampled[row] == len(run)
        assert tokens[row].tolist() == run + [-1] * (width - len(run))
    assert tokens.dtype == num_sampled.dtype == torch.int32


def test_a_failed_sample_ends_its_rows_run_and_marks_the_row() -> None:
    starts = packed_starts([3, 3, 1])
    ids, sampled = int32([0, 1, 2, 0, 1, 2, 0]), int32([1, -1, 2, 1, 2, 3, -1])
    tokens, num_sampled = verify_coupled(sampled, ids, starts, int32([2, 2, 0]), 3)
    assert tokens.tolist() == [[1, -1, -1], [1, 2, 3], [-1, -1, -1]]
    assert num_sampled.tolist() == [2, 3, 1]
    assert failed_rows(tokens, num_sampled).tolist() == [True, False, True]
    # A missing draft (-1) does not match a failed sample.
    _, num_sampled = verify_coupled(int32([-1, 5]), int32([0, -1]), packed_starts([2]), int32([1]), 2)
    assert num_sampled.tolist() == [1]


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.5])
def test_gumbel_coupling_accepts_as_often_as_theory_says(spread: float) -> None:
    """The chance that two argmaxes under one noise agree (Daliri et al., 2024), and its bound (1 - TV) / (1 + TV)."""
    vocab, rows = 16, 40_000
    params = SamplingParams(temperature=1.0)
    target = random_table(vocab, 31)
    draft = target + random_table(vocab, 32, spread)
    _, accepted = Rounds(target, draft, k=1).run(params, rows, 1)
    p, q = reference_probs(target, params)[START], reference_probs(draft, params)[START]
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(vocab))
    distance = np.abs(p - q).sum() / 2
    error = 4 * np.sqrt(expected * (1 - expected) / rows)
    assert abs((accepted == 1).mean() - expected) < error
    assert (1 - distance) / (1 + distance) - error < (accepted == 1).mean() < 1 - distance + error

    independent = Rounds(target, target, k=1, draw_from=draft)  # control: a draft with noise of its own
    _, uncoupled = independent.run(params, rows, 1)
    assert (uncoupled == 1).mean() < expected - error


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    target = random_table(200, 33)
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.9, top_p=0.8)):
        for method in ("coupled", "rejection"):
            _, accepted = Rounds(target, target, k=4, method=method).run(params, 50, 1)
            assert accepted.min() == 4, (params, method)


# -- tree ------------------------------------------------------------------------------------------------------------


def random_tree(generator: np.random.Generator, nodes: int) -> list[int]:
    return [-1] + [int(generator.integers(0, i)) for i in range(1, nodes)]


@pytest.mark.parametrize("seed", range(20))
def test_tree_equals_a_walk(seed: int) -> None:
    generator = np.random.default_rng(seed)
    max_nodes = int(generator.integers(1, 12))
    lengths = [*generator.integers(1, max_nodes + 1, 8).tolist(), 0]
    trees = [random_tree(generator, n) if n else [] for n in lengths]
    total = sum(lengths)
    ids = generator.integers(0, 3, total).astype(np.int32)
    sampled = generator.integers(0, 3, total).astype(np.int32)
    starts = packed_starts(lengths)
    parents = int32([p for tree in trees for p in tree])
    tokens, num_sampled, path = verify_tree(
        torch.from_numpy(sampled), torch.from_numpy(ids), parents, starts, max_nodes, max_nodes
    )
    for row, tree in enumerate(trees):
        begin = int(starts[row])
        run, nodes, current = [], [], 0 if tree else None
        while current is not None:
            token = int(sampled[begin + current])
            run.append(token)
            nodes.append(current)
            children = [i for i, p in enumerate(tree) if p == current and ids[begin + i] == token]
            current = children[0] if children else None
        assert num_sampled[row] == len(run)
        assert tokens[row].tolist() == run + [-1] * (max_nodes - len(run))
        assert path[row].tolist() == nodes + [-1] * (max_nodes - len(nodes))


def test_a_tree_without_forks_is_a_chain() -> None:
    generator = np.random.default_rng(1)
    lengths = generator.integers(1, 6, 30).tolist()
    total = sum(lengths)
    ids, sampled = (torch.from_numpy(generator.integers(0, 2, total).astype(np.int32)) for _ in range(2))
    parents = int32([i - 1 for n in lengths for i in range(n)])
    starts = packed_starts(lengths)
    chain = verify_coupled(sampled, ids, starts, int32(lengths) - 1, 5)
    tree = verify_tree(sampled, ids, parents, starts, 5, 5)
    assert torch.equal(tree[0], chain[0])
    assert torch.equal(tree[1], chain[1])


# -- rejection -------------------------------------------------------------------------------------------------------


def rejection(
    p: Tensor, q: Tensor | None, ids: list[int], lengths: list[int], num_draft: list[int], seed: int = 0
) -> tuple[Tensor, Tensor]:
    starts = packed_starts(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(torch.int32)
    seeds = torch.arange(len(lengths)) + seed
    return verify_rejection(p, q, int32(ids), starts, int32(num_draft), seeds, positions, max(lengths))


def test_rejection_edges() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]).repeat(2, 1)
    q = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]]).repeat(2, 1, 1)
    # Row 0: draft 1 is sure, draft 2 impossible and replaced; row 1 proposed nothing. The third row is padding.
    tokens, num_sampled = rejection(p, torch.cat((q, q[:1])), [9, 1, 2, 9, 9, 9], [3, 3, 0], [2, 0, 0])
    assert num_sampled.tolist() == [2, 1, 0]
    assert tokens[0].tolist()[0] == 1
    assert tokens[0].tolist()[1] in (0, 1)
    assert tokens[1:].tolist() == [[1, -1, -1], [-1, -1, -1]]


def test_bonus_token_after_full_acceptance_comes_from_the_target() -> None:
    count = 4000
    p = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]]).repeat(count, 1)
    tokens, num_sampled = rejection(p, p[None, 0:1].expand(count, 1, 3), [0, 1] * count, [2] * count, [1] * count)
    assert (num_sampled == 2).all()
    share = np.bincount(tokens[:, 1].numpy(), minlength=3) / count
    np.testing.assert_allclose(share, [0.2, 0.3, 0.5], atol=0.04)


def test_a_residual_of_nothing_falls_back_to_the_target() -> None:
    """p = q to the last bit of the residual, yet rejected: only possible when a drafter reports a wrong q."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]).repeat(300, 1)
    q = torch.tensor([[0.5, 0.5, 0.0]]).expand(300, 1, 3)
    tokens, num_sampled = rejection(p, q, [0, 2] * 300, [2] * 300, [1] * 300)  # token 2 cannot have come from q
    assert (num_sampled == 1).all()
    assert set(tokens[:, 0].tolist()) == {0, 1}


def test_rejection_fails_a_row_with_broken_probabilities() -> None:
    p = torch.full((4, 3), 1 / 3)
    p[0] = torch.nan
    tokens, num_sampled = rejection(p, None, [0, 1, 0, 1], [2, 2], [1, 1])
    assert failed_rows(tokens, num_sampled).tolist() == [True, False]


def test_draft_probabilities_must_cover_every_draft() -> None:
    p = torch.full((3, 4), 0.25)
    with pytest.raises(ValueError, match=r"draft_probs .*\[1, 2, 4\].*\[1, 1, 4\]"):
        rejection(p, p[None, :1], [0, 1, 2], [3], [2])


def test_rejection_accepts_more_than_coupling() -> None:
    target = random_table(16, 41)
    draft = target + random_table(16, 42, 1.0)
    params = SamplingParams(temperature=1.0)
    _, coupled = Rounds(target, draft, k=1).run(params, 20_000, 1)
    _, rejected = Rounds(target, draft, k=1, method="rejection").run(params, 20_000, 1)
    p, q = reference_probs(target, params)[START], reference_probs(draft, params)[START]
    assert rejected.mean() == pytest.approx(np.minimum(p, q).sum(), abs=0.015)
    assert rejected.mean() > coupled.mean()
