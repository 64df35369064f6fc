"""From the start of `specbatch run` to its first written row, beside a bare `import torch`: a timeline, medians in turns.

    python benchmarks/startup.py [--model PATH ...] [--rounds 5] [--cold]

Every round starts one process that only imports torch and one job of one row a model. `--cold`: each job finds nothing
that was measured or proved before (an empty cache folder), as on the day of installation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "examples" / "prompts.parquet"
STAGES = (
    ("interpreter", "spawned", "child"),
    ("command line, plan of the job", "child", "torch"),
    ("import torch", "torch", "torch end"),
    ("import the engine", "torch end", "plan"),
    ("plan: device, dtype, pages", "plan", "plan end"),
    ("load and pack weights", "load", "load end"),
    ("of it: proof by logits", "proof", "proof end"),
    ("make the engine", "load end", "build end"),
    ("step times", "policy", "policy end"),
    ("first row done, written", "policy end", "written"),
)


def child(arguments: list[str]) -> int:
    """Run the command line in this process and print when what happened, seconds of time.monotonic()."""
    marks: dict[str, float] = {"child": time.monotonic()}

    class Watch:
        """Hears of every import first and finds nothing itself."""

        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "torch":
                marks.setdefault("torch", time.monotonic())
            elif "torch" in marks and name.startswith("specbatch."):
                marks.setdefault("torch end", time.monotonic())

    sys.meta_path.insert(0, Watch)  # type: ignore[arg-type]
    from specbatch.cli import main
    from specbatch.job import part_writer

    def timed(owner: Any, name: str, mark: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            marks.setdefault(mark, time.monotonic())
            result = function(*args, **options)
            marks[f"{mark} end"] = time.monotonic()
            return result

        setattr(owner, name, wrapper)

    def on_engine() -> None:
        from specbatch import compose
        from specbatch.engine import packing, parts

        timed(compose, "plan_engine", "plan")
        timed(compose, "build_parts", "build")
        timed(compose, "make_policy", "policy")
        timed(parts, "load_models", "load")
        timed(packing, "is_proved", "proof")

    from specbatch import target

    original = target._on_devices

    def engine(*args: Any) -> Any:
        on_engine()
        return original(*args)

    target._on_devices = engine
    timed(part_writer.ParquetPart, "close", "part")
    code = main(arguments)
    marks["written"] = marks.get("part end", float("nan"))
    marks["transformers"] = float("transformers" in sys.modules)
    print(json.dumps(marks))
    return code


def environment(cache: Path | None = None) -> dict[str, str]:
    """Of the processes: modules are compiled once, as an installation has them."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | ({"XDG_CACHE_HOME": str(cache)} if cache is not None else {})


def bare() -> float:
    """Wall seconds from the start of a process until it has imported torch (not until it has ended)."""
    code = "import torch, time; print(time.monotonic())"
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    return float(done.stdout) - start


def job(model: str | None, cache: Path | None) -> dict[str, float]:
    """Marks of one job, counted from its start."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", "run", str(PROMPTS), "--limit", "1", "-o", f"{folder}/out"]
        command += ["--max-tokens", "16", *(["--model", model] if model else [])]
        start = time.monotonic()
        done = subprocess.run(command, env=environment(cache), capture_output=True, text=True, check=False)
        end = time.monotonic()
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    marks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return marks | {"spawned": start, "ended": end}


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="also this model folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    models: list[str | None] = [None, *options.model]
    cache = Path(tempfile.mkdtemp()) if options.cold else None
    bare(), [job(model, cache) for model in models]  # files into memory, caches filled
    torch, jobs = [], {model: [] for model in models}
    for _ in range(options.rounds):
        torch.append(bare())
        for model in models:
            if cache is not None:
                shutil.rmtree(cache)
            jobs[model].append(job(model, cache))
    if cache is not None:
        shutil.rmtree(cache)
    middle = statistics.median
    print(f"bare import torch: {middle(torch):.2f} s ({min(torch):.2f} to {max(torch):.2f}), {options.rounds} rounds")
    for model, runs in jobs.items():
        print(f"\n{model or 'built-in'}:" + (" transformers was imported" if runs[-1]["transformers"] else ""))
        for name, begin, end in STAGES:
            seconds = [run[end] - run[begin] for run in runs if begin in run and end in run]
            if seconds:
                print(f"  {name:32} {1000 * middle(seconds):6.0f} ms")
        written = [run["written"] - run["spawned"] for run in runs]
        beyond = [w - t for w, t in zip(written, torch, strict=True)]
        print(f"  {'start to first written row':32} {1000 * middle(written):6.0f} ms")
        print(
            f"  {'beyond a bare import torch':32} {1000 * middle(beyond):6.0f} ms ({min(beyond):.2f} to {max(beyond):.2f} s)"
        )
        print(f"  {'to the end of the process':32} {1000 * middle([r['ended'] - r['spawned'] for r in runs]):6.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
