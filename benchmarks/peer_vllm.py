"""vLLM's CPU build over a list of token-id prompts, as a process that answers on demand.

Run by `against_peers.py` in vLLM's own environment. The same lines as `peer_openvino.py`: one JSON object a line from stdin
({"prompts", "max_tokens", "lookup"}), each answered with one ({"seconds", "completion_tokens"}); loading is not timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from typing import Any


def make_engine(args: argparse.Namespace, rows: int, lookup: bool) -> Any:
    import vllm

    options: dict[str, Any] = {}
    if lookup:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    return vllm.LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=rows,
        enable_prefix_caching=args.prefix_caching,
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--eos", type=int, default=2)
    parser.add_argument("--prefix-caching", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")  # by default it leaves a core unused
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its log goes to stderr, whoever writes it
    from vllm import SamplingParams

    engines: dict[tuple[int, bool], Any] = {}
    for line in sys.stdin:
        job = json.loads(line)
        sampling = SamplingParams(
            temperature=0, max_tokens=job["max_tokens"], stop_token_ids=[args.eos], detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        key = (len(prompts), job["lookup"])
        if key not in engines:
            if any(rows != key[0] for rows, _ in engines):
                engines.clear()  # each holds its own KV, and making one compiles for a minute
                gc.collect()
            engines[key] = make_engine(args, *key)
            warm = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
            engines[key].generate(prompts[:1], warm, use_tqdm=False)
        start = time.perf_counter()
        results = engines[key].generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(r.outputs[0].token_ids) for r in results)
        print(json.dumps({"seconds": seconds, "completion_tokens": tokens}), file=out, flush=True)


if __name__ == "__main__":
    main()
