"""Ahead-of-time compilation of the paged attention kernels: shared memory within each chip's limit, nothing spilled.

The sample always runs; the full matrix (all configurations that can be launched, six chips, two dtypes) with -m slow.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="torch for this machine came without Triton")

import triton
import triton.language as tl

from specbatch.attention import triton_aot
from specbatch.attention.triton_aot import (
    Features,
    compile_attend,
    compile_combine,
    compile_write_kv,
    launchable_kernels,
)
from specbatch.attention.triton_configs import SHARED_MEMORY, Capability, KernelConfig, table_rows

CHIPS = sorted(SHARED_MEMORY)
DTYPES = ("bfloat16", "float16")
EVERYTHING = Features(tree=True, window=True, softcap=True, sinks=True)


@pytest.mark.parametrize(("capability", "dtype"), [((8, 6), "float16"), ((9, 0), "bfloat16"), ((12, 0), "bfloat16")])
def test_sample_of_decode_configurations(capability: Capability, dtype: str) -> None:
    config = table_rows(128, 2, capability)[0]
    used = compile_attend(capability, dtype, 128, config, Features())
    assert used.shared <= SHARED_MEMORY[capability]
    assert not used.spills
    assert used.registers > 32  # the figures are read, not defaulted


def test_sample_of_the_other_kernels() -> None:
    for used in (compile_combine((10, 0), "bfloat16", 128, Features(), 64), compile_write_kv((8, 0), "float32", 128)):
        assert used.shared <= SHARED_MEMORY[(8, 6)]
        assert not used.spills


@triton.jit
def hoard_kernel(out_ptr, key_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    values = tl.load(key_ptr + at)
    tl.store(out_ptr + at, values / tl.sum(values, axis=0))


@pytest.mark.slow
def test_what_is_too_large_is_seen() -> None:
    """Negative control: more values alive than one warp has registers, and more tiles in flight than a chip holds."""
    assert triton_aot._compile(hoard_kernel, (9, 0), "float32", {"SIZE": 8192}, set(), 1, 3).spills
    used = compile_attend((8, 6), "float16", 128, KernelConfig(16, 64, 4, 9), Features(split=False))
    assert used.shared > SHARED_MEMORY[(8, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", CHIPS, ids=lambda c: f"{c[0]}.{c[1]}")
def test_every_configuration_that_can_be_launched(capability: Capability, dtype: str) -> None:
    faults = []
    for head_dim, config, features, block_size in launchable_kernels(capability, dtype):
        used = compile_attend(capability, dtype, head_dim, config, features, block_size=block_size)
        if used.shared > SHARED_MEMORY[capability] or used.spills:
            faults.append((head_dim, config, features, block_size, used))
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", CHIPS, ids=lambda c: f"{c[0]}.{c[1]}")
def test_every_feature(capability: Capability, dtype: str) -> None:
    """Trees, windows, softcap, sinks and head sizes that need masks, at the sizes models have."""
    for head_dim in (64, 80, 128, 256):
        config = table_rows(head_dim, 2, capability)[0]
        for features in (EVERYTHING, Features(window=True), Features(tree=True), Features(softcap=True, sinks=True)):
            used = compile_attend(capability, dtype, head_dim, config, features)
            assert used.shared <= SHARED_MEMORY[capability]
            assert not used.spills, (head_dim, config, features, used)
        for splits in (2, 64):
            assert not compile_combine(capability, dtype, head_dim, Features(window=True), splits).spills
        assert not compile_write_kv(capability, dtype, head_dim).spills


@pytest.mark.slow
@pytest.mark.parametrize("capability", CHIPS, ids=lambda c: f"{c[0]}.{c[1]}")
def test_float32_fits(capability: Capability) -> None:
    """float32 is for comparisons, not for speed: it must fit, and may spill."""
    for head_dim in (64, 128, 256):
        for config in table_rows(head_dim, 4, capability):
            used = compile_attend(capability, "float32", head_dim, config, Features())
            assert used.shared <= SHARED_MEMORY[capability]
