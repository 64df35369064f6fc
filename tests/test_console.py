"""What stands on the screen: widths, glyphs, colours, streams that fail; and the lines of a log."""

from __future__ import annotations

import io
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from specbatch.console import GENERATING, LiveEvents, RunDisplay, print_page, print_summary
from specbatch.console_tables import print_lines, shard_table
from specbatch.job.options import JobPlan, JobProgress
from specbatch.job.report import ShardReport
from specbatch.lines import LineEvents, Log
from specbatch.meter import Meter
from specbatch.requests import EngineProgress
from specbatch.streams import SafeStream, ascii_only, is_smart, printable
from tests.test_summary import a_result

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def advance(clock: Clock, progress: JobProgress, seconds: int = 20) -> None:
    """A job of 570 tokens and 130 rows a second, 70 % of its drafts accepted."""
    engine = progress.engine
    assert engine is not None
    for _ in range(seconds * 10):
        clock.now += 0.1
        progress.elapsed = clock.now
        progress.rows_done += 13
        engine.completion_tokens += 57
        engine.prompt_tokens += 30
        engine.drafted += 40
        engine.accepted += 28
        yield_modes = {1: "ar", 2: "ngram k=4"}
        engine.mode = yield_modes
        engine.running, engine.waiting, engine.pages_used = 64, 511, 3100


def a_progress() -> JobProgress:
    return JobProgress(rows_total=1_000_000, shards_total=4, shards_done=1, engine=EngineProgress(pages_total=5000))


def a_display(**changes: Any) -> RunDisplay:
    clock, progress = Clock(), a_progress()
    display = RunDisplay(clock)
    display.begin(GENERATING)
    for name, value in changes.items():
        setattr(progress, name, value)
    for _ in range(20):
        advance(clock, progress, 1)
        display.update(progress)
    return display


def screen(renderable: object, width: int, height: int = 24, encoding: str = "utf-8", **options: Any) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    settings = {"force_terminal": True, "no_color": True, "highlight": False, "legacy_windows": False} | options
    Console(file=file, width=width, height=height, **settings).print(renderable)
    file.flush()
    text = file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip("\n").split("\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("changes", [{}, {"stopping": "SIGTERM"}, {"row_errors": 7, "skipped": 12345, "reused": 9}])
def test_no_line_is_wider_than_the_terminal(encoding: str, changes: dict[str, Any]) -> None:
    display = a_display(**changes)
    for width in [*range(1, 66), 80, 100, 200]:
        lines = screen(display, width, encoding=encoding)
        assert max(cell_len(line) for line in lines) <= width, (width, lines)


def test_a_wide_terminal_shows_the_same_six_lines_at_any_time() -> None:
    for changes in ({}, {"stopping": "max-duration"}, {"row_errors": 3}, {"rows_done": 900_000}):
        blank, *lines = screen(a_display(**changes), 80)
        assert blank.strip() == ""
        assert len(lines) == 6
        assert [line.split()[0] for line in lines[1:]] == ["speed", "drafts", "memory", "rows", "time"]
    text = "\n".join(screen(a_display(), 100))
    for figure in (
        "570 tokens/s",
        "70 % accepted",
        "shard 2 ngram k=4",
        "KV 62 %",
        "64 running",
        "511 waiting",
        "left",
    ):
        assert figure in text


def test_narrow_and_flat_terminals_get_less() -> None:
    assert len(screen(a_display(), 50)) == 2
    assert len(screen(a_display(), 100, height=5)) == 2
    assert len(screen(a_display(), 20)) == 1


def test_an_ascii_terminal_gets_ascii() -> None:
    for width in (20, 50, 100):
        assert all(line.isascii() for line in screen(a_display(), width, encoding="ascii"))
    assert not all(line.isascii() for line in screen(a_display(), 100))


def test_before_generation_the_stage_and_its_time_are_shown() -> None:
    clock = Clock()
    display = RunDisplay(clock)
    display.begin("loading model")
    clock.now = 12.0
    assert screen(display, 80) == ["loading model ... 12 s"]


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        file = io.StringIO()
        file.isatty = lambda: True  # type: ignore[method-assign]
        live = LiveEvents(SafeStream(file))
        live.warning("x", "careful")
        live.console.print(a_display())
        return file.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(shown())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(shown())


def test_a_stream_that_fails_never_raises() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    closed = io.StringIO()
    closed.close()
    read, write = os.pipe()
    os.close(read)
    broken = open(write, "w")  # noqa: SIM115
    for stream in (Full(), closed, broken, None):
        safe = SafeStream(stream)
        with LiveEvents(safe) as live:
            live.plan(a_plan())
            live.stage(GENERATING)
            live.tick(a_progress())
            live.report(a_progress())
        LineEvents(Log(safe)).stopping("SIGTERM", 20.0)
        print_summary(safe, a_result())
        assert safe.failed
        assert not is_smart(safe, {"TERM": "xterm"})
    with pytest.raises(BrokenPipeError):
        broken.close()


def a_plan() -> JobPlan:
    columns = ("completion", "finish_reason", "error")
    return JobPlan(Path("out"), 1, 1 << 20, 2290, 4, 1, 600, "column prompt", ("id", "prompt"), columns, True, ("odd",))


@pytest.mark.parametrize(
    ("encoding", "environ", "expected"),
    [
        ("utf-8", {"LANG": "en_US.UTF-8"}, False),
        ("utf-8", {"LANG": "C.UTF-8"}, False),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),  # what Python makes of LANG=C
        ("utf-8", {"LC_CTYPE": "C.UTF-8"}, True),  # of env -i
        ("utf-8", {"LANG": "en_US.UTF-8", "LC_ALL": "C"}, True),
        ("utf-8", {"LC_CTYPE": "de_DE.UTF-8"}, False),
        ("utf-8", {"LANG": "C", "PYTHONUTF8": "1"}, False),
        ("ascii", {"LANG": "en_US.UTF-8"}, True),
        ("iso-8859-1", {"LANG": "en_US"}, True),
    ],
)
def test_when_a_terminal_has_only_ascii(encoding: str, environ: dict[str, str], expected: bool) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert ascii_only(stream, environ) is expected


