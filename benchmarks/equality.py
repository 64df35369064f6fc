"""Is greedy output the same as transformers' own, token for token, in float32, in every decoding mode?

    python benchmarks/equality.py MODEL PROMPTS.parquet --draft-model DRAFT [--rows 64] [--max-tokens 128]

The reference is transformers' generate, one row at a time (kept in --reference FILE, as it is the slow part). A row
that differs is examined at its first divergence: a tie when the reference's two best logits there are closer than
--tie (then either token is a right answer), else structural. Prints one JSON line and exits 1 on a structural difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch


def prompts_of(path: str, rows: int, tokenizer: Any) -> list[list[int]]:
    messages = pq.read_table(path, columns=["messages"]).slice(0, rows)["messages"].to_pylist()
    texts = [tokenizer.render(m) for m in messages]
    values, offsets = tokenizer.encode(texts, add_special_tokens=False)
    return [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]


class Reference:
    """transformers alone, with its own attention and cache."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def margin(self, tokens: list[int]) -> float:
        """Distance between the two best next-token logits after `tokens`."""
        best = self.model(torch.tensor([tokens])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])


def reference_tokens(args: argparse.Namespace, prompts: list[list[int]]) -> list[list[int]]:
    file = Path(args.reference) if args.reference else None
    if file and file.exists():
        kept = json.loads(file.read_text())
        if kept["prompts"] == prompts and kept["max_tokens"] == args.max_tokens:
            return kept["tokens"]
    reference = Reference(args.model)
    tokens = []
    for i, prompt in enumerate(prompts):
        tokens.append(reference.generate(prompt, args.max_tokens))
        print(f"reference {i + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    if file:
        file.write_text(json.dumps({"prompts": prompts, "max_tokens": args.max_tokens, "tokens": tokens}))
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--draft-model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--live", type=int, default=64, help="rows running at once")
    parser.add_argument("--modes", default="off:0,ngram:4,draft:4")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--tie", type=float, default=1e-3)
    parser.add_argument("--reference")
    args = parser.parse_args()

    from specbatch.models.tokenizer import HFTokenizer

    prompts = prompts_of(args.prompts, args.rows, HFTokenizer(args.model))
    expected = reference_tokens(args, prompts)

    from specbatch import Engine, SamplingParams

    report: dict[str, Any] = {"rows": len(prompts), "max_tokens": args.max_tokens}
    structural = 0
    for mode in args.modes.split(","):
        speculate, k = mode.split(":")
        options = {"draft_model": args.draft_model} if speculate == "draft" else {}
        engine = Engine(
            model=args.model,
            dtype="float32",
            speculate=speculate,
            num_speculative_tokens=int(k) or None,
            max_num_seqs=args.live,
            attention=args.attention,
            **options,
        )
        with engine:
            start = time.perf_counter()
            got = engine.generate(prompts, SamplingParams(max_tokens=args.max_tokens))
            seconds = time.perf_counter() - start
        ties, wrong = [], []
        for row, (completion, tokens) in enumerate(zip(got, expected, strict=True)):
            if list(completion.token_ids) == tokens:
                continue
            at = next((i for i, (a, b) in enumerate(zip(completion.token_ids, tokens, strict=False)) if a != b), -1)
            margin = Reference(args.model).margin(prompts[row] + tokens[:at]) if at >= 0 else float("inf")
            (ties if margin < args.tie else wrong).append({"row": row, "token": at, "margin": margin})
        structural += len(wrong)
        drafted, accepted = sum(c.drafted for c in got), sum(c.accepted for c in got)
        report[mode] = {
            "identical": len(prompts) - len(ties) - len(wrong),
            "ties": ties,
            "structural": wrong,
            "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
            "completion_tokens_per_second": round(sum(c.completion_tokens for c in got) / seconds, 1),
        }
        print(mode, json.dumps(report[mode]), file=sys.stderr, flush=True)
    print(json.dumps(report))
    return 1 if structural else 0


if __name__ == "__main__":
    raise SystemExit(main())
