"""Choosing tokens: ties, truncation and penalties against transformers, both ways of choosing, broken logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specbatch.engine.logits import adjust_logits
from specbatch.engine.rejection import verify_coupled, verify_rejection, verify_tree
from specbatch.engine.row_params import RowParams, Tables, rows_over
from specbatch.engine.sampler import (
    Samples,
    draft_prefix,
    processed_probs,
    row_of_logit,
    sample,
    sample_draft,
    tree_prefix,
)
from specbatch.engine.sampler_cpu import largest
from specbatch.engine.sampling_state import SamplingState, count_tokens
from specbatch.sampling_params import SamplingParams


def rows_of(
    params: list[SamplingParams], vocab: int, prompts: list[list[int]] | None = None, **state: object
) -> RowParams:
    """One gathered row a params; prompts default to one token 0."""
    prompts = prompts or [[0]] * len(params)
    keeper = SamplingState(len(params), vocab, **state)  # type: ignore[arg-type]
    handles = np.arange(len(params), dtype=np.int32)
    keeper.set(
        handles,
        params,
        request_id=np.arange(len(params)),
        prompt_values=np.concatenate([np.array(p, np.int32) for p in prompts]),
        prompt_offsets=np.cumsum([0] + [len(p) for p in prompts]),
    )
    return keeper.gather(handles, keeper.new_rows(len(params)))


def choose(logits: Tensor, rows: RowParams, position: int = 0, **options: object) -> Samples:
    row = torch.arange(len(logits))
    return sample(logits, rows, row, torch.full((len(logits),), position, dtype=torch.int32), **options)  # type: ignore[arg-type]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- greedy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [2, 7, 64, 1000, 49_152])
@pytest.mark.parametrize("plain", [True, False])
def test_greedy_ties_go_to_the_lowest_id(vocab: int, plain: bool) -> None:
    logits = normal(6, vocab).round()
    first, second = 1 % vocab, vocab - 1
    logits[0, first] = logits[0, second] = 50.0
    logits[1] = 3.0  # all equal
    expected = [int(np.flatnonzero(row == row.max())[0]) for row in logits.numpy()]
    assert expected[0] == first
    assert expected[1] == 0
    rows = rows_of([SamplingParams(logprobs=not plain)] * 6, vocab)
    for given in (logits, logits.double(), logits.bfloat16()):
        assert choose(given, rows).token_ids.tolist() == expected
        assert choose(given, rows, static=True).token_ids.tolist() == expected


def test_padding_of_the_head_is_never_chosen() -> None:
    logits = normal(3, 40)
    logits[:, 32:] = 99.0
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)]
    for static in (True, False):
        assert int(choose(logits, rows_of(params, 32), static=static).token_ids.max()) < 32
    assert int(choose(logits, rows_of([SamplingParams()] * 3, 32)).token_ids.max()) < 32


def test_logits_are_left_as_they_are() -> None:
    params = [
        SamplingParams(temperature=0.7, top_p=0.9, logit_bias={3: 2.0}, repetition_penalty=1.3, logprobs=True),
        SamplingParams(temperature=2.0),
    ]
    logits = normal(2, 50)
    before = logits.clone()
    for static in (True, False):
        choose(logits, rows_of(params, 50), static=static)
        assert torch.equal(logits, before)


def test_parts_choose_what_the_whole_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shapes are fixed, logits are worked on a few at a time: nothing may hang on where they are cut."""
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, logit_bias={3: 2.0}, seed=2),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=1.5, top_k=7, seed=3),
    ]
    logits, rows = normal(4, 50), rows_of(params, 50)
    prior = torch.tensor([[1, -1], [2, 3], [4, 4], [-1, -1]], dtype=torch.int32)
    row, position = torch.arange(4), torch.tensor([5, 900, 3, 77], dtype=torch.int32)
    whole = sample(logits, rows, row, position, prior_ids=prior, static=True)
    for elements in (1, 50, 150):
        monkeypatch.setattr("specbatch.engine.sampler._PART_ELEMENTS", elements)
        parts = sample(logits, rows, row, position, prior_ids=prior, static=True)
        assert torch.equal(parts.token_ids, whole.token_ids)