def test_a_dumb_terminal_is_not_redrawn() -> None:
    file = io.StringIO()
    file.isatty = lambda: True  # type: ignore[method-assign]
    assert is_smart(SafeStream(file), {"TERM": "xterm"})
    for term in ("dumb", "unknown", ""):
        assert not is_smart(SafeStream(file), {"TERM": term})
    assert not is_smart(SafeStream(io.StringIO()), {"TERM": "xterm"})


def a_shard(index: int, **changes: Any) -> ShardReport:
    values: dict[str, Any] = {
        "shard": index, "file": "a.parquet", "first_row": index * 600, "rows": 600, "part": f"part-{index:05d}.parquet",
        "row_errors": index % 2, "skipped": 0, "reused": 0, "prompt_tokens": 9000, "completion_tokens": 42113,
        "tokens_per_second": 570.2, "modes": {"ar": 600}, "mode": ("ar", "ngram k=4")[index % 2], "changes": 1,
        "reason": "AR 410/s beats ngram k=2 380/s at 64 rows", "drafted": 1000, "accepted": 710,
        "acceptance_rate": 0.71, "acceptance_by_position": {"ngram": [0.84, 0.71]}, "preemptions": 0,
        "predicted_tokens_per_second": {"ar": 410.0, "ngram k=2": 380.0},
    }  # fmt: skip
    return ShardReport(**(values | changes))


def test_the_shard_table_gives_up_columns_not_lines() -> None:
    shards = [a_shard(index) for index in range(4)]
    for width in range(12, 200):
        lines = screen(shard_table(shards, width, put_together=False), width)
        assert len(lines) == 5, width
        assert max(cell_len(line.rstrip()) for line in lines) <= width
    wide, narrow = (" ".join(screen(shard_table(shards, w, put_together=False), w)) for w in (200, 40))
    for figure in ("570", "84 71", "ar 410, ngram k=2 380", "at 64 rows", "71 %"):
        assert figure in wide
    assert "ngram k=4" in narrow
    assert "at 64 rows" not in narrow


def test_many_shards_are_put_together_by_mode() -> None:
    shards = [a_shard(index) for index in range(40)]
    lines = screen(shard_table(shards, 100, put_together=True), 100)
    assert len(lines) == 3
    assert lines[1].split()[:3] == ["ar", "20", "12,000"]
    assert len(screen(shard_table(shards, 100, put_together=False), 100)) == 41


def test_a_name_cannot_bring_control_codes_or_lines_into_a_log() -> None:
    assert printable("a\x1b[31mb\nc\tü") == "a\\x1b[31mb\\nc\\tü"


