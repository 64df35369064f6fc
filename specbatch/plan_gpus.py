"""Data sheets of accelerators: memory, memory bandwidth, dense 16-bit tensor rate. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20

# What kernels reach of the printed rates. Fitted to a published set of step times (an 8B model on one H100: 5.886 ms
# + 39.26 ns a KV token + 21.01 us a token + 1.2 ms): 82 % of bandwidth for weights, 78 % of the tensor rate.
BANDWIDTH_REACHED = 0.82
FLOPS_REACHED = 0.78
STEP_OVERHEAD = 1.2e-3  # seconds of host and launch time a step


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator as its maker describes it (SXM form where there are several)."""

    name: str
    memory_bytes: int  # as the driver reports it
    bandwidth: float  # bytes a second
    flops: float  # dense bfloat16 (float16 where it has no bfloat16), FLOP a second
    has_bfloat16: bool = True


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4", 15_360 * MIB, 320e9, 65e12, has_bfloat16=False),
        Gpu("v100", 32_768 * MIB, 900e9, 125e12, has_bfloat16=False),
        Gpu("rtx3090", 24_576 * MIB, 936e9, 71e12),
        Gpu("rtx4090", 24_564 * MIB, 1_008e9, 165e12),
        Gpu("rtx5090", 32_607 * MIB, 1_792e9, 209e12),
        Gpu("a10", 23_028 * MIB, 600e9, 125e12),
        Gpu("a10g", 23_028 * MIB, 600e9, 70e12),
        Gpu("l4", 23_034 * MIB, 300e9, 121e12),
        Gpu("l40s", 46_068 * MIB, 864e9, 362e12),
        Gpu("a100-40", 40_960 * MIB, 1_555e9, 312e12),
        Gpu("a100", 81_920 * MIB, 2_039e9, 312e12),
        Gpu("h100-pcie", 81_559 * MIB, 2_000e9, 756e12),
        Gpu("h100", 81_559 * MIB, 3_350e9, 989e12),
        Gpu("h200", 143_771 * MIB, 4_800e9, 989e12),
        Gpu("b200", 183_359 * MIB, 8_000e9, 2_250e12),
        Gpu("mi300x", 196_592 * MIB, 5_300e9, 1_307e12),
    )
}
ALIASES = {"a100-80": "a100", "h100-sxm": "h100", "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090"}


def find_gpu(name: str) -> Gpu:
    """The data sheet of that name, upper or lower case. Raises ValueError with the names there are."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    gpu = GPUS.get(ALIASES.get(key, key))
    if gpu is None:
        raise ValueError(f"gpu must be one of {', '.join(sorted(GPUS))}, got {name!r}")
    return gpu
