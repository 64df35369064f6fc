"""A hand-made scheduler for tests of models: scattered block tables, packed ragged steps, several tokens a pass.

Stands in for the Rust core where only the model side is tested.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionBackend, AttentionMetadata
from specbatch.attention.reference import ReferenceBackend
from specbatch.engine.kv_cache import PagedKVCache, plan_pages
from specbatch.engine.model_runner import ModelRunner
from specbatch.models.loading import LoadedModel


def int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class PagedRows:
    """Rows of one model over pages handed out in random order; unused bytes read as NaN."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        rows: int,
        max_len: int,
        block_size: int = 4,
        backend: AttentionBackend | None = None,
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        self.pages_per_row = -(-max_len // block_size)
        num_pages = max(rows * self.pages_per_row + 1, 12)
        self.cache = PagedKVCache(plan_pages(model.kv_shape, None, block_size), num_pages)
        self.runner = ModelRunner(model, self.cache.pages("target"), backend or ReferenceBackend())
        self.cache.storage.view(model.dtype).fill_(float("nan"))
        pages = list(range(1, num_pages))
        random.Random(seed).shuffle(pages)
        self.tables = [[pages.pop() for _ in range(self.pages_per_row)] for _ in range(rows)]

    def metadata(self, spans: list[tuple[int, int, int]], padding: int = 0) -> AttentionMetadata:
        """Spans of (row, first position, tokens), packed in this order; `padding` unused tokens behind them."""
        starts, slots, positions = [0], [], []
        for row, first, count in spans:
            starts.append(starts[-1] + count)
            for p in range(first, first + count):
                positions.append(p)
                slots.append(self.tables[row][p // self.block_size] * self.block_size + p % self.block_size)
        lengths = [first + count for _, first, count in spans]
        return AttentionMetadata(
            query_start_loc=int32(starts),
            seq_lens=int32(lengths),
            positions=int32(positions + [0] * padding),
            slot_mapping=int32(slots + [-1] * padding),
            block_tables=int32([self.tables[row] for row, _, _ in spans]),
            num_rows=len(spans),
            num_tokens=starts[-1],
            max_query_len=max(count for _, _, count in spans),
            max_seq_len=max(lengths),
        )

    def step(self, feed: list[tuple[int, int, list[int]]], padding: int = 0) -> list[Tensor]:
        """Run (row, first position, ids) spans; logits [tokens, vocab] of each."""
        metadata = self.metadata([(row, first, len(ids)) for row, first, ids in feed], padding)
        ids = int32([i for _, _, span in feed for i in span] + [0] * padding)
        logits = self.runner.forward(ids, metadata, torch.arange(metadata.num_tokens, dtype=torch.int32))
        return list(logits.split([len(span) for _, _, span in feed]))

    def fill(self, feed: list[tuple[int, int, list[int]]]) -> None:
        """The same for the KV alone."""
        metadata = self.metadata([(row, first, len(ids)) for row, first, ids in feed])
        self.runner.forward_hidden(int32([i for _, _, span in feed for i in span]), metadata)


def greedy(
    rows: PagedRows, prompts: list[list[int]], max_tokens: int, guesses: list[list[int]], seed: int = 0
) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy decoding as an engine does it: prompts in ragged chunks, then passes of one to five tokens a row.

    `guesses[r]` are tokens to draft from (the known continuation); some drafts are spoilt on purpose, so that rejected
    tokens leave KV behind. Returns the outputs and, per row, the logits each token was chosen from.
    """
    rng = random.Random(seed)
    outputs: list[list[int]] = [[] for _ in prompts]
    chosen: list[list[Tensor]] = [[] for _ in prompts]
    computed = [0] * len(prompts)
    while any(len(p) - c > 1 for p, c in zip(prompts, computed, strict=True)):
        feed = []
        for row, prompt in enumerate(prompts):
            left = len(prompt) - 1 - computed[row]
            if left > 0:
                count = min(left, rng.randint(1, 9))
                feed.append((row, computed[row], prompt[computed[row] : computed[row] + count]))
        rng.shuffle(feed)
        rows.fill(feed)
        for row, _, ids in feed:
            computed[row] += len(ids)
    while any(len(out) < max_tokens for out in outputs):
        live = [r for r in range(len(prompts)) if len(outputs[r]) < max_tokens]
        rng.shuffle(live)
        feed, drafts = [], {}
        for row in live:
            done = len(outputs[row])
            last = outputs[row][-1] if outputs[row] else prompts[row][-1]
            draft = guesses[row][done : done + rng.randint(0, min(4, max_tokens - done - 1))]
            if draft and rng.random() < 0.4:
                spoilt = rng.randrange(len(draft))
                draft = [*draft[:spoilt], (draft[spoilt] + 1) % 90 + 3, *draft[spoilt + 1 :]]
            drafts[row] = draft
            feed.append((row, len(prompts[row]) - 1 + done, [last, *draft]))
        for (row, _, ids), logits in zip(feed, rows.step(feed, padding=rng.randint(0, 3)), strict=True):
            for i in range(len(ids)):
                token = int(logits[i].argmax())
                outputs[row].append(token)
                chosen[row].append(logits[i])
                if i < len(drafts[row]) and drafts[row][i] != token:
                    break
    return outputs, [torch.stack(c) for c in chosen]
