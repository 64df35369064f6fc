"""The choice itself on made-up observations: what it picks, when it changes its mind, what it costs to ask."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from specbatch import _core
from specbatch.control import records
from specbatch.control.choice import Limits, ShardState, expected_improvement
from specbatch.control.controller import Controller, ControllerOptions, FixedPolicy
from specbatch.control.cost_model import Affine, AffineCost
from specbatch.control.records import (
    METHOD_DRAFT,
    METHOD_NGRAM,
    METHOD_NGRAM_SHADOW,
    METHOD_NONE,
    STEP_DECODE,
    AcceptanceSample,
    Decision,
    Observation,
    RowGroup,
    ShardRows,
    StepTimer,
)
from specbatch.control.row_groups import RowMix, RowTally

COST = AffineCost(Affine(7e-3, 4e-5, 4e-8), Affine(0.7e-3, 1e-6, 1e-9))


def test_codes_are_those_of_the_core() -> None:
    for name in ("METHOD_NONE", "METHOD_NGRAM", "METHOD_DRAFT", "METHOD_EXTERNAL", "METHOD_NGRAM_SHADOW",
                 "STEP_PREFILL", "STEP_DECODE", "STEP_DRAFT_PREFILL"):  # fmt: skip
        assert getattr(records, name) == getattr(_core, name)


@dataclass
class World:
    """Draws observations: rows in decode, all of one kind, with true costs and acceptance that a test may change."""

    running: int
    accept: float = 0.7
    match: float = 0.0
    waiting: int = 1000
    cost: AffineCost = COST
    limit: float = 200.0
    shards: tuple[int, ...] = (0,)
    shadow: bool = True
    step: int = 0
    clock: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.timer = StepTimer()
        self.counts: dict[tuple[int, int], list[Any]] = {}
        self.decision: Decision | None = None

    def observe(self) -> Observation:
        each, rest = divmod(self.running, len(self.shards))
        samples = tuple(
            AcceptanceSample(s, m, c[0], c[1], tuple(c[2]), tuple(c[3])) for (s, m), c in self.counts.items()
        )
        self.counts.clear()
        return Observation(
            step=self.step,
            time=self.clock,
            running=self.running,
            waiting=self.waiting,
            shards=tuple(
                ShardRows(s, each + (i < rest), self.waiting // len(self.shards)) for i, s in enumerate(self.shards)
            ),
            mean_context=400.0,
            mean_prompt=400.0 - self.limit // 2,
            mean_limit=self.limit - self.limit // 2,
            free_pages=10_000,
            total_pages=100_000,
            target_pages=self.running * 25,
            draft_pages=0,
            max_num_seqs=4096,
            steps=self.timer.drain(),
            acceptance=samples,
        )

    def run(self, policy: Any, steps: int) -> list[Decision]:
        decisions = []
        for _ in range(steps):
            if policy.due(self.step, self.running, self.waiting):
                self.decision = policy.decide(self.observe())
                decisions.append(self.decision)
            self._step()
        return decisions

    def _step(self) -> None:
        assert self.decision is not None
        method, k = self.mode()
        drafts = np.zeros(self.running, dtype=int)
        if method == METHOD_DRAFT:
            drafts[:] = k
        elif method == METHOD_NGRAM:
            drafts[self.rng.random(self.running) < self.match] = k
        rows, tokens = self.running, self.running + int(drafts.sum())
        context = rows * 400
        draft = k * self.cost.draft(rows, rows, context) if method == METHOD_DRAFT else 0.0
        seconds = (self.cost.target(rows, tokens, context) + draft) * float(np.exp(self.rng.normal(0, 0.03)))
        self.timer.add(
            STEP_DECODE, method if drafts.any() else METHOD_NONE, int(drafts.max(initial=0)), rows=rows, tokens=tokens,
            context=context, seconds=seconds, draft_rows=int((drafts > 0).sum()), draft_tokens=int(drafts.sum()),
        )  # fmt: skip
        if k:
            self._count(method, k, drafts)
        if self.shadow and self.decision.shadow_ngram:
            hits = np.where(self.rng.random(rows) < self.match, self.decision.shadow_ngram, 0)
            self._count(METHOD_NGRAM_SHADOW, self.decision.shadow_ngram, hits)
        self.step += 1
        self.clock += seconds

    def _count(self, method: int, k: int, drafts: Any) -> None:
        line = self.counts.setdefault((self.shards[0], method), [0, 0, [0] * 8, [0] * 8])
        line[0] += len(drafts)
        live = int((drafts > 0).sum())
        line[1] += live
        for j in range(k):
            line[2][j] += live
            live = int(self.rng.binomial(live, self.accept))
            line[3][j] += live

    def mode(self) -> tuple[int, int]:
        assert self.decision is not None
        if self.decision.shards:
            return self.decision.shards[0].method, self.decision.shards[0].k
        return self.decision.method, self.decision.k

    def rate(self, method: int, k: int) -> float:
        """True tokens a second of a mode in steady state."""
        share = {METHOD_NONE: 0.0, METHOD_NGRAM: self.match, METHOD_DRAFT: 1.0}[method]
        gain = share * sum(self.accept**j for j in range(1, k + 1))
        context = self.running * 400
        seconds = self.cost.target(self.running, self.running * (1 + share * k), context)
        seconds += k * self.cost.draft(self.running, self.running, context) if method == METHOD_DRAFT else 0.0
        return self.running * (1 + gain) / seconds


def controller(*methods: int, **options: Any) -> Controller:
    return Controller(ControllerOptions(methods=methods, max_num_seqs=4096, can_probe_draft=False, **options), COST)


CASES = [
    (METHOD_DRAFT, 4, 0.8, 1.0),
    (METHOD_DRAFT, 64, 0.8, 1.0),
    (METHOD_DRAFT, 64, 0.05, 1.0),
    (METHOD_DRAFT, 1500, 0.5, 1.0),
    (METHOD_NGRAM, 4, 0.7, 0.4),
    (METHOD_NGRAM, 64, 0.05, 0.4),
    (METHOD_NGRAM, 1500, 0.7, 0.4),
]


@pytest.mark.parametrize(("method", "running", "accept", "match"), CASES)
def test_settles_within_three_per_cent_of_the_best_mode(method: int, running: int, accept: float, match: float) -> None:
    world, policy = World(running, accept, match), controller(method)
    world.run(policy, 400)
    spent: dict[tuple[int, int], int] = {}
    for _ in range(200):
        world.run(policy, 1)
        spent[world.mode()] = spent.get(world.mode(), 0) + 1
    best = max([world.rate(METHOD_NONE, 0)] + [world.rate(method, k) for k in policy.options.ks])
    seen = sum(n / 200 * world.rate(*mode) for mode, n in spent.items())
    assert seen >= 0.97 * best, spent


@pytest.mark.parametrize("wrong", [0.7, 1.3])
@pytest.mark.parametrize(("running", "accept"), [(8, 0.6), (256, 0.6), (1500, 0.6)])
def test_a_cost_model_wrong_by_a_third_is_mended(running: int, accept: float, wrong: float) -> None:
    true = AffineCost(Affine(7e-3, 4e-5 * wrong, 4e-8), Affine(0.7e-3 / wrong, 1e-6, 1e-9))
    world, policy = World(running, accept, cost=true), controller(METHOD_DRAFT)
    world.run(policy, 500)
    best = max([world.rate(METHOD_NONE, 0)] + [world.rate(METHOD_DRAFT, k) for k in policy.options.ks])
    seen = 0.0
    for _ in range(150):
        world.run(policy, 1)
        seen += world.rate(*world.mode()) / 150
    assert seen >= 0.97 * best


def test_short_rows_are_never_drafted_for() -> None:
    """D4: with max_tokens = 1 there is nothing to draft."""
    world, policy = World(4, accept=0.99, match=1.0, limit=1.0), controller(METHOD_NGRAM, METHOD_DRAFT)
    decisions = world.run(policy, 100)
    # the limit is seen with the first rows; nothing drafts from then on
    assert all(s.k == 0 for d in decisions[1:] for s in d.shards)


def test_when_nothing_pays_it_costs_nothing() -> None:
    """Hopeless draft, hopeless n-gram, large batch: at most 1 % of the steps are spent on finding out."""
    world, policy = World(1000, accept=0.03, match=0.3), controller(METHOD_NGRAM, METHOD_DRAFT)
    world.run(policy, 200)
    lost = 0.0
    for _ in range(1000):
        world.run(policy, 1)
        lost += 1.0 - min(world.rate(*world.mode()) / world.rate(METHOD_NONE, 0), 1.0)
    assert lost / 1000 < 0.01


def test_an_oscillating_batch_does_not_flap() -> None:
    """The live batch swings around the crossover: switches stay few, each with a reason."""
    world, policy = World(64, accept=0.5), controller(METHOD_DRAFT)
    sizes = [n for n in range(16, 2000, 16) if world_rate(n, 0.5) > 1.0]
    crossover = max(sizes)
    decisions = []
    for swing in range(60):
        world.running = int(crossover * (0.8 if swing % 2 else 1.25))
        decisions += world.run(policy, 24)
    switches = [s for d in decisions[1:] for s in d.shards if s.switched]
    assert len(switches) <= 24
    assert all(s.reason for s in switches)
    modes = [s.method for d in decisions[1:] for s in d.shards if s.switched]
    between_methods = sum(a != b for a, b in itertools.pairwise(modes))
    assert between_methods <= 10


def world_rate(running: int, accept: float) -> float:
    world = World(running, accept)
    return max(world.rate(METHOD_DRAFT, k) for k in (1, 2, 3, 4)) / world.rate(METHOD_NONE, 0)


def test_without_dwell_and_hysteresis_it_would_flap() -> None:
    """The twin of the test above: the same noise, nothing to hold it, many more switches."""
    world = World(64, accept=0.5)
    careless = Limits(switch_gain=0.0, switch_k_gain=0.0, steady_gain=0.0, steady_times=1, dwell=0, max_dwell=0)
    calm, hasty = controller(METHOD_DRAFT), controller(METHOD_DRAFT, limits=careless)
    crossover = max(n for n in range(16, 2000, 16) if world_rate(n, 0.5) > 1.0)
    counts = []
    for policy in (calm, hasty):
        world = World(crossover, accept=0.5)
        counts.append(sum(s.switched for d in world.run(policy, 1500)[1:] for s in d.shards))
    assert counts[1] > 2 * counts[0]


def test_the_tail_is_decided_from_the_live_batch() -> None:
    """A run drains from a batch where AR is best to one where the draft pays."""
    world, policy = World(1800, accept=0.55), controller(METHOD_DRAFT)
    assert world_rate(1800, 0.55) < 1.0 < world_rate(40, 0.55)
    world.run(policy, 300)
    assert world.mode() == (METHOD_NONE, 0)
    world.waiting, world.running = 0, 40
    world.run(policy, 60)
    assert world.mode()[0] == METHOD_DRAFT


def test_a_smaller_batch_is_looked_at_at_once() -> None:
    world, policy = World(512), controller(METHOD_DRAFT)
    world.run(policy, 800)
    waits = []
    while not policy.due(world.step, world.running, world.waiting) or not waits:
        waits.append(world.step)
        world.run(policy, 1)
    assert policy.due(world.step + 2, 100, 0)


def test_the_prior_of_an_earlier_run_is_used() -> None:
    world = World(64, accept=0.9)
    first = controller(METHOD_DRAFT)
    world.run(first, 400)
    again = Controller(first.options, COST, prior=first.known.book.to_json())
    decision = again.decide(replace(World(64, waiting=64).observe(), running=0, step=0))
    assert decision.shards[0].method == METHOD_DRAFT
    assert decision.shards[0].k >= 3


def test_several_speculators_are_compared() -> None:
    for accept, match, best in ((0.85, 0.05, METHOD_DRAFT), (0.85, 1.0, METHOD_NGRAM)):
        world, policy = World(64, accept, match), controller(METHOD_NGRAM, METHOD_DRAFT)
        world.run(policy, 500)
        assert world.mode()[0] == best


def test_forced_speculation_chooses_k_only() -> None:
    world, policy = World(1500, accept=0.1), controller(METHOD_DRAFT, allow_ar=False)
    decisions = world.run(policy, 300)
    assert all(s.method == METHOD_DRAFT for d in decisions for s in d.shards)
    assert world.mode()[1] == 1


def test_a_pinned_k_is_kept() -> None:
    world, policy = World(8, accept=0.9), controller(METHOD_DRAFT, ks=(3,))
    decisions = world.run(policy, 300)
    assert {s.k for d in decisions for s in d.shards} <= {0, 3}
    assert world.mode() == (METHOD_DRAFT, 3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("methods", (9,), "methods"),
        ("ks", (), "ks"),
        ("ks", (4, 2), "ks"),
        ("max_num_seqs", 0, "max_num_seqs"),
        ("draft_kv_ratio", -0.1, "draft_kv_ratio"),
    ],
)
def test_options_that_cannot_be_are_refused(field: str, value: Any, message: str) -> None:
    """A6: refused by name, not ignored."""
    with pytest.raises(ValueError, match=message):
        ControllerOptions(**{"methods": (METHOD_DRAFT,), "max_num_seqs": 8, field: value})
    with pytest.raises(ValueError, match="at least one method"):
        ControllerOptions(methods=(), max_num_seqs=8, allow_ar=False)


def test_options_survive_as_json() -> None:
    options = ControllerOptions(methods=(1, 2), max_num_seqs=64, ks=(1, 4), draft_kv_ratio=0.3, limits=Limits(dwell=3))
    assert ControllerOptions.from_json(json.loads(json.dumps(options.to_json()))) == options


def test_asking_is_cheap() -> None:
    """due() is called every step: far below 20 microseconds. A decision is rarer, and takes milliseconds at most."""
    world, policy = World(64), controller(METHOD_NGRAM, METHOD_DRAFT)
    world.run(policy, 500)
    start = time.process_time()
    for _ in range(20_000):
        policy.due(world.step, 64, 0)
    assert (time.process_time() - start) / 20_000 < 5e-6
    start = time.process_time()
    decisions = len(world.run(policy, 2000))
    assert decisions < 250
    assert (time.process_time() - start) / 2000 < 2e-3


def test_observations_and_decisions_survive_as_json() -> None:
    world, policy = World(16, match=0.3), controller(METHOD_NGRAM, METHOD_DRAFT)
    events: list[dict[str, Any]] = []
    policy.log = events.append
    world.run(policy, 60)
    assert [e["event"] for e in events[:2]] == ["start", "decision"]
    for event in events[1:]:
        event = json.loads(json.dumps(event))
        assert Observation.from_json(event["observation"]).to_json() == event["observation"]
        assert Decision.from_json(event["decision"]).to_json() == event["decision"]


def test_fixed_policy_decides_once() -> None:
    events: list[dict[str, Any]] = []
    policy, world = FixedPolicy(METHOD_NGRAM, 4, log=events.append), World(4)
    decisions = world.run(policy, 50)
    assert len(decisions) == len(events) == 1
    assert (decisions[0].method, decisions[0].k) == (METHOD_NGRAM, 4)
    assert decisions[0].changed
    for method, k in ((METHOD_NONE, 2), (METHOD_DRAFT, 0), (7, 1)):
        with pytest.raises(ValueError, match=r"method|k must"):
            FixedPolicy(method, k)


# -- parts -------------------------------------------------------------------------------------------------------------


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
    wanted = [slow.wants(20 + 4 * i, arm, 0.02, limits) for i in range(6)]  # a small gain, but again and again
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
    assert mix.correction(4, 4, True, 1.0) == pytest.approx(wanted, abs=0.05)
    assert mix.correction(1, 4, True, 1.0) > mix.correction(8, 4, True, 1.0)
    assert RowMix().correction(4, 4, True, 1.0) == 1.0


def test_luck_is_not_taken_for_a_difference_between_rows() -> None:
    tally, rng = RowTally(), np.random.default_rng(0)
    rows = np.arange(300)
    for _ in range(6):
        hits = rng.random((300, 3)) < 0.6
        tally.add(rows, np.full(300, 3), np.cumprod(hits, axis=1).sum(axis=1))
    mix = RowMix()
    mix.add(tally.groups(rows, finished=False), 300)
    assert 0.96 < mix.correction(3, 3, True, 1.0) <= 1.0
    tally.reset(rows[:150])
    assert sum(g.rows for g in tally.groups(rows, finished=True)) == 150


def test_a_few_slow_rows_do_not_promise_fast_ones_to_come() -> None:
    """Eight rows that accept little now, many that accepted much before: what is counted now is not raised for that."""
    mix = RowMix()
    slow = RowGroup(finished=False, rows=8, rounds=80, drafted=320, accepted=40)
    fast = RowGroup(finished=True, rows=100, rounds=1000, drafted=4000, accepted=3000)
    mix.add([slow, fast], running=8)
    here, everyone, seen = mix._parts(4, 4, True)
    assert 1.0 / (everyone * seen) > 1.3  # what it would be raised by
    assert mix.correction(4, 4, True, 0.9) == 1.0
    assert 1.0 / (here * seen) <= 1.0
