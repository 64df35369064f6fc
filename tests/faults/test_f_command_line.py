"""F5 and F7 from the command line: what cannot be right is refused with exit 2 before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import specbatch.standin
from specbatch.cli import main


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Grows by one each time a model would be loaded."""
    made: list[int] = []
    engine = specbatch.standin.StandInEngine

    def counting(*arguments: object, **options: object) -> object:
        made.append(1)
        return engine(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(specbatch.standin, "StandInEngine", counting)
    monkeypatch.chdir(tmp_path)
    return made


def write(**columns: list[object]) -> None:
    pq.write_table(pa.table(columns), "in.parquet")


def run(*more: str) -> int:
    return main(["run", "in.parquet", "--model", "stand-in", "--progress", "none", *more])


@pytest.mark.parametrize("value", ["0", "-1", "null", "None", "", "1.5", "1e3", "2147483648", "131072"])
def test_f5_a_wrong_max_tokens_is_exit_2(value: str, loads: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    write(prompt=["a"])
    assert run("--max-tokens", value) == 2
    error = capsys.readouterr().err
    assert "error: --max-tokens " in error
    assert loads == []
    assert not Path("in.out").exists()


def test_f5_the_same_from_a_variable_and_a_file(loads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    write(prompt=["a"])
    Path("c.toml").write_text("max-tokens = 0\n")
    assert run("--config", "c.toml") == 2
    monkeypatch.setenv("SPECBATCH_MAX_TOKENS", "-1")
    assert run() == 2
    assert run("--max-tokens", "3") == 0  # and the command line still wins
    assert loads == [1]


def test_f5_a_value_that_fits_is_taken(loads: list[int]) -> None:
    write(prompt=["some prompt"] * 5)
    assert run("--max-tokens", "1") == 0
    assert loads == [1]
    assert pq.read_table("in.out")["completion_tokens"].to_pylist() == [1] * 5


@pytest.mark.parametrize("column", ["completion", "finish_reason", "error", "decoding", "completion_token_ids"])
def test_f7_a_name_the_output_needs_is_refused_before_the_model_loads(
    column: str, loads: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    write(prompt=["a"], **{column: [7]})
    more = ["--output-token-ids"] if column == "completion_token_ids" else []
    assert run(*more) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert repr(column) in error
    assert "--output-prefix" in hint
    assert "--keep-columns" in hint
    assert loads == []
    assert not Path("in.out").exists()


def test_f7_both_ways_out_work(loads: list[int]) -> None:
    write(id=[1], prompt=["a"], completion=["mine"])
    assert run("--output-prefix", "new_", "-o", "one") == 0
    table = pq.read_table("one")
    assert table["completion"].to_pylist() == ["mine"]
    assert "new_completion" in table.column_names
    assert run("--keep-columns", "id", "-o", "two") == 0
    assert pq.read_table("two").column_names[:2] == ["id", "completion"]
    assert len(loads) == 2