def log_lines(format: Any, interval: float, seconds: int) -> list[str]:
    stream, clock, progress = io.StringIO(), Clock(), a_progress()
    log = Log(SafeStream(stream), format, now=lambda: datetime(2026, 3, 1, 2, 14, 5, tzinfo=UTC))
    events = LineEvents(log, interval=interval, clock=clock)
    events.plan(a_plan())
    events.engine_ready({"model": "/m/SmolLM2", "device": "cpu", "dtype": "float32", "max_num_seqs": 64})
    for _ in range(seconds):
        advance(clock, progress, 1)
        events.tick(progress)
    events.stopping("SIGTERM", 20.0)
    return stream.getvalue().splitlines()


def test_one_plain_line_an_interval() -> None:
    lines = log_lines("text", 10.0, 61)
    assert not any(CONTROL.search(line) for line in lines)
    assert all(line.startswith("2026-03-01 02:14:05 ") and line.isascii() for line in lines)
    progress = [line for line in lines if "tokens/s" in line]
    assert len(progress) == 6
    assert "570 tokens/s, acceptance 70 %, KV 62 %, 64 running, 511 waiting, mode ar x1, ngram k=4 x1" in progress[1]
    assert "model: SmolLM2 on cpu, float32" in " ".join(lines)


def test_json_lines_are_objects_with_time_event_and_message() -> None:
    entries = [json.loads(line) for line in log_lines("json", 10.0, 31)]
    assert all({"time", "event", "message"} <= entry.keys() for entry in entries)
    assert [entry["event"] for entry in entries] == [
        "plan", "warning", "engine", "progress", "progress", "progress", "stopping"]  # fmt: skip
    assert entries[3]["rows_total"] == 1_000_000
    assert entries[3]["modes"] == {"1": "ar", "2": "ngram k=4"}


def test_rates_are_those_of_the_last_seconds_and_time_left_follows_them() -> None:
    clock, progress, meter = Clock(), a_progress(), Meter()
    for _ in range(600):
        advance(clock, progress, 1)
        reading = meter.read(progress, clock.now)
    assert reading.tokens_per_second == pytest.approx(570, rel=0.02)
    assert reading.acceptance_rate == pytest.approx(0.7)
    left = progress.rows_total - progress.rows_done
    assert reading.seconds_left == pytest.approx(left / 130, rel=0.02)
    for _ in range(30):  # it stands still: the recent rate says so, the time left grows
        clock.now += 1
        progress.elapsed = clock.now
        stalled = meter.read(progress, clock.now)
    assert stalled.tokens_per_second == 0
    assert stalled.acceptance_rate is None
    assert stalled.seconds_left is not None
    assert reading.seconds_left is not None
    assert stalled.seconds_left > reading.seconds_left


def test_the_time_before_the_first_step_does_not_count() -> None:
    clock, meter = Clock(), Meter()
    progress = JobProgress(rows_total=1_000_000)
    for _ in range(100):  # reading and loading, with rows settled without an engine
        clock.now += 1
        progress.elapsed = clock.now
        progress.rows_done += 50
        reading = meter.read(progress, clock.now)
    assert reading.seconds_left == pytest.approx(995_000 / 50, rel=0.02)
    progress.engine = EngineProgress(pages_total=5000)
    clock.now += 60
    assert meter.read(progress, clock.now).tokens_per_second is None
    for _ in range(5):
        advance(clock, progress, 1)
        progress.engine.steps += 1
        reading = meter.read(progress, clock.now)
    assert reading.tokens_per_second == pytest.approx(570, rel=0.3)
    assert reading.seconds_left == pytest.approx(995_000 / 130, rel=0.3)


def test_nothing_is_claimed_before_there_is_anything_to_go_by() -> None:
    reading = Meter().read(JobProgress(rows_total=10), 0.0)
    assert (reading.tokens_per_second, reading.seconds_left, reading.acceptance_rate, reading.kv_share) == (None,) * 4
    assert Meter().read(JobProgress(rows_total=0), 0.0).share == 1.0


def test_a_page_on_a_tiny_screen_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    file = io.StringIO()
    print_page(SafeStream(file), lambda console: print_lines(console, [("rows", "2,000 of 2,000", "")]))
    assert file.getvalue() == "rows        2,000 of 2,000\n"
