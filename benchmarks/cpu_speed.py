"""Completion tokens a second on this machine, by live rows and speculation, as one JSON line a setting.

    python benchmarks/cpu_speed.py MODEL PROMPTS.parquet [--rows 1,8,64] [--modes off:0,ngram:4] [--repeat 1]

`--rows N` takes the first N prompts (column `messages`) and runs them all at once, greedy. Loading and profiling are not
timed. Settings are interleaved, so that a drifting machine slows all of them; compare only within one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import pyarrow.parquet as pq

from specbatch import Engine, SamplingParams


def measure(args: argparse.Namespace, rows: int, mode: str) -> dict[str, Any]:
    speculate, k = mode.split(":")
    options: dict[str, Any] = {"num_speculative_tokens": int(k)} if int(k) else {}
    if args.draft_model and speculate in ("draft", "auto"):
        options["draft_model"] = args.draft_model
    messages = pq.read_table(args.prompts, columns=["messages"]).slice(0, rows)["messages"].to_pylist()
    with Engine(model=args.model, dtype=args.dtype, speculate=speculate, max_num_seqs=rows, **options) as engine:
        engine.generate(messages[:1], SamplingParams(max_tokens=4))
        start = time.perf_counter()
        done = engine.generate(messages, SamplingParams(max_tokens=args.max_tokens))
        seconds = time.perf_counter() - start
        described = engine.core.describe()
    drafted = sum(c.drafted for c in done)
    return {
        "rows": rows,
        "mode": mode,
        "dtype": described["dtype"],
        "threads": described["threads"],
        "attention": described["attention"].split(":")[0],
        "prompt_tokens": sum(c.prompt_tokens for c in done),
        "completion_tokens": sum(c.completion_tokens for c in done),
        "seconds": round(seconds, 3),
        "completion_tokens_per_second": round(sum(c.completion_tokens for c in done) / seconds, 1),
        "acceptance_rate": round(sum(c.accepted for c in done) / drafted, 3) if drafted else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--draft-model")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--modes", default="off:0,ngram:4")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _ in range(args.repeat):
        for rows in map(int, args.rows.split(",")):
            for mode in args.modes.split(","):
                result = measure(args, rows, mode)
                rates[rows, mode].append(result["completion_tokens_per_second"])
                print(json.dumps(result), flush=True)
    if args.repeat > 1:
        for (rows, mode), values in rates.items():
            print(json.dumps({"rows": rows, "mode": mode, "median": statistics.median(values), "runs": len(values)}))


if __name__ == "__main__":
    main()
