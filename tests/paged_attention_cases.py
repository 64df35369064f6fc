"""Random cases of paged attention and their answer in float64, for the tests of every backend on every device.

Written from the words of the interface alone, token by token; knows no backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specbatch.attention.backend import AttentionMetadata
from specbatch.engine.kv_cache import KVShape, PagedKVCache, plan_pages

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(repr=False)
class Case:
    """One step of one layer: pages written already, NaN wherever no row has a token."""

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    metadata: AttentionMetadata
    keys: list[Tensor]  # per row [context, kv_heads, head_dim]
    values: list[Tensor]
    options: dict[str, Any]


def build_case(
    rows: list[tuple[int, int]],  # (query tokens, context before them)
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    tenant: str = "target",
    dtype: torch.dtype = torch.float32,
    tree: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    spare_rows: int = 0,
    spare_tokens: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    shape = KVShape(2, kv_heads, head_dim, NAMES[dtype])
    # As the draft tenant, the pages are those of a larger target: their stride and block size are whatever came out.
    target = shape if tenant == "target" else KVShape(3, 2, 40, NAMES[dtype])
    layout = plan_pages(target, shape, block_size)
    tokens_a_page = layout.block_size if tenant == "target" else layout.draft_block_size
    lengths = [query + before for query, before in rows]
    pages_a_row = [-(-length // tokens_a_page) for length in lengths]
    cache = PagedKVCache(layout, 1 + sum(pages_a_row) + 2)
    cache.storage.view(dtype).fill_(float("nan"))
    key_pages, value_pages = cache.layer_pages(tenant, 1)  # type: ignore[arg-type]

    free = (torch.randperm(cache.num_pages - 1, generator=generator) + 1).tolist()
    total_rows = len(rows) + spare_rows
    tables = torch.zeros(total_rows, max(pages_a_row, default=0) + 1, dtype=torch.int32)
    starts = [0]
    positions: list[int] = []
    ancestors: list[int] = []
    keys, values = [], []
    for r, (query, before) in enumerate(rows):
        pages = [free.pop() for _ in range(pages_a_row[r])]
        tables[r, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        keys.append(random(lengths[r], kv_heads, head_dim))
        values.append(random(lengths[r], kv_heads, head_dim))
        for i in range(lengths[r]):
            key_pages[pages[i // tokens_a_page], i % tokens_a_page] = keys[r][i]
            value_pages[pages[i // tokens_a_page], i % tokens_a_page] = values[r][i]
        depth, bits = [0] * query, [1 << i for i in range(query)]
        for i in range(1, query):
            parent = int(torch.randint(0, i, (), generator=generator)) if tree else i - 1
            depth[i] = depth[parent] + 1
            bits[i] |= bits[parent]
        positions += [before + d for d in depth]
        ancestors += bits if tree else [0] * query
        starts.append(starts[-1] + query)
    num_tokens = starts[-1]
    starts += [num_tokens] * spare_rows
    heads = kv_heads * group
    int32 = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    metadata = AttentionMetadata(
        query_start_loc=int32(starts),
        seq_lens=int32([*lengths, *[0] * spare_rows]),
        positions=int32(positions + [0] * spare_tokens),
        slot_mapping=int32([-1] * (num_tokens + spare_tokens)),
        block_tables=tables.to(device),
        num_rows=total_rows,
        num_tokens=num_tokens,
        max_query_len=max(query for query, _ in rows),
        max_seq_len=max(lengths),
        tree_ancestors=torch.tensor(ancestors + [0] * spare_tokens, device=device) if tree else None,
    )
    options = {
        "scale": head_dim**-0.5,
        "sliding_window": window,
        "softcap": softcap,
        "sinks": random(heads).to(device) if sinks else None,
    }
    query_tensor = (
        random(heads, num_tokens + spare_tokens, head_dim).to(device).transpose(0, 1)
    )  # strided, as projected
    if device != "cpu":
        there = PagedKVCache(layout, cache.num_pages, device)
        there.storage.copy_(cache.storage)
        key_pages, value_pages = there.layer_pages(tenant, 1)  # type: ignore[arg-type]
    return Case(query_tensor, key_pages, value_pages, metadata, keys, values, options)


def expected(case: Case) -> Tensor:
    """[T, heads, head_dim] in float64 on the CPU, token by token from the words of the interface."""
    metadata, options = case.metadata, case.options
    query = case.query.double().cpu()
    out = torch.zeros(query.shape, dtype=torch.float64)
    heads = query.shape[1]
    starts = metadata.query_start_loc.tolist()
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        group = heads // keys.shape[1]
        key = keys.double().repeat_interleave(group, dim=1)
        value = values.double().repeat_interleave(group, dim=1)
        before = len(keys) - (starts[row + 1] - starts[row])
        place = list(range(before)) + metadata.positions[starts[row] : starts[row + 1]].tolist()
        for token in range(starts[row], starts[row + 1]):
            own = before + token - starts[row]
            seen = [j for j in range(len(keys)) if j <= own]
            if metadata.tree_ancestors is not None:
                bits = int(metadata.tree_ancestors[token])
                seen = [j for j in range(len(keys)) if j < before or (bits >> (j - before)) & 1]
            if options["sliding_window"] is not None:
                seen = [j for j in seen if place[j] > place[own] - options["sliding_window"]]
            scores = torch.einsum("hd,jhd->hj", query[token], key[seen]) * options["scale"]
            if options["softcap"] is not None:
                scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            if options["sinks"] is not None:
                scores = torch.cat([scores, options["sinks"].double().cpu()[:, None]], dim=1)
            weights = scores.softmax(dim=1)[:, : len(seen)]
            out[token] = torch.einsum("hj,jhd->hd", weights, value[seen])
    return out


def error(case: Case, actual: Tensor) -> float:
    """Largest deviation from the float64 answer in units of the tolerance; NaN counts as infinite."""
    assert actual.shape == case.query.shape
    assert actual.dtype == case.query.dtype
    deviation = (actual.double().cpu() - expected(case)).abs().max().item() / TOLERANCE[case.query.dtype]
    return float("inf") if deviation != deviation else deviation
