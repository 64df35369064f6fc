"""Paged attention on a real device: every configuration of its table, all dtypes, graphs replayed at other lengths."""

from __future__ import annotations

import itertools

import pytest
import torch

from specbatch.attention.reference import ReferenceBackend
from specbatch.attention.registry import AttentionNeeds, pick_backend
from specbatch.attention.triton_configs import table_rows
from tests.paged_attention_cases import Case, build_case, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def forward(case: Case) -> torch.Tensor:
    from specbatch.attention.triton_paged import TritonPagedAttention

    return TritonPagedAttention().forward(case.query, case.key_pages, case.value_pages, case.metadata, **case.options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_every_configuration_of_the_table(head_dim: int, dtype: torch.dtype) -> None:
    capability = torch.cuda.get_device_capability()
    for number, config in enumerate(table_rows(head_dim, dtype.itemsize, capability)):
        group = 1 + 3 * (number % 3)
        tokens = config.block_m // group
        for block_size, tenant in ((16, "target"), (64, "target"), (16, "draft")):
            case = build_case(
                [(tokens, 300), (max(tokens - 1, 1), 3), (1, 130)],
                group=group, head_dim=head_dim, block_size=block_size, tenant=tenant, dtype=dtype, spare_rows=2,
                spare_tokens=3, device="cuda",
            )  # fmt: skip
            assert error(case, forward(case)) < 1, (config, block_size, tenant)


OPTIONS = [
    {"tree": True},
    {"window": 40},
    {"tree": True, "window": 5},
    {"softcap": 20.0, "sinks": True},
    {"tree": True, "softcap": 5.0, "sinks": True, "window": 100},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_softcap_and_sinks(dtype: torch.dtype, options: dict[str, object]) -> None:
    for head_dim, rows in itertools.product((64, 128), ([(9, 200), (1, 0), (4, 1000)], [(150, 70), (33, 0)])):
        if "tree" in options and rows[0][0] > 63:
            continue
        case = build_case(rows, group=4, head_dim=head_dim, dtype=dtype, device="cuda", **options)  # type: ignore[arg-type]
        assert error(case, forward(case)) < 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_context_and_many_rows_against_the_reference(dtype: torch.dtype) -> None:
    for rows in ([(5, 20_000), (1, 31)], [(5, 100 + 7 * r) for r in range(130)], [(700, 1500), (64, 3000)]):
        case = build_case(rows, group=4, head_dim=128, dtype=dtype, device="cuda")
        wanted = ReferenceBackend().forward(case.query, case.key_pages, case.value_pages, case.metadata, **case.options)
        case.metadata.plan = None
        tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(forward(case), wanted, rtol=0, atol=tolerance)


def test_a_captured_graph_serves_other_lengths_and_pages() -> None:
    """Captured once with full buffers, replayed with rows that grew, ended and moved: equal to an eager launch bit by bit."""
    wide = build_case([(5, 900)] * 8, group=4, head_dim=128, dtype=torch.bfloat16, device="cuda", seed=1)
    forward(wide)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = forward(wide)
    for seed in range(4):
        rows = [(1 + (seed + r) % 5, 1 + 113 * ((seed * 7 + r) % 8)) for r in range(8 - seed)]
        case = build_case(
            rows, group=4, head_dim=128, dtype=torch.bfloat16, device="cuda", spare_rows=seed,
            spare_tokens=40 - sum(q for q, _ in rows), seed=seed,
        )  # fmt: skip
        wide.query.copy_(case.query)
        _copy_pages(case, wide)
        graph.replay()
        assert error(case, captured) < 1
        eager = forward(Case(wide.query, wide.key_pages, wide.value_pages, wide.metadata, [], [], wide.options))
        assert torch.equal(captured, eager)


def _copy_pages(source: Case, target: Case) -> None:
    pages, blocks = source.key_pages.shape[0], source.metadata.block_tables.shape[1]
    assert pages <= target.key_pages.shape[0]
    target.key_pages[:pages].copy_(source.key_pages)
    target.value_pages[:pages].copy_(source.value_pages)
    target.metadata.query_start_loc.copy_(source.metadata.query_start_loc)
    target.metadata.seq_lens.copy_(source.metadata.seq_lens)
    target.metadata.block_tables.zero_()
    target.metadata.block_tables[:, :blocks].copy_(source.metadata.block_tables)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 183])
def test_write_kv(dtype: torch.dtype, block_size: int) -> None:
    from specbatch.attention.triton_paged import TritonPagedAttention

    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(100, 40, 128, generator=generator, device="cuda").to(dtype)
    slots = torch.randperm(20 * block_size, generator=generator, device="cuda")[:100].to(torch.int32)
    slots = torch.cat([slots, slots.new_full((100 - len(slots),), -1)])
    slots[::7] = -1
    pages = [torch.zeros(21, 3, 2, block_size, 8, 128, dtype=dtype, device="cuda") for _ in range(2)]
    for backend, storage in zip((TritonPagedAttention(), ReferenceBackend()), pages, strict=True):
        backend.write_kv(qkv[:, 24:32], qkv[:, 32:], storage[:, 1, 0], storage[:, 1, 1], slots)
    assert torch.equal(*pages)
    assert pages[0].count_nonzero() > 0


def test_is_the_first_choice() -> None:
    choice = pick_backend(torch.device("cuda"), torch.bfloat16, AttentionNeeds(128))
    assert choice.backend.name == "triton", choice.reason


def test_the_other_devices_are_not_touched() -> None:
    """A launch goes to the tensors' device even while another one is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    case = build_case([(1, 30)], device="cuda:1")
    with torch.cuda.device(0):
        assert error(case, forward(case)) < 1
