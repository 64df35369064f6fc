"""What a decode step costs the host: everything that Python and Rust do, over a device whose passes cost nothing.

    python benchmarks/host_step.py [--rows 256] [--k 4] [--steps 3000] [--method draft|ngram|ar] [--policy fixed|auto]

A whole Engine on its graph path: scheduling, sampling parameters, copies of the step's arrays, launch, result, policy, rows that
finish and others that take their place. The models are empty; how many drafts are accepted is drawn at random. Median over
decode steps of the time between two launches, the empty device's own taken off; then where it goes, part by part, and the
functions that cProfile finds dearest (--profile). The yardstick is vLLM 0.32's scheduler alone: 1.9 ms a step at 256
running rows, measured elsewhere on two cores.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specbatch import _core
from specbatch.control.controller import Controller, ControllerOptions, FixedPolicy
from specbatch.control.cost_model import AffineCost, roofline
from specbatch.engine.decode_graphs import DecodeGraphs
from specbatch.engine.engine import Engine
from specbatch.engine.graphs import GraphRunner
from specbatch.engine.sampling_state import SamplingState
from specbatch.engine.static_step import StaticStep
from specbatch.engine.step_buffers import Bucket, StepArrays
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams

VLLM_SECONDS = 1.9e-3
VOCAB, BLOCK_SIZE, DRAFT_BLOCK_SIZE, MAX_LEN, PROMPT, ANSWER = 512, 16, 64, 2048, 300, 400
METHODS = {"ar": _core.METHOD_NONE, "ngram": _core.METHOD_NGRAM, "draft": _core.METHOD_DRAFT}


class NullStep(StaticStep):
    """The device: knows at once how many drafts of each row are right."""

    seconds = 0.0

    def prime(self, acceptance: float) -> None:
        """Draw the results of 64 steps, used in turn."""
        rng = np.random.default_rng(0)
        rows = len(self.result)
        runs = np.cumprod(rng.random((64, rows, self.max_width - 1)) < acceptance, axis=2).sum(axis=2)
        self.accepted = torch.from_numpy(runs.astype(np.int32))
        self.token_ids = torch.from_numpy(rng.integers(100, VOCAB, (64, rows, self.max_width), dtype=np.int32))
        self.turn = 0

    def target(self, bucket: Bucket) -> None:
        start = time.perf_counter()
        self.turn = (self.turn + 1) % 64
        rows = bucket.rows
        self.result[:rows, :-1] = self.token_ids[self.turn, :rows]
        drafts = self.arrays.device["num_draft_tokens"][:rows]
        torch.minimum(self.accepted[self.turn, :rows], drafts, out=self.result[:rows, -1])
        self.result[:rows, -1] += 1
        type(self).seconds += time.perf_counter() - start

    def draft(self, bucket: Bucket, first_tokens: int = 2) -> None:
        pass


class NullRunner:
    """A model without layers."""

    logits = torch.zeros(512, VOCAB)
    can_choose = False

    def forward(self, ids: Any, metadata: Any, indices: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(indices)]

    def forward_hidden(self, ids: Any, metadata: Any) -> None:
        return None


class NullSpeculator:
    """Its drafts are never looked at."""

    name = "draft"

    def prefill(self, info: Any, arrays: Any) -> None:
        return None


def make_engine(rows: int, k: int, method: int, policy: str, acceptance: float) -> Engine:
    """An engine over an empty device with room for all rows."""
    pages = -(-MAX_LEN // BLOCK_SIZE)
    num_pages = rows * (-(-(PROMPT + ANSWER + 16) // BLOCK_SIZE) + 12) + 2
    with_draft = method == _core.METHOD_DRAFT
    layout = SimpleNamespace(block_size=BLOCK_SIZE, draft_block_size=DRAFT_BLOCK_SIZE if with_draft else 0)
    plan = SimpleNamespace(
        max_model_len=MAX_LEN, num_pages=num_pages, layout=layout, max_num_seqs=rows, max_speculative_tokens=max(k, 1)
    )
    core = _core.Scheduler(
        num_pages=num_pages,
        block_size=BLOCK_SIZE,
        draft_block_size=layout.draft_block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=MAX_LEN,
        max_speculative_tokens=max(k, 1),
        eos_token_ids=np.array([0], np.int32),
    )
    arrays = StepArrays(
        max_num_seqs=rows,
        max_num_tokens=max(8192, rows * (k + 1)),
        max_num_logits=rows * (k + 1),
        pages_per_row=pages,
        draft_pages_per_row=-(-MAX_LEN // DRAFT_BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        draft_block_size=DRAFT_BLOCK_SIZE,
        mirror=True,
    )
    sampling = SamplingState(rows, VOCAB)
    parts: Any = SimpleNamespace(
        plan=plan, core=core, arrays=arrays, sampling=sampling, rows=sampling.new_rows(rows), runner=NullRunner(),
        speculator=NullSpeculator() if with_draft else None, rejection=False,
    )  # fmt: skip
    step = NullStep(
        arrays, parts.rows, parts.runner, max_speculative_tokens=plan.max_speculative_tokens, max_model_len=MAX_LEN
    )
    step.prime(acceptance)
    parts.graphs = DecodeGraphs(step, GraphRunner(None), max_num_seqs=rows)
    parts.graphs.runner._capturer = SimpleNamespace(capture=captured, memory=lambda: 0)
    fixed = FixedPolicy(method, k if method else 0)
    return Engine(parts, auto_policy(rows, k, with_draft) if policy == "auto" else fixed)


def captured(function: Callable[[], None]) -> Callable[[], None]:
    function()
    return function


def auto_policy(rows: int, k: int, with_draft: bool) -> Controller:
    """The live controller over the step times of an 8B target and a 0.6B draft."""
    costs = [
        roofline(parameter_bytes=2 * n, parameters=n, kv_bytes_per_token=kv, bandwidth=3e12, flops=6e14, overhead=2e-4)
        for n, kv in ((8_000_000_000, 131_072), (600_000_000, 114_688))
    ]
    methods = (_core.METHOD_NGRAM, _core.METHOD_DRAFT) if with_draft else (_core.METHOD_NGRAM,)
    options = ControllerOptions(methods=methods, max_num_seqs=rows, ks=(k,), draft_kv_ratio=0.25 if with_draft else 0.0)
    return Controller(options, AffineCost(costs[0], costs[1] if with_draft else None))


class Parts:
    """Notes the time of each call of some methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, owner: Any, name: str, label: str) -> None:
        method = getattr(owner, name)
        calls: list[float] = []
        self.seconds[label] = calls

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                calls.append(time.perf_counter() - start)

        setattr(owner, name, timed)


