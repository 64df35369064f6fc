"""One allocation, two tenants: sizes, views, alignment, and what must be refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.engine.kv_cache import KVShape, PagedKVCache, plan_pages
from specbatch.engine.kv_layout import PAGE_ALIGNMENT

TARGET = KVShape(layers=3, kv_heads=2, head_dim=16, dtype="float32")
DRAFT = KVShape(layers=1, kv_heads=2, head_dim=8, dtype="bfloat16")

shapes = st.builds(
    KVShape,
    layers=st.integers(1, 6),
    kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([1, 3, 8, 40, 64]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)


def test_sizes_of_a_known_model() -> None:
    """SmolLM2-135M in float32: 30 layers, 3 KV heads of 64."""
    shape = KVShape(30, 3, 64, "float32")
    assert shape.bytes_per_token == 2 * 30 * 3 * 64 * 4 == 46_080
    layout = plan_pages(shape, None, 16)
    assert layout.page_bytes == 16 * 46_080
    assert layout.draft_block_size == 0
    assert layout.pages_for(1 << 30) == (1 << 30) // (16 * 46_080)
    assert layout.pages_for(-5) == 0


@given(target=shapes, draft=shapes, block_size=st.integers(1, 17))
@settings(max_examples=200, deadline=None)
def test_pages_hold_what_they_say(target: KVShape, draft: KVShape, block_size: int) -> None:
    try:
        layout = plan_pages(target, draft, block_size)
    except ValueError:
        rounded = -(-block_size * target.bytes_per_token // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        assert draft.bytes_per_token > rounded
        return
    assert layout.page_bytes % PAGE_ALIGNMENT == 0
    assert layout.page_bytes - PAGE_ALIGNMENT < block_size * target.bytes_per_token <= layout.page_bytes
    assert layout.draft_block_size >= 1
    used = layout.draft_block_size * draft.bytes_per_token
    assert used <= layout.page_bytes < used + draft.bytes_per_token
    cache = PagedKVCache(layout, 3)
    assert cache.pages("target").shape == (3, target.layers, 2, block_size, target.kv_heads, target.head_dim)
    assert cache.pages("draft").shape == (3, draft.layers, 2, layout.draft_block_size, draft.kv_heads, draft.head_dim)
    for tenant in ("target", "draft"):
        view = cache.pages(tenant)
        assert view.stride(0) * view.element_size() == layout.page_bytes
        assert view[0].is_contiguous()
        assert view.untyped_storage().data_ptr() == cache.storage.untyped_storage().data_ptr()


def test_a_page_belongs_to_one_tenant_at_a_time_and_touches_no_other_page() -> None:
    layout = plan_pages(TARGET, DRAFT, 4)
    cache = PagedKVCache(layout, 5)
    cache.pages("draft")[2] = 1.5
    assert bool((cache.pages("target")[[0, 1, 3, 4]] == 0).all())
    assert bool((cache.pages("target")[2] != 0).any())
    cache.pages("target")[3] = -2.0
    assert bool((cache.pages("draft")[2] == 1.5).all())
    assert bool((cache.pages("draft")[[0, 1, 4]] == 0).all())


def test_layer_pages_are_views_of_the_layer() -> None:
    cache = PagedKVCache(plan_pages(TARGET, DRAFT, 4), 4)
    keys, values = cache.layer_pages("target", 1)
    keys[2, 3, 1, 5] = 7.0
    values[1, 0, 0, 0] = 8.0
    view = cache.pages("target")
    assert view[2, 1, 0, 3, 1, 5] == 7.0
    assert view[1, 1, 1, 0, 0, 0] == 8.0
    assert float(view.sum()) == 15.0
    assert cache.block_size("target") == 4
    assert cache.block_size("draft") == cache.layout.draft_block_size
    assert cache.nbytes == 4 * cache.layout.page_bytes


def test_a_draft_token_larger_than_a_page_is_refused_with_the_block_size_that_would_do() -> None:
    small, large = KVShape(1, 1, 64, "float16"), KVShape(8, 8, 64, "float16")
    with pytest.raises(ValueError, match=r"one draft token takes 16384 bytes.*block size of at least 64"):
        plan_pages(small, large, 16)
    assert plan_pages(small, large, 64).draft_block_size == 1


def test_a_draft_of_another_dtype_shares_the_bytes() -> None:
    layout = plan_pages(TARGET, DRAFT, 4)
    assert layout.draft_block_size == layout.page_bytes // DRAFT.bytes_per_token
    cache = PagedKVCache(layout, 3)
    assert cache.pages("target").dtype is torch.float32
    assert cache.pages("draft").dtype is torch.bfloat16


def test_no_draft_no_draft_view() -> None:
    cache = PagedKVCache(plan_pages(TARGET, None, 4), 3)
    with pytest.raises(KeyError):
        cache.pages("draft")


@pytest.mark.parametrize("pages", [0, 1])
def test_too_few_pages(pages: int) -> None:
    with pytest.raises(ValueError, match=f"{pages} pages"):
        PagedKVCache(plan_pages(TARGET, None, 4), pages)


def test_impossible_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="got 0, 2, 16"):
        KVShape(0, 2, 16, "float32")
    with pytest.raises(ValueError, match="float64"):
        KVShape(1, 2, 16, "float64")
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        plan_pages(TARGET, None, 0)
