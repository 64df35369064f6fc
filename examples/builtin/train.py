"""Trains one model of the built-in pair from scratch on generated rows: plain torch, CPU, seeded, resumable.

    python examples/builtin/train.py target OUT --work DIR [--steps N]
    python examples/builtin/train.py draft  OUT --work DIR [--steps N]

OUT is a folder that holds tokenizer.json already (train_tokenizer.py). The state of a run is kept in DIR/<which>.pt;
the same command continues it. The loss counts the answer's tokens only. Rows of equal length are batched together, so
little is padded and no row sees another.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from copy_start import start_copying
from messages import make_row
from muon import Muon
from tokenizers import Tokenizer
from train_tokenizer import ASSISTANT, CONTEXT, END, PAD, USER, VOCAB_SIZE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

# Steps are what the shipped pair had; see README in this folder for time and results.
SIZES: Final[dict[str, dict[str, Any]]] = {
    "target": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 320,
    },
    "draft": {
        "hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
        "intermediate_size": 256,
    },
}  # fmt: skip
POOL: Final = 32  # batches drawn together, sorted by length
BETAS: Final = (0.9, 0.98)


def build(which: str, pad: int, end: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=None,
        initializer_range=0.02,
        **SIZES[which],
    )
    model = LlamaForCausalLM(config)
    start_copying(model, heads=2)
    return model


def encode(tokenizer: Tokenizer, split: str, seed: int, start: int, count: int) -> list[tuple[list[int], int]]:
    """(ids, where the answer starts) of rows [start, start + count), worded as the chat template words them."""
    rows = [make_row(split, seed, i) for i in range(start, start + count)]
    prompts = tokenizer.encode_batch([f"{USER} {row.message.strip()}{END}{ASSISTANT}" for row in rows])
    answers = tokenizer.encode_batch([f"{row.expected}{END}" for row in rows])
    return [(p.ids + a.ids, len(p.ids)) for p, a in zip(prompts, answers, strict=True)]


def collate(rows: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input ids [B, T], labels [B, T]); labels are the next token inside the answer and -100 elsewhere."""
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), -100)
    for i, (ids, answer) in enumerate(rows):
        inputs[i, : len(ids)] = torch.tensor(ids)
        labels[i, answer - 1 : len(ids) - 1] = torch.tensor(ids[answer:])
    return inputs, labels


def batches(
    tokenizer: Tokenizer, pad: int, seed: int, size: int, first: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batch number `first` and on: never the same row twice, the same batches for the same seed."""
    pool = first // POOL
    while True:
        rows = encode(tokenizer, "train", seed, pool * POOL * size, POOL * size)
        rows.sort(key=lambda row: len(row[0]))
        order = list(range(POOL))
        Random(f"{seed}/{pool}").shuffle(order)
        for j in order[first % POOL if pool == first // POOL else 0 :]:
            yield collate(rows[j * size : (j + 1) * size], pad)
        pool += 1


def answer_logits(
    model: LlamaForCausalLM, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and next tokens [n] of the answer positions of a batch; the head runs on those alone.

    Rows are padded on the right and attention is causal, so no mask is needed."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    wanted = labels != -100
    return model.lm_head(hidden[wanted]), labels[wanted]


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, rows: list[tuple[list[int], int]], pad: int) -> float:
    """Share of rows whose every answer token is the argmax given the right tokens before it: greedy exact match."""
    right = 0
    rows = sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(rows), 64):
        inputs, labels = collate(rows[start : start + 64], pad)
        logits, wanted = answer_logits(model, inputs, labels)
        hits = torch.ones_like(labels, dtype=torch.bool)
        hits[labels != -100] = logits.argmax(-1) == wanted
        right += int(hits.all(dim=1).sum())
    return right / len(rows)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def save(model: LlamaForCausalLM, folder: Path, pad: int, end: int) -> None:
    """A Hugging Face folder in bfloat16, beside the tokenizer files that are there already."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.config.dtype = torch.bfloat16
    copy.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=False)
    copy.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=sorted(SIZES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="start from the weights of this .pt file instead of random ones")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument(
        "--lr", type=float, default=0.02, help="peak, of Muon; AdamW (embedding, norms) has a quarter of it"
    )
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the training rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=250)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    model = build(args.which, pad, end)
    table = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() > 1 and p is not table]
    others = [p for p in model.parameters() if p.dim() == 1 or p is table]
    optimizers = [Muon(matrices, lr=args.lr), torch.optim.AdamW(others, lr=args.lr / 4, betas=BETAS, weight_decay=0.0)]
    peaks = [args.lr, args.lr / 4]

    args.work.mkdir(parents=True, exist_ok=True)
    state_file, step, seconds = args.work / f"{args.which}.pt", 0, 0.0
    if state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seconds = state["step"], state["seconds"]
    elif args.init:
        model.load_state_dict(torch.load(args.init)["model"])
    held_out = encode(tokenizer, "held_out", 1, 0, 256)
    print(
        json.dumps({"which": args.which, "parameters": sum(p.numel() for p in model.parameters()), "step": step}),
        flush=True,
    )

    data = batches(tokenizer, pad, args.seed, args.batch, step)
    losses, tokens, began, cpu = [], 0, time.perf_counter(), time.process_time()
    while step < args.steps:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = learning_rate(step, args.steps, peak, args.warmup)
        inputs, labels = next(data)
        logits, wanted = answer_logits(model, inputs, labels)
        loss = torch.nn.functional.cross_entropy(logits.float(), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        losses.append(loss.item())
        tokens += inputs.numel()
        if step % 50 == 0 or step == args.steps:
            now = time.perf_counter()
            line = {
                "step": step,
                "loss": round(sum(losses) / len(losses), 4),
                "tokens_per_second": round(tokens / (now - began)),
                "cpu_share": round((time.process_time() - cpu) / (now - began), 2),
            }
            seconds += now - began
            if step % args.save_every == 0 or step == args.steps:
                line |= {"exact_match": round(exact_match(model, held_out, pad), 4), "seconds": round(seconds)}
                state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                         "step": step, "seconds": seconds}  # fmt: skip
                torch.save(state, state_file.with_suffix(".tmp"))
                state_file.with_suffix(".tmp").replace(state_file)
                save(model, args.out, pad, end)
            print(json.dumps(line), flush=True)
            losses, tokens, began, cpu = [], 0, time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main()
