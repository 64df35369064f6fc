"""`specbatch.run` from Python."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import specbatch
from specbatch.errors import UsageError


def table(path: Path, rows: int = 5) -> Path:
    pq.write_table(pa.table({"prompt": [f"say {i}" for i in range(rows)]}), path)
    return path


def test_run_does_the_job_and_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = specbatch.run(
        table(tmp_path / "in.parquet"), output=tmp_path / "out", model="stand-in", max_tokens=6, progress=True
    )
    assert result.exit_code == 0
    assert result.rows_done == 5
    assert result.completion_tokens <= 30
    assert pq.read_table(tmp_path / "out" / "part-00000.parquet").num_rows == 5
    out, err = capfd.readouterr()
    assert out == ""
    assert "specbatch" in err


def test_a_wrong_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max-tokens"):
        specbatch.run(table(tmp_path / "in.parquet"), output=tmp_path / "out", model="stand-in", max_tokens=0)
    with pytest.raises(UsageError, match="max-tokns"):
        specbatch.run(table(tmp_path / "in.parquet"), output=tmp_path / "out", model="stand-in", max_tokns=3)
