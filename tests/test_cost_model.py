"""Step times: monotone fits, measured surfaces, the budget of the profiler, the disk cache, the online correction."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.control.correction import CostCorrection, Parts
from specbatch.control.cost_model import (
    Affine,
    AffineCost,
    CostCache,
    GridCost,
    Surface,
    cost_from_json,
    isotonic,
    monotone,
    roofline,
)
from specbatch.control.profiler import profile
from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM
from specbatch.control.scoring import step_parts
from specbatch.control.simulate import EAGLE_LIKE, H100_8B

FLOATS = st.floats(0.001, 100)
AR, DRAFT_2, DRAFT_4, NGRAM_2 = (0, 0), (METHOD_DRAFT, 2), (METHOD_DRAFT, 4), (METHOD_NGRAM, 2)


@given(st.lists(FLOATS, min_size=1, max_size=30))
def test_isotonic(values: list[float]) -> None:
    fit = isotonic(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(fit))
    assert sum(fit) == pytest.approx(sum(values))
    assert isotonic(fit) == pytest.approx(fit)
    if values == sorted(values):
        assert fit == pytest.approx(values)


@given(st.lists(st.lists(FLOATS, min_size=4, max_size=4), min_size=1, max_size=6))
def test_monotone_in_both_directions(table: list[list[float]]) -> None:
    fit = np.array(monotone(table))
    assert (np.diff(fit, axis=1) >= 0).all()
    assert (np.diff(fit, axis=0) >= 0).all()
    sorted_table = np.sort(np.sort(np.array(table), axis=0), axis=1)
    assert np.array(monotone(sorted_table.tolist())) == pytest.approx(sorted_table)


def test_surface_between_and_beyond_its_points() -> None:
    surface = Surface([1, 4, 16], [1, 3, 9], [[2, 3, 6], [4, 8, 20], [10, 26, 74]], [0.0, 0.01, 0.01], 100)
    assert surface(4, 12, 400) == 8
    assert surface(1, 2, 100) == pytest.approx(2.5)
    assert surface(10, 10, 1000) == pytest.approx(7)
    assert surface(10, 10, 2000) == pytest.approx(7 + 0.01 * 1000)
    assert surface(32, 32, 3200) == pytest.approx(18)  # the last slope goes on
    assert surface(4, 48, 400) == pytest.approx(26)
    assert surface(0, 0, 0) == 0
    assert surface(4, 4, 0) > 0  # never below zero, however short the context
    with pytest.raises(ValueError, match="lines"):
        Surface([1, 2], [1], [[1]], [0, 0], 1)


class FakeDevice:
    """Steps that take what a formula says, on a clock of its own."""

    def __init__(self, target: Callable[[int, int, int], float], *, noise: float = 0.0, overhead: float = 0.0) -> None:
        self.target, self.noise, self.overhead = target, noise, overhead
        self.now, self.calls = 0.0, 0
        self.rng = np.random.default_rng(0)

    def __call__(self, kind: str, rows: int, tokens_per_row: int, context: int) -> float:
        seconds = self.target(rows, tokens_per_row, context) * (0.2 if kind == "draft" else 1.0)
        seconds *= 1.0 + abs(self.rng.normal(0.0, self.noise))
        self.now += seconds + self.overhead
        self.calls += 1
        return seconds

    def clock(self) -> float:
        return self.now


def stairs(rows: int, q: int, context: int) -> float:
    """A GPU-like device: flat up to 64 tokens, then linear, in tiles of 64."""
    return 0.005 + 4e-5 * 64 * max(math.ceil(rows * q / 64) - 1, 0) + 3e-8 * rows * context


def cpu_like(rows: int, q: int, context: int) -> float:
    """A CPU-like device: bound by tokens from the start, verify passes a little dearer."""
    return 0.020 + 0.0035 * rows * q * (1.0 + 0.1 * (q > 1)) + 2e-6 * rows * context


@pytest.mark.parametrize("device", [stairs, cpu_like])
def test_profile_finds_the_surface(device: Callable[[int, int, int], float]) -> None:
    fake = FakeDevice(device, noise=0.02)
    cost = profile(fake, max_rows=128, max_k=8, with_draft=True, budget=60.0, clock=fake.clock)
    for rows in (1, 3, 8, 20, 64, 100, 128):
        for q in (1, 2, 3, 5, 9):
            for context in (128, 700):
                truth = device(rows, q, context)
                assert cost.target(rows, rows * q, rows * context) == pytest.approx(truth, rel=0.2), (rows, q, context)
    # what the choice rests on: AR against verifying, at the same rows
    for rows in (1, 8, 64, 128):
        truth = device(rows, 5, 128) / device(rows, 1, 128)
        assert cost.target(rows, rows * 5, rows * 128) / cost.target(rows, rows, rows * 128) == pytest.approx(
            truth, rel=0.08
        )
    assert cost.draft(8, 8, 8 * 128) == pytest.approx(0.2 * device(8, 1, 128), rel=0.1)


@pytest.mark.parametrize("budget", [0.5, 3.0, 8.0])
def test_profile_keeps_its_budget(budget: float) -> None:
    fake = FakeDevice(cpu_like, overhead=0.01)
    lines: list[str] = []
    cost = profile(fake, max_rows=64, max_k=8, with_draft=True, budget=budget, clock=fake.clock, progress=lines.append)
    longest = cpu_like(64, 9, 1024) + 0.01
    assert fake.now < budget + 3 * longest
    assert cost.target(64, 64 * 9, 64 * 128) > cost.target(64, 64, 64 * 128) > cost.target(1, 1, 128)
    assert any("measuring" in line for line in lines)
    assert f"measured in {fake.now:.1f} s" in lines[-1]


def test_profile_of_one_row_and_no_drafts() -> None:
    fake = FakeDevice(stairs)
    cost = profile(fake, max_rows=1, max_k=0, with_draft=False, clock=fake.clock)
    assert cost.target(1, 1, 128) == pytest.approx(stairs(1, 1, 128), rel=0.02)
    assert cost.draft(1, 1, 1) == 0


def grid() -> GridCost:
    fake = FakeDevice(stairs)
    return profile(fake, max_rows=16, max_k=4, with_draft=True, clock=fake.clock)


@pytest.mark.parametrize("cost", [grid(), AffineCost(H100_8B, EAGLE_LIKE), AffineCost(H100_8B)])
def test_costs_survive_as_json(cost: GridCost | AffineCost) -> None:
    again = cost_from_json(json.loads(json.dumps(cost.to_json())))
    assert again.to_json() == cost.to_json()
    assert again.target(7, 21, 900) == cost.target(7, 21, 900)
    assert again.draft(7, 7, 900) == cost.draft(7, 7, 900)
    with pytest.raises(ValueError, match="unknown kind"):
        cost_from_json({"kind": "other", "draft": None})


def test_roofline_of_an_8b_model() -> None:
    model = roofline(
        parameter_bytes=16e9, parameters=8e9, kv_bytes_per_token=131072, bandwidth=3.35e12, flops=989e12, overhead=1e-3
    )
    assert model(1, 1, 0) == pytest.approx(1e-3 + 4.776e-3 + 1.6e-5, rel=1e-3)


KEY = {"device": "a", "model": "b", "dtype": "float32", "torch": "2.11"}


def test_cache_gives_back_what_it_was_given(tmp_path: Path) -> None:
    cache, cost = CostCache(tmp_path / "new" / "folder"), grid()
    assert cache.load(KEY) is None
    path = cache.store(KEY, cost)
    loaded = cache.load(KEY)
    assert loaded is not None
    assert loaded.to_json() == cost.to_json()
    assert cache.load(KEY | {"dtype": "bfloat16"}) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file left


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 99}', '{"format": 1, "key": {}, "cost": {}}'])
def test_a_damaged_cache_counts_as_none(tmp_path: Path, damage: str) -> None:
    cache = CostCache(tmp_path)
    cache.store(KEY, grid()).write_text(damage)
    assert cache.load(KEY) is None


def test_a_key_is_checked_not_only_its_hash(tmp_path: Path) -> None:
    cache = CostCache(tmp_path)
    path = cache.store(KEY, grid())
    path.rename(cache.path(KEY | {"device": "other"}))
    assert cache.load(KEY | {"device": "other"}) is None


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, cost = CostCache(tmp_path), grid()
    cache.store(KEY, cost)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.store(KEY, AffineCost(H100_8B))
    monkeypatch.undo()
    loaded = cache.load(KEY)
    assert loaded is not None
    assert loaded.to_json() == cost.to_json()
    assert len(list(tmp_path.iterdir())) == 1


# -- the online correction ---------------------------------------------------------------------------------------------


def believed() -> AffineCost:
    return AffineCost(H100_8B, EAGLE_LIKE)


def real(tokens: float, draft: float, machine: float) -> AffineCost:
    """A device whose verify tokens, draft and everything cost otherwise than believed."""
    target = Affine(H100_8B.base * machine, H100_8B.per_token * tokens * machine, H100_8B.per_kv_token * machine)
    scaled = Affine(*(machine * draft * v for v in (EAGLE_LIKE.base, EAGLE_LIKE.per_token, EAGLE_LIKE.per_kv_token)))
    return AffineCost(target, scaled)


def parts(cost: AffineCost, arm: tuple[int, int], rows: int = 256, context: int = 512) -> Parts:
    k = arm[1]
    return step_parts(cost, rows, rows * (1 + k), rows * context, {k: rows} if arm[0] == METHOD_DRAFT else {})


@pytest.mark.parametrize(("tokens", "draft", "machine"), [(1.3, 1.0, 1.0), (0.7, 1.3, 1.2), (1.0, 0.7, 0.7)])
def test_correction_mends_a_model_that_is_wrong_by_a_third(tokens: float, draft: float, machine: float) -> None:
    rng, filter_, truth = np.random.default_rng(0), CostCorrection(), real(tokens, draft, machine)
    for arm in [AR] * 8 + [DRAFT_2] * 8 + [AR] * 8 + [DRAFT_2] * 8:
        filter_.advance()
        seconds = parts(truth, arm).total * float(np.exp(rng.normal(0, 0.03)))
        filter_.observe(arm, parts(believed(), arm), seconds, 4)
    # the ratio that decides, and a k that never ran
    for arm, tolerance in ((DRAFT_2, 0.03), (DRAFT_4, 0.08)):
        right = parts(truth, arm).total / parts(truth, AR).total
        guess = filter_.predict(arm, parts(believed(), arm)) / filter_.predict(AR, parts(believed(), AR))
        assert guess == pytest.approx(right, rel=tolerance)
    uncorrected = parts(believed(), DRAFT_2).total / parts(believed(), AR).total
    right = parts(truth, DRAFT_2).total / parts(truth, AR).total
    assert uncorrected != pytest.approx(right, rel=0.015)


def test_a_slower_machine_changes_no_comparison() -> None:
    filter_ = CostCorrection()
    before = filter_.predict(DRAFT_2, parts(believed(), DRAFT_2)) / filter_.predict(AR, parts(believed(), AR))
    for _ in range(30):
        filter_.observe(AR, parts(believed(), AR), 1.5 * parts(believed(), AR).total, 8)
    after = filter_.predict(DRAFT_2, parts(believed(), DRAFT_2)) / filter_.predict(AR, parts(believed(), AR))
    assert filter_.predict(AR, parts(believed(), AR)) == pytest.approx(1.5 * parts(believed(), AR).total, rel=0.02)
    assert after == pytest.approx(before, rel=0.15)


def test_trying_a_mode_settles_the_doubt_about_it() -> None:
    filter_ = CostCorrection()
    for _ in range(20):
        filter_.observe(AR, parts(believed(), AR), parts(believed(), AR).total, 8)
    here, there = parts(believed(), AR), parts(believed(), DRAFT_4)
    doubt = filter_.difference_sd(DRAFT_4, there, AR, here)
    filter_.observe(DRAFT_4, there, there.total, 4)
    assert filter_.difference_sd(DRAFT_4, there, AR, here) < 0.5 * doubt
    assert filter_.difference_sd(AR, here, AR, here) == 0


def test_one_long_step_is_noise() -> None:
    filter_, here = CostCorrection(), parts(believed(), AR)
    for _ in range(20):
        filter_.observe(AR, here, here.total, 4)
    filter_.observe(AR, here, 20 * here.total, 1)
    assert filter_.predict(AR, here) < 1.1 * here.total
    for _ in range(30):  # but a machine that stays slow is believed
        filter_.advance()
        filter_.observe(AR, here, 3 * here.total, 4)
    assert filter_.predict(AR, here) > 2.5 * here.total


def test_draft_seconds_tell_draft_and_target_apart() -> None:
    filter_, truth = CostCorrection(), real(1.0, 1.4, 1.0)
    for _ in range(10):
        ran = parts(truth, DRAFT_4)
        filter_.observe(DRAFT_4, parts(believed(), DRAFT_4), ran.total, 4, ran.draft)
    factors = filter_.factors()
    assert factors["draft"] * factors["machine"] == pytest.approx(1.4, rel=0.05)


def test_another_batch_size_brings_doubt_back() -> None:
    filter_, here, there = CostCorrection(), parts(believed(), AR), parts(believed(), NGRAM_2)
    for _ in range(20):
        filter_.observe(NGRAM_2, there, 1.2 * there.total, 4)
        filter_.observe(AR, here, here.total, 4)
    before = filter_.difference_sd(NGRAM_2, there, AR, here)
    filter_.new_tier()
    assert filter_.difference_sd(NGRAM_2, there, AR, here) > 2 * before


def test_a_first_touch_of_memory_is_not_taken_for_the_price_of_context() -> None:
    """The long context of many rows touches pages nobody has used: once, and just when the time is nearly up."""
    now, touched = 0.0, set[tuple[int, int]]()

    def measure(kind: str, rows: int, tokens_per_row: int, context: int) -> float:
        nonlocal now
        seconds = 0.02 + 1e-6 * rows * context
        if rows * context > 2**15 and (rows, context) not in touched:
            touched.add((rows, context))
            seconds += 2.0
        now += seconds
        return seconds

    cost = profile(measure, max_rows=64, max_k=8, with_draft=False, budget=3.0, clock=lambda: now)
    assert cost.target(64, 64, 64 * 400) < 0.15


def test_what_else_runs_on_the_machine_is_not_taken_for_the_price_of_a_step() -> None:
    """Every now and then something takes the processor for a time that is long beside a short step, for several in a row."""
    rng, now, busy = np.random.default_rng(3), 0.0, 0

    def measure(kind: str, rows: int, tokens_per_row: int, context: int) -> float:
        nonlocal now, busy
        busy = busy - 1 if busy else 6 * int(rng.random() < 0.05)
        seconds = cpu_like(rows, tokens_per_row, context) / 50.0 * (5.0 if busy else 1.0)
        now += seconds
        return seconds

    cost = profile(measure, max_rows=64, max_k=8, with_draft=True, budget=8.0, clock=lambda: now)
    for rows in (1, 8, 64):
        for q in (1, 2, 5, 9):
            truth = cpu_like(rows, q, 128) / 50.0
            assert cost.target(rows, rows * q, rows * 128) == pytest.approx(truth, rel=0.15), (rows, q)


def test_the_host_is_part_of_every_step() -> None:
    cost = replace(grid(), host_seconds=((1.0, 1e-3), (16.0, 4e-3)))
    assert [cost.host(rows) for rows in (1, 8.5, 16, 40)] == pytest.approx([1e-3, 2.5e-3, 4e-3, 4e-3])
    assert grid().host(8) == 0.0
    assert cost_from_json(json.loads(json.dumps(cost.to_json()))).host(8.5) == cost.host(8.5)
    with_host, without = (step_parts(c, 4.0, 8.0, 400.0, {}) for c in (cost, grid()))
    assert with_host.total - without.total == pytest.approx(cost.host(4.0))
