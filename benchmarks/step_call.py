"""How long does one `Scheduler.step` take through Python, and how does that compare with a scheduler written in Python?

    python benchmarks/step_call.py [--rows 256] [--k 4] [--width 128] [--steps 2000]

Every row runs, every step verifies k drafts a row (a mix of acceptances), block tables are `--width` pages wide. Median
over steps of the call alone, arrays made beforehand. The yardstick is vLLM 0.32's Python scheduler (schedule and
update) at 256 running rows: 1.9 ms a step, measured elsewhere on two cores.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc

import numpy as np

from specbatch import _core

VLLM_SECONDS = 1.9e-3


def make_buffers(rows: int, k: int, width: int, tokens: int) -> tuple[_core.StepBuffers, dict[str, np.ndarray]]:
    """Step buffers and the arrays behind them."""
    length = max(rows * (k + 1), tokens)
    shapes: dict[str, int | tuple[int, int]] = {"block_tables": (rows, width), "draft_block_tables": (rows, 1)}
    for prefix in ("", "draft_"):
        shapes |= {prefix + "query_start_loc": rows + 1, prefix + "seq_lens": rows}
        shapes |= {prefix + name: length for name in ("input_ids", "positions", "slot_mapping")}
    shapes |= {"seq_index": rows, "num_draft_tokens": rows, "logits_start_loc": rows + 1, "logits_indices": length}
    arrays = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    return _core.StepBuffers(**arrays), arrays


def run(rows: int, k: int, width: int, steps: int, method: int) -> list[float]:
    """Seconds of each decode step's call."""
    block_size = 16
    max_len = width * block_size
    prompt_len = max_len // 4
    scheduler = _core.Scheduler(
        num_pages=rows * width + 2,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=max_len,
        max_speculative_tokens=max(k, 1),
        eos_token_ids=np.array([0], np.int32),
    )
    scheduler.set_speculation(method if k else _core.METHOD_NONE, k)
    buffers, arrays = make_buffers(rows, k, width, 8192)
    rng = np.random.default_rng(0)
    next_id = 0

    def refill() -> None:
        nonlocal next_id
        missing = rows - scheduler.num_unfinished
        if missing:
            scheduler.add_requests(
                request_id=np.arange(next_id, next_id + missing, dtype=np.int64),
                shard=np.zeros(missing, np.int32),
                prompt_values=rng.integers(1, 30000, missing * prompt_len, dtype=np.int32),
                prompt_offsets=np.arange(missing + 1, dtype=np.int64) * prompt_len,
                max_tokens=np.full(missing, max_len, np.int32),
            )
            next_id += missing

    token_ids = rng.integers(1, 30000, (rows, k + 1), dtype=np.int32)
    ones, zeros = np.ones(rows, np.int32), np.zeros(rows, np.int32)
    sampled = [rng.integers(1, k + 2, rows, dtype=np.int32) for _ in range(64)]
    drafts = np.full(rows, k, np.int32)
    result: tuple[np.ndarray, np.ndarray, np.ndarray] = (token_ids[:0], ones[:0], zeros[:0])
    step_id, times, turn = 0, [], 0
    refill()
    while len(times) < steps:
        start = time.perf_counter()
        info = scheduler.step(step_id, *result, buffers)
        seconds = time.perf_counter() - start
        step_id = info.step_id
        count = info.num_rows
        if info.kind == _core.STEP_DECODE:
            if count == rows:
                times.append(seconds)
            turn += 1
            given = arrays["num_draft_tokens"][:count].copy() if method == _core.METHOD_NGRAM else drafts[:count]
            given = np.minimum(given, arrays["num_draft_tokens"][:count])
            result = (token_ids[:count], np.minimum(sampled[turn % 64][:count], given + 1), given)
        elif info.kind == _core.STEP_PREFILL:
            logits = np.diff(arrays["logits_start_loc"][: count + 1])
            result = (token_ids[:count], logits.astype(np.int32), zeros[:count])
        else:
            result = (token_ids[:0], ones[:0], zeros[:0])
        if info.num_finished:
            scheduler.take_finished()
            refill()
    return times


def python_allocations(rows: int, k: int, width: int) -> int:
    """Blocks a step call leaves allocated in Python beyond its StepInfo (0 a row is the promise)."""
    block_size = 16
    scheduler = _core.Scheduler(
        num_pages=rows * width + 2,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=width * block_size,
        max_speculative_tokens=k,
    )
    buffers, _ = make_buffers(rows, k, width, 8192)
    scheduler.add_requests(
        request_id=np.arange(rows, dtype=np.int64),
        shard=np.zeros(rows, np.int32),
        prompt_values=np.ones(rows, np.int32),
        prompt_offsets=np.arange(rows + 1, dtype=np.int64),
        max_tokens=np.full(rows, 1000, np.int32),
    )
    scheduler.set_speculation(_core.METHOD_EXTERNAL, k)
    tokens = np.ones((rows, k + 1), np.int32)
    ones, drafts = np.ones(rows, np.int32), np.full(rows, k, np.int32)
    info = scheduler.step(0, tokens[:0], ones[:0], drafts[:0], buffers)
    info = scheduler.step(info.step_id, tokens, ones, np.zeros(rows, np.int32), buffers)
    for _ in range(3):
        info = scheduler.step(info.step_id, tokens, ones, drafts, buffers)
    step_id = info.step_id
    gc.collect()
    tracemalloc.start()
    info = scheduler.step(step_id, tokens, ones, drafts, buffers)
    snapshot = tracemalloc.take_snapshot()
    tracemalloc.stop()
    return sum(stat.count for stat in snapshot.statistics("filename") if stat.traceback[0].filename == __file__)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    rows, k, width = options.rows, options.k, options.width
    print(f"{rows} rows, tables {width} wide, {options.steps} steps")
    for name, method, drafts in [
        ("autoregressive", _core.METHOD_NONE, 0),
        (f"k = {k}, proposed outside", _core.METHOD_EXTERNAL, k),
        (f"k = {k}, n-gram", _core.METHOD_NGRAM, k),
    ]:
        times = run(rows, drafts, width, options.steps, method)
        median, low = statistics.median(times), sorted(times)[len(times) // 10]
        print(
            f"{name:>24}: median {median * 1e6:6.1f} us, 10th percentile {low * 1e6:6.1f} us,"
            f" {VLLM_SECONDS / median:5.0f} times faster than 1.9 ms"
        )
    print(f"Python objects a step: {python_allocations(rows, k, width)}")


if __name__ == "__main__":
    main()