# -- against transformers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 17},
        {"top_k": 5000},
        {"top_p": 0.01},
        {"top_p": 0.6},
        {"top_p": 0.97},
        {"min_p": 0.02},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.005},
    ],
)
def test_truncation_equals_transformers(options: dict[str, float]) -> None:
    vocab, count = 1000, 24
    logits = normal(count, vocab, seed=4) * torch.linspace(0.5, 4, count)[:, None]
    for temperature in (0.6, 1.0, 1.7):
        params = SamplingParams(temperature=temperature, **options)  # type: ignore[arg-type]
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            warpers.append(MinPLogitsWarper(params.min_p))
        expected = torch.softmax(warpers(torch.zeros(count, 1, dtype=torch.long), logits), dim=-1)
        position = torch.zeros(count, dtype=torch.int32)
        actual = processed_probs(logits, rows_of([params] * count, vocab), torch.arange(count), position)
        assert torch.equal(actual > 0, expected > 0)
        torch.testing.assert_close(actual, expected)


def test_repetition_penalty_equals_transformers() -> None:
    vocab, count = 60, 16
    generator = np.random.default_rng(3)
    logits = normal(count, vocab, seed=5) * 3
    prompts = [generator.integers(0, vocab, 9).tolist() for _ in range(count)]
    outputs = torch.from_numpy(generator.integers(0, vocab, (count, 7)).astype(np.int32))
    params = [SamplingParams(repetition_penalty=float(x)) for x in generator.uniform(0.5, 2, count)]
    rows = rows_of(params, vocab, prompts)
    position = torch.zeros(count, dtype=torch.int32)
    actual = adjust_logits(logits, rows, torch.arange(count), position, outputs)
    for i in range(count):
        seen = torch.tensor([prompts[i] + outputs[i].tolist()])
        expected = RepetitionPenaltyLogitsProcessor(params[i].repetition_penalty)(seen, logits[i : i + 1])
        torch.testing.assert_close(actual[i : i + 1], expected)


def test_presence_and_frequency_count_committed_and_drafted_output() -> None:
    vocab, count = 12, 8
    generator = np.random.default_rng(6)
    logits = normal(count, vocab, seed=7)
    params = [
        SamplingParams(presence_penalty=float(a), frequency_penalty=float(b))
        for a, b in generator.uniform(-2, 2, (count, 2))
    ]
    keeper = SamplingState(count, vocab)
    handles = np.arange(count, dtype=np.int32)
    prompts = generator.integers(0, vocab, (count, 5)).astype(np.int32)
    keeper.set(
        handles,
        params,
        request_id=np.arange(count),
        prompt_values=prompts.ravel(),
        prompt_offsets=np.arange(0, 5 * count + 1, 5),
    )
    rows = keeper.gather(handles, keeper.new_rows(count))
    committed = generator.integers(0, vocab, (count, 6)).astype(np.int32)
    num_sampled = generator.integers(0, 7, count).astype(np.int32)
    keeper.commit(rows, torch.from_numpy(committed), torch.from_numpy(num_sampled))
    prior = generator.integers(-1, vocab, (count, 4)).astype(np.int32)
    position = torch.zeros(count, dtype=torch.int32)
    actual = adjust_logits(logits, rows, torch.arange(count), position, torch.from_numpy(prior))
    for i, item in enumerate(params):
        out = committed[i, : num_sampled[i]].tolist() + prior[i][prior[i] >= 0].tolist()
        counts = np.bincount(out, minlength=vocab)
        expected = logits[i].numpy() - counts * item.frequency_penalty - (counts > 0) * item.presence_penalty
        np.testing.assert_allclose(actual[i].numpy(), expected, rtol=1e-5, atol=1e-5)


# -- two ways, one answer ----------------------------------------------------------------------------------------------


