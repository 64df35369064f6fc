"""The device a run uses: which one, how much memory is free there, and the dtype it multiplies fastest.

Knows nothing of models beyond one matrix size.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch


def resolve_device(name: str) -> torch.device:
    """"auto" is the first GPU, or the CPU. Raises ValueError when a CUDA device was asked for and there is none."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device {name!r} was asked for, torch sees {count} CUDA devices (use --device cpu or auto)")
        return torch.device("cuda", device.index or 0)
    return device


def use_threads(threads: int | None) -> int:
    """Set torch's CPU threads: as asked, or the cores this process may run on. Returns the number in force."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    return torch.get_num_threads()


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on the device now: nothing that another process holds, within the control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(available, _cgroup_room())


def _cgroup_room() -> int:
    """Bytes left under the control group's memory limit (version 2); practically infinite without one."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text("ascii").strip()
        if limit == "max":
            return 1 << 62
        return max(int(limit) - int((root / "memory.current").read_text("ascii")), 0)
    except (OSError, ValueError):
        return 1 << 62


def resolve_dtype(name: str, device: torch.device, hidden_size: int) -> tuple[torch.dtype, str]:
    """The dtype to run in and why. "auto": bfloat16 on a GPU that has it (float16 before), on a CPU the faster of two."""
    if name != "auto":
        return getattr(torch, name), "asked for"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"compute capability {major}.{minor} multiplies it"
        return torch.float16, f"compute capability {major}.{minor} has no bfloat16"
    seconds = {dtype: _product_seconds(dtype, hidden_size) for dtype in (torch.float32, torch.bfloat16)}
    best = min(seconds, key=lambda dtype: seconds[dtype])
    ratio = max(seconds.values()) / min(seconds.values())
    return best, f"measured {ratio:.1f}x as fast as the other of float32 and bfloat16 here"


@torch.inference_mode()
def _product_seconds(dtype: torch.dtype, hidden_size: int) -> float:
    """Best of three of a batch of 64 tokens through one [4 h, h] layer."""
    size = min(max(hidden_size, 256), 2048)
    inputs, weight = torch.randn(64, size).to(dtype), torch.randn(4 * size, size).to(dtype)
    best = float("inf")
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        torch.nn.functional.linear(inputs, weight)
        best = min(best, time.perf_counter() - start)
    return best
