"""Times the paged attention kernels on a GPU beside the time their bytes (decode) or products (prefill) must take.

    python benchmarks/gpu/attention.py [--json FILE] [--sweep]

Decode reads KV once: the bound is KV bytes over the bandwidth that a plain copy reaches on the same device. --sweep
also times other launch configurations than the table's, to judge the table. Every figure is the median over graph
replays of LAYERS calls on different pages, so neither launches nor the cache hide what a layer costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specbatch.attention.triton_configs import KernelConfig, choose_config, shared_memory
from specbatch.attention.triton_paged import chip_of, launch_attention, launch_write_kv

DEVICE = "cuda"
LAYERS = 8
BLOCK_SIZE = 16
POOL_BYTES = 8 << 30


@dataclass(frozen=True)
class Shape:
    """A step of `rows` rows, each `query` tokens on top of `context` others."""

    rows: int
    query: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * self.rows * (self.context + self.query) * self.kv_heads * self.head_dim

    @property
    def flop(self) -> float:
        pairs = self.rows * self.query * (self.context + (self.query + 1) / 2)
        return 4.0 * pairs * self.heads * self.head_dim


DECODE = [Shape(r, q, c) for c in (1024, 8192) for r in (1, 8, 64, 256) for q in (1, 5)] + [
    Shape(1, 5, 32768),
    Shape(64, 5, 1024, heads=14, kv_heads=2, head_dim=64),
    Shape(64, 5, 1024, heads=16, kv_heads=8, head_dim=256),
]
PREFILL = [Shape(1, 2048, 0), Shape(8, 512, 0), Shape(1, 2048, 14336), Shape(4, 64, 4096)]


def seconds_of(function: Callable[[], object], calls: int, repeats: int = 15) -> float:
    """Median seconds of one of the `calls` calls that `function` makes, replayed as a graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second (read plus written) of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), 1)


def matmul_rate() -> float:
    """FLOP a second of a large bfloat16 product."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    return 2 * 8192**3 / seconds_of(lambda: torch.mm(a, a), 1)


class Step:
    """Tensors of one shape: LAYERS layers over pages in random order."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        length = shape.context + shape.query
        pages_a_row = -(-length // BLOCK_SIZE)
        pages = 1 + shape.rows * pages_a_row
        page_bytes = 2 * 2 * BLOCK_SIZE * shape.kv_heads * shape.head_dim
        self.layers = max(1, min(LAYERS, POOL_BYTES // (pages * page_bytes)))
        size = (pages, self.layers, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self.pages = torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_()
        order = torch.randperm(pages - 1, device=DEVICE)[: shape.rows * pages_a_row] + 1
        int32 = {"dtype": torch.int32, "device": DEVICE}
        self.tables = order.view(shape.rows, pages_a_row).to(torch.int32)
        self.starts = torch.arange(shape.rows + 1, **int32) * shape.query
        self.lengths = torch.full((shape.rows,), length, **int32)
        tokens = shape.rows * shape.query
        self.positions = torch.arange(shape.context, length, **int32).repeat(shape.rows)
        self.query = torch.randn(tokens, shape.heads, shape.head_dim, device=DEVICE, dtype=torch.bfloat16)
        self.new = torch.randn(2, tokens, shape.kv_heads, shape.head_dim, device=DEVICE, dtype=torch.bfloat16)
        page = self.tables.gather(1, (self.positions.view(shape.rows, -1) // BLOCK_SIZE).long())
        self.slots = (page * BLOCK_SIZE + self.positions.view(shape.rows, -1) % BLOCK_SIZE).flatten().to(torch.int32)

    def attend(self, config: KernelConfig | None = None) -> None:
        shape = self.shape
        for layer in range(self.layers):
            launch_attention(
                self.query, self.pages[:, layer, 0], self.pages[:, layer, 1], self.starts, self.lengths, self.tables,
                self.positions, None, None, shape.rows, shape.query, shape.head_dim**-0.5, None, None, config=config,
            )  # fmt: skip

    def write(self) -> None:
        for layer in range(self.layers):
            launch_write_kv(self.new[0], self.new[1], self.pages[:, layer, 0], self.pages[:, layer, 1], self.slots)


def alternatives(shape: Shape) -> list[KernelConfig]:
    """Configurations near the table's that fit the chip."""
    chip = chip_of(torch.device(DEVICE, 0))
    base = choose_config(shape.query, shape.heads // shape.kv_heads, shape.head_dim, 2, chip.capability)
    found = []
    for block_n in (16, 32, 64, 128):
        for warps in (2, 4, 8):
            for stages in (3, 5, 7):
                tiles = 2 * 2 * block_n * shape.head_dim * ((stages - 1) // 2)
                if tiles + 20_000 < shared_memory(chip.capability):
                    found.append(KernelConfig(base.block_m, block_n, warps, stages))
    return found


def measure(shape: Shape, bandwidth: float, rate: float, sweep: bool) -> dict[str, Any]:
    step = Step(shape)
    seconds = seconds_of(step.attend, step.layers)
    bound = max(shape.kv_bytes / bandwidth, shape.flop / rate)
    result: dict[str, Any] = {
        "shape": vars(shape) | {"layers": step.layers},
        "microseconds": seconds * 1e6,
        "bound_microseconds": bound * 1e6,
        "share_of_bound": bound / seconds,
        "write_microseconds": seconds_of(step.write, step.layers) * 1e6,
    }
    if sweep:
        times = {}
        for config in alternatives(shape):
            try:
                times[f"{config.block_n} x {config.num_warps} warps x {config.num_stages} stages"] = (
                    seconds_of(partial(step.attend, config), step.layers) * 1e6
                )
            except Exception as error:  # out of shared memory: noted, not fatal
                times[str(config)] = str(error).splitlines()[0]
        result["sweep_microseconds"] = dict(sorted(times.items(), key=lambda item: (isinstance(item[1], str), item[1])))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "copy_bytes_a_second": bandwidth,
        "matmul_flop_a_second": rate,
        "decode": [],
        "prefill": [],
    }
    print(f"{results['device']}: copy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.0f} TFLOP/s")
    print(f"{'rows':>5} {'query':>6} {'context':>8} {'heads':>11} {'us':>9} {'bound':>9} {'share':>6} {'write us':>9}")
    for kind, shapes in (("decode", DECODE), ("prefill", PREFILL)):
        for shape in shapes:
            found = measure(shape, bandwidth, rate, arguments.sweep)
            results[kind].append(found)
            heads = f"{shape.heads}/{shape.kv_heads}x{shape.head_dim}"
            print(
                f"{shape.rows:5} {shape.query:6} {shape.context:8} {heads:>11} {found['microseconds']:9.1f} "
                f"{found['bound_microseconds']:9.1f} {found['share_of_bound']:6.0%} {found['write_microseconds']:9.1f}"
            )
            for name, value in list(found.get("sweep_microseconds", {}).items())[:3]:
                print(f"      {name}: {value if isinstance(value, str) else round(value, 1)}")
            torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
