"""Compiles the paged attention kernels ahead of time for any CUDA chip, without one, and reads what they use of it.

Mirrors the launches of triton_paged.py argument by argument; knows nothing of running them.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specbatch.attention import triton_kernels as kernels
from specbatch.attention.triton_configs import (
    Capability,
    KernelConfig,
    launchable_configs,
    pad_to_power,
    table_rows,
)

POINTER_TYPES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
_INT32 = ("query_start_loc_ptr", "seq_lens_ptr", "block_tables_ptr", "positions_ptr", "slot_mapping_ptr")
_FLOAT32 = ("part_ptr", "lse_ptr")
_ALIGNED = ("_ptr", "_token", "_head", "_page")  # what a launch can promise to be a multiple of 16


@dataclass(frozen=True, slots=True)
class Features:
    """What one launch asks for beyond causal attention over whole rows."""

    search: bool = False  # several query tiles a row
    split: bool = True
    tree: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler says a kernel takes. Sizes in bytes; stack and local are a thread's: only spills use them."""

    shared: int
    registers: int
    stack: int
    local: int

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0


def launchable_kernels(capability: Capability, dtype: str) -> Iterator[tuple[int, KernelConfig, Features, int]]:
    """(head size, configuration, features, block size) of the attend launches the table can lead to on a chip.

    Decoding with pages gathered into a context tile and, for the tile a prompt uses, prefill over both kinds of pages.
    """
    itemsize = 4 if dtype == "float32" else 2
    for head_dim, size, config in launchable_configs(capability):
        if size != itemsize:
            continue
        yield head_dim, config, Features(), 16
        if config == table_rows(head_dim, itemsize, capability)[-1]:
            yield head_dim, config, Features(search=True, split=False), 16
            yield head_dim, config, Features(search=True, split=False), 64


def compile_attend(
    capability: Capability,
    dtype: str,
    head_dim: int,
    config: KernelConfig,
    features: Features,
    *,
    group: int = 4,
    kv_heads: int = 8,
    block_size: int = 16,
) -> Resources:
    """Compile the attend kernel as launch_attention would launch it."""
    absent = set()
    if not features.split:
        absent |= {"part_ptr", "lse_ptr"}
    if not features.tree:
        absent.add("ancestors_ptr")
    if not (features.tree and features.window):
        absent.add("positions_ptr")
    optional = {"window": features.window, "softcap": features.softcap, "sinks_ptr": features.sinks}
    absent |= {name for name, used in optional.items() if not used}
    constants: dict[str, object] = {
        "NUM_KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": pad_to_power(head_dim, 16),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SEARCH": features.search,
    }
    return _compile(kernels.attend_kernel, capability, dtype, constants, absent, config.num_warps, config.num_stages)


def compile_combine(capability: Capability, dtype: str, head_dim: int, features: Features, splits: int) -> Resources:
    """Compile the combine kernel for up to `splits` splits."""
    padded = pad_to_power(head_dim, 16)
    constants: dict[str, object] = {
        "NUM_HEADS": 32,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": padded,
        "BLOCK_Q": 4,
        "BLOCK_N": 32,
        "SPLITS_PAD": pad_to_power(splits),
        "SEARCH": features.search,
        "TREE": features.tree,
    }
    absent = set() if features.window else {"window"}
    return _compile(kernels.combine_kernel, capability, dtype, constants, absent, 4 if padded <= 128 else 8, 3)


def compile_write_kv(
    capability: Capability, dtype: str, head_dim: int, kv_heads: int = 8, block_size: int = 16
) -> Resources:
    """Compile the KV write kernel."""
    constants: dict[str, object] = {
        "BLOCK_SIZE": block_size,
        "NUM_KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK": min(1024, pad_to_power(kv_heads * head_dim)),
    }
    return _compile(kernels.write_kv_kernel, capability, dtype, constants, set(), 4, 3)


def _compile(
    kernel: triton.JITFunction,
    capability: Capability,
    dtype: str,
    constants: dict[str, object],
    absent: set[str],
    num_warps: int,
    num_stages: int,
) -> Resources:
    constants = constants | dict.fromkeys(absent)
    signature = {}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in _INT32:
            signature[name] = "*i32"
        elif name in _FLOAT32:
            signature[name] = "*fp32"
        elif name == "ancestors_ptr":
            signature[name] = "*i64"
        elif name.endswith("_ptr"):
            signature[name] = POINTER_TYPES[dtype]
        else:
            signature[name] = "fp32" if name in ("score_scale", "softcap") else "i32"
        if name.endswith(_ALIGNED):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})
    return _read_resources(compiled.asm["cubin"], compiled.metadata.shared)


def _read_resources(cubin: bytes, shared: int) -> Resources:
    """Registers and spills as the cuobjdump that Triton ships prints them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in shown.splitlines() if "REG:" in line)
    counts = dict(word.split(":", 1) for word in line.split() if ":" in word)
    return Resources(shared, int(counts["REG"]), int(counts["STACK"]), int(counts["LOCAL"]))
