"""What the job layer costs around an engine: rows a second on one core, memory, reuse, and how long an engine waits.

    python benchmarks/job_overhead.py                      # stand-in model, 1,000,000 rows
    python benchmarks/job_overhead.py --model FOLDER --prompts FILE.parquet   # adds a real tokenizer, and a real engine

With a real tokenizer the stand-in engine takes so many rows a second: its idle share says up to what speed of engine the
tokenizer, ahead in its threads, keeps up. Then the real engine's own idle share on the same file.

Every case runs in a process of its own, pinned to one core (not the one with a real model), so that memory and CPU time
are its own. CPU seconds count the stand-in too, which answers at once; its share is printed beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.job.options import EngineFactory

TOKENIZED_ROWS = 2000
ENGINE_RATES = (30, 100)  # rows a second
IDLE = ("engine_seconds", "idle_share")


def make_table(path: Path, rows: int, changed: float, row_group: int) -> None:
    """Short prompts, an id, and a wide column that is only carried along."""
    number = np.arange(rows)
    edited = np.random.default_rng(1).random(rows) < changed
    texts = [f"{'Changed: ' if e else ''}Tell me about number {n} please" for n, e in zip(number, edited, strict=True)]
    with pq.ParquetWriter(
        path, pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("other", pa.string())])
    ) as out:
        for start in range(0, rows, row_group):
            piece = texts[start : start + row_group]
            ids = pa.array(number[start : start + row_group])
            out.write_table(pa.table({"id": ids, "prompt": piece, "other": [f"{'x' * 200}{t}" for t in piece]}))


def resident(name: str) -> int:
    """KiB of this process (getrusage would still show the parent's peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def paced_engine(rows_per_second: int, max_model_len: int) -> EngineFactory:
    """An engine that finishes this many rows a second and leaves the processor alone meanwhile, as one on a GPU does."""
    from specbatch.standin import StandInEngine, StandInSettings

    settings = StandInSettings(capacity=64, delay=64 / rows_per_second)
    return lambda context: StandInEngine(settings, max_model_len=max_model_len)


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one job in this process and say what it took. Called in the child."""
    from specbatch.job.options import JobOptions
    from specbatch.job.run import run_job
    from specbatch.sampling_params import SamplingParams
    from specbatch.target import make_target

    if arguments["model"] is None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        from specbatch.standin import make_stand_in

        target, factory = make_stand_in()
    else:
        from specbatch.engine_options import EngineOptions

        engine = EngineOptions(model=arguments["model"], speculate="off", profile=False)
        target, factory = make_target(engine)
        if rate := arguments.get("engine_rows_per_second"):
            factory = paced_engine(rate, target.max_model_len)
    options = JobOptions(
        inputs=(arguments["table"],),
        output=Path(arguments["output"]),
        reuse=tuple(map(Path, arguments.get("reuse", ()))),
        deduplicate=arguments.get("deduplicate", True),
        sampling=SamplingParams(max_tokens=arguments.get("max_tokens", 128)),
    )
    before = resident("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    result = run_job(options, target=target, make_engine=factory)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "rows": result.rows,
        "rows_computed": result.rows_computed,
        "reused": result.reused,
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "rows_per_cpu_second": round(result.rows / cpu),
        "rows_per_second": round(result.rows / wall),
        "engine_seconds": round(result.engine_busy_seconds, 2),
        "memory_growth_mib": round((resident("VmHWM") - before) / 1024),
        "prompt_tokens_per_second": round(result.prompt_tokens / max(result.generation_seconds, 1e-9)),
        "idle_share": round(1 - result.engine_busy_seconds / max(result.generation_seconds, 1e-9), 4),
    }


def child(**arguments: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps({"model": None} | arguments)],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def show(name: str, figures: dict[str, Any], names: tuple[str, ...]) -> None:
    print(f"{name:44}", "  ".join(f"{key} {figures[key]:,}" for key in names), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", help="folder of a checkpoint for the idle share")
    parser.add_argument("--prompts", help="Parquet file for the idle share")
    parser.add_argument("--max-tokens", type=int, default=16, help="of the real engine: few, which is hard on the job")
    parser.add_argument("--only-real", action="store_true", help="leave out the cases without a real tokenizer")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(json.loads(options.child))))
        return
    work = Path(tempfile.mkdtemp(prefix="job-overhead-"))
    try:
        if not options.only_real:
            stand_in_cases(work, options.rows)
        if options.model and options.prompts:
            real_cases(work, options.model, options.prompts, options.max_tokens)
    finally:
        shutil.rmtree(work)


def stand_in_cases(work: Path, rows: int) -> None:
    """Everything but a tokenizer and a model."""
    speed = ("rows_per_cpu_second", "rows_per_second", "cpu_seconds", "engine_seconds", "memory_growth_mib")
    for name, group in (("row groups of 10,000", 10_000), ("one row group", rows)):
        make_table(work / f"{group}.parquet", rows, 0.0, group)
        figures = child(table=str(work / f"{group}.parquet"), output=str(work / f"out-{group}"))
        show(name, figures, speed)
    make_table(work / "tonight.parquet", rows, 0.02, 10_000)
    figures = child(table=str(work / "tonight.parquet"), output=str(work / "tonight"), reuse=[str(work / "out-10000")])
    show("2 % changed, the rest from last night", figures, ("rows_computed", "reused", *speed))


def real_cases(work: Path, model: str, prompts: str, max_tokens: int) -> None:
    """The tokenizer of `model` before paced engines, on copies of `prompts`; then its own engine on the file as it is."""
    table = pq.read_table(prompts, columns=["prompt"])
    copies = max(1, TOKENIZED_ROWS // table.num_rows)
    pq.write_table(pa.concat_tables([table] * copies), work / "copies.parquet", row_group_size=1000)
    for rate in ENGINE_RATES:
        figures = child(
            table=str(work / "copies.parquet"),
            output=str(work / f"paced-{rate}"),
            model=model,
            engine_rows_per_second=rate,
            deduplicate=False,
        )
        name = f"real tokenizer, engine of {rate:,} rows/s"
        speed = ("rows", "rows_per_second", "rows_per_cpu_second", "prompt_tokens_per_second")
        show(name, figures, (*speed, *IDLE))
    figures = child(table=prompts, output=str(work / "real"), model=model, max_tokens=max_tokens)
    show("real model and tokenizer", figures, ("rows", "wall_seconds", *IDLE))


if __name__ == "__main__":
    main()
