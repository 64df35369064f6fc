"""J38, J39: what a run writes to a log, a terminal, a pipe or nowhere; real processes, a stand-in for the model."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.cli import main

ROOT = Path(__file__).parent.parent.parent
CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
SLOW = "capacity=10,delay=0.1"
ROWS = 60


def environment(**changes: str) -> dict[str, str]:
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "TERM": "xterm-256color"}
    return base | changes


def arguments(folder: Path, *more: str) -> list[str]:
    path = folder / "prompts.parquet"
    if not path.exists():
        table = pa.table({"id": range(ROWS), "prompt": [f"prompt number {i}" for i in range(ROWS)]})
        pq.write_table(table, path, row_group_size=20)
    command = [sys.executable, "-m", "specbatch", "run", "prompts.parquet", "--model", "stand-in", "--shard-rows", "20"]
    return [*command, *more]


def finished(folder: Path) -> None:
    """The whole table is there."""
    output = folder / "prompts.out"
    assert (output / "_SUCCESS").exists()
    assert pq.read_table(output).num_rows == ROWS


def run(folder: Path, *more: str, environ: Mapping[str, str] | None = None, **streams: Any) -> Any:
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    environ = environment() if environ is None else environ
    return subprocess.run(arguments(folder, *more), cwd=folder, env=environ, check=False, timeout=180, **options)


def again(folder: Path, *more: str) -> int:
    """The same command in this process."""
    command = arguments(folder, *more)[3:]
    return main([command[0], str(folder / command[1]), *command[2:]])


def test_j38_a_log_file_gets_plain_lines_one_an_interval(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        done = run(
            tmp_path,
            "--log-interval",
            "0.2s",
            environ=environment(SPECBATCH_STANDIN=SLOW),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    assert done.returncode == 0
    text = log.read_bytes()
    assert not CONTROL.search(text)
    lines = text.decode().splitlines()
    progress = [line for line in lines if " elapsed, " in line]
    assert 2 <= len(progress) <= 8
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines[:-1])
    assert re.fullmatch(r"done: 60 of 60 rows in prompts\.out, .* \[exit 0\]", lines[-1])
    assert max(map(len, lines)) < 250
    finished(tmp_path)


def test_j39_a_bare_environment_gets_ascii(tmp_path: Path) -> None:
    os.rename(_with_name(tmp_path, "prömpts"), tmp_path / "prompts.parquet")
    done = run(tmp_path, environ={"LANG": "C", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert done.stderr.isascii()
    assert rb"pr\xf6mpts" in done.stderr
    finished(tmp_path)


def _with_name(folder: Path, column: str) -> Path:
    path = folder / "other.parquet"
    values = [f"prompt number {i}" for i in range(ROWS)]
    pq.write_table(pa.table({column: values}), path, row_group_size=20)
    return path


@pytest.mark.parametrize("fault", ["closed", "broken"])
def test_j39_an_output_that_fails_never_ends_the_job(tmp_path: Path, fault: str) -> None:
    """stderr closed, or a pipe whose reader has gone; progress is written many times."""
    streams: dict[str, Any] = {}
    if fault == "closed":
        streams["preexec_fn"] = lambda: os.close(2)
        streams["stderr"] = None
    else:
        read, write = os.pipe()
        os.close(read)
        streams["stderr"] = write
    done = run(tmp_path, "--log-interval", "0.01s", "--json", environ=environment(SPECBATCH_STANDIN=SLOW), **streams)
    assert done.returncode == 0
    assert json.loads(done.stdout)["rows_done"] == ROWS
    finished(tmp_path)


def test_a_result_that_cannot_be_delivered_is_not_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb") as full:
        done = run(tmp_path, "--json", stdout=full)
    assert done.returncode == 13
    assert b"cannot write to stdout" in done.stderr
    finished(tmp_path)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as nobody:  # who has gone misses nothing
        monkeypatch.setattr(sys, "stdout", nobody)
        assert again(tmp_path, "--json") == 0
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            nobody.close()


class Terminal:
    """A process on a pseudo-terminal of a given size."""

    def __init__(self, command: Sequence[str], folder: Path, environ: Mapping[str, str], size: tuple[int, int]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(command, cwd=folder, env=environ, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.text = b""

    def read_until(self, pattern: bytes, seconds: float = 180.0) -> None:
        """Read until `pattern` appeared or the process is gone."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, self.text
            try:
                chunk = os.read(self.master, 65536)
            except OSError:
                break
            if not chunk:
                break
            self.text += chunk

    def end(self) -> int:
        self.read_until(rb"\A(?!)")  # to the end
        os.close(self.master)
        return self.process.wait(60)


def on_terminal(
    folder: Path, *more: str, size: tuple[int, int] = (24, 100), standin: str = SLOW, **environ: str
) -> Terminal:
    return Terminal(arguments(folder, *more), folder, environment(SPECBATCH_STANDIN=standin, **environ), size)


