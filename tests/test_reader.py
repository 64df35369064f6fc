"""Inputs as slices: files, globs, partitions, schemas over files, JSON lines."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.errors import InputMissing, OutputMismatch, SchemaError, UsageError
from specbatch.job.inputs import FileState, InputSpec, digests, expand_inputs
from specbatch.job.reader import InputSet
from specbatch.job.shards import Shard, plan_shards
from tests.jobs import run, write


def open_inputs(*patterns: str | Path, output: Path = Path("/nowhere")) -> InputSet:
    specs = expand_inputs([str(p) for p in patterns], output)
    return InputSet(specs, [FileState.of(spec.path) for spec in specs])


def rows_of(inputs: InputSet, names: list[str], target: int = 1000) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for shard in plan_shards(inputs.row_groups, target):
        for piece in inputs.read(shard, names):
            rows.extend(zip(*(piece.columns[name].to_pylist() for name in names), strict=True))
    return rows


class TestExpansion:
    def test_files_globs_and_directories(self, tmp_path: Path) -> None:
        for name in ("b.parquet", "a.parquet", "c.pq", "notes.txt", "_hidden.parquet", ".x.parquet"):
            write(tmp_path / "in" / name, {"prompt": [name]})
        found = [spec.path.name for spec in expand_inputs([str(tmp_path / "in")], tmp_path / "out")]
        assert found == ["a.parquet", "b.parquet", "c.pq"]
        found = [spec.path.name for spec in expand_inputs([str(tmp_path / "in" / "[ab]*.parquet")], tmp_path / "out")]
        assert found == ["a.parquet", "b.parquet"]

    def test_the_output_below_the_input_is_not_read(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {"prompt": ["a"]})
        write(tmp_path / "out" / "part-00000.parquet", {"prompt": ["b"]})
        assert [spec.path.name for spec in expand_inputs([str(tmp_path)], tmp_path / "out")] == ["a.parquet"]

    def test_outputs_of_earlier_runs_are_read_only_when_given(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {"prompt": ["a"]})
        run(tmp_path / "a.parquet", tmp_path / "monday")
        assert [spec.path.name for spec in expand_inputs([str(tmp_path)], tmp_path / "tuesday")] == ["a.parquet"]
        given = expand_inputs([str(tmp_path / "monday")], tmp_path / "tuesday")
        assert [spec.path.name for spec in given] == ["part-00000.parquet"]
        (tmp_path / "a.parquet").unlink()
        with pytest.raises(InputMissing, match="no input") as caught:
            expand_inputs([str(tmp_path)], tmp_path / "tuesday")
        assert "outputs of other runs" in str(caught.value.hint)

    def test_a_name_that_is_no_text(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {"prompt": ["a"]}).rename(tmp_path / "\udcff.parquet")
        with pytest.raises(UsageError, match=r"the name of .*udcff.parquet' is not valid UTF-8"):
            expand_inputs([str(tmp_path)], tmp_path / "out")

    def test_a_directory_that_contains_itself(self, tmp_path: Path) -> None:
        write(tmp_path / "in" / "a.parquet", {"prompt": ["a"]})
        (tmp_path / "in" / "again").symlink_to(".")
        with pytest.raises(UsageError, match="twice"):
            expand_inputs([str(tmp_path / "in")], tmp_path / "out")

    @pytest.mark.parametrize("pattern", ["missing.parquet", "*.parquet", "empty"])
    def test_nothing_there(self, tmp_path: Path, pattern: str) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputMissing, match="no input"):
            expand_inputs([str(tmp_path / pattern)], tmp_path / "out")

    def test_overlapping_patterns(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {"prompt": ["a"]})
        with pytest.raises(UsageError, match="twice"):
            expand_inputs([str(tmp_path), str(tmp_path / "*.parquet")], tmp_path / "out")

    def test_no_regular_file(self) -> None:
        with pytest.raises(UsageError, match="not a regular file"):
            expand_inputs(["/dev/null"], Path("/nowhere"))

    def test_digests_know_the_content_not_the_name(self, tmp_path: Path) -> None:
        one, two, other = (tmp_path / name for name in "abc")
        one.write_bytes(b"same")
        two.write_bytes(b"same")
        other.write_bytes(b"else")
        first, second, third = digests([one, two, other], [None] * 3)
        assert first == second != third
        assert digests([one], ["known"]) == ["known"]


class TestPartitions:
    def test_values_become_columns(self, tmp_path: Path) -> None:
        write(tmp_path / "day=1" / "lang=de" / "a.parquet", {"prompt": ["a"]})
        write(tmp_path / "day=2" / "lang=fr%20x" / "b.parquet", {"prompt": ["b"]})
        write(tmp_path / "day=__HIVE_DEFAULT_PARTITION__" / "lang=en" / "c.parquet", {"prompt": ["c"]})
        inputs = open_inputs(tmp_path)
        assert [(f.name, str(f.type)) for f in inputs.schema] == [
            ("prompt", "string"), ("day", "int64"), ("lang", "string"),
        ]  # fmt: skip
        rows = rows_of(inputs, ["prompt", "day", "lang"])
        assert rows == [("a", 1, "de"), ("b", 2, "fr x"), ("c", None, "en")]

    def test_in_globs(self, tmp_path: Path) -> None:
        for day in (1, 2):
            write(tmp_path / "x=9" / f"day={day}" / "lang=de" / "a.parquet", {"prompt": ["a"]})
        for pattern in ("x=9/day=*/lang=de/*.parquet", "x=9/day=*", "x=9/**/*.parquet"):
            inputs = open_inputs(tmp_path / pattern)
            assert rows_of(inputs, ["day", "lang"]) == [(1, "de"), (2, "de")]
            assert "x" not in inputs.schema.names  # fixed by the one who asks

    def test_leading_zeros_stay_text(self, tmp_path: Path) -> None:
        write(tmp_path / "month=01" / "a.parquet", {"prompt": ["a"]})
        assert rows_of(open_inputs(tmp_path), ["month"]) == [("01",)]

    def test_the_files_own_column_wins(self, tmp_path: Path) -> None:
        write(tmp_path / "day=1" / "a.parquet", {"prompt": ["a"], "day": ["own"]})
        assert rows_of(open_inputs(tmp_path), ["day"]) == [("own",)]


class TestSchemas:
    def test_missing_columns_are_null_and_numbers_widen(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {"prompt": ["a"], "n": pa.array([1], pa.int8())})
        write(tmp_path / "b.parquet", {"prompt": ["b"], "n": pa.array([2.5]), "new": ["x"]})
        write(tmp_path / "c.parquet", {"prompt": pa.array(["c"], pa.large_string())})
        assert rows_of(open_inputs(tmp_path), ["prompt", "n", "new"]) == [
            ("a", 1.0, None), ("b", 2.5, "x"), ("c", None, None),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "kinds",
        [
            (pa.string(), pa.dictionary(pa.int8(), pa.string())),
            (pa.dictionary(pa.int32(), pa.string()), pa.large_string()),
            (pa.string_view(), pa.string(), pa.dictionary(pa.int8(), pa.string())),
            (pa.null(), pa.dictionary(pa.int8(), pa.string()), pa.binary_view()),
        ],
    )
    def test_texts_of_several_types_are_texts(self, tmp_path: Path, kinds: tuple[pa.DataType, ...]) -> None:
        """One file of many has a categorical, as pandas likes to write them."""
        for i, kind in enumerate(kinds):
            texts = pa.nulls(2) if kind == pa.null() else pa.array(["a", "b"]).cast(kind)
            write(tmp_path / f"{i}.parquet", {"prompt": texts})
        found = [row[0] for row in rows_of(open_inputs(tmp_path), ["prompt"])]
        found = [value.decode() if isinstance(value, bytes) else value for value in found]
        assert found == [value for kind in kinds for value in ((None, None) if kind == pa.null() else ("a", "b"))]

    def test_integers_and_decimals(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {"n": pa.array([2**63 - 1])})
        write(tmp_path / "b.parquet", {"n": pa.array([Decimal("1.10")], pa.decimal128(10, 2))})
        found = [row[0] for row in rows_of(open_inputs(tmp_path), ["n"])]
        assert found == [2**63 - 1, Decimal("1.10")]

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (pa.string(), pa.int64()),
            (pa.list_(pa.int64()), pa.int64()),
        ],
    )
    def test_types_without_a_common_one(self, tmp_path: Path, one: pa.DataType, other: pa.DataType) -> None:
        write(tmp_path / "a.parquet", {"prompt": ["a"], "n": pa.nulls(1, one)})
        write(tmp_path / "b.parquet", {"prompt": ["b"], "n": pa.nulls(1, other)})
        with pytest.raises(SchemaError, match="column 'n' is") as caught:
            open_inputs(tmp_path)
        assert "a.parquet" in caught.value.message

    def test_types_that_do_not_fit(self, tmp_path: Path) -> None:
        write(tmp_path / "a.parquet", {"prompt": ["a"], "n": [1]})
        write(tmp_path / "b.parquet", {"prompt": ["b"], "n": ["one"]})
        with pytest.raises(SchemaError, match="'n' is string") as caught:
            open_inputs(tmp_path)
        assert "b.parquet" in caught.value.message

    def test_two_columns_of_one_name(self, tmp_path: Path) -> None:
        pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), tmp_path / "a.parquet")
        with pytest.raises(SchemaError, match="two columns named 'prompt'"):
            open_inputs(tmp_path / "a.parquet")

    def test_thousands_of_columns(self, tmp_path: Path) -> None:
        """What is done a column must not look at all of them: 3,000 took seconds of processor time once."""
        columns = {f"c{i}": [i] for i in range(3000)} | {"prompt": ["p"], "s": [{"a": {"b": 1}}]}
        path = write(tmp_path / "a.parquet", columns)
        before = time.process_time()
        inputs = open_inputs(path)
        assert rows_of(inputs, [f"c{i}" for i in range(3000)]) == [tuple(range(3000))]
        assert rows_of(inputs, ["s"]) == [({"a": {"b": 1}},)]
        assert time.process_time() - before < 1.5

    def test_names_with_dots(self, tmp_path: Path) -> None:
        columns = {"a": [{"b": "nested"}], "a.b": ["flat"], "prompt": ["p"]}
        inputs = open_inputs(write(tmp_path / "a.parquet", columns))
        assert rows_of(inputs, ["a.b"]) == [("flat",)]
        assert rows_of(inputs, ["a"]) == [({"b": "nested"},)]

    def test_pandas_index_metadata_is_dropped(self, tmp_path: Path) -> None:
        table = pa.table({"prompt": ["a"]}).replace_schema_metadata({"pandas": "{}"})
        pq.write_table(table, tmp_path / "a.parquet")
        assert open_inputs(tmp_path / "a.parquet").schema.metadata is None


class TestChanges:
    def test_a_file_that_changes_between_plan_and_read(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"prompt": ["a"]})
        inputs = open_inputs(path)
        write(path, {"prompt": ["a", "b"]})
        with pytest.raises(OutputMismatch, match="changed"):
            list(inputs.read(Shard(0, 0, 0, 1, 0, 1), ["prompt"]))

    def test_a_file_that_is_gone(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"prompt": ["a"]})
        inputs = open_inputs(path)
        path.unlink()
        with pytest.raises(InputMissing, match=r"a\.parquet"):
            list(inputs.read(Shard(0, 0, 0, 1, 0, 1), ["prompt"]))


class TestShards:
    @given(
        groups=st.lists(st.lists(st.integers(0, 20), max_size=8), min_size=1, max_size=5),
        target=st.integers(1, 40),
        limit=st.none() | st.integers(1, 200),
    )
    @settings(max_examples=80, deadline=None)
    def test_every_row_is_in_one_shard(self, groups: list[list[int]], target: int, limit: int | None) -> None:
        shards = plan_shards(groups, target, limit)
        covered = [(shard.file, shard.first_row + i) for shard in shards for i in range(shard.rows)]
        every = [(file, row) for file, sizes in enumerate(groups) for row in range(sum(sizes))]
        assert covered == every[:limit]
        assert [shard.index for shard in shards] == list(range(len(shards)))
        for shard in shards:
            sizes = groups[shard.file][shard.first_group : shard.first_group + shard.num_groups]
            assert sum(groups[shard.file][: shard.first_group]) == shard.first_row
            assert shard.rows <= sum(sizes)
            assert sum(sizes) <= target or sum(size > 0 for size in sizes) <= 1 or shard.rows <= target

    def test_no_rows_make_one_empty_shard(self) -> None:
        assert plan_shards([[], [0, 0]], 10) == [Shard(0, 0, 0, 0, 0, 0)]


class TestJsonLines:
    def test_lines_blocks_and_blanks(self, tmp_path: Path) -> None:
        lines = [json.dumps({"custom_id": f"r{i}", "body": {"prompt": "x" * (i % 7)}}) for i in range(2500)]
        lines[3] = "not json"
        lines[4] = json.dumps({"custom_id": 7})
        path = tmp_path / "in.jsonl"
        path.write_bytes("\n\n".join(lines).encode() + b"\n \n" + b"\xff\xfe")
        inputs = open_inputs(path)
        assert inputs.row_groups == [[1024, 1024, 453]]
        rows = rows_of(inputs, ["custom_id", "request"], target=1024)
        assert [row[1] for row in rows[:-1]] == lines
        assert rows[0][0] == "r0"
        assert (rows[3][0], rows[4][0]) == (None, "7")
        assert rows[-1] == (None, None)  # no UTF-8: nothing that a string column could hold

    def test_kinds_are_not_mixed(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("{}\n")
        write(tmp_path / "b.parquet", {"prompt": ["a"]})
        with pytest.raises(UsageError, match="two kinds"):
            open_inputs(tmp_path / "a.jsonl", tmp_path / "b.parquet")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("\n\n")
        assert open_inputs(tmp_path / "a.jsonl").rows == [0]


def test_columns_that_no_one_asks_for(tmp_path: Path) -> None:
    """Without any column the rows are still counted."""
    inputs = open_inputs(write(tmp_path / "a.parquet", {"prompt": ["a"] * 10_000}, row_group_size=10_000))
    pieces = list(inputs.read(Shard(0, 0, 0, 1, 0, 9000), []))
    assert [piece.rows for piece in pieces] == [8192, 808]
    assert pieces[0].columns == {}


def test_specs_compare_by_path_and_partition(tmp_path: Path) -> None:
    assert InputSpec(tmp_path) == InputSpec(tmp_path)
    assert InputSpec(tmp_path / "a.JSONL").is_jsonl
