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

from specbatch import _core
from specbatch.control.records import Decision, Observation
from specbatch.engine import sampler
from specbatch.engine.engine import Engine
from specbatch.engine.graphs import DecodeGraphs, GraphRunner, row_sizes
from specbatch.engine.parts import EngineParts, build_parts
from specbatch.engine.plan import plan_engine
from specbatch.engine.static_step import StaticStep
from specbatch.engine.step_buffers import Bucket
from specbatch.engine_options import EngineOptions
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams
from tests.graph_stand_in import TapeCapturer
from tests.static_attention import StaticAttention
from tests.tiny import write_llama

MAX_ROWS, MAX_K = 12, 4
MODES = (
    (_core.METHOD_NONE, 0),
    (_core.METHOD_NGRAM, 3),
    (_core.METHOD_DRAFT, 1),
    (_core.METHOD_DRAFT, 2),
    (_core.METHOD_DRAFT, 4),
)
PARAMS = (
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0),
    SamplingParams(max_tokens=5, temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=20, min_tokens=4, frequency_penalty=0.5, repetition_penalty=1.2),
)
WITH_LOGPROBS = (
    SamplingParams(max_tokens=12, logprobs=True),
    SamplingParams(max_tokens=9, logprobs=True, temperature=1.0, top_p=0.8),
)


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


class RandomPolicy:
    """Another mode every few steps."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def due(self, step: int, running: int, waiting: int) -> bool:
        return step % 5 == 0

    def decide(self, observation: Observation) -> Decision:
        method, k = MODES[self.rng.integers(len(MODES))]
        return Decision(observation.step, method, k, (), 0, 0, 0, 0, changed=True, reason="random")


def make_parts(models: tuple[Path, Path]) -> EngineParts:
    target, draft = (str(path) for path in models)
    options = EngineOptions(
        model=target, draft_model=draft, device="cpu", dtype="float32", speculate="draft", num_speculative_tokens=MAX_K,
        max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, max_model_len=48, block_size=4, kv_memory_bytes=48 * 4 * 256,
        threads=1, attention="reference",
    )  # fmt: skip
    parts = build_parts(plan_engine(options), options)
    for runner in (parts.runner, parts.speculator.runner):  # type: ignore[union-attr]
        runner.backend = runner._step.backend = StaticAttention()
    return parts


def fixed_tensors(parts: EngineParts, step: StaticStep) -> list[torch.Tensor]:
    """Everything a graph may touch: weights, pages, step arrays, sampling rows and tables, the step's own buffers."""
    tables = step.rows.tables
    modules = [parts.runner.model.module, parts.speculator.runner.model.module]  # type: ignore[union-attr]
    return [
        *(t for module in modules for t in (*module.parameters(), *module.buffers())),
        parts.cache.storage,
        parts.arrays.packed_device,
        step.rows.packed,
        *(getattr(tables, name) for name in tables.__slots__),
        *(t for t in vars(step).values() if isinstance(t, torch.Tensor)),
    ]


class Twin(Engine):
    """Runs every decode step through graphs first, then puts everything back and runs it eagerly; both must agree."""

    def __init__(self, parts: EngineParts, rng: np.random.Generator, step_class: type[StaticStep] = StaticStep) -> None:
        super().__init__(parts, RandomPolicy(rng))
        self.static = step_class(
            parts.arrays, self._rows, parts.runner, parts.speculator.runner,  # type: ignore[union-attr]
            max_speculative_tokens=MAX_K, max_model_len=parts.plan.max_model_len,
            draft_block_size=parts.plan.layout.draft_block_size,
        )  # fmt: skip
        self.capturer = TapeCapturer(fixed_tensors(parts, self.static))
        self.runner = GraphRunner(self.capturer)
        self.graphs = DecodeGraphs(
            self.static, self.runner, max_num_seqs=MAX_ROWS, generation=lambda: self.sampling.generation
        )
        self.graphs.prepare()
        self.compared: dict[str, int] = {}
        self.buckets: set[Bucket] = set()

    def _decode(self, info: Any) -> float:
        arrays, storage = self.arrays, self.parts.cache.storage
        params = self._gather(info.num_rows)
        tables = params.tables
        self.capturer.fixed |= {getattr(tables, name).untyped_storage().data_ptr() for name in tables.__slots__}
        pages_before, arrays_before = storage.clone(), arrays.packed_device.clone()
        self.static.result.fill_(-77)
        with_draft = info.method == _core.METHOD_DRAFT and info.num_draft_tokens > 0
        bucket = self.graphs.launch(info, draft=with_draft)
        got = self.graphs.wait()
        tokens, num_sampled = got.token_ids.copy(), got.num_sampled.copy()
        logprobs = None if got.logprobs is None else got.logprobs.copy()
        pages_after = storage.clone()
        storage.copy_(pages_before)
        arrays.packed_device.copy_(arrays_before)

        self.eager_logprobs: torch.Tensor | None = None
        eager = super()._decode(info)
        wanted_tokens, wanted_sampled, _ = self._result
        np.testing.assert_array_equal(num_sampled, wanted_sampled)
        for row, count in enumerate(num_sampled.tolist()):
            np.testing.assert_array_equal(tokens[row, :count], wanted_tokens[row, :count])
        torch.testing.assert_close(
            pages_after.view(torch.float32), storage.view(torch.float32), rtol=1e-4, atol=1e-5, equal_nan=True
        )
        assert not pages_after[: self.plan.layout.page_bytes].any(), "the null page was written"
        if logprobs is not None:
            assert self.eager_logprobs is not None
            starts = arrays.host["query_start_loc"]
            for row, count in enumerate(num_sampled.tolist()):
                committed = slice(starts[row], starts[row] + count)
                np.testing.assert_allclose(logprobs[committed], self.eager_logprobs[committed].numpy(), atol=1e-4)
        mode = f"method {info.method}, kind {params.kind}"
        self.compared[mode] = self.compared.get(mode, 0) + 1
        self.buckets.add(bucket)
        return eager

    def _commit(self, params: Any, tokens: Any, num_sampled: Any, logprobs: Any, starts: Any) -> None:
        self.eager_logprobs = logprobs
        super()._commit(params, tokens, num_sampled, logprobs, starts)


