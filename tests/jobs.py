"""Help for tests of the job: small tables, runs with the stand-in model, and parts read back one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.job.options import EngineContext, JobEvents, JobOptions, JobPlan, JobResult, Target
from specbatch.job.run import run_job
from specbatch.requests import BatchEngine
from specbatch.standin import StandInEngine, StandInSettings, StandInTokenizer

ROOT = Path(__file__).parent.parent
DECODING = ("source", "mode", "steps", "drafted", "accepted", "wasted", "preemptions", "cached_tokens")


class Recorder(JobEvents):
    """Remembers what happened."""

    def __init__(self) -> None:
        self.plans: list[JobPlan] = []
        self.warnings: list[tuple[str, str]] = []
        self.committed: list[int] = []
        self.stages: list[str] = []

    def plan(self, plan: JobPlan) -> None:
        self.plans.append(plan)

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def warning(self, code: str, message: str) -> None:
        self.warnings.append((code, message))

    def shard_committed(self, shard: int, rows: int, errors: int, part: str) -> None:
        self.committed.append(shard)


def write(path: Path, columns: dict[str, Any], row_group_size: int | None = None) -> Path:
    """A Parquet file of these columns (lists or Arrow arrays)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def prompts(count: int, text: str = "prompt number") -> list[str]:
    return [f"{text} {i}" for i in range(count)]


def target(max_model_len: int = 4096, tokenizer: Callable[[], Any] = StandInTokenizer, **fingerprint: str) -> Target:
    return Target("stand-in", max_model_len, {"model": "stand-in", "dtype": "none"} | fingerprint, tokenizer)


class Factory:
    """Makes engines and remembers them: `made` is empty when none was needed."""

    def __init__(
        self, settings: StandInSettings | None = None, make: Callable[[EngineContext], BatchEngine] | None = None
    ) -> None:
        self.made: list[Any] = []
        self.contexts: list[EngineContext] = []
        self._make = make or (lambda context: StandInEngine(settings, max_model_len=4096))

    def __call__(self, context: EngineContext) -> BatchEngine:
        self.contexts.append(context)
        self.made.append(self._make(context))
        return self.made[-1]  # type: ignore[no-any-return]


def run(
    inputs: Path | Sequence[Path],
    output: Path,
    *,
    to: Target | None = None,
    factory: Factory | None = None,
    events: JobEvents | None = None,
    settings: StandInSettings | None = None,
    **options: Any,
) -> JobResult:
    """run_job with the stand-in model in this process."""
    paths = [inputs] if isinstance(inputs, Path) else inputs
    return run_job(
        JobOptions(inputs=tuple(map(str, paths)), output=output, **options),
        target=to or target(),
        make_engine=factory or Factory(settings),
        events=events,
    )


def parts(output: Path) -> list[Path]:
    return sorted(output.glob("part-*"))


def read(output: Path) -> list[dict[str, Any]]:
    """Rows of all parts in order; every part must have the same schema."""
    schemas = {pq.read_schema(path).remove_metadata() for path in parts(output)}
    assert len(schemas) == 1, schemas
    return [row for path in parts(output) for row in pq.ParquetFile(path).read().to_pylist()]


def answers(output: Path) -> list[dict[str, Any]]:
    """Rows without the evidence of how they were decoded, which may differ between runs that give the same answers."""
    return [{name: value for name, value in row.items() if name != "decoding"} for row in read(output)]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "specbatch", "run", *map(str, arguments), "--model", "stand-in"]


def environment(standin: str = "", **more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "SPECBATCH_STANDIN": standin, "OMP_NUM_THREADS": "1"} | more


def start(*arguments: str | Path, standin: str = "", **keywords: Any) -> subprocess.Popen[str]:
    """`specbatch run` as its own process."""
    return subprocess.Popen(
        command(*arguments),
        env=environment(standin),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def finish(process: subprocess.Popen[str], timeout: float = 300) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. The process does not outlive this."""
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process.returncode, out, err
