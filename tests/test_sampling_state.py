"""Parameters by handle: what a step gathers, growth, reuse of handles and slots, seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specbatch.engine.logits import adjust_logits
from specbatch.engine.row_params import RowParams
from specbatch.engine.sampling_state import SamplingState, row_seed
from specbatch.sampling_params import SamplingParams

VOCAB = 20


def put(state: SamplingState, handles: list[int], params: SamplingParams | list[SamplingParams]) -> None:
    count = len(handles)
    state.set(
        np.array(handles, np.int32),
        params,
        request_id=np.array(handles) + 100,
        prompt_values=np.tile(np.array([1, 2], np.int32), count),
        prompt_offsets=np.arange(0, 2 * count + 1, 2),
    )


def take(state: SamplingState, handles: list[int], rows: RowParams | None = None) -> RowParams:
    return state.gather(np.array(handles, np.int32), rows or state.new_rows(len(handles) + 2))


def test_gather_gives_each_row_its_own_and_null_to_padding() -> None:
    state = SamplingState(1, VOCAB, run_seed=7)
    items = [
        SamplingParams(temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=2**63 - 1),
        SamplingParams(temperature=1.5, repetition_penalty=1.25, presence_penalty=-0.5, frequency_penalty=2.0),
        SamplingParams(),
    ]
    put(state, [0, 4, 9], items)  # far beyond the capacity: grows
    rows = take(state, [9, 0, -1, 4])
    assert rows.temperature.tolist() == [0, 0.5, 0, 1.5, 0, 0]
    assert rows.top_k.tolist() == [0, 3, 0, 0, 0, 0]
    assert rows.top_p.tolist() == [1, 0.75, 1, 1, 1, 1]
    assert rows.min_p.tolist() == [0, 0.25, 0, 0, 0, 0]
    assert rows.repetition_penalty.tolist() == [1, 1, 1, 1.25, 1, 1]
    assert rows.presence_penalty.tolist() == [0, 0, 0, -0.5, 0, 0]
    assert rows.frequency_penalty.tolist() == [0, 0, 0, 2, 0, 0]
    assert rows.prompt_len.tolist() == [2, 2, 0, 2, 0, 0]
    expected = row_seed(7, np.array([109, 104]))
    seeds = rows.seed(torch.tensor([0, 1, 3])).tolist()
    assert seeds == [int(expected[0]), 2**63 - 1, int(expected[1])]


def test_flags_are_those_of_the_rows_at_hand() -> None:
    state = SamplingState(8, VOCAB, eos_token_ids=[0])
    put(
        state,
        list(range(8)),
        [
            SamplingParams(),
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=1.0, top_k=2),
            SamplingParams(top_k=2, top_p=0.5, min_p=0.1),  # greedy: truncation means nothing
            SamplingParams(frequency_penalty=1.0),
            SamplingParams(logit_bias={1: 1.0}),
            SamplingParams(min_tokens=1),
            SamplingParams(logprobs=True),
        ],
    )
    buffers = state.new_rows(8)

    def flags(*handles: int) -> tuple[bool, ...]:
        r = take(state, list(handles), buffers)
        return (r.all_greedy, r.any_top_k_p, r.any_penalty, r.any_bias, r.any_logprobs)

    plain = (True, False, False, False, False)
    assert flags(0, 3) == plain
    assert take(state, [0, 3], buffers).is_plain_greedy
    assert flags(0, 1) == (False, False, False, False, False)
    assert flags(2) == (False, True, False, False, False)
    assert flags(4) == (True, False, True, False, False)
    assert flags(5) == flags(6) == (True, False, False, True, False)
    assert flags(7) == (True, False, False, False, True)
    assert flags(*range(8)) == (False, True, True, True, True)
    state.release(np.array([1, 2, 4, 5, 6, 7], np.int32))
    assert flags(0, 3) == plain


def test_penalty_counts_start_when_a_row_first_runs_and_end_with_it() -> None:
    state = SamplingState(4, VOCAB)
    put(state, [0, 1, 2], SamplingParams(frequency_penalty=1.0))
    buffers = state.new_rows(4)
    before = state.generation
    rows = take(state, [1], buffers)
    assert state.generation > before  # the table had to move
    assert rows.tables.prompt_seen[rows.penalty_slot[0]].nonzero()[:, 0].tolist() == [1, 2]
    state.commit(rows, torch.tensor([[5, 5, 6, 7]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    rows = take(state, [2, 1], buffers)
    counts = rows.tables.output_counts[rows.penalty_slot[:2].long()]
    assert counts[0].sum() == 0
    assert counts[1].nonzero()[:, 0].tolist() == [5, 6]
    assert counts[1, 5] == 2
    slot = int(rows.penalty_slot[1])
    state.release(np.array([1], np.int32))
    put(state, [1], SamplingParams(presence_penalty=1.0))
    rows = take(state, [1], buffers)
    assert int(rows.penalty_slot[0]) == slot  # the slot serves again, emptied
    assert rows.tables.output_counts[slot].sum() == 0


def test_penalties_stay_right_while_the_history_grows() -> None:
    generator = np.random.default_rng(1)
    state = SamplingState(2, VOCAB)
    items = [SamplingParams(frequency_penalty=0.5), SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)]
    put(state, [0, 1], items)
    buffers = state.new_rows(3)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    out: list[list[int]] = [[], []]
    for step in range(80):
        order = [1, 0] if step % 3 else [0, 1]
        rows = take(state, order, buffers)
        tokens = generator.integers(0, 8 + step % 12, (2, 5)).astype(np.int32)
        num_sampled = generator.integers(0, 6, 2).astype(np.int32)
        state.commit(rows, torch.from_numpy(tokens), torch.from_numpy(num_sampled))
        for place, handle in enumerate(order):
            out[handle] += tokens[place, : num_sampled[place]].tolist()
        rows = take(state, [0, 1, -1], buffers)
        actual = adjust_logits(logits, rows, torch.arange(3), torch.zeros(3, dtype=torch.int32)).numpy()
        counts = np.array([np.bincount(tokens, minlength=VOCAB) for tokens in out])
        first = logits[0].numpy() - 0.5 * counts[0]
        seen = (counts[1] > 0) | np.isin(np.arange(VOCAB), [1, 2])
        second = logits[1].numpy()
        second = np.where(seen, np.where(second > 0, second / 2, second * 2), second) - (counts[1] > 0)
        np.testing.assert_allclose(actual, [first, second, logits[2].numpy()], rtol=1e-5, atol=1e-5)
    assert len(out[0]) > 64 < len(out[1])  # several doublings


def test_many_requests_come_and_go_without_the_tables_growing() -> None:
    state = SamplingState(4, VOCAB)
    buffers = state.new_rows(4)
    item = SamplingParams(repetition_penalty=1.2, logit_bias={3: 1.0, 4: 2.0, 5: 3.0})
    for _ in range(50):
        put(state, [0, 1, 2, 3], item)
        rows = take(state, [0, 1, 2, 3], buffers)
        assert len(set(rows.bias_slot.tolist())) == 1  # one entry for all that share their parameters
        state.release(np.array([3, 1], np.int32))
        state.release(np.array([0, 1, 2], np.int32))
    assert rows.tables.output_counts.shape[0] <= 8
    assert rows.tables.bias_ids.shape == (2, 4)
    state.release(np.array([0, 1, 2, 3, 77], np.int32))  # unknown handles are nothing


def test_a_token_outside_the_vocabulary_is_refused_and_changes_nothing() -> None:
    state = SamplingState(2, VOCAB)
    put(state, [0, 1], SamplingParams(temperature=1.0))
    bad = SamplingParams(logit_bias={VOCAB: 1.0})
    with pytest.raises(ValueError, match=rf"token id {VOCAB} .* outside 0 to {VOCAB - 1}"):
        state.check(bad)
    with pytest.raises(ValueError, match="token id"):
        put(state, [0, 1], [SamplingParams(), bad])
    assert take(state, [0, 1]).temperature.tolist()[:2] == [1.0, 1.0]
    with pytest.raises(ValueError, match="do not belong together"):
        put(state, [0, 1], [SamplingParams()] * 3)


def test_row_seeds_differ_by_run_and_request() -> None:
    ids = np.arange(100_000)
    seeds = row_seed(0, ids)
    assert len(np.unique(seeds)) == len(ids)
    assert not np.any(seeds == row_seed(1, ids))
    assert np.array_equal(row_seed(0, ids[5:6]), seeds[5:6])
    same = [int(row_seed(i, np.array([i]))[0]) for i in range(-5, 50)]
    assert len(set(same)) == len(same)  # a run seed and an id do not cancel
    bits = (seeds[:, None] >> np.arange(64)) & 1
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.01


def test_cold_temperatures_stay_finite() -> None:
    state = SamplingState(1, VOCAB)
    put(state, [0], SamplingParams(temperature=1e-30))
    rows = take(state, [0])
    assert not rows.all_greedy
    assert float(rows.temperature[0]) > 0
    assert torch.isfinite(torch.tensor(1e4) / rows.temperature[0])
