"""Tokens a second of whole engines on random weights, beside what reading the weights and the KV must take.

    python benchmarks/gpu/engine_speed.py [--json FILE] [--shapes 8B,1B,135M] [--rows 1,8,64,256] [--seconds 140]
    python benchmarks/gpu/engine_speed.py --device cpu --shapes tiny --rows 1,4      (a rehearsal)

Every cell prefills its rows, lets a few decode steps pass (graphs are captured), and times the next ones on the wall clock.
Which drafts are accepted is drawn (0.8, given those before), so a draft of random weights costs what a real one would, and
brings what a good one would. The bound of a step: weights and KV of its passes over the bandwidth of a plain copy; of drafting,
each of the draft's passes and one of the target. Idle: the share of the time in which no step was on the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.shapes import SHAPES, Weights, random_parts
from specbatch import _core
from specbatch.control.fixed import FixedPolicy
from specbatch.engine.synthetic import SyntheticEngine
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams

K, ACCEPT = 4, 0.8
MODES = {"ar": (_core.METHOD_NONE, 0), "ngram": (_core.METHOD_NGRAM, K), "draft": (_core.METHOD_DRAFT, K)}
PROMPT_TOKENS = 65_536  # of all rows of a cell
TARGETS = {("8B", "ar", 1): 0.75, ("8B", "ar", 64): 0.65}  # share of the bound that is hoped for, in bfloat16


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second (read plus written) of a large copy."""
    size = 1 << (30 if device.type == "cuda" else 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        _synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Cell:
    """One engine, one mode, one number of rows."""

    def __init__(self, engine: SyntheticEngine, mode: str, rows: int, context: int, steps: int) -> None:
        self.engine, self.mode, self.rows, self.context, self.steps = engine, mode, rows, context, steps
        self.decodes = 0
        self.drafted = 0
        self.device_seconds = 0.0

    def run(self) -> dict[str, Any]:
        """Time `steps` decode steps of all rows. Raises RuntimeError when they do not all run at once."""
        engine = self.engine
        engine.use_policy(FixedPolicy(*MODES[self.mode]), self.rows)
        warm = 6
        most = (self.steps + warm + 4) * (K + 1)
        engine.add(self.requests(most))
        graphs = engine.parts.graphs
        replays = graphs.runner.replays if graphs is not None else 0

        def note(info: Any, seconds: float) -> None:
            self.decodes += info.kind == _core.STEP_DECODE and info.num_rows == self.rows
            self.drafted += info.num_draft_tokens

        engine.on_step = note
        self._until(lambda: self.decodes >= warm)
        self.drafted = 0
        if graphs is not None:
            replays = graphs.runner.replays
            captured = graphs.runner.capture_seconds
            self._watch(graphs)
        tokens, start = engine.progress.completion_tokens, time.perf_counter()
        self._until(lambda: self.decodes >= warm + self.steps)
        seconds = time.perf_counter() - start
        if graphs is not None:
            seconds -= graphs.runner.capture_seconds - captured
            replays = graphs.runner.replays - replays
            graphs.__dict__.pop("wait", None)
        tokens = engine.progress.completion_tokens - tokens
        engine.on_step = None
        engine.abort_all()
        return {
            "mode": self.mode,
            "rows": self.rows,
            "context": self.context,
            "steps": self.steps,
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "milliseconds_a_step": 1e3 * seconds / self.steps,
            "drafts_a_step": self.drafted / self.steps,
            "replays": replays,
            "idle": max(1 - self.device_seconds / seconds, 0.0) if self.device_seconds else None,
        }

    def _watch(self, graphs: Any) -> None:
        wait = type(graphs).wait

        def timed() -> Any:
            result = wait(graphs)
            self.device_seconds += result.seconds
            return result

        graphs.__dict__["wait"] = timed

    def _until(self, done: Any) -> None:
        while not done():
            if not self.engine.step():
                raise RuntimeError(f"{self.rows} rows did not run at once")
            self.engine.take_finished()

    def requests(self, max_tokens: int) -> RequestBatch:
        """Prompts of one repeated phrase a row, so that look-up finds something."""
        rng = np.random.default_rng(self.rows)
        phrases = rng.integers(0, 256, (self.rows, 32), dtype=np.int32)
        values = np.tile(phrases, (1, -(-self.context // 32)))[:, : self.context]
        return RequestBatch(
            np.arange(self.rows, dtype=np.int64), 0, np.ascontiguousarray(values).ravel(),
            np.arange(self.rows + 1, dtype=np.int64) * self.context, SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )  # fmt: skip


def bound(mode: str, rows: int, context: float, target: Weights, draft: Weights, bandwidth: float) -> float:
    """Seconds that reading alone takes in a step."""
    step = target.pass_bytes + rows * context * target.kv_bytes_per_token
    if mode == "draft":
        step += K * (draft.pass_bytes + rows * context * draft.kv_bytes_per_token)
    return step / bandwidth


def measure_shape(
    name: str, rows: Sequence[int], options: argparse.Namespace, bandwidth: float, end: float
) -> list[dict[str, Any]]:
    """All cells of a shape, as far as time and memory reach."""
    results: list[dict[str, Any]] = []
    settings: dict[str, Any] = {
        "device": options.device, "dtype": options.dtype, "max_num_seqs": max(rows), "max_model_len": 2048,
        "num_speculative_tokens": K, "cuda_graphs": options.cuda_graphs,
    }  # fmt: skip
    if options.device == "cpu":
        settings |= {"kv_memory_bytes": 64 << 20, "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        parts, target, draft = random_parts(Path(folder), name, settings)
    engine = SyntheticEngine(parts, FixedPolicy(_core.METHOD_NONE, 0), [ACCEPT])
    described: Any = engine.describe()
    about = {"shape": name, "dtype": described["dtype"], "attention": described["attention"]}
    for mode in options.modes:
        for count in rows:
            context = min(max(PROMPT_TOKENS // count, 256), 1024) if options.device != "cpu" else 64
            cell = about | {"mode": mode, "rows": count, "context": context}
            if time.monotonic() > end:
                results.append(cell | {"skipped": "out of time"})
                continue
            try:
                found = Cell(engine, mode, count, context, options.steps).run()
            except (RuntimeError, torch.OutOfMemoryError) as error:
                engine.abort_all()
                results.append(cell | {"skipped": str(error).splitlines()[0]})
                continue
            least = bound(mode, count, context + found["tokens"] / count, target, draft, bandwidth)
            found["share_of_bound"] = least / (found["seconds"] / found["steps"])
            found["hoped_for"] = TARGETS.get((name, mode, count))
            results.append(about | found)
            show(results[-1])
    results.append(about | {"graphs": engine.describe()["cuda_graphs"], "pages": parts.plan.num_pages,
                            "activation_bytes": parts.plan.activation_bytes, "graph_bytes": parts.plan.graph_bytes})  # fmt: skip
    engine.close()
    return results


def show(found: dict[str, Any]) -> None:
    idle = "" if found["idle"] is None else f"  idle {found['idle']:4.0%}"
    hoped = f" (hoped for {found['hoped_for']:.0%})" if found["hoped_for"] else ""
    place = f"{found['shape']:>5} {found['mode']:>5} {found['rows']:4} rows x {found['context']:4}"
    speed = f"{found['tokens_per_second']:9.1f} tokens/s {found['milliseconds_a_step']:8.2f} ms a step"
    print(f"{place}: {speed}, {found['share_of_bound']:4.0%} of the bound{hoped}{idle}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shapes", default="8B,1B,135M")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=140.0, help="no cell begins after this")
    parser.add_argument("--cuda-graphs", choices=("auto", "off"), default="auto")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    device = torch.device(options.device)
    bandwidth = copy_bandwidth(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{name}: copy {bandwidth / 1e9:.0f} GB/s")
    cells: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        if shape not in SHAPES:
            parser.error(f"--shapes: {', '.join(SHAPES)}, not {shape}")
        try:
            rows = sorted(int(count) for count in options.rows.split(","))
            cells += measure_shape(shape, rows, options, bandwidth, end)
        except (ValueError, torch.OutOfMemoryError) as error:
            cells.append({"shape": shape, "skipped": str(error).splitlines()[0]})
            print(f"{shape:>5} skipped: {cells[-1]['skipped']}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(
            json.dumps({"device": name, "copy_bytes_a_second": bandwidth, "cells": cells}, indent=1)
        )


if __name__ == "__main__":
    main()
