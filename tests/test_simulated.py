"""Policies at GPU scale: the real scheduler and the real controller over a device that is only a cost model.

Each case runs every forced setting and auto over the same rows with the same luck; auto is held against the best of
them in hindsight. benchmarks/simulated.py prints the whole table.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch.control.controller import Controller, ControllerOptions, FixedPolicy
from specbatch.control.cost_model import Affine, AffineCost, StepCost
from specbatch.control.race import Race, race
from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM, METHOD_NONE, STEP_PREFILL
from specbatch.control.row_model import PlainRows
from specbatch.control.simulate import (
    EAGLE_LIKE,
    H100_8B,
    KV_HEAVY_DRAFT,
    SimDevice,
    SimResult,
    Workload,
    runs,
    simulate,
)
from specbatch.control.workloads import bimodal, constant, drifting, workload
from specbatch.engine.simulated import CoreRows

H100 = SimDevice()
HEAVY = SimDevice(AffineCost(H100_8B, KV_HEAVY_DRAFT, "H100, 8B, a draft with 78 % of its KV"))


def run_race(
    work: Workload,
    pool_tokens: int,
    ks: Sequence[int],
    *,
    device: SimDevice = H100,
    believed: StepCost | None = None,
    draft_tokens_a_page: int = 533,  # an EAGLE-like draft: 3 % of the target's KV a token
    max_num_seqs: int = 512,
    **options: Any,
) -> Race:
    made: list[CoreRows] = []

    def rows() -> CoreRows:
        made.append(
            CoreRows(work, pages=pool_tokens // 16, max_num_seqs=max_num_seqs, draft_block_size=draft_tokens_a_page)
        )
        return made[-1]

    choice = ControllerOptions(
        methods=(METHOD_DRAFT,), max_num_seqs=max_num_seqs, draft_kv_ratio=16 / draft_tokens_a_page, **options
    )
    found = race(rows, [(METHOD_DRAFT, k) for k in ks], choice, device, work.tokens, believed=believed)
    for core_rows in made:
        core_rows.core.check_integrity()
        assert core_rows.completed == len(work)
    return found


@pytest.mark.parametrize(
    ("accept", "prompt", "pool", "ks"),
    [
        pytest.param(constant(0.85), 256, 200_000, (2, 3, 4), id="high"),
        pytest.param(constant(0.85), 1024, 100_000, (4, 6), id="high, no page to spare"),
        pytest.param(constant(0.2), 256, 200_000, (1,), id="low"),
        pytest.param(bimodal(0.15, 0.9), 256, 200_000, (1, 2), id="bimodal"),
        pytest.param(drifting(0.9, 0.1, 0.8, 0.15), 1024, 200_000, (1, 2), id="drifting"),
    ],
)
def test_auto_is_never_far_from_the_best_forced_setting(accept: Any, prompt: int, pool: int, ks: Sequence[int]) -> None:
    rows = 1000 if prompt < 1000 else 400
    found = run_race(workload(rows, accept=accept, prompt=prompt, output=160), pool, ks)
    assert found.score >= 0.97
    assert found.teacher_forced_share <= 0.01


@pytest.mark.slow
def test_the_whole_table() -> None:
    """Four workloads x three prompts x three pools, and those no fixed setting fits, each against k of 1 to 8."""
    script = Path(__file__).parent.parent / "benchmarks" / "simulated.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_auto_beats_every_forced_setting_where_acceptance_drifts() -> None:
    work = workload(800, accept=drifting(0.9, 0.05, 0.9, 0.05), prompt=100, output=160, shards=4)
    found = run_race(work, 800_000, (1, 2, 4), max_num_seqs=128)
    assert found.score >= 1.05


def test_auto_beats_every_forced_setting_where_the_batch_drains() -> None:
    """Long-tailed rows and a draft with large KV: AR while memory is full, the draft for the tail."""
    work = workload(1000, accept=constant(0.8), prompt=300, output=250, long_tail=1.0, persistence=0.2)
    found = run_race(work, 200_000, (2, 3, 4, 6), device=HEAVY, draft_tokens_a_page=20)
    assert found.score >= 1.05
    methods = [s.method for d in found.auto.decisions for s in d.shards if s.switched]
    assert METHOD_DRAFT in methods
    assert all(s.reason for d in found.auto.decisions for s in d.shards if s.switched)


def test_the_tail_of_200_long_tailed_rows() -> None:
    work = workload(200, accept=constant(0.6), prompt=200, output=300, long_tail=0.8)
    found = run_race(work, 800_000, (2, 4))
    assert found.auto.seconds < 0.75 * found.off.seconds
    assert found.score >= 0.97


def decode_rate(result: SimResult) -> float:
    """Tokens a second of decoding: prefill costs all policies the same and is left out."""
    prefill = sum(s for mode, s in result.seconds_by_mode.items() if mode.startswith(f"{STEP_PREFILL}:"))
    return result.tokens / (result.seconds - prefill)


def test_a_kv_heavy_draft_costs_ar_nothing() -> None:
    """78 % of the target's KV a token, acceptance 0.75, 1k context, equal memory: an engine that sets the draft's
    share aside and speculates with k = 4 falls to 0.77x of AR; auto stays at AR's rate."""
    work = workload(1200, accept=constant(0.75), prompt=900, output=250, persistence=0.0)
    options = {"pages": 410_000 // 16, "max_num_seqs": 512, "draft_kv_ratio": 0.78}
    ar = simulate(PlainRows(work, **options), FixedPolicy(METHOD_NONE, 0), HEAVY, work.tokens)
    static = simulate(
        PlainRows(work, **options, static_draft_share=True), FixedPolicy(METHOD_DRAFT, 4), HEAVY, work.tokens
    )
    assert decode_rate(static) / decode_rate(ar) == pytest.approx(0.77, abs=0.05)
    controller = Controller(
        ControllerOptions(methods=(METHOD_DRAFT,), max_num_seqs=512, draft_kv_ratio=0.8), HEAVY.cost
    )
    rows = CoreRows(work, pages=410_000 // 16, max_num_seqs=512, draft_block_size=20)
    auto = simulate(rows, controller, HEAVY, work.tokens)
    assert decode_rate(auto) >= 0.99 * decode_rate(ar)


@pytest.mark.parametrize(("tokens", "draft"), [(1.3, 0.7), (0.7, 1.3)])
def test_a_wrong_cost_model_is_mended_online(tokens: float, draft: float) -> None:
    wrong = AffineCost(
        Affine(H100_8B.base, H100_8B.per_token * tokens, H100_8B.per_kv_token),
        Affine(EAGLE_LIKE.base * draft, EAGLE_LIKE.per_token, EAGLE_LIKE.per_kv_token),
    )
    work = workload(500, accept=constant(0.45), prompt=256, output=160)
    found = run_race(work, 400_000, (1, 2), device=SimDevice(jitter=0.05), believed=wrong, max_num_seqs=256)
    assert found.score >= 0.97


def test_speculation_comes_back_after_a_hopeless_shard() -> None:
    """A7, with and without an engine that can run the draft teacher-forced."""
    work = workload(300, accept=drifting(0.02, 0.9), prompt=200, output=160, shards=2)
    for can_probe in (True, False):
        found = run_race(work, 100_000, (), max_num_seqs=64, can_probe_draft=can_probe)
        last = [s for d in found.auto.decisions[-30:] for s in d.shards if s.shard == 1 and not s.probe]
        assert np.mean([s.method == METHOD_DRAFT for s in last]) > 0.8
        assert found.score > 1.1


def test_ngram_is_taken_at_a_small_batch_and_refused_at_a_large_one() -> None:
    for cap, ngram_accept, wanted in ((4, 0.5, True), (256, 0.02, False)):
        work = workload(
            cap * 4, accept=constant(0.1), prompt=128, output=160, ngram_accept=ngram_accept, ngram_match=0.4
        )

        def go(policy: FixedPolicy | Controller, cap: int = cap, work: Workload = work) -> SimResult:
            return simulate(PlainRows(work, pages=60_000, max_num_seqs=cap), policy, H100, work.tokens)

        fixed = [go(FixedPolicy(METHOD_NGRAM if k else METHOD_NONE, k)).rate for k in (0, 4, 8)]
        auto = go(Controller(ControllerOptions(methods=(METHOD_NGRAM,), max_num_seqs=cap), H100.cost))
        assert auto.rate >= 0.97 * max(fixed)
        used = sum(s for mode, s in auto.seconds_by_mode.items() if f":{METHOD_NGRAM}:" in mode)
        assert (used > 0.5 * auto.seconds) == wanted


def test_the_plain_rows_stand_in_for_the_scheduler() -> None:
    """The numpy stand-in and the real scheduler agree on what a policy is worth."""
    work = workload(200, accept=constant(0.7), prompt=200, output=120)
    for method, k in ((METHOD_NONE, 0), (METHOD_DRAFT, 3)):
        plain = PlainRows(work, pages=3_000, max_num_seqs=512, draft_kv_ratio=0.03)
        core = CoreRows(work, pages=3_000, max_num_seqs=512, draft_block_size=533)
        rates = [simulate(rows, FixedPolicy(method, k), H100, work.tokens).rate for rows in (plain, core)]
        assert rates[0] == pytest.approx(rates[1], rel=0.06)


def test_runs_of_hits() -> None:
    hits = np.array([[True, True, False, True]])
    assert runs(hits).tolist() == [[2, 1, 0, 1, 0]]


class Waves(CoreRows):
    """Rows come in bursts: new ones only when few are left, and then many."""

    high, low = 192, 40
    bursts = 0

    def _feed(self) -> bool:
        if self.core.num_unfinished > self.low:
            return False
        self.feed = self.high
        fed = super()._feed()
        self.bursts += fed
        return fed


def test_a_batch_that_swings_around_the_crossover_does_not_make_it_flap() -> None:
    """AR is best at 192 rows and the draft at 40: a switch at each swing at most, each with its reason, and no loss."""
    work = workload(1300, accept=constant(0.3), prompt=100, output=160, persistence=0.0)
    best = {}
    for rows in (Waves.low, Waves.high):
        rates = {}
        for k in (0, 1):
            made = CoreRows(work, pages=50_000, max_num_seqs=rows, draft_block_size=533)
            rates[k] = simulate(made, FixedPolicy(METHOD_DRAFT if k else METHOD_NONE, k), H100, work.tokens).rate
        best[rows] = max(rates, key=lambda k: rates[k])
    assert best[Waves.high] == 0 < best[Waves.low]
    made: list[Waves] = []

    def rows() -> CoreRows:
        made.append(Waves(work, pages=50_000, max_num_seqs=Waves.high, draft_block_size=533))
        return made[-1]

    options = ControllerOptions((METHOD_DRAFT,), max_num_seqs=Waves.high, draft_kv_ratio=0.03)
    found = race(rows, [(METHOD_DRAFT, 1)], options, H100, work.tokens)
    swings = 2 * made[-1].bursts
    assert swings >= 16
    switches = [s for d in found.auto.decisions[1:] for s in d.shards if s.switched]
    assert len(switches) <= swings
    assert all(s.reason for s in switches)
    assert found.score >= 0.97


def test_a_small_model_on_a_cpu_where_every_token_counts() -> None:
    """8 rows, a step that grows with its tokens: AR is best by a little, and luck among few rows must not hide it."""
    cost = AffineCost(Affine(4.5e-4, 7.5e-5, 1e-9), Affine(9e-5, 2e-5, 1e-9), "a small pair on a CPU")
    work = workload(256, accept=constant(0.87), prompt=60, output=52, persistence=0.2)
    found = run_race(work, 76_800, (1, 2, 4), device=SimDevice(cost), draft_tokens_a_page=96, max_num_seqs=8)
    assert found.score >= 0.97
    weighed = [c for d in found.auto.decisions for s in d.shards for c in s.candidates]
    assert weighed
    assert all(1.0 <= c.tokens_per_row <= c.k + 1 for c in weighed)