class Core:
    """A Scheduler whose step is timed (its own attributes cannot be set)."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def step(self, *args: Any) -> Any:
        return self._core.step(*args)


class Feed:
    """Keeps the engine full."""

    def __init__(self, engine: Engine, rows: int, kind: str) -> None:
        self.engine, self.rows, self.next_id = engine, rows, 0
        self.rng = np.random.default_rng(1)
        hot = SamplingParams(max_tokens=ANSWER, temperature=0.8, top_p=0.95, ignore_eos=True)
        self.params = hot if kind == "sampled" else SamplingParams(max_tokens=ANSWER, ignore_eos=True)

    def refill(self) -> None:
        missing = self.rows + 64 - self.engine.num_unfinished
        if missing < 32:
            return
        lengths = self.rng.integers(PROMPT // 2, PROMPT, missing)
        values = self.rng.integers(100, VOCAB, lengths.sum(), dtype=np.int32)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        ids = np.arange(self.next_id, self.next_id + missing)
        self.next_id += missing
        self.engine.add(RequestBatch(ids, 0, values, offsets, self.params))


def run(engine: Engine, rows: int, steps: int, kind: str) -> tuple[list[float], list[float]]:
    """Seconds, and seconds of processor time, of each turn that launched a decode step with nearly every row: step() and
    take_finished()."""
    feed = Feed(engine, rows, kind)
    feed.refill()
    times: list[float] = []
    busy: list[float] = []
    gc.collect()
    while len(times) < steps:
        device = NullStep.seconds
        start, processor = time.perf_counter(), time.thread_time()
        engine.step()
        engine.take_finished()
        device = NullStep.seconds - device
        processor, seconds = time.thread_time() - processor - device, time.perf_counter() - start - device
        info = engine._info
        if info is not None and info.kind == _core.STEP_DECODE and info.num_rows >= 0.9 * rows:
            times.append(seconds)
            busy.append(processor)
        feed.refill()
    return times, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--method", choices=METHODS, default="draft")
    parser.add_argument("--policy", choices=("fixed", "auto"), default="fixed")
    parser.add_argument("--params", choices=("greedy", "sampled"), default="sampled")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    k = 0 if options.method == "ar" else options.k

    def fresh() -> Engine:
        return make_engine(options.rows, k, METHODS[options.method], options.policy, options.acceptance)

    run(fresh(), options.rows, min(options.steps, 300), options.params)  # warm
    times, busy = run(fresh(), options.rows, options.steps, options.params)
    ordered = sorted(times)
    median, low, worst = (ordered[int(len(times) * share)] for share in (0.5, 0.1, 0.99))
    print(f"{options.rows} rows, {options.method} k = {k}, {options.params}, policy {options.policy}")
    print(
        f"median {median * 1e6:.0f} us a step ({statistics.median(busy) * 1e6:.0f} of processor time), 10th percentile "
        f"{low * 1e6:.0f}, 99th {worst * 1e6:.0f}; {VLLM_SECONDS / median:.0f} times less than 1.9 ms"
    )
    engine, parts = fresh(), Parts()
    core: Any = Core(engine.core)
    engine.core = core
    for owner, name, label in (
        (engine, "_settle", "settle: result, filing, notes for the policy"),
        (engine._policy, "decide", "policy"),
        (core, "step", "Scheduler.step (Rust)"),
        (engine.sampling, "gather", "sampling parameters of the rows"),
        (engine.arrays, "to_device", "copies of the step's arrays (on a GPU: started, not waited for)"),
        (engine._graphs, "launch", "launch, those copies and the empty device included"),
        (engine, "take_finished", "take_finished"),
    ):
        parts.watch(owner, name, label)
    run(engine, options.rows, options.steps, options.params)
    for label, seconds in parts.seconds.items():
        tenth = sorted(seconds)[len(seconds) // 10]
        print(f"{statistics.median(seconds) * 1e6:8.1f} us ({tenth * 1e6:6.1f})  {label}")
    if options.profile:
        engine = fresh()
        profile = cProfile.Profile()
        profile.runcall(run, engine, options.rows, options.steps, options.params)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
