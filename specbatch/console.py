"""The live display of a run on a terminal. With console_tables.py the only importer of rich.

Owns where things stand on the screen; the figures come from meter.py, the sentences from wording.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, cast

from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specbatch import wording
from specbatch.console_tables import shard_table
from specbatch.errors import SpecbatchError
from specbatch.job.options import JobEvents, JobPlan, JobProgress, JobResult
from specbatch.job.report import report
from specbatch.job.summary import final_line
from specbatch.meter import Meter, Reading
from specbatch.streams import SafeStream, printable
from specbatch.units import format_count, format_duration, format_percent, format_rate

REFRESH_PER_SECOND = 2.0
WIDE, NARROW, TALL = 64, 34, 9  # columns for the full block, for two lines; screen lines for the full block
PIPE_WIDTH = 160  # columns where there is no terminal to ask
PAGE_WIDTH = 40  # a page is never narrower: wrapped by the terminal it can be read, without its values it cannot
LABEL = 10  # columns of the words at the left
GENERATING = "generating"


def make_console(stream: SafeStream) -> Console:
    """A console on a stream that never fails: ASCII where the stream is, no colour with NO_COLOR, wide in a pipe."""
    return Console(
        file=cast("IO[str]", stream),
        width=None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH,
        no_color=bool(os.environ.get("NO_COLOR")) or None,
        highlight=False,
        soft_wrap=False,
        emoji=False,
    )


def print_page(stream: SafeStream, draw: Callable[[Console], None]) -> None:
    """Everything `draw` prints, without the blanks that pad table rows."""
    console = make_console(stream)
    console.width = max(console.width, PAGE_WIDTH)
    with console.capture() as captured:
        draw(console)
    for line in captured.get().splitlines():
        stream.line(line.rstrip())


class RunDisplay:
    """What is on the screen while a job runs; renders itself for whatever width there is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meter = Meter()
        self._stage = "starting"
        self._stage_since = clock()
        self._reading: Reading | None = None

    def begin(self, stage: str) -> None:
        self._stage, self._stage_since = stage, self._clock()

    def update(self, progress: JobProgress) -> None:
        self._reading = self._meter.read(progress, self._clock())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        reading = self._reading
        dot = " " if options.ascii_only else " · "
        if reading is None or self._stage != GENERATING:
            waited = format_duration(self._clock() - self._stage_since)
            yield Text(_cut(f"{self._stage} ... {waited}", width, options.ascii_only), no_wrap=True, overflow="crop")
        elif width >= WIDE and options.size.height >= TALL:
            yield self._block(reading, options)
        elif width >= NARROW:
            yield _bar(reading, width, f" {format_percent(reading.share)}")
            figures = [f"{format_count(reading.rows_done)}/{format_count(reading.rows_total)}"]
            figures.append(f"{format_rate(reading.tokens_per_second)} tok/s")
            figures.append(reading.stopping or f"{format_duration(reading.seconds_left)} left")
            yield Text(_cut(dot.join(figures), width, options.ascii_only), no_wrap=True, overflow="crop")
        else:
            short = f"{format_percent(reading.share).replace(' ', '')} {format_rate(reading.tokens_per_second)}/s"
            left = format_duration(reading.seconds_left).split(" ")[0]
            yield Text(f"{short} {left}"[: max(width - 1, 1)], no_wrap=True, overflow="crop")

    def _block(self, reading: Reading, options: ConsoleOptions) -> Table:
        """A blank and six lines, always in the same places: nothing jumps."""
        rows = f"{format_count(reading.rows_done)} of {wording.plural(reading.rows_total, 'row')}"
        body = Table.grid(padding=(0, 2, 0, 0))
        body.add_column(style="dim", no_wrap=True, width=LABEL)
        overflow: OverflowMethod = "crop" if options.ascii_only else "ellipsis"
        body.add_column(no_wrap=True, overflow=overflow, width=options.max_width - LABEL - 3)
        for label, parts in _figures(reading):
            body.add_row(label, Text(", " if options.ascii_only else " · ").join(parts))
        block = Table.grid()
        block.add_row("")
        block.add_row(_bar(reading, options.max_width, f" {format_percent(reading.share):>5}  {rows}"))
        block.add_row(body)
        return block


