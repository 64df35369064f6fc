"""Memory of a whole job does not grow with the file: measured in a process of its own with the stand-in model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.jobs import environment, parts

CHILD = """
import json, sys
from pathlib import Path
from tests.jobs import run
import specbatch.job.pipeline  # what is loaded anyway does not count

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024

before = resident("VmRSS")
result = run(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
print(json.dumps({"growth": resident("VmHWM") - before, "rows": result.rows_done, "errors": result.row_errors_by_code}))
"""


def measure(table: Path, output: Path, **options: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(table), str(output), json.dumps(options)],
        env=environment(), stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def long_table(path: Path, rows: int) -> Path:
    """One row group; the column that is only carried along is several times the memory allowed."""
    with pq.ParquetWriter(path, pa.schema([("prompt", pa.string()), ("other", pa.string())])) as writer:
        texts = pa.array([f"prompt {i}" for i in range(rows)])
        other = pa.array(["x" * 300 + str(i) for i in range(rows)])
        writer.write_table(pa.table({"prompt": texts, "other": other}), row_group_size=rows)
    return path


def test_a_long_row_group(tmp_path: Path) -> None:
    found = measure(long_table(tmp_path / "in.parquet", 100_000), tmp_path / "out")
    assert found["rows"] == 100_000
    assert found["growth"] < 180, found


@pytest.mark.slow
def test_a_million_rows_in_one_row_group(tmp_path: Path) -> None:
    found = measure(long_table(tmp_path / "in.parquet", 1_000_000), tmp_path / "out")
    assert found["rows"] == 1_000_000
    assert found["growth"] < 300, found


@pytest.mark.slow
def test_more_than_two_gibibytes_in_one_column_of_a_row_group(tmp_path: Path) -> None:
    rows, cell = 1100, 2_000_000
    table = tmp_path / "in.parquet"
    schema = pa.schema([("prompt", pa.string()), ("wide", pa.large_string())])
    # Pages of 16 MB: a page is decoded whole, and Arrow's writer, left alone, makes one of 1,024 values whatever they weigh.
    with pq.ParquetWriter(table, schema, write_batch_size=8) as writer:
        wide = pa.array((str(i) + "y" * cell for i in range(rows)), pa.large_string())
        prompts = pa.array([f"prompt {i}" for i in range(rows)])
        writer.write_table(pa.table({"prompt": prompts, "wide": wide}), row_group_size=rows)
    found = measure(table, tmp_path / "out", max_row_bytes=1_000_000)
    assert (found["rows"], found["errors"]) == (rows, {})
    assert found["growth"] < 400, found
    assert sum(pq.ParquetFile(part).metadata.num_rows for part in parts(tmp_path / "out")) == rows
    found = measure(table, tmp_path / "big", max_row_bytes=1_000_000, prompt_column="wide", keep_columns=["prompt"])
    assert found["errors"] == {"row_too_large": rows}
    assert found["growth"] < 400, found


@pytest.mark.slow
def test_cells_of_a_hundred_megabytes(tmp_path: Path) -> None:
    table = tmp_path / "in.parquet"
    cells = ["a", "x" * 100_000_000, "b", "y" * 100_000_000, "c"]
    pq.write_table(pa.table({"prompt": cells}), table)
    found = measure(table, tmp_path / "out")
    assert (found["rows"], found["errors"]) == (5, {"row_too_large": 2})
    assert found["growth"] < 1200, found
