"""Engines that run their decode steps as graphs over the stand-in, and a driver that lets rows come and go at random."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbatch import _core
from specbatch.api import Completion, completions
from specbatch.control.records import Decision, Observation
from specbatch.engine.eager import StepOutcome
from specbatch.engine.engine import Engine
from specbatch.engine.graphs import GraphRunner
from specbatch.engine.parts import EngineParts, build_parts, make_graphs
from specbatch.engine.plan import plan_engine
from specbatch.engine.static_step import StaticStep
from specbatch.engine.step_buffers import Bucket, StepArrays
from specbatch.engine_options import EngineOptions
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams
from tests.driving import ScriptedPolicy
from tests.graph_stand_in import TapeCapturer
from tests.static_attention import StaticAttention

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


class RandomPolicy:
    """Another mode every few steps."""

    def __init__(self, rng: np.random.Generator, modes: tuple[tuple[int, int], ...] = MODES) -> None:
        self.rng = rng
        self.modes = modes

    def due(self, step: int, running: int, waiting: int) -> bool:
        return step % 5 == 0

    def decide(self, observation: Observation) -> Decision:
        method, k = self.modes[self.rng.integers(len(self.modes))]
        return Decision(observation.step, method, k, (), 0, 0, 0, 0, changed=True, reason="random")


def make_parts(models: tuple[Path, Path], *, num_pages: int = 48) -> EngineParts:
    """Parts as a GPU would have them: attention of fixed shapes, and arrays that are another memory than the host's."""
    target, draft = (str(path) for path in models)
    options = EngineOptions(
        model=target, draft_model=draft, device="cpu", dtype="float32", speculate="draft", num_speculative_tokens=MAX_K,
        max_num_seqs=MAX_ROWS, max_num_batched_tokens=64, max_model_len=48, block_size=4,
        kv_memory_bytes=num_pages * 256, threads=1, attention="reference",
    )  # fmt: skip
    plan = plan_engine(options)
    parts = build_parts(plan, options)
    for runner in (parts.runner, parts.speculator.runner):  # type: ignore[union-attr]
        runner.backend = runner._step.backend = StaticAttention()
    parts.arrays = StepArrays(
        max_num_seqs=MAX_ROWS, max_num_tokens=64, max_num_logits=MAX_ROWS * (MAX_K + 1),
        pages_per_row=plan.pages_per_row, draft_pages_per_row=plan.draft_pages_per_row,
        block_size=plan.layout.block_size, draft_block_size=plan.layout.draft_block_size, mirror=True,
    )  # fmt: skip
    return parts


def with_graphs(parts: EngineParts, step_class: type[StaticStep] = StaticStep, capturer: Any = None) -> EngineParts:
    """The same parts with graphs over the stand-in."""
    parts.graphs = make_graphs(parts, None)
    step = parts.graphs.step
    step.__class__ = step_class
    parts.graphs.runner = GraphRunner(capturer or TapeCapturer(fixed_tensors(parts, step)))
    parts.graphs.prepare()
    return parts


def fixed_tensors(parts: EngineParts, step: StaticStep) -> list[torch.Tensor]:
    """Everything a graph may touch: weights, pages, step arrays, sampling rows and tables, the step's own buffers."""
    modules = [parts.runner.model.module, parts.speculator.runner.model.module]  # type: ignore[union-attr]
    return [
        *(t for module in modules for t in (*module.parameters(), *module.buffers())),
        parts.cache.storage,
        parts.arrays.packed_device,
        step.rows.packed,
        *table_tensors(parts),
        *(t for t in vars(step).values() if isinstance(t, torch.Tensor)),
    ]


def table_tensors(parts: EngineParts) -> list[torch.Tensor]:
    tables = parts.rows.tables
    return [getattr(tables, name) for name in tables.__slots__]


class Watched(Engine):
    """Drives through graphs; tables that moved are known to the stand-in, and what ran is counted."""

    def __init__(
        self, parts: EngineParts, rng: np.random.Generator, modes: tuple[tuple[int, int], ...] = MODES
    ) -> None:
        super().__init__(parts, RandomPolicy(rng, modes))
        assert parts.graphs is not None
        self.graphs = parts.graphs
        self.runner = parts.graphs.runner
        self.modes: Counter[str] = Counter()
        self.buckets: Counter[Bucket] = Counter()

    def _run(self, info: Any, start: float) -> None:
        if info.kind == _core.STEP_DECODE:
            params = self._gather(info)
            self.modes[f"method {info.method}, kind {params.kind}"] += 1
            draft = info.method == _core.METHOD_DRAFT and info.max_draft_tokens > 0
            width = max(info.max_draft_tokens + 1 if draft else 1, info.max_query_len)
            self.buckets[self.graphs.bucket(info.num_rows, width)] += 1
        super()._run(info, start)

    def _gather(self, info: Any) -> Any:
        params = self.sampling.gather(self.arrays.host["seq_index"][: info.num_rows], self._rows)
        capturer: Any = self.runner._capturer
        if capturer is not None:
            capturer.fixed |= {tensor.untyped_storage().data_ptr() for tensor in table_tensors(self.parts)}
        return params


