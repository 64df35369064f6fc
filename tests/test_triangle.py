"""The triangle on the built-in pair and the real engine: what is off costs nothing, and the tail is where a draft pays.

Times are this process's own processor time, on one thread, so that neighbours on the machine hardly count.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from specbatch.bench import Run, measure
from specbatch.compose import controller_options, step_costs
from specbatch.control import controller
from specbatch.control.controller import Controller
from specbatch.control.fixed import FixedPolicy
from specbatch.control.records import METHOD_DRAFT, METHOD_NONE, Policy
from specbatch.control.replay import read_log, replay
from specbatch.engine.engine import Engine
from specbatch.engine.parts import build_parts
from specbatch.engine.plan import plan_engine
from specbatch.engine_options import EngineOptions
from specbatch.models.builtin import builtin_paths
from specbatch.models.tokenizer import HFTokenizer
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams

PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.parquet"


def requests(limits: list[int]) -> RequestBatch:
    """The first example prompts, each to produce as many tokens as said."""
    tokenizer = HFTokenizer(builtin_paths()[0])
    texts = pq.read_table(PROMPTS, columns=["prompt"])["prompt"].to_pylist()[: len(limits)]
    texts = [tokenizer.render([{"role": "user", "content": text}]) for text in texts]
    values, offsets = tokenizer.encode(texts, add_special_tokens=False)
    params = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in limits]
    return RequestBatch(np.arange(len(limits), dtype=np.int64), 0, values, offsets, params)


def make_engine(rows: int, **options: Any) -> tuple[Engine, EngineOptions]:
    chosen = EngineOptions(dtype="float32", device="cpu", threads=1, max_num_seqs=rows, **options)
    return Engine(build_parts(plan_engine(chosen), chosen), FixedPolicy(METHOD_NONE, 0)), chosen


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps, passes and the profile are timed by the processor time they take."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def in_turn(rounds: int, *ways: Callable[[], Run]) -> list[float]:
    """Least seconds of each way: what disturbs can only lengthen."""
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for seconds, way in zip(found, ways, strict=True):
            seconds.append(way().seconds)
    return [min(seconds) for seconds in found]


@pytest.mark.slow
def test_off_with_a_draft_loaded_costs_as_much_as_without(own_clock: None) -> None:
    work = requests([24] * 16)
    plain, _ = make_engine(16, speculate="off")
    loaded, _ = make_engine(16, speculate="draft")
    off = FixedPolicy(METHOD_NONE, 0)
    assert plain.parts.speculator is None
    assert loaded.parts.speculator is not None
    seen: list[int] = []

    def with_draft() -> Run:
        run, _ = measure(loaded, work, off, 16)
        assert run.drafted == 0
        assert loaded._info is not None
        seen.append(loaded._info.draft_pages)
        return run

    measure(loaded, work, FixedPolicy(METHOD_DRAFT, 4), 16)  # pages have been the draft's before
    without, with_it = in_turn(30, lambda: measure(plain, work, off, 16)[0], with_draft)
    print(f"{with_it:.3f} s of {without:.3f} s")
    assert with_it <= 1.02 * without
    assert set(seen) == {0}
    loaded.close()  # checks that no page was lost


def long_tailed(rows: int) -> RequestBatch:
    dice = np.random.default_rng(0)
    return requests(np.clip(40 * np.exp(dice.normal(-0.5, 1.0, rows)), 4, 400).astype(int).tolist())


def in_tail(events: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Choices, probes apart, made while at most `most` rows ran and none waited."""
    late = [e for e in events if e["event"] == "decision" and 0 < e["observation"]["running"] <= most]
    return [s for e in late if not e["observation"]["waiting"] for s in e["decision"]["shards"] if not s["probe"]]


@pytest.mark.slow
def test_the_tail_of_200_long_tailed_rows(own_clock: None, tmp_path: Path) -> None:
    """Time saved against AR, the decisions that show it, and the same decisions again from the log."""
    engine, options = make_engine(64)
    work, cost = long_tailed(200), step_costs(options, engine.parts)
    log = tmp_path / "decisions.jsonl"

    def auto() -> Run:
        with log.open("w") as file:
            policy: Policy = Controller(
                controller_options(options, engine.parts), cost, log=lambda event: print(json.dumps(event), file=file)
            )
            run, tokens = measure(engine, work, policy, 64)
        assert tokens == expected
        return run

    off = FixedPolicy(METHOD_NONE, 0)
    expected = measure(engine, work, off, 64)[1]
    without, with_it = in_turn(3, lambda: measure(engine, work, off, 64)[0], auto)
    print(f"{with_it:.2f} s of {without:.2f} s")
    assert with_it <= 0.9 * without
    events = list(read_log(log))
    tail = in_tail(events, 8)
    assert tail
    assert np.mean([s["method"] != METHOD_NONE for s in tail]) > 0.8
    assert all(s["reason"] for s in tail)
    again = replay(events)
    assert again.decisions > 10
    assert again.same, str(again.differences[0])
    engine.close()


def test_the_engine_s_own_log_is_decided_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one of the above, whatever the times: tokens as in AR, and the replay of a real log is exact."""
    monkeypatch.setattr(controller, "BUSY_SHARE", math.inf)  # looks are not spared here, however short the run
    monkeypatch.setattr(controller, "CALM_SHARE", math.inf)
    engine, options = make_engine(4, profile=False)
    work, events = long_tailed(8), []
    expected = measure(engine, work, FixedPolicy(METHOD_NONE, 0), 4)[1]
    policy = Controller(controller_options(options, engine.parts), step_costs(options, engine.parts), log=events.append)
    run, tokens = measure(engine, work, policy, 4)
    assert tokens == expected
    again = replay(json.loads(json.dumps(events)))
    assert again.decisions > 5
    assert again.same, str(again.differences[0])
    groups = [g for e in events[1:] for g in e["observation"]["row_groups"]]
    assert not groups or run.drafted > 0
    if run.drafted > 100:  # fewer may all be of the last steps
        assert groups  # what drafts brought each row reaches the policy
    engine.close()
