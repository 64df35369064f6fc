"""specbatch beside OpenVINO GenAI on this CPU: completion tokens a second, in turns, each at its own best setting.

    python benchmarks/against_openvino.py MODEL PROMPTS.parquet --peer-python OV/bin/python --peer-model MODEL-ov \
        [--rows 1,8,64] [--rounds 3] [--max-tokens 128] [--shared-prefix 400]

OpenVINO lives in an environment of its own (pip install openvino-genai "optimum-intel[openvino]"; optimum-cli export
openvino --model MODEL --task text-generation-with-past --weight-format fp16 MODEL-ov). Both get the same token ids, greedy.
The machine's speed may drift by a factor of two within minutes, so sides alternate and a ratio is the median of the rounds'
own ratios. The peak product and bandwidth measured in the same run stand beside the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from specbatch import Engine, SamplingParams
from specbatch.models.tokenizer import HFTokenizer


def machine(dtype: torch.dtype) -> dict[str, float]:
    """Best of a few: TFLOP/s of a large product, GB/s of reading memory."""
    a, b = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 4096, dtype=dtype)
    big = torch.ones(1 << 27)
    product, read = [], []
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        product.append(time.perf_counter() - start)
        start = time.perf_counter()
        big.sum()
        read.append(time.perf_counter() - start)
    return {
        "tflops": round(2 * 1024 * 1024 * 4096 / min(product) / 1e12, 2),
        "gigabytes_per_second": round(big.numel() * 4 / min(read) / 1e9, 1),
    }


class Peer:
    def __init__(self, args: argparse.Namespace, eos: int) -> None:
        command = [args.peer_python, str(Path(__file__).with_name("peer_openvino.py")), args.peer_model]
        command += ["--threads", str(args.threads), "--precision", args.peer_precision, "--eos", str(eos)]
        command += ["--prefix-caching"] if args.peer_prefix_caching else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, prompts: list[list[int]], max_tokens: int, lookup: bool) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"prompts": prompts, "max_tokens": max_tokens, "lookup": lookup}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the OpenVINO process ended; its words are above")
        answer = json.loads(line)
        return float(answer["completion_tokens"] / answer["seconds"])


def ours(args: argparse.Namespace, prompts: list[list[int]], speculate: str) -> float:
    options: dict[str, Any] = {"num_speculative_tokens": 4} if speculate == "ngram" else {}
    rows = len(prompts)
    with Engine(
        model=args.model, dtype=args.dtype, speculate=speculate, max_num_seqs=rows, threads=args.threads, **options
    ) as engine:
        engine.generate(prompts[:1], SamplingParams(max_tokens=4, ignore_eos=True))
        start = time.perf_counter()
        done = engine.generate(prompts, SamplingParams(max_tokens=args.max_tokens))
        return sum(c.completion_tokens for c in done) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peer-model", required=True)
    parser.add_argument("--peer-precision", default="bf16", choices=["bf16", "f32"])
    parser.add_argument("--peer-prefix-caching", action="store_true")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens put before every prompt")
    parser.add_argument("--json", help="also write everything here")
    args = parser.parse_args()
    tokenizer = HFTokenizer(args.model)
    messages = pq.read_table(args.prompts, columns=["messages"])["messages"].to_pylist()
    values, offsets = tokenizer.encode([tokenizer.render(m) for m in messages], add_special_tokens=False)
    prefix = np.random.default_rng(0).integers(1000, 20000, args.shared_prefix).tolist()
    prompts = [prefix + values[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    eos = next(iter(tokenizer.eos_token_ids))
    peer = Peer(args, eos)
    report: dict[str, Any] = {"machine": machine(torch.bfloat16), "rows": {}}
    print(
        f"bfloat16 product {report['machine']['tflops']} TFLOP/s, memory {report['machine']['gigabytes_per_second']} GB/s"
    )
    print(
        f"{'rows':>5} {'specbatch':>10} {'n-gram k=4':>11} {'OpenVINO':>9} {'lookup':>8}   best of ours / best of theirs"
    )
    for rows in map(int, args.rows.split(",")):
        some = prompts[:rows]
        results: dict[str, list[float]] = {name: [] for name in ("off", "ngram", "peer", "lookup")}
        for _ in range(args.rounds):
            results["off"].append(ours(args, some, "off"))
            results["peer"].append(peer.run(some, args.max_tokens, False))
            results["ngram"].append(ours(args, some, "ngram"))
            results["lookup"].append(peer.run(some, args.max_tokens, True))
        medians = {name: round(statistics.median(rates), 1) for name, rates in results.items()}
        rounds = zip(*(results[name] for name in ("off", "ngram", "peer", "lookup")), strict=True)
        ratios = [max(a, b) / max(c, d) for a, b, c, d in rounds]
        report["rows"][rows] = {"rates": results, "medians": medians, "ratios": ratios}
        m = medians
        print(
            f"{rows:>5} {m['off']:>10} {m['ngram']:>11} {m['peer']:>9} {m['lookup']:>8}   {statistics.median(ratios):.2f}x"
            f"  ({', '.join(f'{r:.2f}' for r in ratios)})",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
