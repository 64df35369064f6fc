"""Trains one model of the built-in pair on generated rows: plain torch, CPU, seeded, resumable.

    python examples/builtin/train.py {target,draft} OUT --work DIR [--steps N] [--layers N] [--grow-from FILE]

OUT is a folder that holds tokenizer.json already (train_tokenizer.py); the checkpoint is written there. The state of a
run is kept in DIR/<which>.pt, and the same command continues it. Under torchrun the processes share each batch. The
loss counts the answer's tokens only. README.md in this folder has the commands that made the shipped pair.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any, Final

import torch
from copy_start import start_copying
from muon import Muon
from rows import EncodedRow, batches, collate, encode
from tokenizers import Tokenizer
from train_tokenizer import CONTEXT, END, PAD, VOCAB_SIZE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SIZES: Final[dict[str, dict[str, Any]]] = {
    "target": {
        "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 320,
    },
    "draft": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 192,
    },
}  # fmt: skip
REPORT_EVERY: Final = 50


def build(which: str, layers: int | None, pad: int, end: int) -> LlamaForCausalLM:
    """A model with starting weights; `layers` overrides the depth."""
    sizes = SIZES[which] | ({"num_hidden_layers": layers} if layers else {})
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=None,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    start_copying(model, heads=2)
    return model


def grow(model: LlamaForCausalLM, shallow: dict[str, torch.Tensor]) -> None:
    """Fill a model with the weights of one that is a half, a third ... as deep; it answers the same.

    Each layer is followed by copies of itself whose two output matrices are zero, so they add nothing at first."""
    grown = {key: value for key, value in shallow.items() if ".layers." not in key}
    depth = 1 + max(int(key.split(".layers.")[1].split(".")[0]) for key in shallow if ".layers." in key)
    times = model.config.num_hidden_layers // depth
    for key, value in shallow.items():
        if ".layers." in key:
            head, tail = key.split(".layers.")
            number, rest = tail.split(".", 1)
            adds = rest.startswith(("self_attn.o_proj", "mlp.down_proj"))
            for copy in range(times):
                fresh = torch.zeros_like(value) if copy and adds else value.clone()
                grown[f"{head}.layers.{times * int(number) + copy}.{rest}"] = fresh
    model.load_state_dict(grown)


def answer_logits(
    model: LlamaForCausalLM, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and next tokens [n] of the answer positions of a batch; the head runs on those alone."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    wanted = labels != -100
    return model.lm_head(hidden[wanted]), labels[wanted]


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, rows: list[EncodedRow], pad: int) -> float:
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


def optimizers(model: LlamaForCausalLM, lr: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """(optimizer, peak learning rate): Muon for the layers' matrices, AdamW for the embedding and the norms."""
    table = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() > 1 and p is not table]
    others = [p for p in model.parameters() if p.dim() == 1 or p is table]
    adam = torch.optim.AdamW(others, lr=lr / 4, betas=(0.9, 0.98), weight_decay=0.0)
    return [(Muon(matrices, lr=lr), lr), (adam, lr / 4)]


def average(model: LlamaForCausalLM, world: int) -> None:
    """Replace every gradient by its mean over the processes."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient) / world)


def save(model: LlamaForCausalLM, folder: Path, pad: int, end: int) -> None:
    """A Hugging Face folder in bfloat16, beside the tokenizer files that are there already."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.config.dtype = torch.bfloat16
    copy.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=False)
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def train(args: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    model = build(args.which, args.layers, pad, end)
    steppers = optimizers(model, args.lr)
    state_file, step, seconds = args.work / f"{args.which}.pt", 0, 0.0
    args.work.mkdir(parents=True, exist_ok=True)
    if state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(steppers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seconds = state["step"], state["seconds"]
    elif args.grow_from:
        grow(model, torch.load(args.grow_from)["model"])

    held_out = encode(tokenizer, "held_out", 1, 0, 256)
    data = batches(tokenizer, pad, args.seed, args.batch, step)
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"which": args.which, "parameters": parameters, "step": step}), flush=True)
    losses: list[float] = []
    tokens, began, cpu = 0, time.perf_counter(), time.process_time()
    while step < args.steps:
        inputs, labels = next(data)
        logits, wanted = answer_logits(model, inputs[rank::world], labels[rank::world])
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        loss.backward()
        if world > 1:
            average(model, world)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in steppers:
            optimizer.param_groups[0]["lr"] = learning_rate(step, args.steps, peak, args.warmup)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        losses.append(loss.item())
        tokens += inputs.numel()
        if rank > 0 or (step % REPORT_EVERY and step != args.steps):
            continue
        passed = time.perf_counter() - began
        seconds += passed
        line = {
            "step": step,
            "loss": round(sum(losses) / len(losses), 4),
            "tokens_per_second": round(tokens / passed),
            "cpu_share": round((time.process_time() - cpu) / passed, 2),
        }
        if step % args.save_every == 0 or step == args.steps:
            line |= {"exact_match": round(exact_match(model, held_out, pad), 4), "seconds": round(seconds)}
            saved = [optimizer.state_dict() for optimizer, _ in steppers]
            state = {"model": model.state_dict(), "optimizers": saved, "step": step, "seconds": seconds}
            torch.save(state, state_file.with_suffix(".tmp"))
            state_file.with_suffix(".tmp").replace(state_file)
            save(model, args.out, pad, end)
        print(json.dumps(line), flush=True)
        losses.clear()
        tokens, began, cpu = 0, time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=sorted(SIZES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="a depth other than the shipped one")
    parser.add_argument("--grow-from", type=Path, help="state file of a run with fewer layers, a divisor")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="rows a step")
    parser.add_argument("--lr", type=float, default=0.02, help="peak of Muon's; AdamW has a quarter of it")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the training rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=250)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
