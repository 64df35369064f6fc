"""Rows as token ids: what training and evaluation feed to a model. Knows nothing of the model.

The ids are those of the tokenizer's chat template around a user message, then the answer and the end token.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final

import torch
from messages import make_row
from tokenizers import Tokenizer
from train_tokenizer import ASSISTANT, END, USER
from vocabulary import Split

POOL: Final = 32  # batches drawn together, sorted by length

EncodedRow = tuple[list[int], int]  # (ids, where the answer starts)


def encode(tokenizer: Tokenizer, split: Split, seed: int, start: int, count: int) -> list[EncodedRow]:
    """Rows [start, start + count) of a split."""
    rows = [make_row(split, seed, i) for i in range(start, start + count)]
    prompts = tokenizer.encode_batch([f"{USER} {row.message.strip()}{END}{ASSISTANT}" for row in rows])
    answers = tokenizer.encode_batch([f"{row.expected}{END}" for row in rows])
    return [(p.ids + a.ids, len(p.ids)) for p, a in zip(prompts, answers, strict=True)]


def collate(rows: list[EncodedRow], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input ids [B, T], labels [B, T]); labels are the next token inside the answer and -100 elsewhere.

    Padding is on the right, where causal attention needs no mask."""
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
    """Training batch number `first` and on: never the same row twice, the same batches for the same seed.

    Rows of about equal length share a batch, so little is padded and no row sees another."""
    pool = first // POOL
    while True:
        rows = encode(tokenizer, "train", seed, pool * POOL * size, POOL * size)
        rows.sort(key=lambda row: len(row[0]))
        order = list(range(POOL))
        Random(f"{seed}/{pool}").shuffle(order)
        for j in order[first % POOL if pool == first // POOL else 0 :]:
            yield collate(rows[j * size : (j + 1) * size], pad)
        pool += 1
