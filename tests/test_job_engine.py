"""The job with the real engine: what the stand-in cannot show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specbatch.engine_options import EngineOptions
from specbatch.errors import ExitCode
from specbatch.job.options import JobOptions
from specbatch.job.run import run_job
from specbatch.sampling_params import SamplingParams
from specbatch.target import make_target
from tests.jobs import answers, prompts, read, write

HOT = SamplingParams(temperature=1.0, max_tokens=12)


def run(model: Path, table: Path, output: Path, *, engine: dict[str, Any] | None = None, **options: Any) -> Any:
    settings = {"dtype": "float32", "profile": False, "kv_memory_bytes": 8 << 20, "block_size": 4} | (engine or {})
    target, factory = make_target(EngineOptions(model=str(model), **settings))
    job = JobOptions(inputs=(str(table),), output=output, **options)
    return run_job(job, target=target, make_engine=factory)


def test_seeds_of_rows_reach_the_sampler(tmp_path: Path, tiny_target: Path) -> None:
    cells = pa.array([{"seed": s} for s in (5, 5, 6, None, None)], pa.struct([("seed", pa.int64())]))
    table = write(tmp_path / "in.parquet", {"prompt": ["the same prompt"] * 5, "p": cells})
    run(tiny_target, table, tmp_path / "out", sampling=HOT, params_column="p")
    texts = [row["completion"] for row in read(tmp_path / "out")]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_answers_do_not_depend_on_the_schedule(tmp_path: Path, tiny_target: Path) -> None:
    table = write(tmp_path / "in.parquet", {"prompt": prompts(24)}, row_group_size=8)
    options: dict[str, Any] = {"sampling": HOT, "n": 2, "shard_rows": 8}
    result = run(tiny_target, table, tmp_path / "a", **options)
    assert (result.exit_code, result.rows_done) == (ExitCode.OK, 24)
    run(tiny_target, table, tmp_path / "b", engine={"max_num_seqs": 3}, **options)
    assert answers(tmp_path / "a") == answers(tmp_path / "b")
    assert all(len(set(row["completion"])) == 2 for row in read(tmp_path / "a"))


def test_reuse_gives_what_a_full_run_gives(tmp_path: Path, tiny_target: Path) -> None:
    old = write(tmp_path / "old.parquet", {"prompt": prompts(20)})
    new = write(tmp_path / "new.parquet", {"prompt": [*prompts(20), "a new one"]})
    greedy = SamplingParams(max_tokens=8)
    run(tiny_target, old, tmp_path / "last", sampling=greedy)
    result = run(tiny_target, new, tmp_path / "tonight", sampling=greedy, reuse=(tmp_path / "last",))
    assert (result.reused, result.rows_computed) == (20, 1)
    run(tiny_target, new, tmp_path / "full", sampling=greedy)
    assert answers(tmp_path / "tonight") == answers(tmp_path / "full")


@pytest.mark.parametrize("grace", [0.0, 5.0])
def test_a_deadline_and_the_rest(tmp_path: Path, tiny_target: Path, grace: float) -> None:
    table = write(tmp_path / "in.parquet", {"prompt": prompts(300)}, row_group_size=50)
    options: dict[str, Any] = {"sampling": SamplingParams(max_tokens=30, ignore_eos=True), "shard_rows": 50}
    result = run(tiny_target, table, tmp_path / "out", max_duration=0.8, grace=grace, **options)
    assert result.exit_code in (ExitCode.DEADLINE, ExitCode.OK)
    result = run(tiny_target, table, tmp_path / "out", **options)
    assert (result.exit_code, result.rows_done) == (ExitCode.OK, 300)
    run(tiny_target, table, tmp_path / "clean", **options)
    assert answers(tmp_path / "out") == answers(tmp_path / "clean")