class Twin(Watched):
    """Runs every decode step through graphs first, then puts everything back and runs it eagerly; both must agree."""

    def _run(self, info: Any, start: float) -> None:
        if info.kind != _core.STEP_DECODE:
            super()._run(info, start)
            return
        arrays, storage = self.arrays, self.parts.cache.storage
        self._gather(info)
        pages_before, arrays_before = storage.clone(), arrays.packed_device.clone()
        self.graphs.step.result.fill_(-77)
        self._graphs = self.graphs
        self.graphs.launch(info, draft=info.method == _core.METHOD_DRAFT)
        got = self.graphs.wait()
        tokens, num_sampled = got.token_ids.copy(), got.num_sampled.copy()
        logprobs = None if got.logprobs is None else got.logprobs.copy()
        pages_after = storage.clone()
        storage.copy_(pages_before)
        arrays.packed_device.copy_(arrays_before)

        self._graphs = None  # the step is run again, as it comes
        super()._run(info, start)
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
                np.testing.assert_allclose(logprobs[committed], self.eager_logprobs[committed], atol=1e-4)

    def _take(self, info: Any, outcome: StepOutcome, start: float) -> None:
        self.eager_logprobs = outcome.logprobs
        super()._take(info, outcome, start)


class Driver:
    """Rows join in bursts and leave, are preempted and aborted, and now and then all drain."""

    def __init__(self, engine: Watched, rng: np.random.Generator, params: tuple[SamplingParams, ...] = PARAMS) -> None:
        self.engine, self.rng, self.params = engine, rng, params
        self.added: dict[int, tuple[list[int], SamplingParams]] = {}
        self.done: dict[int, Completion] = {}

    def join(self) -> None:
        rng = self.rng
        lengths = rng.integers(1, 25, rng.integers(1, 6))
        prompts = [rng.integers(0, 12, n).tolist() for n in lengths]  # few different tokens: n-grams match
        kinds = self.params if rng.random() < 0.5 else self.params[:1]
        ids = np.arange(len(self.added), len(self.added) + len(lengths))
        chosen = [kinds[i] for i in rng.integers(len(kinds), size=len(lengths))]
        self.added |= {int(i): (prompt, p) for i, prompt, p in zip(ids, prompts, chosen, strict=True)}
        self.engine.add(batch_of(ids, prompts, chosen))

    def drive(self, decode_steps: int, *, interfere: bool = False) -> None:
        """`interfere`: rows are put back and dropped by hand too, between a step's launch and its result."""
        engine, rng = self.engine, self.rng
        while engine.modes.total() < decode_steps or (engine.num_unfinished and not interfere):
            if (
                engine.modes.total() < decode_steps
                and engine.num_unfinished < rng.integers(0, 2 * MAX_ROWS)
                and rng.random() < 0.3
            ):
                self.join()
            running = engine.arrays.host["seq_index"][: engine._num_rows]
            if interfere and len(running) and rng.random() < 0.1:
                engine.core.preempt(int(rng.choice(running)))
            if interfere and len(running) and rng.random() < 0.02:
                engine.core.abort(int(rng.choice(running)))
            engine.step()
            rows = engine.take_finished()
            if rows is not None:
                self.done |= dict(zip(rows.request_id.tolist(), completions(rows), strict=True))
            engine.core.check_integrity()


def batch_of(ids: Any, prompts: list[list[int]], params: list[SamplingParams]) -> RequestBatch:
    offsets = np.concatenate(([0], np.cumsum([len(prompt) for prompt in prompts]))).astype(np.int64)
    values = np.array([token for prompt in prompts for token in prompt], np.int32)
    return RequestBatch(np.asarray(ids, np.int64), 0, values, offsets, params)


def without_speculation(models: tuple[Path, Path], added: dict[int, tuple[list[int], SamplingParams]]) -> list[Any]:
    """What an eager engine without drafts, and with room for all, makes of the same requests."""
    engine = Engine(make_parts(models, num_pages=400), ScriptedPolicy(lambda *_: (_core.METHOD_NONE, 0)))
    assert engine.parts.graphs is None
    engine.add(batch_of(list(added), [prompt for prompt, _ in added.values()], [p for _, p in added.values()]))
    done: dict[int, Completion] = {}
    while engine.num_unfinished:
        engine.step()
        rows = engine.take_finished()
        if rows is not None:
            done |= dict(zip(rows.request_id.tolist(), completions(rows), strict=True))
    assert engine.progress.preemptions == 0
    return [(c.token_ids, c.finish_reason) for _, c in sorted(done.items())]
