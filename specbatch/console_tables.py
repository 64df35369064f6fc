"""Tables on a terminal or in a pipe: the shards of a run, an output directory, the changes of mode. Uses rich.

Knows the report of a run, not how it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbatch import wording
from specbatch.job.report import RunReport, ShardReport
from specbatch.units import format_bytes, format_count, format_duration, format_percent, format_rate

FEW_SHARDS = 12  # in a summary, more are put together by mode
LABEL = 10


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a shard table; the ones of least importance go first when the screen is narrow."""

    title: str
    importance: int
    cells: list[str]
    right: bool = True
    elastic: bool = False  # takes what room is left, at least 16

    @property
    def width(self) -> int:
        natural = max(len(self.title), *(len(cell) for cell in self.cells))
        return min(natural, 16) if self.elastic else natural


def shard_table(shards: Sequence[ShardReport], width: int, *, put_together: bool) -> Table:
    """Mode, why, acceptance and speed a shard; many shards are put together by mode when asked."""
    if put_together and len(shards) > FEW_SHARDS:
        return _fit(_mode_columns(shards), width)
    columns = [
        _Column("shard", 9, [str(s.shard) for s in shards]),
        _Column("rows", 7, [format_count(s.rows) for s in shards]),
        _Column("mode", 8, [s.mode if s.part else f"{s.mode or '-'} (open)" for s in shards], right=False),
        _Column("accepted", 6, [format_percent(s.acceptance_rate) for s in shards]),
        _Column("by position", 3, [_positions(s) for s in shards], right=False),
        _Column("tokens", 2, [format_count(s.completion_tokens) for s in shards]),
        _Column("tokens/s", 5, [format_rate(s.tokens_per_second) for s in shards]),
        _Column("errors", 1, [format_count(s.row_errors) if s.row_errors else "-" for s in shards]),
        _Column("expected", 0, [_expected(s) for s in shards], right=False),
        _Column("why", 4, [s.reason or "-" for s in shards], right=False, elastic=True),
    ]
    empty = {"by position": "", "tokens/s": "-", "errors": "-", "expected": "", "why": "-", "accepted": "-"}
    return _fit([c for c in columns if any(cell != empty.get(c.title) for cell in c.cells)], width)


def _mode_columns(shards: Sequence[ShardReport]) -> list[_Column]:
    groups: dict[str, list[ShardReport]] = {}
    for shard in shards:
        groups.setdefault(shard.mode or "-", []).append(shard)
    modes = sorted(groups, key=lambda mode: -len(groups[mode]))

    def sums(name: str) -> list[int]:
        return [sum(getattr(s, name) for s in groups[mode]) for mode in modes]

    rates = [a / d if d else None for a, d in zip(sums("accepted"), sums("drafted"), strict=True)]
    return [
        _Column("mode", 9, modes, right=False),
        _Column("shards", 8, [format_count(len(groups[mode])) for mode in modes]),
        _Column("rows", 7, [format_count(n) for n in sums("rows")]),
        _Column("accepted", 6, [format_percent(rate) for rate in rates]),
        _Column("tokens", 2, [format_count(n) for n in sums("completion_tokens")]),
        _Column("errors", 1, [format_count(n) if n else "-" for n in sums("row_errors")]),
        _Column("why, for one", 4, [groups[mode][-1].reason or "-" for mode in modes], right=False, elastic=True),
    ]


def _positions(shard: ShardReport) -> str:
    """Acceptance by draft position in percent, of the method that drafted most."""
    if not shard.acceptance_by_position:
        return ""
    method, shares = max(shard.acceptance_by_position.items(), key=lambda item: sum(item[1]))
    prefix = f"{method}: " if len(shard.acceptance_by_position) > 1 else ""
    return prefix + " ".join(f"{share * 100:.0f}" for share in shares)


def _expected(shard: ShardReport) -> str:
    """What the modes were thought to reach when they were last weighed, best first."""
    rates = sorted(shard.predicted_tokens_per_second.items(), key=lambda item: -item[1])
    return ", ".join(f"{mode} {format_rate(rate)}" for mode, rate in rates)


def _fit(columns: list[_Column], width: int) -> Table:
    """The most important columns that fit; nothing wraps."""
    gap = 2
    kept = sorted(columns, key=lambda c: -c.importance)
    while len(kept) > 1 and sum(c.width + gap for c in kept) - gap > width:
        kept.pop()
    chosen = [c for c in columns if c in kept]
    spare = width - sum(c.width + gap for c in chosen if not c.elastic)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_edge=False)
    for column in chosen:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True, overflow="crop")
    for row in zip(*(c.cells for c in chosen), strict=True):
        cells = zip(row, chosen, strict=True)
        table.add_row(*(Text(_cut(cell, spare) if column.elastic else cell) for cell, column in cells))
    return table


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[: max(width, 0)]


