"""Prints what the attention kernels take of each chip: shared memory, registers, spills. Needs no GPU.

    python benchmarks/gpu/resources.py [--chips 9.0,12.0] [--dtypes bfloat16,float16] [--processes 2]

Compiles every configuration that can be launched; exits 1 when one does not fit its chip or a kernel spills registers.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from specbatch.attention.triton_aot import Features, Resources, compile_attend, launchable_kernels
from specbatch.attention.triton_configs import SHARED_MEMORY, Capability, KernelConfig

Work = tuple[Capability, str, int, KernelConfig, Features, int]


def compile_one(work: Work) -> Resources | str:
    capability, dtype, head_dim, config, features, block_size = work
    try:
        return compile_attend(capability, dtype, head_dim, config, features, block_size=block_size)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default=",".join(f"{major}.{minor}" for major, minor in SHARED_MEMORY))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    chips = [tuple(int(n) for n in chip.split(".")) for chip in arguments.chips.split(",")]
    work: list[Work] = [
        (chip, dtype, *kernel)  # type: ignore[misc]
        for chip, dtype in product(chips, arguments.dtypes.split(","))
        for kernel in launchable_kernels(chip, dtype)  # type: ignore[arg-type]
    ]
    bad = 0
    columns = ("chip", "dtype", "head", "M", "N", "warps", "stages", "kind", "page", "shared", "limit", "regs", "spill")
    print(("{:>5} {:>9} {:>5}" + " {:>6}" * 10).format(*columns))
    with ProcessPoolExecutor(arguments.processes) as pool:
        for (chip, dtype, head_dim, config, features, block_size), used in zip(
            work, pool.map(compile_one, work), strict=True
        ):
            shape = (config.block_m, config.block_n, config.num_warps, config.num_stages)
            kind = "chunk" if features.search else "decode"
            row = (f"{chip[0]}.{chip[1]}", dtype, head_dim, *shape, kind, block_size)
            limit = SHARED_MEMORY[chip]
            if isinstance(used, str):
                bad += 1
                print(*row, used)
                continue
            bad += used.spills or used.shared > limit
            found = (used.shared, limit, used.registers, used.stack + used.local)
            print(("{:>5} {:>9} {:>5}" + " {:>6}" * 10).format(*row, *found), flush=True)
    print(f"{len(work)} kernels, {bad} that do not fit or spill")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
