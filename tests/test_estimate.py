"""`--dry-run`: what is counted, also of tables without anything to count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specbatch.dry_run import report_lines
from specbatch.job.estimate import Estimate, estimate
from specbatch.job.options import JobOptions
from specbatch.sampling_params import SamplingParams
from tests.jobs import prompts, run, target, write


def look(table: Path, **options: Any) -> Estimate:
    defaults = {"sampling": SamplingParams(max_tokens=10)}
    return estimate(JobOptions(inputs=(str(table),), output=table.parent / "out", **defaults | options), target(100))


@pytest.mark.parametrize("column", [pa.array([], pa.string()), pa.nulls(3, pa.string()), pa.array(["", " "])])
def test_a_table_without_a_prompt(tmp_path: Path, column: pa.Array) -> None:
    found = look(write(tmp_path / "in.parquet", {"prompt": column}))
    assert (found.prompt_tokens, found.prompt_tokens_max, found.histogram) == (0, 0, [])
    assert found.completion_tokens_at_most == 0
    assert len(report_lines(found, "m")) == 6


@pytest.mark.parametrize(
    ("policy", "errors", "skipped", "answered"),
    [("error", 1, 0, 2), ("skip", 0, 1, 2), ("truncate-left", 0, 0, 3), ("truncate-right", 0, 0, 3)],
)
def test_over_long_rows_are_counted_whatever_becomes_of_them(
    tmp_path: Path, policy: Any, errors: int, skipped: int, answered: int
) -> None:

    table = write(tmp_path / "in.parquet", {"prompt": ["a", "x" * 500, "bb"]})
    found = look(table, overlong=policy)
    assert found.overlong == 1
    assert (found.row_errors, found.skipped) == ({"prompt_too_long": 1} if errors else {}, skipped)
    assert found.completion_tokens_at_most == 10 * answered
    assert found.prompt_tokens_max == 500
    assert any("1 too long for the context" in line for line in report_lines(found, "m"))
    result = run(table, tmp_path / "out", to=target(100), overlong=policy, sampling=SamplingParams(max_tokens=10))
    assert (result.row_errors, result.skipped) == (errors, skipped)


def test_counts_are_those_of_the_run(tmp_path: Path) -> None:
    table = write(tmp_path / "in.parquet", {"prompt": [*prompts(50), None, ""]})

    found = look(table, sampling=SamplingParams(max_tokens=20))
    result = run(table, tmp_path / "out", to=target(100), sampling=SamplingParams(max_tokens=20))
    assert (found.rows, found.skipped, sum(found.row_errors.values())) == (result.rows, result.skipped, 1)
    assert found.prompt_tokens == result.total_prompt_tokens
    assert found.completion_tokens_at_most >= result.completion_tokens
    assert sum(count for _, _, count in found.histogram) == 50
    again = look(table, sampling=SamplingParams(max_tokens=20))
    assert again.rows_done == 52
    assert again.tokens_per_second is not None
