"""What a decode step takes beside its passes: the host's work, and what passes timed alone find in the caches.

Owns a short made-up job through the real engine. Knows nothing of policies or surfaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from specbatch._core import METHOD_NONE, STEP_DECODE
from specbatch.control.fixed import FixedPolicy
from specbatch.engine.engine import Engine
from specbatch.engine.parts import EngineParts
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams

PROMPT, TOKENS = 8, 12  # of the made-up rows
LONG = 0.02  # seconds of a step, above which the host is too small a part of it to be worth a job
WARM = 2  # steps that do not count: what is made on first use
LEAST = 5e-4  # seconds that it may be in any case
JOBS = 2  # what else runs on the machine comes and goes
MOST = 2.0  # times the target's pass: more is not the host

Pass = Callable[[float, float, float], float]  # rows, tokens, context: seconds of the target


def host_seconds(parts: EngineParts, target: Pass) -> tuple[tuple[float, float], ...]:
    """(rows, seconds beside the target's pass) at one row and at as many as may run; nothing where steps are long.

    The engine's core must have no rows; it is left as it was found, without cached prefixes.
    """
    room = (parts.plan.num_pages - 1) // -(-(PROMPT + TOKENS) // parts.plan.layout.block_size)
    many = sorted({1, min(parts.plan.max_num_seqs, room)} - {0})
    short = [rows for rows in many if target(rows, rows, rows * (PROMPT + TOKENS)) <= LONG]
    found = []
    for rows in short:
        beside = min(_beside(parts, target, rows) for _ in range(JOBS))
        found.append((float(rows), min(beside, MOST * target(rows, rows, rows * (PROMPT + TOKENS)) + LEAST)))
    return tuple(found)


def _beside(parts: EngineParts, target: Pass, rows: int) -> float:
    engine = Engine(parts, FixedPolicy(METHOD_NONE, 0))
    beside: list[float] = []

    def note(info: Any, seconds: float) -> None:
        if info.kind == STEP_DECODE and info.num_rows == rows:
            beside.append(seconds - target(rows, info.num_tokens, info.total_seq_len))

    engine.on_step = note
    try:
        engine.add(
            RequestBatch(
                request_id=np.arange(rows, dtype=np.int64),
                shard=0,
                prompt_values=np.arange(rows * PROMPT, dtype=np.int32) % parts.runner.vocab_size,
                prompt_offsets=np.arange(rows + 1, dtype=np.int64) * PROMPT,
                params=SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
            )
        )
        while engine.num_unfinished:
            engine.step()
            engine.take_finished()
    finally:
        engine.abort_all()
        parts.core.clear_prefix_cache()
    return max(float(np.median(beside[WARM:] or [0.0])), 0.0)