def mixed_params(count: int, seed: int) -> list[SamplingParams]:
    generator = np.random.default_rng(seed)

    def one() -> SamplingParams:
        def maybe(value: float, default: float) -> float:
            return value if generator.random() < 0.4 else default

        return SamplingParams(
            temperature=float(generator.choice([0.0, 0.5, 1.0, 1.8])),
            top_k=int(maybe(generator.choice([1, 20, 600, 900]), 0)),
            top_p=float(maybe(generator.choice([0.05, 0.5, 0.9, 0.999]), 1.0)),
            min_p=float(maybe(generator.choice([0.01, 0.3]), 0.0)),
            repetition_penalty=float(maybe(1.4, 1.0)),
            frequency_penalty=float(maybe(0.3, 0.0)),
            logit_bias={int(generator.integers(1500)): 3.0} if generator.random() < 0.3 else {},
            logprobs=bool(generator.random() < 0.2),
        )

    return [one() for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_static_and_grouped_choices_agree_in_any_batch(seed: int) -> None:
    vocab, count = 1500, 40
    params = mixed_params(count, seed)
    rows = rows_of(params, vocab)
    logits = (normal(count, vocab, seed=seed) * torch.linspace(0.2, 3, count)[:, None] * 8).round() / 8  # with ties
    position = torch.arange(count, dtype=torch.int32)
    row = torch.arange(count)
    expected = sample(logits, rows, row, position, static=True)
    actual = sample(logits, rows, row, position)
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert int(expected.token_ids.min()) >= 0
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count)[:17].copy())
    some = sample(logits[order], rows, row[order], position[order])
    assert torch.equal(some.token_ids, expected.token_ids[order])
    probs = processed_probs(logits, rows, row, position)
    assert (probs.gather(1, actual.token_ids.long()[:, None]) > 0).all()


def test_a_wide_nucleus_is_searched_to_the_right_token() -> None:
    vocab, count = 6000, 48
    params = [SamplingParams(temperature=1.5, top_p=0.5 + 0.01 * i, min_p=0.001 * (i % 2)) for i in range(count)]
    rows = rows_of(params, vocab)
    logits = normal(count, vocab, seed=8) * 0.4
    assert torch.equal(choose(logits, rows).token_ids, choose(logits, rows, static=True).token_ids)


def test_the_truncation_keeps_equal_logits_together() -> None:
    logits = torch.tensor([[4.0, 3.0, 3.0, 3.0, 1.0, 0.0]])
    for options, kept in (({"top_k": 2}, 4), ({"top_p": 0.5}, 4), ({"top_k": 1}, 1), ({"top_p": 0.4}, 1)):
        rows = rows_of([SamplingParams(temperature=1.0, **options)], 6)  # type: ignore[arg-type]
        probs = processed_probs(logits, rows, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
        assert (probs > 0).sum() == kept, options


@pytest.mark.parametrize(("columns", "count"), [(49_152, 64), (1003, 7), (1003, 900), (5, 5), (130, 3)])
def test_largest_equals_topk(columns: int, count: int) -> None:
    values = normal(5, columns, seed=9)
    found, index = largest(values, count)
    assert torch.equal(found, torch.topk(values, count).values)
    assert torch.equal(values.gather(1, index), found)
    tied = values.round()
    assert torch.equal(largest(tied, count)[0], torch.topk(tied, count).values)


# -- bias, minimum length, log probabilities ---------------------------------------------------------------------------


def test_stop_tokens_are_held_back_until_min_tokens_are_out() -> None:
    eos, stop, prompt = 3, 5, [1, 2, 4, 6]
    params = [
        SamplingParams(min_tokens=3, stop_token_ids=(stop,)),
        SamplingParams(),
        SamplingParams(min_tokens=3, ignore_eos=True),  # there it is a token like any other
    ]
    rows = rows_of(params, 8, [prompt] * 3, eos_token_ids=[eos])
    logits = torch.zeros(3, 8)
    logits[:, [eos, stop]] = 9.0
    for static in (True, False):
        for already_out in range(5):
            last = len(prompt) - 1 + already_out
            tokens = choose(logits, rows, last, static=static).token_ids.tolist()
            assert tokens == [0 if already_out < 3 else eos, eos, eos]


def test_logprobs_are_those_of_the_model() -> None:
    params = [
        SamplingParams(temperature=0.5, top_k=2, logit_bias={1: 5.0}, presence_penalty=1.0, logprobs=True),
        SamplingParams(logprobs=True),
        SamplingParams(temperature=1.0),
    ]
    logits = normal(3, 30, seed=10) * 2
    for static in (True, False):
        result = choose(logits, rows_of(params, 30), static=static)
        expected = torch.log_softmax(logits, -1).gather(1, result.token_ids.long()[:, None])[:, 0]
        assert result.logprobs is not None
        torch.testing.assert_close(result.logprobs, expected)


# -- broken logits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("static", [True, False])
def test_a_row_with_broken_logits_fails_alone(broken: float, static: bool) -> None:
    options: list[SamplingParams] = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(temperature=0.7, frequency_penalty=0.2, logit_bias={2: 1.0}, top_k=7),
    ]
    params = [item for item in options for _ in range(2)]
    logits = normal(len(params), 700, seed=11)
    healthy = choose(logits, rows_of(params, 700), static=static).token_ids
    logits[::2, 300] = broken
    tokens = choose(logits, rows_of(params, 700), static=static).token_ids
    assert (tokens[::2] == -1).all()
    assert torch.equal(tokens[1::2], healthy[1::2])
    plain = choose(logits, rows_of([SamplingParams()] * len(params), 700), static=static).token_ids
    assert (plain[::2] == -1).all()
    assert (plain[1::2] >= 0).all()


