"""The reference backend against an answer in float64 written token by token from the interface's words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.attention import reference
from specbatch.attention.backend import AttentionMetadata
from specbatch.attention.reference import ReferenceBackend
from specbatch.attention.registry import AttentionNeeds, backend_names, create_backend, pick_backend
from specbatch.engine.kv_cache import KVShape, PagedKVCache, plan_pages
from tests.paged_attention_cases import Case, build_case, error

BACKEND = ReferenceBackend()
ROWS = [(1, 0), (1, 33), (5, 20), (17, 3), (1, 16), (5, 19), (1, 15)]


def run(case: Case, backend: ReferenceBackend = BACKEND) -> torch.Tensor:
    return backend.forward(case.query, case.key_pages, case.value_pages, case.metadata, **case.options)


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([8, 24, 32]),
    block_size=st.sampled_from([1, 2, 7, 16]),
    tenant=st.sampled_from(["target", "draft"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tree=st.booleans(),
    window=st.sampled_from([None, 1, 6, 33]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    spare=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_equals_the_answer_in_float64(
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    tenant: str,
    dtype: torch.dtype,
    tree: bool,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    spare: int,
    seed: int,
) -> None:
    case = build_case(
        rows,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        tenant=tenant,
        dtype=dtype,
        tree=tree,
        window=window,
        softcap=softcap,
        sinks=sinks,
        spare_rows=spare,
        spare_tokens=spare,
        seed=seed,
    )
    assert error(case, run(case)) < 1


def test_the_comparison_catches_a_mask_that_is_off_by_one() -> None:
    class Broken(ReferenceBackend):
        def forward(self, query, key_pages, value_pages, metadata, **options):  # type: ignore[no-untyped-def]
            options["sliding_window"] += 1
            return super().forward(query, key_pages, value_pages, metadata, **options)

    case = build_case(ROWS, window=6)
    assert error(case, run(case)) < 1
    case.metadata.plan = None
    assert error(case, run(case, Broken())) > 10


def test_layers_share_the_plan_of_a_step_whatever_their_window() -> None:
    """One metadata serves layers with and without a window, in any order."""
    case = build_case(ROWS)
    for window in (None, 6, None, 3, 6):
        case.options["sliding_window"] = window
        assert error(case, run(case)) < 1


def test_long_queries_are_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build_case([(40, 9), (40, 3), (1, 50)], softcap=3.0)
    monkeypatch.setattr(reference, "MASK_ELEMENTS", 700)
    assert error(case, run(case)) < 1


def test_bytes_of_other_tenants_never_reach_the_output() -> None:
    """Every byte that no token of the row wrote is NaN; so is the null page."""
    case = build_case(ROWS, tenant="draft", dtype=torch.bfloat16)
    assert bool(case.key_pages[0].isnan().all())
    assert bool(run(case).isfinite().all())


@pytest.mark.parametrize("tenant", ["target", "draft"])
def test_write_kv_writes_slots_and_nothing_else(tenant: str) -> None:
    cache = PagedKVCache(plan_pages(KVShape(2, 2, 8, "float32"), KVShape(3, 1, 8, "bfloat16"), 4), 5)
    keys, values = cache.layer_pages(tenant, 1)  # type: ignore[arg-type]
    block_size, heads = keys.shape[1], keys.shape[2]
    key = torch.arange(1, 5).float()[:, None, None].expand(4, heads, 8)
    slots = torch.tensor([2 * block_size + 1, -1, 3 * block_size, 4 * block_size + block_size - 1], dtype=torch.int32)
    BACKEND.write_kv(key, -key, keys, values, slots)
    assert keys[2, 1].eq(1).all()
    assert keys[3, 0].eq(3).all()
    assert keys[4, block_size - 1].eq(4).all()
    assert torch.equal(values, -keys)
    assert int(cache.pages(tenant).count_nonzero()) == 2 * 3 * heads * 8  # type: ignore[arg-type]


def test_only_padding_writes_nothing() -> None:
    cache = PagedKVCache(plan_pages(KVShape(1, 1, 4, "float32"), None, 2), 2)
    keys, values = cache.layer_pages("target", 0)
    ones = torch.ones(3, 1, 4)
    BACKEND.write_kv(ones, ones, keys, values, torch.full((3,), -1, dtype=torch.int32))
    assert int(cache.storage.count_nonzero()) == 0


def test_a_step_of_padding_alone_is_finite() -> None:
    empty = torch.zeros(1, dtype=torch.int32)
    metadata = AttentionMetadata(empty, empty[:0], empty, empty - 1, empty.view(1, 1), 0, 0, 0, 0)
    out = BACKEND.forward(torch.ones(1, 2, 4), torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4), metadata, scale=1.0)
    assert bool(out.isfinite().all())


def test_registry_names_reasons_and_refusals() -> None:
    needs = AttentionNeeds(head_dim=64)
    cpu = torch.device("cpu")
    assert "reference" in backend_names()
    choice = pick_backend(cpu, torch.float32, needs, "reference")
    assert choice.backend.name == "reference"
    assert "asked for" in choice.reason
    automatic = pick_backend(cpu, torch.float32, needs)
    assert automatic.reason
    with pytest.raises(ValueError, match="unknown attention backend 'flash'"):
        create_backend("flash", cpu, torch.float32, needs)
    with pytest.raises(RuntimeError, match="triton runs on cuda, not on cpu"):
        create_backend("triton", cpu, torch.float32, needs)


def test_what_cannot_be_imported_is_passed_over_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from specbatch.attention import registry

    monkeypatch.setitem(registry._MODULES, "cpu", "specbatch.attention.no_such_kernel")
    choice = pick_backend(torch.device("cpu"), torch.float32, AttentionNeeds(head_dim=64))
    assert choice.backend.name == "reference"
    assert "no_such_kernel" in choice.reason
