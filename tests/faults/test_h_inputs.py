"""FAULTS H22 for inputs: what was edited, added or only moved between two starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specbatch.errors import ExitCode, OutputMismatch
from tests.jobs import prompts, run, write


class TestBetweenTwoStarts:
    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        path = write(tmp_path / "in.parquet", {"prompt": prompts(4), "title": prompts(4, "title")})
        run(path, tmp_path / "out", template="{prompt}")
        return path

    def test_an_edited_input(self, tmp_path: Path, table: Path) -> None:
        write(table, {"prompt": [*prompts(3), "prompt number x"], "title": prompts(4, "title")})
        with pytest.raises(OutputMismatch, match=r"in\.parquet was edited") as caught:
            run(table, tmp_path / "out", template="{prompt}")
        assert caught.value.field == "inputs"

    def test_an_edited_input_is_named_also_where_its_columns_changed(self, tmp_path: Path, table: Path) -> None:
        write(table, {"prompt": prompts(4), "title": prompts(4, "title"), "extra": prompts(4)})
        with pytest.raises(OutputMismatch, match=r"in\.parquet was edited"):
            run(table, tmp_path / "out", template="{prompt}")

    def test_of_lists_only_the_difference_is_shown(self, tmp_path: Path, table: Path) -> None:
        with pytest.raises(OutputMismatch, match=r"with other columns: prompt: string is gone$"):
            run(table, tmp_path / "out", template="{prompt}", keep_columns=("title",))
        with pytest.raises(OutputMismatch, match=r"with other columns: their order was another$"):
            run(table, tmp_path / "out", template="{prompt}", keep_columns=("title", "prompt"))

    def test_one_input_more(self, tmp_path: Path, table: Path) -> None:
        more = write(tmp_path / "more.parquet", {"prompt": ["a"], "title": ["b"]})
        with pytest.raises(OutputMismatch, match="1 input files, now there are 2"):
            run([table, more], tmp_path / "out", template="{prompt}")

    def test_a_moved_or_touched_input_is_the_same(self, tmp_path: Path, table: Path) -> None:
        moved = tmp_path / "elsewhere.parquet"
        table.rename(moved)
        os.utime(moved, ns=(1, 1))
        assert run(moved, tmp_path / "out", template="{prompt}").exit_code == ExitCode.OK