def test_nothing_left_to_choose_is_a_failure() -> None:
    logits = torch.full((2, 5), -torch.inf)
    for item in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2)):
        for static in (True, False):
            assert choose(logits, rows_of([item] * 2, 5), static=static).token_ids.tolist() == [-1, -1]


# -- packed rows -------------------------------------------------------------------------------------------------------


def test_prefixes_are_a_rows_own_drafts_before_each_token() -> None:
    generator = np.random.default_rng(12)
    lengths = [4, 1, 3, 2]
    starts = torch.tensor(np.cumsum([0, *lengths, 0]), dtype=torch.int32)  # the last row is padding
    total = sum(lengths)
    ids = torch.from_numpy(generator.integers(0, 99, total).astype(np.int32))
    row = row_of_logit(starts, total)
    assert row.tolist() == [r for r, n in enumerate(lengths) for _ in range(n)]
    prefix = draft_prefix(ids, starts, row, 4)
    chain = torch.tensor([i - 1 for n in lengths for i in range(n)], dtype=torch.int32)
    by_tree = tree_prefix(ids, starts, row, chain, 4)
    for token in range(total):
        begin = int(starts[row[token]])
        expected = sorted(ids[begin + 1 : token + 1].tolist())
        assert sorted(x for x in prefix[token].tolist() if x >= 0) == expected
        assert sorted(x for x in by_tree[token].tolist() if x >= 0) == expected
    # A fork: root, two children, and a grandchild under each.
    fork = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)
    ids = torch.tensor([9, 1, 2, 3, 4], dtype=torch.int32)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    prefix = tree_prefix(ids, starts, row_of_logit(starts, 5), fork, 3)
    assert [sorted(x for x in p if x >= 0) for p in prefix.tolist()] == [[], [1], [2], [1, 3], [2, 4]]


# -- fit for a CUDA graph ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 31])
def test_static_paths_run_without_data(kind: int) -> None:
    """Under fake CUDA tensors any operation that needs the data, or a copy to the host, raises."""
    rows_count, width, vocab = 4, 3, 64
    total = rows_count * width
    with FakeTensorMode():

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device="cuda")

        tables = Tables.empty(vocab, torch.device("cuda"))
        rows = rows_over(zeros(rows_count, 12), np.zeros((rows_count, 12), np.int32), tables)
        rows.kind = kind
        starts, ids, positions = zeros(rows_count + 1), zeros(total), zeros(total)
        num_draft = zeros(rows_count)
        logits = zeros(total, vocab + 8, dtype=torch.float32)
        row = row_of_logit(starts, total)
        prior = draft_prefix(ids, starts, row, width)
        result = sample(logits, rows, row, positions, prior_ids=prior)
        assert result.token_ids.device.type == "cuda"
        assert result.token_ids.shape == (total,)
        tokens, num_sampled = verify_coupled(result.token_ids, ids, starts, num_draft, width)
        assert tokens.shape == (rows_count, width)
        assert num_sampled.dtype == torch.int32
        verify_tree(result.token_ids, ids, zeros(total), starts, width, width)
        tree_prefix(ids, starts, row, zeros(total), width)
        drafts, probs = sample_draft(logits[::width], rows, torch.arange(4, device="cuda"), positions[::width])
        assert probs is None
        assert drafts.shape == (rows_count,)
        if kind:
            p = processed_probs(logits, rows, row, positions, prior_ids=prior)
            q = p.view(rows_count, width, vocab)[:, :-1]
            seed = rows.seed(torch.arange(rows_count, device="cuda"))
            verify_rejection(p, q, ids, starts, num_draft, seed, positions, width)
            verify_rejection(p, None, ids, starts, num_draft, seed, positions, width)
            count_tokens(tables, rows.penalty_slot, tokens, num_sampled)
