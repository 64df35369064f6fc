"""`--show`: finished rows as text."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.job.options import JobOptions
from specbatch.show import first_rows, show_rows
from specbatch.streams import SafeStream


def test_rows_of_all_parts_in_order(tmp_path: Path) -> None:
    for i in range(3):
        pq.write_table(pa.table({"completion": [f"{i}a", f"{i}b"]}), tmp_path / f"part-{i:05d}.parquet")
    assert [r["completion"] for r in first_rows(tmp_path, 5)] == ["0a", "0b", "1a", "1b", "2a"]
    assert len(first_rows(tmp_path, 50)) == 6
    assert first_rows(tmp_path / "nothing", 3) == []


def test_what_a_model_wrote_does_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    text = "red \x1b[31m\x07\nand \x00 \u202e"
    pq.write_table(pa.table({"prompt\x1b": ["p"], "completion": [text]}), tmp_path / "part-00000.parquet")
    file = io.StringIO()
    show_rows(SafeStream(file), JobOptions(inputs=("x",), output=tmp_path), 1)
    shown = file.getvalue()
    assert "completion: red \\x1b[31m\\x07" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_show_prints_rows_to_stderr_and_nothing_to_stdout(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["first one", "second one"]}), tmp_path / "in.parquet")
    command = [sys.executable, "-m", "specbatch", "run", "in.parquet", "--model", "stand-in", "--show", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "prompt: first one" in done.stderr
    assert "completion: " in done.stderr
    assert "second one" not in done.stderr
