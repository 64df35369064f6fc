"""FAULTS G: whatever Parquet and Arrow bring, and whatever the disk does, a part is whole or it is not there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.errors import DiskFull, ExitCode, InputUnreadable, SchemaError
from specbatch.job import durable
from specbatch.job.messages import drop_nulls
from specbatch.standin import StandInTokenizer
from tests.jobs import Factory, finish, parts, prompts, read, run, start, target, write

TEXTS = ["alpha", "beta", None, "alpha", "größe"]


def string_columns() -> dict[str, pa.Array]:
    plain = pa.array(TEXTS)
    return {
        "utf8": plain,
        "large_utf8": plain.cast(pa.large_string()),
        "string_view": plain.cast(pa.string_view()),
        "binary": plain.cast(pa.binary()),
        "large_binary": plain.cast(pa.large_binary()),
        "binary_view": plain.cast(pa.binary_view()),
        "dictionary": plain.dictionary_encode(),
        "dictionary of large_utf8": plain.cast(pa.large_string()).dictionary_encode(),
        "dictionary of binary": plain.cast(pa.binary()).dictionary_encode(),
    }


class TestG11StringTypes:
    @pytest.mark.parametrize("name", string_columns())
    def test_all_read_the_same(self, tmp_path: Path, name: str) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": string_columns()[name]})
        run(table, tmp_path / "out", keep_columns=())
        got = [row["completion"] for row in read(tmp_path / "out")]
        run(write(tmp_path / "plain.parquet", {"prompt": pa.array(TEXTS)}), tmp_path / "plain", keep_columns=())
        assert got == [row["completion"] for row in read(tmp_path / "plain")]
        assert got[2] is None
        run(table, tmp_path / "kept")
        kept = [v.decode() if isinstance(v, bytes) else v for v in (row["prompt"] for row in read(tmp_path / "kept"))]
        assert kept == TEXTS

    def test_all_null(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": pa.nulls(3)})
        result = run(table, tmp_path / "out")
        assert (result.skipped, result.exit_code) == (3, ExitCode.OK)

    @pytest.mark.parametrize("column", [pa.array([1]), pa.array([[1]]), pa.array([{"a": 1}]), pa.array([True])])
    def test_another_type_names_column_and_type(self, tmp_path: Path, column: pa.Array) -> None:
        table = write(tmp_path / "in.parquet", {"q": column})
        factory = Factory()
        with pytest.raises(SchemaError) as caught:
            run(table, tmp_path / "out", factory=factory, prompt_column="q")
        assert "'q'" in caught.value.message
        assert str(pq.read_schema(table).field("q").type) in caught.value.message
        assert factory.made == []


class TestG12OneSchema:
    def test_a_clean_shard_and_one_with_an_error(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a", "b", "", "d"]}, row_group_size=2)
        result = run(table, tmp_path / "out", shard_rows=2)
        assert [pq.ParquetFile(path).metadata.num_rows for path in parts(tmp_path / "out")] == [2, 2]
        assert result.row_errors == 1
        schemas = [pq.read_schema(path).remove_metadata() for path in parts(tmp_path / "out")]
        assert schemas[0] == schemas[1]
        table_back = pq.read_table(tmp_path / "out")  # as one data set
        assert table_back["prompt"].to_pylist() == ["a", "b", "", "d"]


class TestG13Empty:
    def test_no_row_groups(self, tmp_path: Path) -> None:
        schema = pa.schema([("prompt", pa.string()), ("id", pa.int64())])
        pq.ParquetWriter(tmp_path / "in.parquet", schema).close()
        assert pq.ParquetFile(tmp_path / "in.parquet").num_row_groups == 0
        factory = Factory()
        result = run(tmp_path / "in.parquet", tmp_path / "out", factory=factory)
        assert (result.exit_code, result.rows, factory.made) == (ExitCode.OK, 0, [])
        assert pq.read_schema(parts(tmp_path / "out")[0]).names[:3] == ["prompt", "id", "completion"]
        assert (tmp_path / "out" / "_SUCCESS").exists()

    def test_empty_row_groups_between_others(self, tmp_path: Path) -> None:
        schema = pa.schema([("prompt", pa.string())])
        with pq.ParquetWriter(tmp_path / "in.parquet", schema) as writer:
            for texts in ([], ["a"], [], ["b", "c"], []):
                writer.write_table(pa.table({"prompt": pa.array(texts, pa.string())}))
        run(tmp_path / "in.parquet", tmp_path / "out", shard_rows=1)
        assert [row["prompt"] for row in read(tmp_path / "out")] == ["a", "b", "c"]

    def test_an_empty_file_among_others(self, tmp_path: Path) -> None:
        write(tmp_path / "in" / "a.parquet", {"prompt": pa.array([], pa.string())})
        write(tmp_path / "in" / "b.parquet", {"prompt": ["x"]})
        assert run(tmp_path / "in", tmp_path / "out").rows == 1


class TestG15LargeRowGroups:
    def test_only_the_prompt_is_read_for_prompting(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[str]] = []
        real = pq.ParquetFile.iter_batches

        def spy(self: Any, batch_size: int, **keywords: Any) -> Iterator[Any]:
            asked.append([*keywords["columns"], str(batch_size)])
            return real(self, batch_size, **keywords)

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
        table = write(tmp_path / "in.parquet", {"prompt": prompts(20_000), "other": ["x" * 50] * 20_000})
        run(table, tmp_path / "out")
        assert asked == [["prompt", "8192"], ["prompt", "other", "8192"]]

    def test_wide_rows_come_in_small_slices(self, tmp_path: Path) -> None:
        texts = [f"{i}" + "y" * 1_000_000 for i in range(40)]
        table = write(tmp_path / "in.parquet", {"prompt": ["p"] * 40, "wide": texts})
        from specbatch.job.inputs import FileState, InputSpec
        from specbatch.job.reader import InputSet
        from specbatch.job.shards import plan_shards

        inputs = InputSet([InputSpec(table)], [FileState.of(table)])
        (shard,) = plan_shards(inputs.row_groups, 1000)
        sizes = [piece.rows for piece in inputs.read(shard, ["wide"])]
        assert max(sizes) <= 8
        assert sum(sizes) == 40


class TestG16Messages:
    MESSAGES = [  # noqa: RUF012
        [{"role": "user", "content": "hi", "tool_calls": None, "name": None}],
        [{"role": "system", "content": "be brief", "tool_calls": None, "name": None},
         {"role": "user", "content": "hi", "tool_calls": None, "name": "x"}],
        None,
        [],
        [{"role": None, "content": "who", "tool_calls": None, "name": None}],
        [{"role": "robot", "content": "hi", "tool_calls": None, "name": None}],
    ]  # fmt: skip

    def both(self) -> dict[str, pa.Array]:
        item = pa.struct([(name, pa.string()) for name in ("role", "content", "tool_calls", "name")])
        return {
            "struct": pa.array(self.MESSAGES, pa.list_(item)),
            "json": pa.array([None if m is None else json.dumps(m) for m in self.MESSAGES]),
        }

    @pytest.mark.parametrize("form", ["struct", "json"])
    def test_null_fields_are_dropped_and_both_forms_agree(self, tmp_path: Path, form: str) -> None:
        seen: list[Any] = []

        class Watching(StandInTokenizer):
            def render(self, messages: Any) -> str:
                seen.append(messages)
                return super().render(messages)

        table = write(tmp_path / "in.parquet", {"messages": self.both()[form]})
        run(table, tmp_path / "out", to=target(tokenizer=Watching))
        assert seen[0] == [{"role": "user", "content": "hi"}]
        assert seen[1] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi", "name": "x"}]
        codes = [row["error"]["code"] if row["error"] else None for row in read(tmp_path / "out")]
        assert codes == [None, None, None, "empty_prompt", "invalid_messages", "template_error"]
        assert read(tmp_path / "out")[2]["finish_reason"] == "skipped"

    def test_nulls_at_every_depth(self) -> None:
        assert drop_nulls([{"a": None, "b": [{"c": None, "d": [None]}]}]) == [{"b": [{"d": [None]}]}]

    def test_garbage_json_is_a_row_error(self, tmp_path: Path) -> None:
        cells = ["not json", "3", '"text"', "[1]", "[" * 100_000, '[{"role": "user", "content": "\\ud800"}]']
        table = write(tmp_path / "in.parquet", {"messages": cells})
        result = run(table, tmp_path / "out", messages_column="messages")
        assert result.row_errors_by_code == {"invalid_messages": 5, "invalid_utf8": 1}


class TestG17Garbage:
    def test_a_garbage_part_and_leftovers_are_never_trusted(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        table = write(tmp_path / "in.parquet", {"prompt": prompts(6)}, row_group_size=2)
        run(table, out, shard_rows=2)
        expected = read(out)
        parts(out)[1].write_bytes(b"PAR1 this is no parquet file PAR1")
        (out / ".part-00002.parquet.tmp-4711").write_bytes(b"half a part")
        (out / "_specbatch" / "spool" / "part-00001.spool").write_bytes(b"garbage")
        factory = Factory()
        assert run(table, out, factory=factory, shard_rows=2).exit_code == ExitCode.OK
        assert read(out) == expected
        assert factory.contexts[0].rows_left == 2
        assert sorted(path.name for path in out.iterdir()) == [
            "_SUCCESS", "_specbatch", "part-00000.parquet", "part-00001.parquet", "part-00002.parquet",
        ]  # fmt: skip

    def test_a_part_without_a_manifest_entry_is_made_again(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        table = write(tmp_path / "in.parquet", {"prompt": prompts(4)}, row_group_size=2)
        run(table, out, shard_rows=2)
        expected = read(out)
        manifest = json.loads((out / "_specbatch" / "manifest.json").read_text())
        manifest["shards"][0]["part"] = None
        (out / "_specbatch" / "manifest.json").write_text(json.dumps(manifest))
        shutil.copy(parts(out)[1], parts(out)[0])  # a whole part, but not this one
        run(table, out, shard_rows=2)
        assert read(out) == expected

    @pytest.mark.parametrize("damage", ["empty", "text", "truncated", "footer"])
    def test_a_garbage_input_is_named(self, tmp_path: Path, damage: str) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(10)})
        data = table.read_bytes()
        content = {"empty": b"", "text": b"hello" * 100, "truncated": data[:-20], "footer": data[:-8] + b"\xff" * 8}
        table.write_bytes(content[damage])
        with pytest.raises(InputUnreadable, match=r"in\.parquet") as caught:
            run(table, tmp_path / "out")
        assert caught.value.exit_code == ExitCode.USAGE

    def test_one_corrupt_row_group_leaves_the_others_done(self, tmp_path: Path) -> None:
        table = tmp_path / "in.parquet"
        rows = pa.table({"prompt": [f"{i} " + os.urandom(40).hex() for i in range(3000)]})
        pq.write_table(
            rows, table, row_group_size=1000, compression="none", use_dictionary=False, write_page_checksum=True
        )
        chunk = pq.ParquetFile(table).metadata.row_group(1).column(0)
        data = bytearray(table.read_bytes())
        middle = chunk.data_page_offset + chunk.total_compressed_size // 2
        data[middle : middle + 8] = b"\x00" * 8
        table.write_bytes(data)
        result = run(table, tmp_path / "out", shard_rows=1000)
        assert (result.exit_code, result.rows_done) == (ExitCode.USAGE, 2000)
        assert list(result.failed_shards) == [1]
        assert "in.parquet" in result.failed_shards[1]
        assert [path.name for path in parts(tmp_path / "out")] == ["part-00000.parquet", "part-00002.parquet"]
        assert not (tmp_path / "out" / "_SUCCESS").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


class TestG18FullDisk:
    def test_a_full_disk_promotes_nothing_and_a_rerun_goes_on(self, tmp_path: Path, small_disk: Path) -> None:
        noise = np.random.default_rng(0)
        texts = ["".join(map(chr, row)) for row in noise.integers(33, 126, (4000, 500))]
        table = write(tmp_path / "in.parquet", {"prompt": texts}, row_group_size=500)
        out = small_disk / "out"
        code, _, err = finish(start(table, "-o", out, "--shard-rows", "500"))
        assert code == ExitCode.RESOURCE, err
        assert "No space left on device" in err
        assert "Traceback" not in err
        assert not (out / "_SUCCESS").exists()
        for path in parts(out):
            assert pq.ParquetFile(path).metadata.num_rows == 500  # whole, or not there
        assert len(parts(out)) < 8
        subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
        code, _, err = finish(start(table, "-o", out, "--shard-rows", "500"))
        assert code == ExitCode.OK, err
        assert [row["prompt"] for row in read(out)] == texts

    def test_a_read_only_directory(self, tmp_path: Path, small_disk: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a"]})
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        code, _, err = finish(start(table, "-o", small_disk / "out"))
        assert code == ExitCode.RESOURCE, err
        assert "Read-only file system" in err
        assert "Traceback" not in err

    @pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
    def test_each_step_of_a_commit_may_fail(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
    ) -> None:
        """The second part meets a full disk in one of its steps: it is not promoted, and a rerun makes it."""
        import errno

        from specbatch.job import part_writer

        out = tmp_path / "out"
        table = write(tmp_path / "in.parquet", {"prompt": prompts(6)}, row_group_size=2)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def raising(*arguments: Any, **keywords: Any) -> None:
            raise full

        with monkeypatch.context() as patch:
            if failing == "write":
                real = part_writer.ParquetPart._write_group

                def write_group(self: Any) -> None:
                    if "00001" in self.path.name:
                        with durable.writing(self.path):
                            raise full
                    real(self)

                patch.setattr(part_writer.ParquetPart, "_write_group", write_group)
            else:
                name = {"fsync": "fsync_file", "rename": "fsync_directory"}[failing]
                real_step = getattr(durable, name)
                promoted: list[Path] = []

                def step(path: Path) -> None:
                    if "part-00001" in path.name or (failing == "rename" and path == out and len(promoted) == 1):
                        raise full
                    if path == out:
                        promoted.append(path)
                    real_step(path)

                patch.setattr(durable, name, step)
            with pytest.raises(DiskFull) as caught:
                run(table, out, shard_rows=2)
            assert caught.value.exit_code == ExitCode.RESOURCE
        manifest = json.loads((out / "_specbatch" / "manifest.json").read_text())
        assert manifest["shards"][1]["part"] is None
        assert not list(out.glob(".*tmp*"))
        run(table, out, shard_rows=2)
        assert [row["prompt"] for row in read(out)] == prompts(6)

    def test_summary_to_a_full_device(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a"]})
        with open("/dev/full", "w") as full:
            from tests.jobs import command, environment

            done = subprocess.run(
                [*command(table, "-o", tmp_path / "out"), "--json"],
                env=environment(),
                stdout=full,
                stderr=subprocess.PIPE,
                timeout=60,
                check=False,
            )
        assert (tmp_path / "out" / "_SUCCESS").exists()  # the table is whole whatever happens to the summary
        assert b"Traceback" not in done.stderr
        assert done.returncode in (ExitCode.OK, ExitCode.RESOURCE)
