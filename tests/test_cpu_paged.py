"""The CPU attention kernel against the reference backend, through tensors and both tenants' pages."""

from __future__ import annotations

import pytest
import torch

from specbatch.attention import cpu_paged, reference
from specbatch.attention.backend import AttentionMetadata
from specbatch.attention.registry import AttentionNeeds
from specbatch.engine.kv_cache import PagedKVCache
from specbatch.engine.kv_layout import KVShape, plan_pages

NEEDS = AttentionNeeds(head_dim=16)
CPU = torch.device("cpu")


def metadata(
    rows: list[tuple[int, int]], block_size: int, generator: torch.Generator, num_pages: int
) -> AttentionMetadata:
    """Rows of (context before this step, query tokens) on shuffled pages."""
    order = 1 + torch.randperm(num_pages - 1, generator=generator)
    width = max(-(-(c + q) // block_size) for c, q in rows)
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    slots, positions, starts, used = [], [], [0], 0
    for i, (context, queries) in enumerate(rows):
        pages = -(-(context + queries) // block_size)
        tables[i, :pages] = order[used : used + pages]
        used += pages
        at = torch.arange(context, context + queries)
        slots.append(tables[i, at // block_size] * block_size + at % block_size)
        positions.append(at)
        starts.append(starts[-1] + queries)
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([c + q for c, q in rows], dtype=torch.int32),
        positions=torch.cat(positions).to(torch.int32),
        slot_mapping=torch.cat(slots).to(torch.int32),
        block_tables=tables,
        num_rows=len(rows),
        num_tokens=starts[-1],
        max_query_len=max(q for _, q in rows),
        max_seq_len=max(c + q for c, q in rows),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tenant", ["target", "draft"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"softcap": 5.0}, {"sinks": True}])
def test_equals_the_reference(dtype: torch.dtype, tenant: str, options: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(3)
    name = str(dtype).removeprefix("torch.")
    layout = plan_pages(KVShape(2, 2, 16, name), KVShape(1, 1, 24, name), 8)
    cache = PagedKVCache(layout, 40)
    cache.storage.view(dtype).copy_(torch.randn(cache.storage.numel() // dtype.itemsize, generator=generator))
    key_pages, value_pages = cache.layer_pages(tenant, cache.pages(tenant).shape[1] - 1)  # type: ignore[arg-type]
    _, block_size, kv_heads, head_dim = key_pages.shape
    step = metadata([(0, 30), (17, 1), (40, 5), (3, 2)], block_size, generator, 40)
    heads = 3 * kv_heads
    query, key, value = (
        torch.randn(step.num_tokens + 2, h, head_dim, generator=generator).to(dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    step.slot_mapping = torch.cat([step.slot_mapping, torch.tensor([-1, -1], dtype=torch.int32)])
    if options.get("sinks"):
        options = {"sinks": torch.linspace(-1, 2, heads).to(dtype)}
    outputs, contents = [], []
    original = cache.storage.clone()
    for backend in (reference.create(CPU, dtype, NEEDS), cpu_paged.create(CPU, dtype, NEEDS)):
        cache.storage.copy_(original)
        backend.write_kv(key, value, key_pages, value_pages, step.slot_mapping)
        outputs.append(backend.forward(query, key_pages, value_pages, step, scale=0.3, **options)[: step.num_tokens])  # type: ignore[arg-type]
        contents.append(cache.storage.clone())
    assert torch.equal(contents[0], contents[1])
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(outputs[1].float(), outputs[0].float(), atol=tolerance, rtol=tolerance)


def test_trees_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(4)
    cache = PagedKVCache(plan_pages(KVShape(1, 2, 16, "float32"), None, 8), 20)
    cache.storage.view(torch.float32).copy_(torch.randn(cache.storage.numel() // 4, generator=generator))
    key_pages, value_pages = cache.layer_pages("target", 0)
    step = metadata([(20, 4), (0, 1)], 8, generator, 20)
    step.tree_ancestors = torch.tensor([0b0001, 0b0011, 0b0101, 0b1011, 0b1])
    query = torch.randn(5, 4, 16, generator=generator)
    one, two = (
        backend.forward(query, key_pages, value_pages, step, scale=0.25)
        for backend in (reference.create(CPU, torch.float32, NEEDS), cpu_paged.create(CPU, torch.float32, NEEDS))
    )
    torch.testing.assert_close(two, one, atol=2e-6, rtol=2e-6)


def test_float16_is_left_to_the_reference() -> None:
    with pytest.raises(RuntimeError, match="float16"):
        cpu_paged.create(CPU, torch.float16, NEEDS)
