"""Graphs of decode steps, over a stand-in for CUDA graphs: equal to the eager loop whatever comes and goes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbatch.engine import sampler
from specbatch.engine.decode_graphs import row_sizes
from specbatch.engine.graphs import GraphRunner
from specbatch.engine.memory_fit import _try, fitted
from specbatch.engine.static_step import StaticStep
from specbatch.engine.step_buffers import Bucket
from specbatch.engine_options import EngineOptions
from tests.graph_engines import (
    MAX_ROWS,
    MODES,
    PARAMS,
    WITH_LOGPROBS,
    Driver,
    Twin,
    Watched,
    make_parts,
    with_graphs,
    without_speculation,
)
from tests.graph_stand_in import TapeCapturer
from tests.tiny import write_llama


@pytest.fixture(autouse=True)
def _torch_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's argmax goes through numpy on a CPU, which no tape sees."""

    def argmax(scores: torch.Tensor) -> torch.Tensor:
        values, indices = scores.max(dim=-1)
        return torch.where(torch.isfinite(values), indices, -1).to(torch.int32)

    monkeypatch.setattr(sampler, "argmax_finite", argmax)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that agrees with it now and then: the same weights, less spread out."""
    folder = tmp_path_factory.mktemp("graphs")
    target = write_llama(folder / "target", seed=1, layers=1, hidden=16)
    return target, write_llama(folder / "draft", seed=1, layers=1, hidden=16, initializer_range=0.22)


# Short, a few modes and kinds of rows stand for all: recording takes the stand-in longer than running.
STEPS = [45, pytest.param(2000, marks=pytest.mark.slow)]
FEW_MODES, FEW_PARAMS = (MODES[0], MODES[1], MODES[3]), (PARAMS[0], PARAMS[3])


@pytest.mark.parametrize("steps", STEPS)
def test_an_engine_on_graphs_answers_as_an_eager_one(steps: int, models: tuple[Path, Path]) -> None:
    """The whole engine: random modes, rows that join, finish, are preempted by a small pool, pad and drain."""
    rng = np.random.default_rng(4)
    short = steps < 1000
    engine = Watched(with_graphs(make_parts(models)), rng, FEW_MODES if short else MODES)
    driver = Driver(engine, rng, FEW_PARAMS if short else PARAMS)
    driver.drive(steps)
    assert engine.runner.off_reason is None
    assert engine.runner.replays > steps / 3
    assert engine.progress.preemptions > steps / 50
    assert engine.progress.accepted > steps / 20
    assert sorted(driver.done) == sorted(driver.added)
    got = [(c.token_ids, c.finish_reason) for _, c in sorted(driver.done.items())]
    assert got == without_speculation(models, driver.added)
    if steps >= 1000:
        check_coverage(engine, steps)
    engine.close()


@pytest.mark.parametrize("steps", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_step_equals_its_eager_twin(steps: int, models: tuple[Path, Path]) -> None:
    """Step by step: tokens, counts and every page that both leave behind."""
    rng = np.random.default_rng(0)
    short = steps < 1000
    engine = Twin(with_graphs(make_parts(models)), rng, FEW_MODES if short else MODES)
    Driver(engine, rng, FEW_PARAMS if short else PARAMS).drive(steps, interfere=True)
    assert engine.runner.off_reason is None


def check_coverage(engine: Watched, steps: int) -> None:
    assert {bucket.rows for bucket in engine.buckets} == set(row_sizes(MAX_ROWS))
    assert {bucket.tokens_per_row for bucket in engine.buckets} == {1, 2, 3, 4, 5}
    assert len(engine.buckets) >= 30, "of 7 row counts x 5 widths"
    for method in {method for method, _ in MODES}:
        assert sum(n for mode, n in engine.modes.items() if mode.startswith(f"method {method}")) > steps / 40
    assert len({mode.split("kind")[1] for mode in engine.modes}) >= 5


@pytest.mark.slow
def test_logprobs_come_with_the_step(models: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(2)
    engine = Twin(with_graphs(make_parts(models)), rng)
    Driver(engine, rng, WITH_LOGPROBS).drive(40, interfere=True)
    assert engine.runner.off_reason is None


class HostCounts(StaticStep):
    """Broken: the number of drafts is taken from the host, so a graph keeps that of its capture."""

    def target(self, bucket: Bucket) -> None:
        super().target(bucket)
        counts = self.arrays.host["num_draft_tokens"][: bucket.rows].tolist()
        for row, count in enumerate(counts):
            if count == 0:
                self.num_sampled(bucket)[row : row + 1].clamp_(max=1)


class ForgottenPadding(StaticStep):
    """Broken: rows that want no further draft still write the token they are fed."""

    def _draft_one(self, ids: Any, positions: Any, active: Any, tables: Any) -> Any:
        return super()._draft_one(ids, positions, torch.ones_like(active), tables)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [HostCounts, ForgottenPadding])
def test_the_comparison_catches_broken_steps(broken: type[StaticStep], models: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(0)
    engine = Twin(with_graphs(make_parts(models), broken), rng)
    with pytest.raises(AssertionError):
        Driver(engine, rng).drive(300, interfere=True)


def test_a_failed_capture_says_why_once_and_goes_on(
    models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses(TapeCapturer):
        """Captures twice, and then no more: what a run meets in its middle."""

        left = 2

        def capture(self, function: Callable[[], None]) -> Callable[[], None]:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("operation not permitted when stream is capturing\nmore detail")
            return super().capture(function)

    rng = np.random.default_rng(1)
    with caplog.at_level(logging.WARNING):
        parts = with_graphs(make_parts(models), capturer=Refuses([]))
        engine = Watched(parts, rng, FEW_MODES)
        driver = Driver(engine, rng, FEW_PARAMS)
        driver.drive(12)
    assert not engine.runner.enabled
    assert engine.runner.num_graphs == 0
    described: Any = engine.describe()["cuda_graphs"]
    assert not described["enabled"]
    assert "outside the captured buffers" in described["reason"] or "not permitted" in described["reason"]
    assert len([r for r in caplog.records if "graphs are off" in r.getMessage()]) == 1
    got = [(c.token_ids, c.finish_reason) for _, c in sorted(driver.done.items())]
    assert got == without_speculation(models, driver.added)


def test_the_caller_works_while_the_device_does(models: tuple[Path, Path]) -> None:
    """A decode step is on the device when step() returns; rows may join meanwhile, and a dropped step leaves nothing."""
    rng = np.random.default_rng(3)
    engine = Watched(with_graphs(make_parts(models)), rng)
    driver = Driver(engine, rng)
    driver.join()
    while not engine.graphs.in_flight:
        engine.step()
    before = engine.progress.completion_tokens
    driver.join()
    assert engine.graphs.in_flight
    assert engine.progress.completion_tokens == before
    engine.step()
    assert engine.progress.completion_tokens > before
    while not engine.graphs.in_flight:
        engine.step()
    engine.abort_all()
    assert not engine.graphs.in_flight
    assert engine.num_unfinished == 0
    engine.core.check_integrity()
    driver.added.clear()
    driver.join()
    driver.drive(0)
    assert [(c.token_ids, c.finish_reason) for _, c in sorted(driver.done.items())] == without_speculation(
        models, driver.added
    )


def test_graphs_and_activations_are_measured_and_leave_the_pages_less(models: tuple[Path, Path]) -> None:
    class Meter:
        def free(self) -> int:
            return 10_000

        def peak_of(self, function: Callable[[], object]) -> int:
            function()
            return 300

    parts = make_parts(models)
    plan, options = parts.plan, EngineOptions(model=str(models[0]), kv_memory_fraction=1.0)

    class Anything(TapeCapturer):
        """The trial's own buffers are made after it."""

        def capture(self, function: Callable[[], None]) -> Callable[[], None]:
            self.nbytes += 1000
            function()
            return function

    activation, graphs = _try(parts, Meter(), Anything([]))
    assert (activation, graphs) == (300, 6000)  # largest step and largest without drafts, their drafts, two kinds
    page = plan.layout.page_bytes
    without = fitted(plan, options, free=10 * page + 5, activation=0, graphs=0)
    less = fitted(plan, options, free=10 * page + 5, activation=page, graphs=2 * page)
    assert (without.num_pages, less.num_pages) == (10, 6)
    assert (less.activation_bytes, less.graph_bytes) == (page, 2 * page)
    assert less.max_rows_ar < plan.max_rows_ar
    with pytest.raises(ValueError, match="cuda-graphs off"):
        fitted(plan, options, free=10 * page, activation=8 * page, graphs=page)


