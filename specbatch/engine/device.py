"""The device a run uses: which one, how much memory is free there, and the dtype it multiplies fastest.

Knows nothing of models beyond one matrix size.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import torch

from specbatch.errors import NoDevice

BFLOAT16_GAIN = 1.3  # on a CPU bfloat16 must be this much faster to be taken: it gives some precision away


def resolve_device(name: str) -> torch.device:
    """ "auto" is the first GPU, or the CPU. Raises NoDevice when a CUDA device was asked for and there is none."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise NoDevice(
                f"device {name!r} was asked for, torch sees {count} CUDA devices", hint="use --device cpu or auto"
            )
        return torch.device("cuda", device.index or 0)
    return device


def count_cuda_devices() -> int:
    """Devices that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_lost(device: torch.device) -> bool:
    """Whether a CUDA device answers nothing any more. (An error in a kernel ends the whole context: no later call works.)"""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


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
    ratio = _product_ratio(hidden_size)
    if ratio >= BFLOAT16_GAIN:
        return torch.bfloat16, f"measured {ratio:.1f}x as fast as float32 here"
    return torch.float32, f"bfloat16 measured {ratio:.1f}x as fast here, less than {BFLOAT16_GAIN}x"


@torch.inference_mode()
def _product_ratio(hidden_size: int) -> float:
    """Time of float32 over time of bfloat16 for 64 tokens through one [4 h, h] layer: the median of paired runs, so
    that a busy neighbour slows both sides alike."""
    size = min(max(hidden_size, 512), 2048)
    inputs, weight = torch.randn(64, size), torch.randn(4 * size, size)
    sides = [(inputs, weight), (inputs.bfloat16(), weight.bfloat16())]
    ratios = []
    for _ in range(8):  # the first pair warms up
        times = []
        for pair in sides:
            start = time.perf_counter()
            torch.nn.functional.linear(*pair)
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return statistics.median(ratios[1:])
