"""The draft run teacher-forced over produced tokens: right counts, no trace in rows or pages, and what a policy makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch import _core
from specbatch.control import controller
from specbatch.control.controller import Controller, ControllerOptions
from specbatch.control.correction import CostCorrection
from specbatch.control.cost_model import Affine, AffineCost
from specbatch.control.records import METHOD_DRAFT, METHOD_DRAFT_SHADOW, AcceptanceSample, Decision, Observation
from specbatch.engine.engine import Engine
from specbatch.engine.parts import build_parts
from specbatch.engine.plan import plan_engine
from specbatch.engine_options import EngineOptions
from specbatch.sampling_params import SamplingParams
from tests.driving import ScriptedPolicy, add, draft, finish, make_engine, tokens
from tests.paged_device import PagedDevice, prompts
from tests.row_model import Model, Request


def lend(device: PagedDevice, rows: int) -> list[int]:
    """Lend, check what is in the arrays, read it as the draft would, give back. Returns the handles."""
    before = device.info
    device.info = info = device.core.lend_draft(rows, device.buffers)
    device.core.check_integrity()
    device.check_padding()
    handles = device.arrays["seq_index"][: info.num_rows].tolist()
    for row, handle in enumerate(handles):
        known = tuple(device.tokens[handle])
        where, first, length = device.packed("draft_", row)
        assert (first, length) == (0, len(known) - 1)
        assert device.arrays["draft_input_ids"][where].tolist() == list(known[:-1])
        device.compute("draft_", row, known[:-1], 0)
    assert info.draft_num_tokens <= device.max_num_batched_tokens
    assert len(set(handles)) == len(handles) <= rows
    given_back = sum(device.core.drop_draft(handle) for handle in handles)
    assert (given_back > 0) == bool(handles)
    device.core.check_integrity()
    device.info = before
    return handles


@pytest.mark.parametrize("num_pages", [14, 64])
def test_lending_between_steps_leaves_no_trace(num_pages: int) -> None:
    """Also while rows are preempted for want of pages, and while some of them draft by look-up."""
    requests = [Request(i, p, max_tokens=20) for i, p in enumerate(prompts(9))]
    device = PagedDevice(num_pages=num_pages, draft_block_size=5, model=Model(memory=3))
    device.core.set_speculation(_core.METHOD_NGRAM, 3)
    device.add(requests)
    lent = 0
    while device.step().kind != _core.STEP_IDLE:
        lent += len(lend(device, 3))
    assert lent > 10
    for request in requests:
        device.check_answer(request)


def test_only_rows_that_decode_without_the_draft_are_lent_to() -> None:
    device = PagedDevice(draft_block_size=4, draft_max_model_len=12, max_num_batched_tokens=64)
    device.core.set_speculation(_core.METHOD_DRAFT, 2, 1)
    rows = [Request(i, p, max_tokens=20, shard=i % 2) for i, p in enumerate(prompts(4))]
    handles = device.add(rows)
    found: set[int] = set()
    for _ in range(4):
        device.step()
        assert lend(device, 4) == []  # nobody has produced enough
    while device.step().kind != _core.STEP_IDLE:
        taken = lend(device, 4)
        assert all(len(device.tokens[handle]) <= 12 for handle in taken)  # the draft's limit
        found |= set(taken)
    assert found <= {handles[0], handles[2]}  # shard 1 drafts in earnest
    assert found
    with pytest.raises(ValueError, match="draft_block_size"):
        lend(PagedDevice(), 1)


def test_rows_in_a_pattern_are_not_all_of_one_kind() -> None:
    device = PagedDevice(draft_block_size=4, max_num_seqs=32, num_pages=400, max_num_batched_tokens=512)
    handles = device.add([Request(i, p, max_tokens=40) for i, p in enumerate(prompts(32))])
    for _ in range(8):
        device.step()
    taken = [handles.index(handle) for _ in range(4) for handle in (device.step(), lend(device, 8))[1]]
    assert len(taken) == 32
    assert 8 <= sum(i % 2 for i in taken) <= 24
    assert 4 <= sum(i % 4 == 0 for i in taken) <= 14


class Asking(ScriptedPolicy):
    """AR that asks for a pass every few steps and keeps what comes back."""

    def __init__(self, rows: int = 4, k: int = 3) -> None:
        super().__init__(lambda *_: draft(0))
        self.rows, self.k = rows, k
        self.seen: list[Observation] = []

    def due(self, step: int, running: int, waiting: int) -> bool:
        super().due(step, running, waiting)
        return step % 5 == 0

    def decide(self, observation: Observation) -> Decision:
        self.seen.append(observation)
        return replace(super().decide(observation), probe_draft_rows=self.rows, probe_draft_k=self.k)

    @property
    def samples(self) -> list[AcceptanceSample]:
        return [s for o in self.seen for s in o.acceptance]


def probing_engine(target: Path, draft_model: Path, policy: Any, **options: Any) -> Engine:
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 4 << 20, "threads": 1, "device": "cpu"}
    resolved = EngineOptions(model=str(target), draft_model=str(draft_model), **(settings | options))
    return Engine(build_parts(plan_engine(resolved), resolved), policy)


WORK = [np.random.default_rng(i).integers(0, 256, 20 + 3 * i).tolist() for i in range(5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_hits_always_and_a_random_one_hardly(
    tiny_target: Path, tiny_draft: Path, temperature: float
) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, top_k=50 if temperature else 0)
    plain = make_engine(tiny_target)
    add(plain, WORK, params)
    expected = tokens(finish(plain))
    rates = []
    for model in (tiny_target, tiny_draft):
        policy = Asking()
        engine = probing_engine(tiny_target, model, policy)
        add(engine, WORK, params)
        assert tokens(finish(engine)) == expected
        assert {s.method for s in policy.samples} == {METHOD_DRAFT_SHADOW}
        assert {s.k for s in policy.samples} == {1, 2, 3}
        deepest = [s for s in policy.samples if s.k == 3]
        offered, accepted = (np.sum([getattr(s, n) for s in deepest], axis=0) for n in ("offered", "accepted"))
        assert (offered[:-1] >= offered[1:]).all()
        assert offered[0] > 100
        rates.append(accepted[0] / offered[0])
        assert all(o.draft_pages == 0 for o in policy.seen)
        passes = [s for o in policy.seen for s in o.steps if s.method == METHOD_DRAFT_SHADOW]
        assert passes
        assert all(s.seconds > 0 and s.tokens > s.rows for s in passes)
        engine.close()
    assert rates[0] == 1.0
    assert rates[1] < 0.3


def test_a_pass_is_not_counted_as_the_time_of_a_step(tiny_target: Path, tiny_draft: Path) -> None:
    policy = Asking()
    engine = probing_engine(tiny_target, tiny_draft, policy)
    add(engine, WORK)
    found = engine._policy.probe
    assert found is not None
    slow = type("Slow", (), {"run": lambda self, *args: replace(f, seconds=9.0) if (f := found.run(*args)) else None})()
    engine._policy.probe = slow
    finish(engine)
    seconds = [(s.method == METHOD_DRAFT_SHADOW, s.seconds / s.steps) for o in policy.seen for s in o.steps]
    assert {s for is_pass, s in seconds if is_pass} == {9.0}
    assert max(s for is_pass, s in seconds if not is_pass) < 1.0


def test_rows_with_penalties_are_passed_over(tiny_target: Path) -> None:
    policy = Asking()
    engine = probing_engine(tiny_target, tiny_target, policy)
    add(engine, WORK[:3], SamplingParams(max_tokens=30, ignore_eos=True, frequency_penalty=0.5), shard=1)
    add(engine, WORK[3:], SamplingParams(max_tokens=30, ignore_eos=True), shard=2, first_id=3)
    finish(engine)
    assert {s.shard for s in policy.samples} == {2}
    assert all(s.accepted == s.offered for s in policy.samples)


def test_a_draft_that_became_good_is_found_without_running_it(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What earlier runs learned says that the draft is hopeless; passes over AR's own tokens say otherwise."""
    # This machine's clock is to have no say: the draft is the target itself, and steps are far shorter than assumed.
    monkeypatch.setattr(CostCorrection, "observe", lambda *_, **__: None)
    monkeypatch.setattr(controller, "BUSY_SHARE", math.inf)
    monkeypatch.setattr(controller, "CALM_SHARE", math.inf)
    hopeless = {str(METHOD_DRAFT): {"rounds": 4e4, "proposed": 4e4, "offered": [4e4, 400.0], "accepted": [400.0, 4.0]}}
    cost = AffineCost(Affine(1e-2, 1e-6, 1e-9), Affine(1e-3, 1e-6, 1e-9))
    answers, decisions = [], []
    for can_probe in (True, False):
        log: list[dict[str, Any]] = []
        # Trying modes out in earnest is not what is tested: no budget for it.
        options = ControllerOptions(methods=(METHOD_DRAFT,), max_num_seqs=8, can_probe_draft=can_probe)
        options = replace(
            options, limits=replace(options.limits, probe_share=0.0, first_draft_gain=1e9, shadow_share=0.5)
        )
        engine = probing_engine(tiny_target, tiny_target, Controller(options, cost, prior=hopeless, log=log.append))
        add(engine, WORK, SamplingParams(max_tokens=200, ignore_eos=True))
        answers.append(tokens(finish(engine)))
        decisions.append([s["method"] for e in log if e["event"] == "decision" for s in e["decision"]["shards"]])
        engine.close()
    assert answers[0] == answers[1]
    assert METHOD_DRAFT in decisions[0]
    assert METHOD_DRAFT not in decisions[1]