def _figures(reading: Reading) -> Iterator[tuple[str, list[Text]]]:
    """The lines of the block: a word and its figures."""
    speed = Text(f"{format_rate(reading.tokens_per_second)} tokens/s", style="bold")
    written = Text(f"{format_count(reading.completion_tokens)} written")
    yield "speed", [speed, written, Text(f"{format_count(reading.prompt_tokens)} prompt")]
    drafts = "none" if reading.acceptance_rate is None else f"{format_percent(reading.acceptance_rate)} accepted"
    yield "drafts", [Text(part) for part in (drafts, _modes(reading)) if part]
    memory = [] if reading.kv_share is None else [f"KV {format_percent(reading.kv_share)}"]
    memory += [f"{format_count(reading.running)} running", f"{format_count(reading.waiting)} waiting"]
    if reading.preemptions:
        memory.append(wording.plural(reading.preemptions, "preemption"))
    yield "memory", [Text(part) for part in memory]
    done = [Text(f"{reading.shards_done} of {wording.plural(reading.shards_total, 'shard')} written")]
    for count, word in ((reading.skipped, "skipped"), (reading.reused, "reused"), (reading.deduplicated, "equal")):
        if count:
            done.append(Text(f"{format_count(count)} {word}"))
    errors = wording.plural(reading.row_errors, "error") if reading.row_errors else "no errors"
    yield "rows", [*done, Text(errors, style="red" if reading.row_errors else "")]
    time_left = [] if reading.seconds_left is None else [Text(f"{format_duration(reading.seconds_left)} left")]
    if reading.stopping:
        time_left = [Text(f"stopping: {reading.stopping}", style="yellow")]
    yield "time", [Text(format_duration(reading.elapsed)), *time_left]


def _bar(reading: Reading, width: int, right: str) -> Table:
    """A bar with its words at the right; both on one line."""
    line = Table.grid(padding=0)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True)
    room = max(width - len(right) - 1, 4)
    bar = ProgressBar(
        total=max(reading.rows_total, 1),
        completed=reading.rows_done,
        width=room,
        pulse=False,
        style="bright_black",
        complete_style="cyan",
        finished_style="green",
    )
    line.add_row(bar, Text(right))
    return line


def _modes(reading: Reading) -> str:
    """Mode by live shard while there are few, counted when there are many."""
    if len(reading.modes) <= 3:
        return ", ".join(f"shard {shard} {mode}" for shard, mode in sorted(reading.modes.items()))
    return ", ".join(f"{count} shards {mode}" for mode, count in reading.mode_counts)


def _cut(text: str, width: int, ascii_only: bool) -> str:
    """At most width - 1 characters, so that no terminal wraps."""
    room = max(width - 1, 1)
    if len(text) <= room:
        return text
    mark = "" if room < 4 else "..." if ascii_only else "…"
    return text[: room - len(mark)] + mark


class LiveEvents(JobEvents):
    """JobEvents on a terminal: sentences scroll, one block below them is redrawn in place. Use as a context manager."""

    is_live = True

    def __init__(self, stream: SafeStream, *, ending: Callable[[SpecbatchError], object] | None = None) -> None:
        """`ending`: what to do when the process is about to end, besides nothing but saying it."""
        self.console = make_console(stream)
        self._ending = ending
        self._display = RunDisplay()
        self._live = Live(
            self._display,
            console=self.console,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> LiveEvents:
        self._live.start()
        self.console.show_cursor(True)  # a killed process could not bring it back
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the block off the screen; what was said stays."""
        self._live.stop()

    def say(self, event: str, message: str, *, style: str = "", **fields: object) -> None:
        """One sentence above the block; what stands before its first colon is its label."""
        head, colon, rest = printable(message).partition(": ")
        if not colon or self.console.width < NARROW:  # beside a label there would be no room for words
            self.console.print(Text(head + colon + rest, style=style))
            return
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(style=style or "dim", no_wrap=True, width=LABEL)
        line.add_column(overflow="fold")
        if len(head) <= LABEL:
            line.add_row(head, Text(rest))
        else:
            line.add_row("", Text(f"{head}: {rest}", style=style))
        self.console.print(line)

    def plan(self, plan: JobPlan) -> None:
        for line in wording.plan_lines(plan):
            self.say("plan", line)
        for warning in plan.warnings:
            self.warning("plan", warning)

    def stage(self, name: str) -> None:
        self._display.begin(name)

    def engine_ready(self, description: Mapping[str, object]) -> None:
        for line in wording.engine_lines(description):
            self.say("engine", line)

    def tick(self, progress: JobProgress) -> None:
        self._display.update(progress)

    def report(self, progress: JobProgress) -> None:
        self._display.update(progress)
        self._live.refresh()

    def warning(self, code: str, message: str) -> None:
        self.say("warning", f"warning: {message}", style="yellow")

    def stopping(self, reason: str, seconds: float) -> None:
        self.say("stopping", wording.stopping_line(reason, seconds), style="yellow")

    def ending(self, error: SpecbatchError) -> None:
        self.close()
        (self._ending or super().ending)(error)


def print_summary(stream: SafeStream, result: JobResult) -> None:
    """At the end: the shards as a table where there is something to see, and the final line."""
    console = make_console(stream)
    try:
        shards = [shard for shard in report(Path(result.output)).shards if shard.part or shard.mode]
    except SpecbatchError:
        shards = []
    if any(shard.mode for shard in shards):
        console.print(shard_table(shards, console.width, put_together=True))
    style = {0: "green", 3: "yellow", 5: "yellow"}.get(result.exit_code, "red")
    head, colon, rest = printable(final_line(result)).partition(":")
    console.print(Text.assemble((head, style), colon, rest), soft_wrap=True)
