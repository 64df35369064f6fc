"""FAULTS F: every kind of bad row is a row error of its own, and no row moves or disappears."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from specbatch.errors import ROW_ERROR_CODES, ExitCode, SchemaError, UsageError
from specbatch.job.driver import EngineDriver
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams
from specbatch.standin import StandInEngine, StandInSettings, StandInTokenizer
from tests.jobs import Factory, prompts, read, run, target, write


def codes(output: Path) -> list[str | None]:
    found = [row["error"]["code"] if row["error"] else None for row in read(output)]
    assert set(found) <= {None, *ROW_ERROR_CODES}
    return found


class TestF1Overlong:
    def test_the_long_row_is_an_error_with_the_numbers(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["short", "x" * 40_960, "also short"]})
        result = run(table, tmp_path / "out")
        rows = read(tmp_path / "out")
        assert result.exit_code == ExitCode.ROW_ERRORS
        assert result.row_errors_by_code == {"prompt_too_long": 1}
        assert [row["finish_reason"] for row in rows] == ["stop", "error", "stop"]
        assert rows[1]["completion"] is None
        assert "40960" in rows[1]["error"]["message"]
        assert "4096" in rows[1]["error"]["message"]
        assert rows[1]["prompt_tokens"] == 40_960

    @pytest.mark.parametrize(("policy", "seen"), [("truncate-left", "tail"), ("truncate-right", "head")])
    def test_truncation_leaves_room_for_the_answer(self, tmp_path: Path, policy: str, seen: str) -> None:
        long = "head" + "x" * 5000 + "tail"
        table = write(tmp_path / "in.parquet", {"prompt": ["short", long]})
        factory = Factory(make=lambda context: _Remembering())
        result = run(table, tmp_path / "out", factory=factory, overlong=policy)
        assert result.exit_code == ExitCode.OK
        assert read(tmp_path / "out")[1]["prompt_tokens"] == 4096 - 128
        prompt = max(factory.made[0].seen, key=len)
        assert len(prompt) == 4096 - 128
        assert prompt.startswith(b"head") == (seen == "head")
        assert prompt.endswith(b"tail") == (seen == "tail")

    def test_skip_is_no_error(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["short", "x" * 5000]})
        result = run(table, tmp_path / "out", overlong="skip")
        assert (result.exit_code, result.skipped) == (ExitCode.OK, 1)
        row = read(tmp_path / "out")[1]
        assert (row["finish_reason"], row["completion"], row["error"], row["prompt_tokens"]) == (
            "skipped", None, None, 5000,
        )  # fmt: skip


class _Remembering(StandInEngine):
    """Keeps the prompts it got."""

    def __init__(self) -> None:
        super().__init__(max_model_len=4096)
        self.seen: list[bytes] = []

    def add(self, batch: RequestBatch) -> None:
        offsets = batch.prompt_offsets.tolist()
        for begin, end in itertools.pairwise(offsets):
            self.seen.append(batch.prompt_values[begin:end].astype(np.uint8).tobytes())
        super().add(batch)


class TestF2NullAndEmpty:
    def test_null_is_skipped_and_empty_is_an_error(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a", None, "", "  ", "\n\t", "b"]})
        result = run(table, tmp_path / "out")
        assert codes(tmp_path / "out") == [None, None, "empty_prompt", "empty_prompt", "empty_prompt", None]
        reasons = [row["finish_reason"] for row in read(tmp_path / "out")]
        assert reasons == ["stop", "skipped", "error", "error", "error", "stop"]
        assert (result.skipped, result.row_errors, result.exit_code) == (1, 3, ExitCode.ROW_ERRORS)

    def test_a_shard_of_only_such_rows_commits_without_an_engine(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": [None, "", "  "]})
        factory = Factory()
        result = run(table, tmp_path / "out", factory=factory)
        assert factory.made == []
        assert (result.rows_done, result.shards_done) == (3, 1)
        assert (tmp_path / "out" / "_SUCCESS").exists()

    def test_a_tokenizer_that_makes_no_token_of_a_text(self, tmp_path: Path) -> None:
        class Deaf(StandInTokenizer):
            encode_utf8 = None  # type: ignore[assignment]

            def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> Any:
                return super().encode(["" if text == "deaf" else text for text in texts], add_special_tokens=True)

        table = write(tmp_path / "in.parquet", {"prompt": ["a", "deaf", "b"]})
        run(table, tmp_path / "out", to=target(tokenizer=Deaf))
        assert codes(tmp_path / "out") == [None, "empty_prompt", None]

    def test_a_tokenizer_that_raises_on_one_text(self, tmp_path: Path) -> None:
        class Picky(StandInTokenizer):
            encode_utf8 = None  # type: ignore[assignment]

            def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> Any:
                if "poison" in texts:
                    raise RuntimeError("cannot")
                return super().encode(texts, add_special_tokens=add_special_tokens)

        table = write(tmp_path / "in.parquet", {"prompt": ["a", "poison", "b"]})
        run(table, tmp_path / "out", to=target(tokenizer=Picky))
        assert codes(tmp_path / "out") == [None, "tokenizer_error", None]


class TestF3MissingValuesInTemplates:
    def test_never_the_text_nan_or_none(self, tmp_path: Path) -> None:
        columns = {
            "title": ["one", None, "three", "four"],
            "score": pa.array([1.5, 2.0, float("nan"), None], pa.float64()),
        }
        table = write(tmp_path / "in.parquet", columns)
        factory = Factory(make=lambda context: _Remembering())
        result = run(table, tmp_path / "out", factory=factory, template="{title}: {score}!")
        assert codes(tmp_path / "out") == [None] + ["template_value_missing"] * 3
        assert "'score'" in read(tmp_path / "out")[2]["error"]["message"]
        assert factory.made[0].seen == [b"one: 1.5!"]
        assert result.row_errors == 3

    def test_other_types_and_braces(self, tmp_path: Path) -> None:
        columns = {"n": [7], "ok": [True], "body": pa.array(["text"]).dictionary_encode()}
        factory = Factory(make=lambda context: _Remembering())
        table = write(tmp_path / "in.parquet", columns)
        run(table, tmp_path / "out", factory=factory, template="{{{n}}} {ok} {body}")
        assert factory.made[0].seen == [b"{7} true text"]

    @pytest.mark.parametrize(
        "template", ["no column", "{missing}", "{prompt!r}", "{prompt:>10}", "{prompt", "{nested}"]
    )
    def test_a_template_that_cannot_work_is_refused(self, tmp_path: Path, template: str) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a"], "nested": [[1]]})
        with pytest.raises(UsageError):
            run(table, tmp_path / "out", template=template)
        assert not (tmp_path / "out").exists()


class TestF5Parameters:
    def column(self) -> pa.Array:
        values = [1, 0, -1, None, 5000]
        return pa.array([{"max_tokens": v} for v in values], pa.struct([("max_tokens", pa.int64())]))

    def test_in_a_struct_column(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(5), "params": self.column()})
        run(table, tmp_path / "out", params_column="params")
        assert codes(tmp_path / "out") == [None, "invalid_parameters", "invalid_parameters", None, "invalid_parameters"]
        rows = read(tmp_path / "out")
        assert rows[0]["completion_tokens"] == 1
        assert re.search("max_tokens .*at least 1, got 0", rows[1]["error"]["message"])
        assert "5000" in rows[4]["error"]["message"]
        assert "4096" in rows[4]["error"]["message"]

    def test_in_a_json_column(self, tmp_path: Path) -> None:
        cells = ['{"max_tokens": 1}', None, "", "{}", "not json", "[1]", '{"temperatur": 1}', '{"temperature": -1}',
                 '{"stop": "x", "seed": 7}', '{"max_tokens": "5"}', '{"max_tokens": 5.0}', '{"seed": -3}']  # fmt: skip
        table = write(tmp_path / "in.parquet", {"prompt": prompts(len(cells)), "params": cells})
        run(table, tmp_path / "out", params_column="params")
        bad = "invalid_parameters"
        assert codes(tmp_path / "out") == [None] * 4 + [bad] * 4 + [None, bad, None, bad]

    def test_nan_from_pandas_is_no_value(self, tmp_path: Path) -> None:
        column = pa.array(
            [{"max_tokens": float("nan")}, {"max_tokens": 3.0}], pa.struct([("max_tokens", pa.float64())])
        )
        table = write(tmp_path / "in.parquet", {"prompt": prompts(2), "params": column})
        assert run(table, tmp_path / "out", params_column="params").exit_code == ExitCode.OK

    def test_the_same_from_the_command_line_is_usage(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"max_tokens .*at least 1"):
            SamplingParams(max_tokens=0)
        table = write(tmp_path / "in.parquet", {"prompt": ["a"]})
        with pytest.raises(UsageError, match="4096") as caught:
            run(table, tmp_path / "out", sampling=SamplingParams(max_tokens=4096))
        assert caught.value.exit_code == ExitCode.USAGE

    @pytest.mark.parametrize("column", [pa.array([{"top": 1}]), pa.array([3]), pa.array([[1]])])
    def test_a_column_that_cannot_hold_parameters_is_refused(self, tmp_path: Path, column: pa.Array) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a"], "params": column})
        with pytest.raises(SchemaError, match="params"):
            run(table, tmp_path / "out", params_column="params")


class TestF6Identity:
    def test_equal_ids_in_one_file_and_in_two(self, tmp_path: Path) -> None:
        one = write(tmp_path / "a.parquet", {"id": ["x", "x", "y"], "prompt": ["a0", "a1", "a2"]})
        two = write(tmp_path / "b.parquet", {"id": ["x", "x", "y"], "prompt": ["b0", "b1", "b2"]})
        run([one, two], tmp_path / "out")
        both = read(tmp_path / "out")
        assert [row["prompt"] for row in both] == ["a0", "a1", "a2", "b0", "b1", "b2"]
        for name in ("a", "b"):
            run(tmp_path / f"{name}.parquet", tmp_path / name)
        alone = read(tmp_path / "a") + read(tmp_path / "b")
        assert [row["completion"] for row in both] == [row["completion"] for row in alone]

    def test_the_same_file_twice_is_refused(self, tmp_path: Path) -> None:
        one = write(tmp_path / "a.parquet", {"prompt": ["a"]})
        with pytest.raises(UsageError, match="twice"):
            run([one, one], tmp_path / "out")


class TestF7NameCollision:
    def test_refused_before_the_model_loads_naming_the_options(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a"], "completion": ["old"]})
        factory = Factory()
        with pytest.raises(SchemaError, match="'completion'") as caught:
            run(table, tmp_path / "out", factory=factory)
        assert caught.value.exit_code == ExitCode.USAGE
        assert "--output-prefix" in str(caught.value.hint)
        assert "--keep-columns" in str(caught.value.hint)
        assert factory.made == []

    def test_both_ways_out(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a"], "completion": ["old"]})
        run(table, tmp_path / "one", output_prefix="new_")
        row = read(tmp_path / "one")[0]
        assert row["completion"] == "old"
        assert row["new_completion"] is not None
        run(table, tmp_path / "two", keep_columns=("prompt",))
        assert read(tmp_path / "two")[0]["completion"] != "old"


class TestF8Exceptions:
    """A step that raises in the middle of a batch."""

    @pytest.mark.parametrize("settings", [StandInSettings(raise_once=2, capacity=7), StandInSettings(raise_once=1)])
    def test_a_passing_fault_costs_no_row(self, tmp_path: Path, settings: StandInSettings) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(40)}, row_group_size=10)
        result = run(table, tmp_path / "out", settings=settings, shard_rows=10)
        run(table, tmp_path / "clean", shard_rows=10)
        assert result.exit_code == ExitCode.OK
        assert [r["completion"] for r in read(tmp_path / "out")] == [r["completion"] for r in read(tmp_path / "clean")]

    def test_a_poison_row_ends_alone(self, tmp_path: Path) -> None:
        texts = prompts(50)
        texts[17] = "this is poison"
        table = write(tmp_path / "in.parquet", {"prompt": texts})
        result = run(table, tmp_path / "out", settings=StandInSettings(raise_on="poison", capacity=8))
        assert result.row_errors_by_code == {"engine_error": 1}
        rows = read(tmp_path / "out")
        assert [i for i, row in enumerate(rows) if row["error"]] == [17]
        assert [row["prompt"] for row in rows] == texts

    def test_an_engine_that_always_raises_ends_the_job(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(100, "poison")})
        with pytest.raises(RuntimeError, match="poison"):
            run(table, tmp_path / "out", settings=StandInSettings(raise_on="poison"))

    def test_the_check_sees_a_lost_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Negative control: a driver that forgets its rows after an exception must not end with success."""
        monkeypatch.setattr(EngineDriver, "_isolate", lambda self, extra, error, halve: self.engine.abort_all())
        table = write(tmp_path / "in.parquet", {"prompt": prompts(40)})
        result = run(table, tmp_path / "out", settings=StandInSettings(raise_once=2, capacity=7))
        assert result.row_errors_by_code["engine_error"] > 0


