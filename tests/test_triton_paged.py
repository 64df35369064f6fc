"""The host side of Triton's paged attention, and the run of its kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="torch for this machine came without Triton")

import triton

from specbatch.attention import triton_paged
from specbatch.attention.backend import AttentionMetadata
from specbatch.attention.registry import AttentionNeeds
from specbatch.attention.triton_configs import (
    MAX_SPLITS,
    SHARED_MEMORY,
    Chip,
    LaunchPlan,
    choose_config,
    launchable_configs,
    plan_launch,
    shared_memory,
    table_rows,
)

H100 = Chip((9, 0), 132)


def test_kernels_in_the_interpreter() -> None:
    """Runs tests/triton_interpreter_checks.py in a process where Triton is told to interpret before its import."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        try:
            int(np.array([1]))
        except TypeError:
            pytest.skip(
                f"the interpreter of Triton {triton.__version__} needs a NumPy that makes numbers of such arrays"
            )
    checks = Path(__file__).with_name("triton_interpreter_checks.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=checks.parent.parent, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


# ---- the plan


def splits_of_row(plan: LaunchPlan, first: int, query_len: int, seq_len: int) -> list[tuple[int, int]]:
    """The context tiles of each split of one query tile, as the kernels work them out."""
    end = -(-(seq_len - query_len + min(first + plan.tokens_a_tile, query_len)) // plan.config.block_n)
    per_split = max(-(-end // plan.num_splits), plan.min_split_tiles)
    return [(s * per_split, min((s + 1) * per_split, end)) for s in range(plan.num_splits) if s * per_split < end]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    capability=st.sampled_from(sorted(SHARED_MEMORY)),
    head_dim=st.integers(1, 256),
    itemsize=st.sampled_from([2, 4]),
    group=st.integers(1, 16),
    kv_heads=st.integers(1, 32),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    pages=st.integers(1, 4096),
    data=st.data(),
)
def test_plan_covers_every_token_and_context_once(
    capability: tuple[int, int],
    head_dim: int,
    itemsize: int,
    group: int,
    kv_heads: int,
    lengths: list[int],
    pages: int,
    data: Any,
) -> None:
    longest = max(lengths)
    config = choose_config(longest, group, head_dim, itemsize, capability)
    max_context = max(pages * 16, longest)
    plan = plan_launch(
        config, data.draw(st.integers(1, 200)), num_rows=len(lengths), num_tokens=sum(lengths), max_query_len=longest,
        group=group, kv_heads=kv_heads, max_context=max_context,
    )  # fmt: skip
    assert 1 <= plan.num_splits <= MAX_SPLITS
    block_q = config.block_m // group
    assert block_q >= 1
    if plan.search:
        starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
        tiles = [(r, t) for r in range(len(lengths)) for t in range(-(-lengths[r] // block_q))]
        places = [starts[r] // block_q + r + t for r, t in tiles]
        assert len(set(places)) == len(places)  # no two query tiles share a program
        assert all(place < plan.query_tiles for place in places)
        assert all(place < starts[r + 1] // block_q + r + 1 for (r, _), place in zip(tiles, places, strict=True))
    else:
        assert longest <= block_q
        assert plan.query_tiles == len(lengths)
        assert plan.tokens_a_tile == longest
    seq_len = data.draw(st.integers(max(longest, 1), max_context))
    if longest:
        ranges = splits_of_row(plan, 0, longest, seq_len)
        assert [tile for start, end in ranges for tile in range(start, end)] == list(range(ranges[-1][1]))


def test_plan_fills_the_chip_with_few_rows_and_leaves_many_whole() -> None:
    def splits(rows: int, context: int, window: int | None = None) -> int:
        config = choose_config(5, 4, 128, 2, H100.capability)
        return plan_launch(
            config, H100.num_sms, num_rows=rows, num_tokens=5 * rows, max_query_len=5, group=4, kv_heads=8,
            max_context=context, sliding_window=window,
        ).num_splits  # fmt: skip

    assert splits(1, 32768) == MAX_SPLITS
    assert splits(256, 2048) == 1
    assert splits(64, 32768) > 1  # one long row among short ones is shared out
    assert splits(1, 32768, window=128) <= 2  # there is nothing to share out inside a window


def test_table_knows_its_chips() -> None:
    assert shared_memory((8, 9)) == 101_376
    assert shared_memory((8, 7)) == shared_memory((8, 6))  # not listed: the nearest earlier chip of its generation
    assert shared_memory((13, 0)) == min(SHARED_MEMORY.values())
    for capability in SHARED_MEMORY:
        for head_dim, itemsize, config in launchable_configs(capability):
            tile = 2 * config.block_n * head_dim * itemsize * ((config.num_stages - 1) // 2)
            assert tile < shared_memory(capability)
            assert config.block_m & (config.block_m - 1) == 0
            assert config.block_n & (config.block_n - 1) == 0
    with pytest.raises(ValueError, match="head size 257"):
        table_rows(257, 2, (9, 0))
    with pytest.raises(ValueError, match="200 query heads"):
        choose_config(1, 200, 128, 2, (9, 0))


# ---- what a graph would capture


class Recorder:
    """Stands in for a kernel: keeps grid and arguments instead of launching."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    made = {name: Recorder() for name in ("attend_kernel", "combine_kernel", "write_kv_kernel")}
    for name, recorder in made.items():
        monkeypatch.setattr(triton_paged.kernels, name, recorder)
    return made


def fake_step(rows: int, tokens_a_row: int, tree: bool = False) -> tuple[tuple[torch.Tensor, ...], AttentionMetadata]:
    tokens = rows * tokens_a_row
    int32 = lambda *shape: torch.empty(*shape, dtype=torch.int32, device="cuda")  # noqa: E731
    pages = torch.empty(100, 2, 2, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
    qkv = torch.empty(tokens, 12, 64, dtype=torch.bfloat16, device="cuda")
    metadata = AttentionMetadata(
        query_start_loc=int32(rows + 1),
        seq_lens=int32(rows),
        positions=int32(tokens),
        slot_mapping=int32(tokens),
        block_tables=int32(rows, 256),
        num_rows=rows,
        num_tokens=tokens,
        max_query_len=tokens_a_row,
        max_seq_len=4096,
        tree_ancestors=torch.empty(tokens, dtype=torch.int64, device="cuda") if tree else None,
    )
    return (qkv[:, :8], qkv[:, 8:10], qkv[:, 10:], pages[:, 1, 0], pages[:, 1, 1]), metadata


@pytest.mark.parametrize(("tokens_a_row", "tree"), [(1, False), (5, False), (5, True), (200, False)])
def test_launches_read_no_data(recorders: dict[str, Recorder], tokens_a_row: int, tree: bool) -> None:
    """Under fake tensors a data-dependent operation or a copy to the host raises; launches get tensors and numbers."""
    with FakeTensorMode():
        (query, key, value, key_pages, value_pages), metadata = fake_step(3, tokens_a_row, tree)
        triton_paged.launch_write_kv(key, value, key_pages, value_pages, metadata.slot_mapping)
        out = triton_paged.launch_attention(
            query, key_pages, value_pages, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables,
            metadata.positions, metadata.tree_ancestors, None, metadata.num_rows, metadata.max_query_len, 0.125,
            1000, 30.0, chip=H100,
        )  # fmt: skip
    assert out.shape == query.shape
    assert out.device.type == "cuda"
    assert len(recorders["attend_kernel"].launches) == len(recorders["write_kv_kernel"].launches) == 1
    (grid, args, _), (_, combine_args, _) = (
        recorders["attend_kernel"].launches[0],
        recorders["combine_kernel"].launches[0],
    )
    assert grid[0] % 2 == 0
    assert grid[1] > 1
    assert all(
        type(argument) in (int, float, type(None)) or argument.device.type == "cuda"
        for argument in (*args, *combine_args)
    )
    assert args[3] is query  # a strided query is read in place, not copied


def test_operators_run_under_fake_tensors() -> None:
    backend = triton_paged.TritonPagedAttention()
    with FakeTensorMode():
        (query, key, value, key_pages, value_pages), metadata = fake_step(4, 5)
        backend.write_kv(key, value, key_pages, value_pages, metadata.slot_mapping)
        out = backend.forward(query, key_pages, value_pages, metadata, scale=0.125, sliding_window=64, softcap=50.0)
    assert (out.shape, out.dtype, out.device.type) == (query.shape, torch.bfloat16, "cuda")
    assert out.is_contiguous()


def test_a_launch_does_not_depend_on_lengths(recorders: dict[str, Recorder]) -> None:
    """A graph captured at one length serves all: grid and numbers are the same whatever max_seq_len says."""
    seen = []
    with FakeTensorMode():
        for longest in (5, 4096):
            (query, _, _, key_pages, value_pages), metadata = fake_step(2, 5)
            metadata.max_seq_len = longest
            triton_paged.launch_attention(
                query, key_pages, value_pages, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables,
                metadata.positions, None, None, metadata.num_rows, metadata.max_query_len, 0.125, None, None, chip=H100,
            )  # fmt: skip
            grid, args, kwargs = recorders["attend_kernel"].launches.pop()
            seen.append((grid, [a for a in args if not isinstance(a, torch.Tensor)], kwargs))
    assert seen[0] == seen[1]


# ---- refusals


def test_create_says_why_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device, not cpu"):
        triton_paged.create(torch.device("cpu"), torch.float32, AttentionNeeds(64))
    with pytest.raises(RuntimeError, match=r"not torch\.float64"):
        triton_paged.create(torch.device("cuda"), torch.float64, AttentionNeeds(64))
    monkeypatch.setattr(triton_paged, "chip_of", lambda device: Chip((7, 5), 40))
    with pytest.raises(RuntimeError, match=r"8\.0 or later, this device has 7\.5"):
        triton_paged.create(torch.device("cuda"), torch.float16, AttentionNeeds(64))
    monkeypatch.setattr(triton_paged, "chip_of", lambda device: H100)
    with pytest.raises(RuntimeError, match="head size 288"):
        triton_paged.create(torch.device("cuda"), torch.bfloat16, AttentionNeeds(288))
    assert triton_paged.create(torch.device("cuda"), torch.bfloat16, AttentionNeeds(80)).name == "triton"


def test_pages_of_the_wrong_layout_are_refused() -> None:
    pages = torch.zeros(4, 2, 16, 64)
    with pytest.raises(ValueError, match="only the page stride free"):
        triton_paged.launch_write_kv(
            torch.zeros(1, 16, 64),
            torch.zeros(1, 16, 64),
            pages.transpose(1, 2).transpose(2, 3),
            pages,
            torch.zeros(1, dtype=torch.int32),
        )
    with pytest.raises(ValueError, match="do not fit KV pages"):
        triton_paged.launch_write_kv(
            torch.zeros(1, 8, 64), torch.zeros(1, 8, 64), pages, pages, torch.zeros(1, dtype=torch.int32)
        )