def visible(text: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())


def test_a_terminal_gets_a_block_in_place_and_a_summary(tmp_path: Path) -> None:
    terminal = on_terminal(tmp_path)
    assert terminal.end() == 0
    shown = visible(terminal.text)
    for word in ("speed", "drafts", "memory", "rows", "time", "60 rows", "tokens/s", "done: 60 of 60 rows"):
        assert word in shown
    assert re.search(rb"\x1b\[\d*A", terminal.text)  # it moved up to redraw
    assert b"\x1b[?1049h" not in terminal.text  # it did not take over the screen
    hidden, visible_again = (terminal.text.rfind(code) for code in (b"\x1b[?25l", b"\x1b[?25h"))
    assert visible_again > hidden
    finished(tmp_path)


def test_a_terminal_that_cannot_redraw_gets_lines(tmp_path: Path) -> None:
    terminal = on_terminal(tmp_path, TERM="dumb")
    assert terminal.end() == 0
    assert not CONTROL.search(terminal.text.replace(b"\r\n", b"\n"))
    assert b"done: 60 of 60 rows" in terminal.text


def test_a_tiny_ascii_terminal_without_colour(tmp_path: Path) -> None:
    terminal = on_terminal(tmp_path, size=(24, 20), LANG="C", NO_COLOR="1", COLUMNS="20")
    assert terminal.end() == 0
    assert terminal.text.isascii()
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", terminal.text)
    redrawn = re.findall(r"\d+% [\d.,-]+/s", visible(terminal.text))
    assert redrawn
    words = "".join(visible(terminal.text).split())
    assert "settings:shard-rows20,modelstand-in" in words  # whole, however often the terminal wraps it
    finished(tmp_path)


def test_interrupt_drains_says_so_and_the_next_start_continues(tmp_path: Path) -> None:
    terminal = on_terminal(tmp_path, standin="capacity=2,delay=0.2")
    terminal.read_until(rb"tokens/s")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    shown = visible(terminal.text)
    assert "no new rows" in shown
    assert re.search(r"run it again to continue \[exit 130\]", shown)
    assert "Traceback" not in shown
    assert terminal.text.rfind(b"\x1b[?25h") > terminal.text.rfind(b"\x1b[?25l")
    assert again(tmp_path) == 0
    finished(tmp_path)


def test_a_killed_process_leaves_the_cursor_visible(tmp_path: Path) -> None:
    terminal = on_terminal(tmp_path, standin="capacity=1,delay=0.2")
    terminal.read_until(rb"tokens/s")
    terminal.process.kill()
    terminal.end()
    assert terminal.text.rfind(b"\x1b[?25h") > terminal.text.rfind(b"\x1b[?25l")


def test_json_progress_is_json_and_stdout_has_the_result_alone(tmp_path: Path) -> None:
    more = ["--progress", "json", "--log-interval", "0.2s", "--json", "--metrics-file", "m.prom"]
    done = run(tmp_path, *more, environ=environment(SPECBATCH_STANDIN=SLOW))
    assert done.returncode == 0
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    events = [entry["event"] for entry in entries]
    assert {"settings", "plan", "engine", "progress", "shard_started", "shard_committed", "end"} <= set(events)
    assert events[-1] == "end"
    (line,) = done.stdout.splitlines()
    assert json.loads(line) == entries[-1]["result"]
    assert "specbatch_last_success_timestamp_seconds" in (tmp_path / "m.prom").read_text()


def test_usr1_prints_progress_also_where_it_is_off(tmp_path: Path) -> None:
    process = subprocess.Popen(
        arguments(tmp_path, "--progress", "none"),
        cwd=tmp_path,
        env=environment(SPECBATCH_STANDIN="capacity=4,delay=0.2"),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    for line in lines:
        if line.endswith(" generating\n"):
            process.send_signal(signal.SIGUSR1)
            break
    assert " elapsed, " in next(lines)  # and no other: --progress none
    process.send_signal(signal.SIGTERM)
    rest = list(lines)
    assert process.wait(60) == 143
    assert "SIGTERM: no new rows" in rest[0]
    assert rest[-1].endswith("[exit 143]\n")
    process.stderr.close()


def test_restart_asks_on_a_terminal_before_it_discards(tmp_path: Path) -> None:
    assert again(tmp_path) == 0
    part = tmp_path / "prompts.out" / "part-00000.parquet"
    before = part.stat().st_mtime_ns
    terminal = on_terminal(tmp_path, "--restart")
    terminal.read_until(rb"\[y/N\]")
    assert b"discards 60 finished rows" in terminal.text
    os.write(terminal.master, b"n\n")
    assert terminal.end() == 2
    assert part.stat().st_mtime_ns == before
    assert again(tmp_path, "--restart") == 0  # nobody to ask: the command line means it
    assert part.stat().st_mtime_ns > before
    finished(tmp_path)