def drive(
    engine: Twin, rng: np.random.Generator, decode_steps: int, params: tuple[SamplingParams, ...] = PARAMS
) -> None:
    """Rows join in bursts and leave, are preempted and aborted, and now and then all drain."""
    next_id = 0
    while sum(engine.compared.values()) < decode_steps:
        if engine.num_unfinished < rng.integers(0, 2 * MAX_ROWS) and rng.random() < 0.3:
            lengths = rng.integers(1, 25, rng.integers(1, 6))
            prompts = rng.integers(0, 12, lengths.sum()).astype(np.int32)  # few different tokens: n-grams match
            kind = params if rng.random() < 0.5 else params[:1]
            batch = RequestBatch(
                request_id=np.arange(next_id, next_id + len(lengths)),
                shard=0,
                prompt_values=prompts,
                prompt_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
                params=[kind[i] for i in rng.integers(len(kind), size=len(lengths))],
            )
            engine.add(batch)
            next_id += len(lengths)
        running = engine.arrays.host["seq_index"][: engine._num_rows]
        if len(running) and rng.random() < 0.1:
            engine.core.preempt(int(rng.choice(running)))
        if len(running) and rng.random() < 0.02:
            engine.core.abort(int(rng.choice(running)))
        engine.step()
        engine.take_finished()
        engine.core.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [250, 2000])
def test_equal_to_eager_through_random_steps(steps: int, models: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(0)
    engine = Twin(make_parts(models), rng)
    drive(engine, rng, steps)
    assert engine.runner.off_reason is None
    assert engine.runner.replays > steps / 2
    assert engine.progress.preemptions > steps / 100
    assert engine.progress.accepted > steps / 20
    assert {bucket.rows for bucket in engine.buckets} == set(row_sizes(MAX_ROWS))
    assert {bucket.tokens_per_row for bucket in engine.buckets} == {1, 2, 3, 4, 5}
    for method in {method for method, _ in MODES}:
        assert sum(n for mode, n in engine.compared.items() if mode.startswith(f"method {method}")) > steps / 40
    assert len({mode.split("kind")[1] for mode in engine.compared}) >= 5


@pytest.mark.slow
def test_logprobs_come_with_the_step(models: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(2)
    engine = Twin(make_parts(models), rng)
    drive(engine, rng, 40, WITH_LOGPROBS)
    assert engine.runner.off_reason is None


class HostCounts(StaticStep):
    """Broken: the number of drafts is taken from the host, so a graph keeps that of its capture."""

    def target(self, bucket: Bucket) -> None:
        super().target(bucket)
        counts = self.arrays.host["num_draft_tokens"][: bucket.rows].tolist()
        keep = torch.ones(bucket.rows, dtype=torch.int32)
        for row, count in enumerate(counts):
            if count == 0:
                keep[row : row + 1].fill_(1)
                self.num_sampled(bucket)[row : row + 1].clamp_(max=1)


class ForgottenPadding(StaticStep):
    """Broken: rows that want no further draft still write the token they are fed."""

    def _draft_one(self, ids: Any, positions: Any, active: Any, tables: Any) -> Any:
        return super()._draft_one(ids, positions, torch.ones_like(active), tables)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [HostCounts, ForgottenPadding])
def test_the_comparison_catches_broken_steps(broken: type[StaticStep], models: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(0)
    engine = Twin(make_parts(models), rng, broken)
    with pytest.raises(AssertionError):
        drive(engine, rng, 300)


@pytest.mark.slow
def test_a_failed_capture_says_why_once_and_goes_on(
    models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses(TapeCapturer):
        def capture(self, function: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore detail")

    rng = np.random.default_rng(1)
    engine = Twin(make_parts(models), rng)
    runner = engine.graphs.runner = GraphRunner(Refuses([]))
    with caplog.at_level(logging.WARNING):
        drive(engine, rng, 20)
    assert not runner.enabled
    assert runner.num_graphs == 0
    assert "operation not permitted" in (runner.off_reason or "")
    assert len([r for r in caplog.records if "graphs are off" in r.getMessage()]) == 1


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