def print_report(console: Console, report: RunReport) -> None:
    """What `specbatch inspect` shows."""
    state = "complete" if report.complete else "not complete: run it again to continue"
    style = "green" if report.complete else "yellow"
    lines: list[tuple[str, Text]] = [("output", Text.assemble(report.output + ", ", (state, style)))]
    rows = [f"{format_count(report.rows_done)} of {format_count(report.rows)}"]
    for count, word in ((report.skipped, "skipped"), (report.reused, "reused"), (report.deduplicated, "deduplicated")):
        if count:
            rows.append(f"{format_count(count)} {word}")
    lines.append(("rows", Text(", ".join(rows))))
    if report.row_errors:
        codes = ", ".join(f"{format_count(n)} {code}" for code, n in report.row_errors_by_code.items())
        lines.append(("errors", Text(f"{wording.plural(report.row_errors, 'row')}: {codes}", style="red")))
    cached = f" ({format_percent(report.cached_tokens / report.prompt_tokens)} from the prefix cache)"
    tokens = f"{format_count(report.completion_tokens)} written, {format_count(report.prompt_tokens)} prompt"
    lines.append(("tokens", Text(tokens + (cached if report.cached_tokens else ""))))
    if report.drafted:
        share = format_percent(report.acceptance_rate)
        lines.append(("drafts", Text(f"{share} of {format_count(report.drafted)} accepted")))
    for entry in report.inputs:
        size = f"{format_count(entry['rows'])} rows, {format_bytes(entry['size'])}"
        lines.append(("input" if entry is report.inputs[0] else "", Text(f"{entry['path']} ({size})")))
    lines += [(head, Text(rest)) for head, _, rest in (s.partition(": ") for s in _engine(report))]
    lines += [("starts" if i == 0 else "", Text(_start(start))) for i, start in enumerate(report.starts[-5:])]
    console.print(_grid(lines))
    console.print()
    console.print(shard_table(report.shards, console.width, put_together=False))


def _engine(report: RunReport) -> list[str]:
    return wording.engine_lines(report.engine) if report.engine else [f"model: {report.model}"]


def _start(start: dict[str, object]) -> str:
    """One start of the run in one line; it says only what the manifest has."""
    words = [str(start[name]) for name in ("started", "time", "host") if start.get(name)]
    if isinstance(seconds := start.get("wall_seconds"), int | float):
        words.append(format_duration(seconds))
    if isinstance(rate := start.get("completion_tokens_per_second"), int | float):
        words.append(f"{format_rate(rate)} tokens/s")
    code = start.get("exit_code")
    words.append(f"exit {code}" if code is not None else "killed, or still running")
    return ", ".join(words)


def print_decisions(console: Console, report: RunReport) -> None:
    """Every change of mode with its reason, in the order they were taken."""
    changes = report.evidence.changes
    if not changes:
        console.print(Text("no decision was logged", style="dim"))
        return
    columns = [
        _Column("time", 6, [format_duration(c.time) for c in changes]),
        _Column("step", 3, [format_count(c.step) for c in changes]),
        _Column("running", 4, [format_count(c.running) for c in changes]),
        _Column("shards", 7, [_ranges(c.shards) for c in changes], right=False),
        _Column("mode", 9, [c.mode + (" (probe)" if c.probe else "") for c in changes], right=False),
        _Column("why", 8, [c.reason for c in changes], right=False, elastic=True),
    ]
    console.print(_fit(columns, console.width))
    total = f"{wording.plural(report.evidence.decisions, 'decision')}, {len(changes)} shown: those that changed a mode"
    console.print(Text(total, style="dim"))


def _ranges(numbers: Iterable[int]) -> str:
    """(0, 1, 2, 5) -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _grid(lines: Iterable[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, width=LABEL)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(label, text)
    return grid


def print_lines(console: Console, lines: Iterable[tuple[str, str, str]]) -> None:
    """Labelled lines; the third says how one is to be taken: "good", "bad" or ""."""
    styles = {"good": "green", "bad": "yellow"}
    console.print(_grid((label, Text(words, style=styles.get(state, ""))) for label, words, state in lines))
