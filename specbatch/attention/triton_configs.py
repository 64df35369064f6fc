"""How the paged attention kernels are launched: tile sizes by head size, dtype and capability, and the split plan.

Plain tables and arithmetic: no Triton, no torch, nothing tuned at run time. Every entry is one that the compiler
accepted for its chips within their shared memory and without spilled registers (tests/test_triton_compile.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

Capability = tuple[int, int]

# Bytes of shared memory that one block may use.
SHARED_MEMORY: dict[Capability, int] = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}
MAX_HEAD_DIM = 256
MAX_SPLITS = 64
SPLIT_TOKENS = 1024  # a split is at least this long when the launch fills the chip anyway ...
MIN_SPLIT_TOKENS = 128  # ... and this long when it does not
TAIL_TOKENS = 4096  # one program should not read a longer context than this alone
PROGRAMS_PER_SM = 4  # programs that keep one multiprocessor busy
MAX_PROGRAMS_PER_SM = 16  # programs worth starting only to shorten the longest row


@dataclass(frozen=True, slots=True)
class Chip:
    """What the table and the plan need to know of a device."""

    capability: Capability
    num_sms: int


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Tile sizes and launch options of the attend kernel.

    NOTE: a page number must be loaded before the page, so Triton's pipeline takes two stages for each tile that it
    holds in flight: 3 stages are one tile ahead, 5 are two.
    """

    block_m: int  # lanes of a query tile: query tokens x heads of a KV head
    block_n: int  # context tokens of a context tile
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Grid of one launch. A function of shapes, buckets and the chip only, so a captured graph may keep it."""

    config: KernelConfig
    tokens_a_tile: int  # query tokens of a query tile that can be in use
    search: bool  # a row may be several query tiles, so programs look their row up
    query_tiles: int
    num_splits: int
    min_split_tiles: int


_NARROW, _WIDE = 101_376, 166_912

# (shared memory at least, bytes an element, padded head size) -> (block_m, block_n, warps, stages), by block_m.
_TABLE: dict[tuple[int, int, int], tuple[tuple[int, int, int, int], ...]] = {
    (_NARROW, 2, 16): ((16, 64, 4, 5), (32, 64, 4, 5), (64, 64, 4, 5), (128, 64, 8, 5)),
    (_NARROW, 2, 32): ((16, 64, 4, 5), (32, 64, 4, 5), (64, 64, 4, 5), (128, 64, 8, 5)),
    (_NARROW, 2, 64): ((16, 64, 4, 5), (32, 64, 4, 5), (64, 64, 4, 5), (128, 64, 8, 5)),
    (_NARROW, 2, 128): ((16, 32, 4, 5), (32, 32, 4, 5), (64, 32, 4, 5), (128, 32, 8, 5)),
    (_NARROW, 2, 256): ((16, 16, 4, 5), (32, 16, 4, 5), (64, 32, 8, 3)),
    (_WIDE, 2, 16): ((16, 128, 4, 5), (32, 128, 4, 5), (64, 64, 4, 5), (128, 64, 8, 5)),
    (_WIDE, 2, 32): ((16, 128, 4, 5), (32, 128, 4, 5), (64, 64, 4, 5), (128, 64, 8, 3)),
    (_WIDE, 2, 64): ((16, 64, 4, 5), (32, 64, 4, 5), (64, 64, 4, 5), (128, 64, 8, 5)),
    (_WIDE, 2, 128): ((16, 64, 4, 5), (32, 64, 4, 5), (64, 32, 4, 5), (128, 64, 8, 5)),
    (_WIDE, 2, 256): ((16, 32, 4, 5), (32, 32, 4, 5), (64, 32, 8, 3)),
    (_NARROW, 4, 16): ((16, 32, 4, 3), (32, 32, 4, 3)),
    (_NARROW, 4, 32): ((16, 32, 4, 3), (32, 32, 4, 3)),
    (_NARROW, 4, 64): ((16, 32, 4, 3), (32, 32, 4, 3)),
    (_NARROW, 4, 128): ((16, 16, 4, 3), (32, 16, 4, 3)),
    (_NARROW, 4, 256): ((16, 16, 4, 3), (32, 16, 8, 3)),
}


def pad_to_power(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and `least`."""
    return max(least, 1 << max(value - 1, 0).bit_length())


