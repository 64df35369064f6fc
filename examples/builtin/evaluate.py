"""Measures the pair: exact match of the target on held-out rows, and how many of the draft's proposals it accepts.

    python examples/builtin/evaluate.py [TARGET DRAFT] [--rows N] [-k K]

Acceptance is simulated round by round, as the engine runs greedy decoding: the draft proposes k tokens after the
committed ones, the target keeps those that equal its own and adds one of its own. Knows nothing of specbatch's engine,
so that the two can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from rows import EncodedRow, collate, encode
from tokenizers import Tokenizer
from train_tokenizer import END, PAD
from transformers import LlamaForCausalLM

HERE = Path(__file__).resolve().parent


def greedy(model: LlamaForCausalLM, prompts: list[list[int]], pad: int, end: int, max_new: int) -> list[list[int]]:
    """Greedy completions of prompts of any length, the end token included."""
    completions: list[list[int]] = []
    for start in range(0, len(prompts), 64):
        batch = prompts[start : start + 64]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=pad,
        )[:, width:].tolist()
        completions += [row[: row.index(end) + 1] if end in row else row for row in out]
    return completions


@torch.no_grad()
def argmax_hits(model: LlamaForCausalLM, rows: list[EncodedRow], pad: int) -> list[list[bool]]:
    """For each token of each answer: is it what the model would have chosen after the tokens before it?"""
    hits: list[list[bool]] = []
    for start in range(0, len(rows), 64):
        inputs, labels = collate(rows[start : start + 64], pad)
        same = model(input_ids=inputs, use_cache=False).logits.argmax(-1) == labels
        hits += [line[wanted].tolist() for line, wanted in zip(same, labels != -100, strict=True)]
    return hits


def simulate(hits: list[list[bool]], k: int) -> dict[str, float]:
    """Rounds over every row: k proposals a round; those up to the first miss, or the row's end, are accepted.

    A proposal in the middle of a round follows accepted proposals only, so `hits` decides it."""
    rounds = proposed = accepted = tokens = 0
    for row in hits:
        at = 1  # prefill yields the first token
        tokens += len(row)
        while at < len(row):
            run = 0
            while run < k and at + run < len(row) and row[at + run]:
                run += 1
            rounds, proposed, accepted = rounds + 1, proposed + k, accepted + run
            at += run + 1
    decoded = tokens - len(hits)
    return {
        "acceptance_rate": accepted / proposed,
        "tokens_per_step": decoded / rounds,
        "rounds": rounds,
        "proposed": proposed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package = HERE.parents[1] / "specbatch" / "models" / "builtin"
    parser.add_argument("target", type=Path, nargs="?", default=package / "target")
    parser.add_argument("draft", type=Path, nargs="?", default=package / "draft")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=7, help="of the held-out rows; 7 are those of prompts.parquet")
    parser.add_argument("-k", type=int, default=4)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    models = [
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (args.target, args.draft)
    ]
    rows = encode(tokenizer, "held_out", args.seed, 0, args.rows)
    began = time.perf_counter()
    # A row whose every expected token is the target's argmax needs no generation: its greedy answer is the expected one.
    right = [all(hits) for hits in argmax_hits(models[0], rows, pad)]
    wrong = [row for row, ok in zip(rows, right, strict=True) if not ok]
    made = iter(greedy(models[0], [ids[:answer] for ids, answer in wrong], pad, end, 200))
    spoken = [row if ok else (row[0][: row[1]] + next(made), row[1]) for row, ok in zip(rows, right, strict=True)]
    lengths = sorted(len(ids) - answer for ids, answer in spoken)
    report = {
        "rows": len(rows),
        "parameters": [sum(p.numel() for p in model.parameters()) for model in models],
        "exact_match": sum(right) / len(rows),
        "completion_tokens": {"mean": sum(lengths) / len(lengths), "min": lengths[0], "max": lengths[-1]},
        "k": args.k,
        **simulate(argmax_hits(models[1], spoken, pad), args.k),
        "seconds": round(time.perf_counter() - began),
    }
    json.dump(report, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
