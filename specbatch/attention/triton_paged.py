"""Paged attention on CUDA devices with Triton: the backend and its two torch operators.

Owns shapes, strides and launches; the kernels are in triton_kernels.py, their sizes in triton_configs.py. Nothing here
reads a tensor on the host, so everything may be captured in a graph. The operators are registered with torch, so they
also run under fake tensors and torch.compile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from specbatch.attention import triton_kernels as kernels
from specbatch.attention.backend import AttentionMetadata
from specbatch.attention.triton_configs import Chip, KernelConfig, choose_config, pad_to_power, plan_launch, table_rows

LOG2_E = 1.4426950408889634
OLDEST_CAPABILITY = (8, 0)
INTERPRETED = not isinstance(kernels.attend_kernel, triton.JITFunction)  # TRITON_INTERPRET=1: kernels run on the CPU
INTERPRETER_CHIP = Chip(capability=(9, 0), num_sms=4)
WRITE_BLOCK = 1024  # elements of a token that one program of the write kernel copies


class TritonPagedAttention:
    """Implements AttentionBackend for head sizes up to 256 in float16, bfloat16 and float32.

    KV is read once for each row, KV head and query tile; a row's query tokens share a tile as long as they fit in one.
    """

    name = "triton"

    def write_kv(
        self, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor
    ) -> None:
        torch.ops.specbatch.write_kv(key, value, key_pages, value_pages, slot_mapping)

    def forward(
        self,
        query: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out: Tensor = torch.ops.specbatch.paged_attention(
            query,
            key_pages,
            value_pages,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.positions,
            metadata.tree_ancestors,
            sinks,
            metadata.num_rows,
            metadata.max_query_len,
            scale,
            sliding_window,
            softcap,
        )
        return out


def launch_attention(
    query: Tensor,  # [T, heads, head_dim]
    key_pages: Tensor,  # [pages, block_size, kv_heads, head_dim]
    value_pages: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    positions: Tensor,
    tree_ancestors: Tensor | None,
    sinks: Tensor | None,
    num_rows: int,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    *,
    config: KernelConfig | None = None,
    chip: Chip | None = None,
) -> Tensor:
    """Attention output [T, heads, head_dim], zero for tokens of no row. `config` and `chip`: by default the device's.

    The launch depends on shapes and on `num_rows` and `max_query_len`, never on what the tensors hold.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    num_tokens, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = key_pages.shape
    _check_pages(key_pages, value_pages)
    group, remainder = divmod(heads, kv_heads)
    if remainder or key_pages.shape[3] != head_dim:
        raise ValueError(f"query {tuple(query.shape)} does not fit KV pages {tuple(key_pages.shape)}")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0 or num_rows == 0:
        return out.zero_()

    chip = chip or chip_of(query.device)
    config = config or choose_config(max_query_len, group, head_dim, query.element_size(), chip.capability)
    plan = plan_launch(
        config,
        chip.num_sms,
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_query_len=max_query_len,
        group=group,
        kv_heads=kv_heads,
        max_context=block_tables.shape[1] * block_size,
        sliding_window=sliding_window,
    )
    part = lse = None
    if plan.num_splits > 1:
        part = torch.empty((num_tokens, heads, plan.num_splits, head_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty((num_tokens, heads, plan.num_splits), dtype=torch.float32, device=query.device)
    tree = tree_ancestors is not None
    padded = pad_to_power(head_dim, 16)
    kernels.attend_kernel[(plan.query_tiles * kv_heads, plan.num_splits)](
        out,
        part,
        lse,
        query,
        key_pages,
        value_pages,
        query_start_loc,
        seq_lens,
        block_tables,
        positions if tree and sliding_window is not None else None,
        tree_ancestors,
        sinks,
        scale * LOG2_E if softcap is None else scale / softcap,
        None if softcap is None else softcap * LOG2_E,
        sliding_window,
        num_rows,
        num_tokens,
        plan.num_splits,
        plan.min_split_tiles,
        query.stride(0),
        query.stride(1),
        key_pages.stride(0),
        value_pages.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=padded,
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SEARCH=plan.search,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if plan.num_splits > 1:
        kernels.combine_kernel[(plan.query_tiles * plan.tokens_a_tile, heads)](
            out,
            part,
            lse,
            query_start_loc,
            seq_lens,
            sliding_window,
            num_rows,
            plan.num_splits,
            plan.min_split_tiles,
            plan.tokens_a_tile,
            NUM_HEADS=heads,
            HEAD_DIM=head_dim,
            HEAD_PAD=padded,
            BLOCK_Q=config.block_m // group,
            BLOCK_N=config.block_n,
            SPLITS_PAD=pad_to_power(plan.num_splits),
            SEARCH=plan.search,
            TREE=tree,
            num_warps=4 if padded <= 128 else 8,
        )
    return out


def launch_write_kv(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slot_mapping: Tensor) -> None:
    """Store key, value [T, kv_heads, head_dim] at their slots; negative slots are skipped."""
    _check_pages(key_pages, value_pages)
    num_tokens, kv_heads, head_dim = key.shape
    _, block_size, page_heads, page_dim = key_pages.shape
    if (kv_heads, head_dim) != (page_heads, page_dim) or value.shape != key.shape:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)} do not fit KV pages {tuple(key_pages.shape)}"
        )
    if num_tokens == 0:
        return
    key = key if key.stride(-1) == 1 else key.contiguous()
    value = value if value.stride(-1) == 1 else value.contiguous()
    block = min(WRITE_BLOCK, pad_to_power(kv_heads * head_dim))
    kernels.write_kv_kernel[(num_tokens, -(-kv_heads * head_dim // block))](
        key,
        value,
        key_pages,
        value_pages,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_pages.stride(0),
        value_pages.stride(0),
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=block,
        num_warps=4,
    )


def create(device: torch.device, dtype: torch.dtype, needs: object) -> TritonPagedAttention:
    """For the registry. Raises RuntimeError with the reason when the device, dtype or head size cannot be served."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise RuntimeError(f"triton serves float16, bfloat16 and float32, not {dtype}")
    if device.type != "cuda" and not INTERPRETED:
        raise RuntimeError(f"triton needs a CUDA device, not {device.type}")
    if device.type == "cuda" and torch.version.hip is not None:
        raise RuntimeError("the launch configurations of triton are for NVIDIA devices")
    capability = chip_of(device).capability
    if capability < OLDEST_CAPABILITY:
        raise RuntimeError(
            f"triton needs compute capability 8.0 or later, this device has {capability[0]}.{capability[1]}"
        )
    head_dim = getattr(needs, "head_dim", None)
    if head_dim is not None:
        try:
            table_rows(head_dim, dtype.itemsize, capability)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
    return TritonPagedAttention()


@lru_cache
def chip_of(device: torch.device) -> Chip:
    """Capability and multiprocessors of a CUDA device (of a stand-in when the kernels are interpreted)."""
    if device.type != "cuda":
        return INTERPRETER_CHIP
    properties = torch.cuda.get_device_properties(device)
    return Chip((properties.major, properties.minor), properties.multi_processor_count)


def _check_pages(key_pages: Tensor, value_pages: Tensor) -> None:
    _, _, kv_heads, head_dim = key_pages.shape
    inner = (kv_heads * head_dim, head_dim, 1)
    if key_pages.stride()[1:] != inner or value_pages.stride()[1:] != inner or value_pages.shape != key_pages.shape:
        raise ValueError(
            "KV pages must be [pages, block_size, kv_heads, head_dim] with only the page stride free, got "
            f"{tuple(key_pages.shape)} with strides {key_pages.stride()} and {tuple(value_pages.shape)} with "
            f"{value_pages.stride()}"
        )


# The operators. Triton launches on the current device, so a device that is not current is made so first.
_LIBRARY: Any = torch.library.Library("specbatch", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor key_pages, Tensor value_pages, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor block_tables, Tensor positions, Tensor? tree_ancestors, Tensor? sinks, int num_rows, int max_query_len, "
    "float scale, int? sliding_window, float? softcap) -> Tensor"
)
_LIBRARY.define(
    "write_kv(Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor slot_mapping) -> ()"
)


def _attention_on_device(query: Tensor, *args: object) -> Tensor:
    with torch.cuda.device(query.device):
        return launch_attention(query, *args)  # type: ignore[arg-type]


def _write_kv_on_device(key: Tensor, *args: Tensor) -> None:
    with torch.cuda.device(key.device):
        launch_write_kv(key, *args)


def _attention_shape(query: Tensor, *args: object) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _write_kv_shape(*args: Tensor) -> None:
    return None


_LIBRARY.impl("paged_attention", _attention_on_device, "CUDA")
_LIBRARY.impl("write_kv", _write_kv_on_device, "CUDA")
if INTERPRETED:
    _LIBRARY.impl("paged_attention", launch_attention, "CPU")
    _LIBRARY.impl("write_kv", launch_write_kv, "CPU")
torch.library.register_fake("specbatch::paged_attention", _attention_shape, lib=_LIBRARY)
torch.library.register_fake("specbatch::write_kv", _write_kv_shape, lib=_LIBRARY)
