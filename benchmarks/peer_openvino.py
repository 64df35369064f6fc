"""OpenVINO GenAI (continuous batching, CPU) over a list of token-id prompts, as a process that answers on demand.

Run by `against_peers.py` in OpenVINO's own environment. Reads one JSON object a line from stdin ({"prompts", "max_tokens",
"lookup"}) and answers each with one on stdout ({"seconds", "completion_tokens"}); loading is not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def make_pipeline(args: argparse.Namespace, rows: int, lookup: bool) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = rows
    scheduler.enable_prefix_caching = args.prefix_caching
    properties = {"INFERENCE_NUM_THREADS": args.threads, "INFERENCE_PRECISION_HINT": args.precision}
    if lookup:
        properties["prompt_lookup"] = True
    return genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an OpenVINO export (optimum-cli export openvino)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "f32"])
    parser.add_argument("--eos", type=int, default=2)
    parser.add_argument("--prefix-caching", action="store_true")
    args = parser.parse_args()
    pipelines: dict[tuple[int, bool], Any] = {}
    for line in sys.stdin:
        job = json.loads(line)
        config = genai.GenerationConfig()
        config.max_new_tokens = job["max_tokens"]
        config.do_sample = False
        config.eos_token_id = args.eos
        config.stop_token_ids = {args.eos}
        if job["lookup"]:
            config.num_assistant_tokens = 4
            config.max_ngram_size = 3
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in job["prompts"]]
        key = (len(inputs), job["lookup"])
        if key not in pipelines:
            pipelines.clear()  # one at a time: each holds its own KV
            pipelines[key] = make_pipeline(args, *key)
            pipelines[key].generate(inputs[:1], [config])
        start = time.perf_counter()
        results = pipelines[key].generate(inputs, [config] * len(inputs))
        seconds = time.perf_counter() - start
        tokens = sum(len(r.m_generation_ids[0]) for r in results)
        print(json.dumps({"seconds": seconds, "completion_tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
