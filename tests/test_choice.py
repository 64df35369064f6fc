"""Hysteresis, dwell and the value of knowing more; rows that differ."""

from __future__ import annotations

import numpy as np
import pytest

from specbatch.control.choice import Limits, ShardState, expected_improvement
from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM, METHOD_NONE, RowGroup
from specbatch.control.row_groups import RowMix, RowTally


def test_hysteresis_wants_two_looks_and_a_dwell() -> None:
    limits, arm = Limits(dwell=8), (METHOD_DRAFT, 4)
    state = ShardState((METHOD_NONE, 0), since=0, dwell=8)
    assert not state.wants(4, arm, 0.10, limits)  # too early
    assert state.wants(8, arm, 0.10, limits)
    fresh = ShardState((METHOD_NONE, 0), since=0, dwell=8)
    assert not fresh.wants(20, arm, 0.10, limits)  # once is not enough
    assert not fresh.wants(24, arm, 0.02, limits)  # and it must be in a row
    assert not fresh.wants(28, arm, 0.10, limits)
    assert fresh.wants(32, arm, 0.10, limits)
    slow = ShardState((METHOD_NONE, 0), since=0, dwell=8)
    wanted = [slow.wants(20 + 4 * i, arm, 0.035, limits) for i in range(6)]  # a small gain, but again and again
    assert wanted == [False] * 5 + [True]


def test_going_back_and_forth_doubles_the_dwell() -> None:
    limits, state = Limits(dwell=8, max_dwell=256), ShardState((METHOD_NONE, 0), since=0, dwell=8)
    step, dwells = 0, []
    for i in range(20):
        step += state.dwell
        state.switch(step, (METHOD_DRAFT, 4) if i % 2 == 0 else (METHOD_NONE, 0), limits)
        dwells.append(state.dwell)
    assert dwells[-1] == 256
    assert sorted(dwells) == dwells
    state.switch(step + 10_000, (METHOD_NGRAM, 2), limits)
    assert state.dwell < 256


def test_expected_improvement() -> None:
    rng = np.random.default_rng(0)
    for gain, sd in ((0.1, 0.2), (-0.1, 0.2), (-0.3, 0.1), (0.0, 0.05)):
        draws = np.maximum(rng.normal(gain, sd, 400_000), 0).mean()
        assert expected_improvement(gain, sd) == pytest.approx(draws, abs=5e-4)
    assert expected_improvement(-0.1, 0.0) == 0.0
    assert expected_improvement(0.1, 0.0) == 0.1


def test_rows_that_differ_progress_at_the_harmonic_mean() -> None:
    """Half of the rows accept nearly all, half nearly nothing: a large k looks better now than it is in the long run."""
    tally, rng = RowTally(), np.random.default_rng(0)
    rows = np.arange(200)
    alpha = np.where(rows % 2 == 0, 0.9, 0.15)
    for _ in range(12):
        hits = rng.random((200, 4)) < alpha[:, None]
        tally.add(rows, np.full(200, 4), np.cumprod(hits, axis=1).sum(axis=1))
    mix = RowMix()
    mix.add(tally.groups(rows, finished=False), 200)
    speed = (1 - alpha**5) / (1 - alpha)
    wanted = 1 / (1 / speed).mean() / speed.mean()
    assert mix.correction(4, True, 1.0) == pytest.approx(wanted, abs=0.05)
    assert mix.correction(1, True, 1.0) > mix.correction(8, True, 1.0)
    assert RowMix().correction(4, True, 1.0) == 1.0


def test_luck_is_not_taken_for_a_difference_between_rows() -> None:
    tally, rng = RowTally(), np.random.default_rng(0)
    rows = np.arange(300)
    for _ in range(6):
        hits = rng.random((300, 3)) < 0.6
        tally.add(rows, np.full(300, 3), np.cumprod(hits, axis=1).sum(axis=1))
    mix = RowMix()
    mix.add(tally.groups(rows, finished=False), 300)
    assert 0.96 < mix.correction(3, True, 1.0) <= 1.0
    tally.reset(rows[:150])
    assert sum(g.rows for g in tally.groups(rows, finished=True)) == 150


def test_finished_rows_are_counted_once_and_their_handles_start_anew() -> None:
    """In whatever order rows end: groups of all that ended are those of the same rows while they ran."""
    tally, rng = RowTally(), np.random.default_rng(1)
    rows = np.arange(100)
    for _ in range(8):
        tally.add(rows, np.full(100, 4), rng.binomial(4, rows / 100))
    wanted = tally.groups(rows[10:70], finished=True)
    for ended in (rows[40:70], rows[10:40]):
        tally.finish(ended)
        tally.add(rows[:10], np.full(10, 4), np.full(10, 4))  # the steps between have other rows
    assert tally.finished_groups() == wanted
    assert sum(g.rows for g in wanted) == 60
    assert tally.finished_groups() == ()
    assert sum(g.rows for g in tally.groups(rows, finished=False)) == 40


def test_a_few_slow_rows_do_not_promise_fast_ones_to_come() -> None:
    """Eight rows that accept little now, many that accepted much before: what is counted now is not raised for that."""
    mix = RowMix()
    slow = RowGroup(finished=False, rows=8, rounds=80, drafted=320, accepted=40)
    fast = RowGroup(finished=True, rows=100, rounds=1000, drafted=4000, accepted=3000)
    mix.add([slow, fast], running=8)
    here, everyone, seen = mix._parts(4, True)
    assert 1.0 / (everyone * seen) > 1.3  # what it would be raised by
    assert mix.correction(4, True, 0.9) == 1.0
    assert 1.0 / (here * seen) <= 1.0


def test_how_much_a_row_must_show_depends_on_how_much_rows_differ() -> None:
    tally, rng = RowTally(), np.random.default_rng(0)
    rows = np.arange(300)
    assert RowMix().spread() == (0.0, 0.0)
    weights = []
    for alpha in (np.full(300, 0.6), np.where(rows % 2 == 0, 0.9, 0.15)):
        for _ in range(12):
            hits = rng.random((300, 3)) < alpha[:, None]
            tally.add(rows, np.full(300, 3), np.cumprod(hits, axis=1).sum(axis=1))
        mix = RowMix()
        mix.add(tally.groups(rows, finished=False), 300)
        tally.reset(rows)
        mean, weight = mix.spread()
        assert mean == pytest.approx(alpha.mean(), abs=0.1)
        weights.append(weight)
    assert weights[0] > 20 > 4 > weights[1]


def test_a_draft_model_that_is_no_better_is_given_up_after_a_while() -> None:
    limits, state = Limits(steady_times=3, tie=0.01), ShardState((METHOD_DRAFT, 2), since=0, dwell=8)
    assert [state.tied(gain, limits) for gain in (0.0, 0.005, 0.2, 0.0, -0.1, 0.009)] == [False] * 5 + [True]
    state.switch(40, (METHOD_NONE, 0), limits)
    assert state.ties == 0