def test_what_cannot_be_captured_is_refused() -> None:
    """The stand-in is as strict as a device: data-dependent operations, host constants, tensors from outside."""
    buffer = torch.zeros(4)
    outside = torch.ones(4)
    capturer = TapeCapturer([buffer])
    for function in (
        lambda: buffer.nonzero(),
        lambda: buffer.add_(float(buffer[0])),
        lambda: buffer.add_(outside),
        lambda: buffer.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0])),
    ):
        with pytest.raises(RuntimeError, match=r"cannot be captured|outside the captured buffers"):
            capturer.capture(function)  # type: ignore[arg-type]

    def count() -> None:
        buffer.add_(1)

    buffer.zero_()
    replay = capturer.capture(count)
    replay()
    assert buffer.tolist() == [4.0] * 4  # warmed up, recorded, replayed twice


def test_graphs_are_captured_largest_first_and_their_memory_is_summed() -> None:
    taken: list[str] = []

    class Counts:
        used = 0

        def capture(self, function: Callable[[], None]) -> Callable[[], None]:
            function()
            self.used += 100 if len(taken) == 1 else 7
            return function

        def memory(self) -> int:
            return self.used

    runner = GraphRunner(Counts())
    assert runner.prepare((name, lambda name=name: taken.append(name)) for name in ("large", "small")) == 107  # type: ignore[misc]
    assert taken == ["large", "small"]
    runner.run("small", lambda: taken.append("never"))
    assert taken == ["large", "small", "small"]
    assert runner.replays == 1
    runner.turn_off("because")
    runner.run("small", lambda: taken.append("eager"))
    assert taken[-1] == "eager"
    assert (runner.memory_bytes, runner.off_reason) == (0, "because")


def test_row_sizes() -> None:
    assert row_sizes(1) == [1]
    assert row_sizes(12) == [1, 2, 3, 4, 6, 8, 12]
    sizes = row_sizes(256)
    assert sizes[-1] == 256
    assert all(larger <= 2 * size for size, larger in pairwise(sizes))
    assert max(b / a for a, b in pairwise(sizes) if a >= 16) <= 1.5
