"""Proof by example for model types nobody has tested: the paged path against transformers' own eager attention.

Runs two short rows in ragged chunks, as an engine would, and compares the logits with one plain forward pass a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionMetadata
from specbatch.engine.model_runner import ModelRunner
from specbatch.models.attention_hook import ATTENTION_NAME

# Largest difference allowed, as a share of the largest logit: two orders of summing, in the model's precision.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
ROWS = ((19, 11), (8, 3))  # (tokens, of which in the first chunk)


def check_against_transformers(runner: ModelRunner) -> float:
    """Largest relative difference of logits; the pages used are left as scratch. Raises RuntimeError when too large.

    Call it before the pages belong to anybody: it writes to the first ones after the null page. Rows are short, so what
    only shows beyond a window or a trained length does not show here.
    """
    rows = sample_rows(runner.vocab_size, runner.model.device)
    with _own_attention(runner.model.module), torch.inference_mode():
        expected = [_plain_logits(runner.model.module, row) for row in rows]
    actual = paged_logits(runner, rows)
    difference = compare_logits(actual, expected)
    if not difference <= TOLERANCE[runner.model.dtype]:  # NaN counts as different
        kind = runner.model.shape.model_type
        raise RuntimeError(
            f"model type {kind} gives other logits on paged KV than in transformers (off by {difference:.1%} of the "
            "largest): specbatch cannot run it right"
        )
    return difference


def compare_logits(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference as a share of the largest expected logit; NaN when there is one."""
    # Largest by torch: Python's max passes over a NaN that is not the first.
    scale = torch.stack([e.abs().max() for e in expected]).max()
    largest = torch.stack([(a - e).abs().max() for a, e in zip(actual, expected, strict=True)]).max()
    return float(largest / scale.clamp(min=1e-6))


def sample_rows(vocab_size: int, device: torch.device) -> list[Tensor]:
    """Token ids of the rows that are run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (length,), generator=generator).to(device) for length, _ in ROWS]


def paged_logits(runner: ModelRunner, rows: list[Tensor]) -> list[Tensor]:
    """Float32 logits of each row's second chunk, [tokens, vocab]."""
    block_size = runner.pages.shape[3]
    tables, used = [], 1
    for row in rows:
        count = -(-len(row) // block_size)
        tables.append(list(range(used, used + count)))
        used += count
    if used > runner.pages.shape[0]:
        raise RuntimeError(f"checking the model takes {used} pages, there are {runner.pages.shape[0]}")
    first = [(0, cut) for _, cut in ROWS]
    second = [(cut, length) for length, cut in ROWS]
    logits: list[Tensor] = []
    for spans in (first, second):
        ids = torch.cat([row[a:b] for row, (a, b) in zip(rows, spans, strict=True)]).int()
        metadata = step_metadata(spans, tables, block_size, runner.model.device)
        out = runner.forward(ids, metadata, torch.arange(len(ids), device=ids.device))
        logits = list(torch.split(out, [b - a for a, b in spans]))
    return logits


def step_metadata(
    spans: list[tuple[int, int]], tables: list[list[int]], block_size: int, device: torch.device
) -> AttentionMetadata:
    """Of rows whose tokens from a to b of `spans` are run, on the pages of `tables`."""

    def int32(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = [0]
    for a, b in spans:
        starts.append(starts[-1] + b - a)
    positions = [p for a, b in spans for p in range(a, b)]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for table, (a, b) in zip(tables, spans, strict=True)
        for p in range(a, b)
    ]
    width = max(len(t) for t in tables)
    return AttentionMetadata(
        query_start_loc=int32(starts),
        seq_lens=int32([b for _, b in spans]),
        positions=int32(positions),
        slot_mapping=int32(slots),
        block_tables=int32([t + [0] * (width - len(t)) for t in tables]),
        num_rows=len(spans),
        num_tokens=starts[-1],
        max_query_len=max(b - a for a, b in spans),
        max_seq_len=max(b for _, b in spans),
    )


def _plain_logits(module: Any, row: Tensor) -> Tensor:
    """Float32 logits [tokens of the second chunk, vocab] of one row in one pass, without any cache of ours."""
    cut = dict(ROWS)[len(row)]
    logits: Tensor = module(input_ids=row[None], use_cache=False).logits[0, cut:]
    return logits.float()


@contextmanager
def _own_attention(module: Any) -> Iterator[None]:
    """Let a model use transformers' eager attention for a while."""
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    changed = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == ATTENTION_NAME]
    for config in changed:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config in changed:
            config._attn_implementation = ATTENTION_NAME
