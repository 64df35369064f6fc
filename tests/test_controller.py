"""The choice itself on made-up observations: what it picks, when it changes its mind, what it costs to ask."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from specbatch import _core
from specbatch.control import records
from specbatch.control.choice import Limits
from specbatch.control.controller import Controller, ControllerOptions, FixedPolicy
from specbatch.control.cost_model import Affine, AffineCost
from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM, METHOD_NONE, Decision, Observation
from tests.made_up_batch import COST, World, controller


def test_codes_are_those_of_the_core() -> None:
    for name in ("METHOD_NONE", "METHOD_NGRAM", "METHOD_DRAFT", "METHOD_EXTERNAL", "METHOD_NGRAM_SHADOW",
                 "STEP_PREFILL", "STEP_DECODE", "STEP_DRAFT_PREFILL"):  # fmt: skip
        assert getattr(records, name) == getattr(_core, name)


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
    # Many rows: long answers to short prompts, since what the draft reads on the way in is no part of this world's rates.
    limit = 700.0 if running > 8 else 200.0
    world, policy = World(running, accept, cost=true, limit=limit), controller(METHOD_DRAFT)
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


@pytest.mark.parametrize("methods", [(METHOD_DRAFT,), (METHOD_NGRAM,), (METHOD_NGRAM, METHOD_DRAFT)])
def test_a_probe_outlives_rows_that_may_have_so_many_tokens(methods: tuple[int, ...]) -> None:
    """Rows with room for few tokens come in while a mode of more drafts than that is tried out."""
    tried = 0
    for running, accept in itertools.product((4, 64), (0.5, 0.85)):
        world, policy = World(running, accept, 0.4, limit=12.0), controller(*methods)
        for _ in range(400):
            world.run(policy, 1)
            state = policy.states.get(0)
            if world.limit > 2.0 and state is not None and state.home is not None:
                world.limit, tried = 2.0, tried + 1
    assert tried
