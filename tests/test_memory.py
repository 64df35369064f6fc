"""Bytes before the run: weights, KV of two models, rows in each mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.control.memory import MemoryBudget, speculative_rows

KIB, GB = 1024, 10**9
# Qwen3-8B with Qwen3-0.6B on one 80 GB device: 144 and 112 KiB of KV a token
HEAVY = MemoryBudget(
    device_bytes=80 * GB,
    target_weights=int(16.4e9),
    target_kv_per_token=144 * KIB,
    draft_weights=int(1.2e9),
    draft_kv_per_token=112 * KIB,
    headroom=0.0,
)


def test_a_heavy_draft_takes_almost_half_of_the_rows() -> None:
    assert HEAVY.draft_kv_ratio == pytest.approx(0.8)  # 112/144, in whole tokens a page: 20 for 16
    ar, spec = HEAVY.rows_ar(1024), HEAVY.rows_speculative(1024)
    assert ar == 413
    assert spec / ar == pytest.approx(1 / 1.8125, rel=0.01)
    assert HEAVY.rows_ar_static_split(1024) == spec  # what an engine that reserves the share would run, even in AR
    assert HEAVY.rows_without_draft(1024) == 421


def test_rows_follow_the_formula() -> None:
    assert speculative_rows(401, 144, 112) == pytest.approx(225.6, abs=0.1)
    assert speculative_rows(100, 320, 512) == pytest.approx(38.46, abs=0.01)
    with pytest.raises(ValueError, match="positive"):
        speculative_rows(1, 0, 1)


@given(
    st.integers(1, 400), st.integers(0, 400), st.integers(1, 4096), st.sampled_from([1, 8, 16, 64]), st.integers(1, 200)
)
def test_rows_fit_the_bytes_they_are_given(target: int, draft: int, context: int, block: int, gigabytes: int) -> None:
    budget = MemoryBudget(
        device_bytes=gigabytes * GB,
        target_weights=GB // 2,
        target_kv_per_token=target * KIB,
        draft_weights=GB // 10 if draft else 0,
        draft_kv_per_token=draft * KIB,
        block_size=block,
    )
    for rows, each in (
        (budget.rows_ar(context), target),
        (budget.rows_speculative(context), target + (draft if budget.draft_block_size else 0)),
    ):
        assert rows * context * each * KIB <= max(budget.kv_bytes(with_draft=True), 0)
    assert budget.rows_speculative(context) <= budget.rows_ar(context) <= budget.rows_without_draft(context)


def test_models_that_do_not_fit_leave_no_rows() -> None:
    small = replace(HEAVY, device_bytes=10 * GB)
    assert small.kv_bytes(with_draft=True) < 0
    assert small.rows_ar(1024) == small.rows_speculative(1024) == 0


def test_self_drafts_and_ngram_cost_no_rows() -> None:
    free = replace(HEAVY, draft_weights=0, draft_kv_per_token=0)
    assert free.draft_kv_ratio == 0
    assert free.rows_speculative(1024) == free.rows_ar(1024) == free.rows_without_draft(1024)


@pytest.mark.parametrize(
    ("name", "value"), [("device_bytes", 0), ("draft_weights", -1), ("headroom", 1.0), ("block_size", 0)]
)
def test_impossible_numbers_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(HEAVY, **{name: value})
    with pytest.raises(ValueError, match="context"):
        HEAVY.rows_ar(0)


def test_the_budget_is_told_in_full() -> None:
    told = HEAVY.describe(1024)
    assert told["rows_ar"] == 413
    assert told["rows_speculative"] == HEAVY.rows_speculative(1024)
    assert told["kv_bytes"] == 80 * GB - int(16.4e9) - int(1.2e9)