class TestF9FirstTokenIsTheEnd:
    def test_empty_completion_is_not_null(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(200)})
        run(table, tmp_path / "out")
        empty = [row for row in read(tmp_path / "out") if row["completion"] == ""]
        assert empty, "the stand-in gives an empty answer to one prompt in 25"
        assert {(row["finish_reason"], row["completion_tokens"], row["error"]) for row in empty} == {("stop", 1, None)}


class TestLargeCells:
    def test_row_above_max_row_bytes(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a", "x" * 3000, "b"]})
        result = run(table, tmp_path / "out", max_row_bytes=2000)
        assert result.row_errors_by_code == {"row_too_large": 1}
        row = read(tmp_path / "out")[1]
        assert "3000" in row["error"]["message"]
        assert "2000" in row["error"]["message"]
        assert row["prompt"] == "x" * 3000

    def test_invalid_utf8(self, tmp_path: Path) -> None:
        raw = pa.array([b"good", b"\xff\xfe", None, b"fine"])
        strings = pa.Array.from_buffers(pa.string(), 4, raw.buffers())  # what other writers put into string columns
        for name, column in (("binary", raw), ("string", strings)):
            table = write(tmp_path / f"{name}.parquet", {"prompt": column})
            run(table, tmp_path / name, keep_columns=())
            assert codes(tmp_path / name) == [None, "invalid_utf8", None, None]
