"""Drives an engine step by step under a scripted policy: what the tests of mode switching and memory share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specbatch.api import Completion, completions
from specbatch.control.records import METHOD_DRAFT, METHOD_NONE, Decision, Observation
from specbatch.engine.engine import Engine
from specbatch.engine.parts import build_parts
from specbatch.engine.plan import plan_engine
from specbatch.engine_options import EngineOptions
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams

Script = Callable[[int, int, int], tuple[int, int]]  # (step, running, waiting) -> (method, k)


class ScriptedPolicy:
    """Asks a function at every step."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.log = None
        self._now = self._last = (METHOD_NONE, 0)

    def due(self, step: int, running: int, waiting: int) -> bool:
        self._now = self.script(step, running, waiting)
        return self._now != self._last

    def decide(self, observation: Observation) -> Decision:
        self._last = self._now
        method, k = self._now
        return Decision(
            step=observation.step,
            method=method,
            k=k,
            shards=(),
            shadow_ngram=0,
            probe_draft_rows=0,
            probe_draft_k=0,
            max_rows=0,
            changed=True,
            reason="scripted",
        )


def draft(k: int) -> tuple[int, int]:
    return (METHOD_DRAFT, k) if k else (METHOD_NONE, 0)


def make_engine(model: Path, script: Script | None = None, **options: Any) -> Engine:
    """An engine under `script` (None: AR) in float32 on one thread."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory_bytes": 4 << 20, "threads": 1, "device": "cpu"}
    if "draft_model" not in options:
        settings["speculate"] = "ngram"
    resolved = EngineOptions(model=str(model), **(settings | options))
    parts = build_parts(plan_engine(resolved), resolved)
    return Engine(parts, ScriptedPolicy(script or (lambda *_: draft(0))))


def add(engine: Engine, prompts: list[list[int]], params: Any = None, shard: int = 0, first_id: int = 0) -> None:
    offsets = np.concatenate(([0], np.cumsum([len(p) for p in prompts]))).astype(np.int64)
    values = np.array([t for p in prompts for t in p], np.int32)
    ids = np.arange(first_id, first_id + len(prompts), dtype=np.int64)
    engine.add(RequestBatch(ids, shard, values, offsets, params or SamplingParams(max_tokens=40, ignore_eos=True)))


def finish(
    engine: Engine, done: dict[int, Completion] | None = None, each_step: Callable[[Engine], None] | None = None
) -> dict[int, Completion]:
    """Step until nothing is left, pages checked after every step; {request id: completion}."""
    done = {} if done is None else done
    while engine.num_unfinished:
        engine.step()
        engine.core.check_integrity()
        rows = engine.take_finished()
        if rows is not None:
            done.update(zip(rows.request_id.tolist(), completions(rows), strict=True))
        if each_step is not None:
            each_step(engine)
    return done


def tokens(done: dict[int, Completion]) -> list[tuple[int, ...]]:
    return [done[i].token_ids for i in sorted(done)]


def acceptance(done: dict[int, Completion]) -> tuple[int, float]:
    drafted = sum(c.drafted for c in done.values())
    return drafted, sum(c.accepted for c in done.values()) / max(drafted, 1)