def shared_memory(capability: Capability) -> int:
    """Bytes a block may use. An unlisted chip counts as the nearest earlier one of its generation, or the smallest."""
    earlier = [known for known in SHARED_MEMORY if known[0] == capability[0] and known <= capability]
    return SHARED_MEMORY[max(earlier)] if earlier else min(SHARED_MEMORY.values())


@lru_cache
def table_rows(head_dim: int, itemsize: int, capability: Capability) -> tuple[KernelConfig, ...]:
    """Configurations for a head size (1 to 256) and bytes an element (2 or 4), smallest query tile first.

    Raises ValueError when there are none."""
    padded = pad_to_power(head_dim, 16)
    limit = shared_memory(capability)
    for floor in (_WIDE, _NARROW):
        rows = _TABLE.get((floor, itemsize, padded))
        if rows is not None and floor <= limit:
            return tuple(KernelConfig(*row) for row in rows)
    raise ValueError(
        f"no launch configuration for head size {head_dim} (1 to {MAX_HEAD_DIM}), {itemsize} bytes an element"
    )


def choose_config(max_query_len: int, group: int, head_dim: int, itemsize: int, capability: Capability) -> KernelConfig:
    """The smallest query tile that holds a row's tokens times the heads of a KV head, or else the largest there is."""
    rows = table_rows(head_dim, itemsize, capability)
    lanes = max_query_len * group
    for config in rows:
        if config.block_m >= lanes:
            return config
    if rows[-1].block_m < group:
        raise ValueError(f"{group} query heads a KV head are more than a query tile of {rows[-1].block_m} lanes holds")
    return rows[-1]


def plan_launch(
    config: KernelConfig,
    num_sms: int,
    *,
    num_rows: int,
    num_tokens: int,
    max_query_len: int,
    group: int,
    kv_heads: int,
    max_context: int,
    sliding_window: int | None = None,
) -> LaunchPlan:
    """Grid and split plan for rows of up to `max_query_len` query tokens and `max_context` context tokens.

    Few rows are cut until the chip is full, many rows only so far that one long row does not hold up the rest. How long
    each row's splits are is worked out on the device from its own length.
    """
    block_q = config.block_m // group
    search = max_query_len > block_q
    query_tiles = num_tokens // block_q + num_rows if search else num_rows
    tokens_a_tile = block_q if search else max_query_len
    if sliding_window is not None:
        max_context = min(max_context, sliding_window + tokens_a_tile + config.block_n)
    programs = max(query_tiles * kv_heads, 1)
    fill = max(-(-PROGRAMS_PER_SM * num_sms // programs), 1)
    tail = min(-(-max_context // TAIL_TOKENS), MAX_PROGRAMS_PER_SM * num_sms // programs)
    min_split = max(MIN_SPLIT_TOKENS, SPLIT_TOKENS // fill)
    min_split_tiles = max(min_split // config.block_n, 1)
    most = -(-max_context // (min_split_tiles * config.block_n))
    num_splits = max(min(max(fill, tail), most, MAX_SPLITS), 1)
    return LaunchPlan(config, tokens_a_tile, search, query_tiles, num_splits, min_split_tiles)


def launchable_configs(capability: Capability) -> Iterator[tuple[int, int, KernelConfig]]:
    """(padded head size, bytes an element, configuration) of everything that can be launched on a chip."""
    for itemsize in (2, 4):
        for head_dim in (16, 32, 64, 128, 256):
            for config in table_rows(head_dim, itemsize, capability):
                yield head_dim, itemsize, config
