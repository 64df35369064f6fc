"""J39 for every command: stdout that is full, closed or left; outputs that may be read but not written, or neither."""

from __future__ import annotations

import contextlib
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch.cli import main
from specbatch.errors import ExitCode, ResourceError
from tests.jobs import Recorder, parts, prompts, read, run, write

COMMANDS = [
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["run", "in.parquet", "--print-config"],
    ["run", "in.parquet", "--print-config", "--json"],
    ["run", "in.parquet", "--model", "stand-in", "--dry-run"],
    ["run", "in.parquet", "--model", "stand-in", "--dry-run", "--json"],
    ["run", "in.parquet", "--model", "stand-in", "--json"],
    ["inspect", "in.out"],
    ["inspect", "in.out", "--json"],
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in.parquet"), {"prompt": prompts(3)})
    assert main(["run", "in.parquet", "--model", "stand-in", "--progress", "none"]) == ExitCode.OK


@contextlib.contextmanager
def stdout_is(kind: str) -> Iterator[None]:
    """A stdout that takes nothing: it is full, closed, or its reader has gone."""
    stream: Any = None
    if kind == "full":
        stream = open("/dev/full", "w")  # noqa: SIM115 - closed below
    elif kind == "left":
        reader, writer = os.pipe()
        os.close(reader)
        stream = open(writer, "w")  # noqa: SIM115
    real, sys.stdout = sys.stdout, stream
    try:
        yield
    finally:
        sys.stdout = real
        if stream is not None:
            stream.close()


@pytest.mark.parametrize("kind", ["full", "closed", "left"])
def test_what_was_asked_for_and_cannot_be_written_is_no_success(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader that has gone wants nothing any more: that is no failure."""
    for arguments in COMMANDS:
        with stdout_is(kind):
            code = main(arguments)
        shown = capsys.readouterr().err
        assert code == (ExitCode.OK if kind == "left" else ExitCode.RESOURCE), (arguments, shown)
        assert ("cannot write to stdout" in shown) == (kind != "left"), (arguments, shown)
        assert "Traceback" not in shown, arguments


def test_print_config_is_a_file_also_where_only_ascii_can_be_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    template = "größe — \U0001f600: {prompt}"
    assert main(["run", "in.parquet", "--template", template, "--print-config"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert tomllib.loads(shown)["template"] == template


def test_a_dry_run_leaves_the_metrics_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "gone.parquet", "--model", "stand-in", "--dry-run", "--metrics-file", "x.prom"]) == 10
    assert not Path("x.prom").exists()


def test_a_finished_output_is_not_written_to(tmp_path: Path) -> None:
    marker = tmp_path / "in.out" / "_SUCCESS"
    before = marker.stat().st_mtime_ns, marker.stat().st_ino
    assert main(["run", "in.parquet", "--model", "stand-in", "--progress", "none"]) == ExitCode.OK
    assert (marker.stat().st_mtime_ns, marker.stat().st_ino) == before


def forbid(monkeypatch: pytest.MonkeyPatch, path: Path, *, module: Any = os, name: str = "open") -> None:
    """Opening `path` fails as on a disk that does not answer (permissions would not stop root)."""
    real = getattr(module, name)

    def guarded(target: Any, *arguments: Any, **keywords: Any) -> Any:
        if str(target) == str(path):
            raise OSError(5, os.strerror(5), str(path))
        return real(target, *arguments, **keywords)

    monkeypatch.setattr(module, name, guarded)


def test_a_part_that_cannot_be_read_now_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "in.parquet", tmp_path / "out")
    before = parts(tmp_path / "out")[0].stat().st_ino
    with monkeypatch.context() as patch:
        forbid(patch, parts(tmp_path / "out")[0])
        with pytest.raises(ResourceError, match=r"cannot read .*part-00000.parquet: Input/output error"):
            run(tmp_path / "in.parquet", tmp_path / "out")
    assert run(tmp_path / "in.parquet", tmp_path / "out").rows_this_start == 0
    assert parts(tmp_path / "out")[0].stat().st_ino == before


def test_earlier_answers_that_cannot_be_read_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "in.parquet", tmp_path / "monday")
    forbid(monkeypatch, tmp_path / "monday" / "_specbatch" / "manifest.json", module=Path, name="read_bytes")
    events = Recorder()
    result = run(tmp_path / "in.parquet", tmp_path / "tuesday", reuse=(tmp_path / "monday",), events=events)
    assert (result.exit_code, result.reused, len(read(tmp_path / "tuesday"))) == (ExitCode.OK, 0, 3)
    assert [code for code, message in events.warnings if "Input/output error; nothing is taken" in message] == ["reuse"]
