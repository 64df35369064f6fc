"""D: slow. What a policy costs, on a device that is only a cost model; the real engine's figures are in the benchmarks."""

from __future__ import annotations

import pytest

from specbatch.control.controller import Controller, ControllerOptions, FixedPolicy
from specbatch.control.records import METHOD_DRAFT, METHOD_NONE, STEP_DECODE
from specbatch.control.simulate import SimDevice, SimResult, SimStep, Workload, simulate
from specbatch.control.workloads import constant, workload
from specbatch.engine.simulated import CoreRows

H100 = SimDevice()


def go(
    work: Workload, rows_at_once: int, policy: FixedPolicy | Controller, steps: list[SimStep] | None = None
) -> SimResult:
    rows = CoreRows(work, pages=50_000, max_num_seqs=rows_at_once, draft_block_size=533)
    return simulate(
        rows, policy, H100, work.tokens, on_step=None if steps is None else lambda _, step, __: steps.append(step)
    )


def auto(rows_at_once: int) -> Controller:
    options = ControllerOptions(methods=(METHOD_DRAFT,), max_num_seqs=rows_at_once, draft_kv_ratio=0.03)
    return Controller(options, H100.cost)


@pytest.mark.parametrize("accept", [0.1, 0.75])
@pytest.mark.parametrize("rows_at_once", [1, 8, 32, 128])
def test_d1_auto_is_within_three_per_cent_of_the_best(rows_at_once: int, accept: float) -> None:
    count = {1: 12, 8: 40, 32: 120, 128: 400}[rows_at_once]
    work = workload(count, accept=constant(accept), prompt=64, output=200, persistence=0.0)
    forced = [go(work, rows_at_once, FixedPolicy(METHOD_NONE, 0)).rate]
    forced += [go(work, rows_at_once, FixedPolicy(METHOD_DRAFT, k)).rate for k in (1, 4, 6)]
    assert go(work, rows_at_once, auto(rows_at_once)).rate >= 0.97 * max(forced)


def test_d4_rows_of_one_token_are_not_drafted_for() -> None:
    work = workload(64, accept=constant(0.9), prompt=64, output=1, persistence=0.0)
    assert work.max_tokens == 1
    for policy in (auto(16), FixedPolicy(METHOD_DRAFT, 4)):
        steps: list[SimStep] = []
        go(work, 16, policy, steps)
        assert sum(step.draft_tokens for step in steps) == 0


def test_d5_drafting_is_batched() -> None:
    """4 rows, k = 3: three passes of the draft a step, each over all rows, not one a row."""
    work = workload(4, accept=constant(0.9), prompt=64, output=100, persistence=0.0)
    steps: list[SimStep] = []
    go(work, 4, FixedPolicy(METHOD_DRAFT, 3), steps)
    full = [s for s in steps if s.kind == STEP_DECODE and s.rows == 4 and s.draft_tokens == 12]
    assert len(full) > 10
    assert all(step.draft_passes == [4, 4, 4] for step in full)
