"""What --quantize int8 brings and what it costs: speed and answers beside the same model unrounded, in one run.

    python benchmarks/quantized.py MODEL PROMPTS.parquet [--rows 1,8,64] [--rounds 3] [--max-tokens 64] [--quality-rows 64]
    python benchmarks/quantized.py builtin examples/prompts.parquet --quality-rows 200

Speed: completion tokens a second, greedy, prefill included, the two sides in turn within each round; the ratio is the
median of the rounds' ratios. Answers to the same prompts (column `messages`, else `prompt` as one user message), for int8
and, as a measure of what rounding always does, for bfloat16, both against float32: greedy rows that are the same, and the
share of a row before it parts, on average; right rows, where there is a column `expected`; and with the tokens of the prompts
given, how the distributions of the next token differ (KL divergence in nats, perplexity of the prompt, float32's first).
Prints one JSON line a part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from specbatch import Engine, SamplingParams
from specbatch.engine.kv_cache import PagedKVCache
from specbatch.engine.kv_layout import plan_pages
from specbatch.engine.model_check import step_metadata
from specbatch.engine.model_runner import ModelRunner

SIDES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
}


def engine(model: str, side: str, rows: int, **options: Any) -> Engine:
    name = None if model == "builtin" else model
    return Engine(model=name, speculate="off", profile=False, max_num_seqs=rows, **SIDES[side], **options)


def speed(args: argparse.Namespace, prompts: list[Any], rows: int) -> dict[str, Any]:
    sides = {side: engine(args.model, side, rows) for side in ("bfloat16", "int8")}
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for side in sides.values():
        side.generate(prompts[:1], SamplingParams(max_tokens=4))
    for turn in range(args.rounds):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            done = sides[name].generate(prompts[:rows], params)
            rates[name].append(sum(c.completion_tokens for c in done) / (time.perf_counter() - start))
    computes = {name: side.core.describe()["compute"] for name, side in sides.items()}
    for side in sides.values():
        side.close()
    ratios = [b / a for a, b in zip(rates["bfloat16"], rates["int8"], strict=True)]
    return {
        "part": "speed",
        "rows": rows,
        **{name: round(statistics.median(r), 1) for name, r in rates.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(r, 2) for r in ratios],
        "compute": computes,
    }


def answers(args: argparse.Namespace, prompts: list[Any]) -> dict[str, list[Any]]:
    params = SamplingParams(max_tokens=args.max_tokens)
    found = {}
    for side in SIDES:
        with engine(args.model, side, 64) as one:
            found[side] = one.generate(prompts, params)
    return found


def agreement(one: list[Any], other: list[Any]) -> dict[str, Any]:
    same, prefixes = 0, []
    for a, b in zip(one, other, strict=True):
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        same += list(a.token_ids) == list(b.token_ids)
        prefixes.append(sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs)) / max(len(a.token_ids), 1))
    return {"identical_rows": same, "of": len(one), "mean_common_prefix": round(statistics.mean(prefixes), 3)}


@torch.inference_mode()
def distributions(args: argparse.Namespace, prompts: list[Any]) -> list[dict[str, Any]]:
    """Of the next token at every place of the prompts."""
    runs: dict[str, list[torch.Tensor]] = {}
    rows: list[torch.Tensor] = []
    for side in SIDES:
        with engine(args.model, side, 1) as one:
            if not rows:
                rows = [torch.from_numpy(one._encode([prompt])[0]) for prompt in prompts]
            runner = one.core.parts.runner
            cache = PagedKVCache(plan_pages(runner.model.kv_shape, None, 16), max(map(len, rows)) // 16 + 3)
            runner = ModelRunner(runner.model, cache.pages("target"), runner.backend)
            runs[side] = [row_logits(runner, row).log_softmax(-1) for row in rows]
    reports = []
    for side in ("bfloat16", "int8"):
        pairs = list(zip(runs["float32"], runs[side], strict=True))
        kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs])
        top = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in pairs])
        surprise = [
            float(torch.cat([x[:-1].gather(1, r[1:, None].long()) for x, r in zip(runs[s], rows, strict=True)]).mean())
            for s in ("float32", side)
        ]
        reports.append({
            "part": "next token", "side": side, "against": "float32", "places": kl.numel(),
            "kl_mean": round(float(kl.mean()), 5), "kl_median": round(float(kl.median()), 5),
            "kl_99th_percentile": round(float(kl.quantile(0.99)), 4), "same_best_token": round(float(top.float().mean()), 4),
            "perplexity": [round(float(torch.tensor(-s).exp()), 3) for s in surprise],
        })  # fmt: skip
    return reports


def row_logits(runner: ModelRunner, row: torch.Tensor) -> torch.Tensor:
    """Float32 logits [tokens, vocab] of a row alone."""
    table = list(range(1, -(-len(row) // 16) + 1))
    metadata = step_metadata([(0, len(row))], [table], 16, torch.device("cpu"))
    return runner.forward(row, metadata, torch.arange(len(row)))


def right(expected: list[str], done: list[Any]) -> int:
    """Rows that state every field as expected, by the example's own checker."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from check_answers import fields

    return sum(fields(e) == fields(c.text) for e, c in zip(expected, done, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--rows", default="1,8,64", help="rows at once whose speed is measured; empty: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--quality-rows", type=int, default=64, help="0: speed alone")
    parser.add_argument("--kl-rows", type=int, default=8, help="prompts whose next-token distributions are compared")
    args = parser.parse_args()
    table = pq.read_table(args.prompts)
    if "messages" in table.column_names:
        prompts = table["messages"].to_pylist()
    else:
        prompts = [[{"role": "user", "content": text}] for text in table["prompt"].to_pylist()]

    def say(report: dict[str, Any]) -> None:
        print(json.dumps(report), flush=True)

    for rows in map(int, filter(None, args.rows.split(","))):
        say(speed(args, prompts, rows))
    if not args.quality_rows:
        return
    found = answers(args, prompts[: args.quality_rows])
    expected = table["expected"].to_pylist()[: args.quality_rows] if "expected" in table.column_names else None
    for side in ("bfloat16", "int8"):
        say({"part": "answers", "side": side, "against": "float32", **agreement(found["float32"], found[side])})
    if expected is not None:
        say({"part": "right", "of": len(expected), **{side: right(expected, done) for side, done in found.items()}})
    for report in distributions(args, prompts[: args.kl_rows]):
        say(report)


if __name__ == "__main__":
    main()
