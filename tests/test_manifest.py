"""The manifest: what is written comes back, a change is named, and nobody sees half of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specbatch.errors import DiskFull, OutputMismatch
from specbatch.job import durable
from specbatch.job.manifest import (
    InputEntry,
    Manifest,
    PartEntry,
    differing_fields,
    path_of,
    require_same,
)
from specbatch.job.shards import Shard
from tests.jobs import prompts, run, write


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "version": "1", "created": "now", "target": "t", "format": "parquet", "n": 1,
        "fingerprint": {"model": "m", "temperature": 0.0, "stop": ["x"]},
        "columns": {"kept": ["a"]},
        "inputs": [InputEntry("/a", 3, 4, "d", 20)],
        "shards": [Shard(0, 0, 0, 1, 0, 10), Shard(1, 0, 1, 1, 10, 10)],
        "parts": [PartEntry("part-00000.parquet", 10, 99, {"empty_prompt": 2}, modes={"ar": 8}), None],
    }  # fmt: skip
    return Manifest(**(values | changes))


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / "_specbatch").mkdir()
    before = manifest(starts=[{"exit_code": 5}], engine={"device": "cpu"}, resolved={"dtype": "float32"})
    before.save(tmp_path)
    assert Manifest.load(tmp_path) == before
    assert before.rows == 20
    assert not before.complete
    assert before.parts[0] is not None
    assert before.parts[0].errors == 2
    text = path_of(tmp_path).read_text()
    assert len([line for line in text.splitlines() if '"first_group"' in line]) == 2  # one shard a line


def test_none_and_garbage(tmp_path: Path) -> None:
    assert Manifest.load(tmp_path) is None
    (tmp_path / "_specbatch").mkdir()
    for content in ("", "{", "[]", '{"schema_version": 1}', '{"schema_version": 99}'):
        path_of(tmp_path).write_text(content)
        with pytest.raises(OutputMismatch):
            Manifest.load(tmp_path)


def test_a_failed_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_specbatch").mkdir()
    manifest().save(tmp_path)
    before = path_of(tmp_path).read_bytes()

    def full(path: Path) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(durable, "fsync_file", full)
    with pytest.raises(DiskFull, match="No space left"):
        manifest(target="other").save(tmp_path)
    assert path_of(tmp_path).read_bytes() == before
    assert [p.name for p in (tmp_path / "_specbatch").iterdir()] == ["manifest.json"]


def test_differences_are_named_in_the_order_of_this_run() -> None:
    before = {"model": "a", "temperature": 0.0, "old": 1}
    now = {"model": "b", "temperature": 0.0, "new": 2}
    assert differing_fields(before, now) == ["model", "new", "old"]
    assert differing_fields(before, before) == []
    with pytest.raises(OutputMismatch, match=r'another model: "a", now "b" \(and new, old\)') as caught:
        require_same(Path("out"), before, now)
    assert caught.value.field == "model"
    with pytest.raises(OutputMismatch, match="another x: nothing, now 1"):
        require_same(Path("out"), {}, {"x": 1})


def test_other_errors_are_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), durable.writing(tmp_path):
        raise IsADirectoryError(21, "is a directory")


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    table = write(tmp_path / "in.parquet", {"prompt": [*prompts(5), "", None]}, row_group_size=4)
    run(table, tmp_path / "out", shard_rows=4)
    content = json.loads(path_of(tmp_path / "out").read_text())
    assert [(s["first_row"], s["rows"], s["part"]["name"]) for s in content["shards"]] == [
        (0, 4, "part-00000.parquet"),
        (4, 3, "part-00001.parquet"),
    ]
    part = content["shards"][1]["part"]
    assert (part["row_errors"], part["skipped"]) == ({"empty_prompt": 1}, 1)
    assert content["inputs"][0]["rows"] == 7
    assert content["columns"]["prompt"] == "column 'prompt'"
    assert content["starts"][-1]["exit_code"] == 3
    assert content["fingerprint"]["temperature"] == 0.0
