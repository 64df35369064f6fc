"""A plan as text tables, as a picture and as one self-contained HTML page.

Owns wording and drawing. Knows no arithmetic beyond rounding. matplotlib is used for PNG and PDF when it is installed;
SVG and HTML need nothing.
"""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbatch.plan import Plan

SVG = 'xmlns="http://www.w3.org/2000/svg"'
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells; the first column is left aligned, the others right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables(plan: Plan) -> list[Table]:
    """Memory, rows, speed-up, break-even and the rules, in the order they are read."""
    return [_memory(plan), _rows(plan), _speedup(plan), _full(plan), _limits(plan), _rules(plan)]


def to_text(plan: Plan) -> str:
    """All tables in plain text."""
    return "\n\n".join(_text(table) for table in tables(plan)) + "\n"


def write_html(plan: Plan, path: str | Path) -> None:
    """One page with the picture and the tables, nothing loaded from elsewhere."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>specbatch plan</title>",
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.15rem .7rem;text-align:right}"
        "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#8881}"
        "th{border-bottom:1px solid #888}svg{max-width:100%;height:auto;background:#fff}</style>",
        f"<h1>{html.escape(_headline(plan))}</h1>",
        to_svg(plan),
    ]
    for table in tables(plan):
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in table.rows)
        note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{body}</table>{note}")
    Path(path).write_text("\n".join(parts) + "</html>\n", encoding="utf-8")


def write_plot(plan: Plan, path: str | Path) -> None:
    """Speed-up over rows, a line an acceptance. .svg needs nothing; .png and .pdf need matplotlib.

    Raises ValueError for another ending, or where matplotlib is needed and not installed.
    """
    path = Path(path)
    if path.suffix == ".svg":
        path.write_text(to_svg(plan), encoding="utf-8")
        return
    if path.suffix not in (".png", ".pdf"):
        raise ValueError(f"plot must end in .svg, .png or .pdf, got {path.name!r}")
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    except ImportError:
        raise ValueError(
            f"{path.suffix} needs matplotlib (pip install 'specbatch[plot]'); .svg needs nothing"
        ) from None
    axes = figure.add_subplot()
    for colour, (acceptance, points) in zip(COLOURS, _lines(plan).items(), strict=False):
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=f"acceptance {acceptance}")
    axes.axhline(1.0, color="#666", linewidth=1)
    axes.set(xlabel="rows at once", ylabel="tokens/s over AR", title=_headline(plan))
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.savefig(path)


def to_svg(plan: Plan) -> str:
    """The same picture as SVG."""
    width, height, left, bottom, right, top = 760, 400, 60, 46, 150, 34
    lines = _lines(plan)
    if not lines:
        return f'<svg {SVG} viewBox="0 0 {width} 30"><text x="8" y="20">no row fits</text></svg>'
    most = max(r for points in lines.values() for r, _ in points)
    high = max(2.0, math.ceil(2 * max(x for points in lines.values() for _, x in points)) / 2)

    def at(rows: float, ratio: float) -> str:
        x = left + (width - left - right) * math.log2(max(rows, 1)) / max(math.log2(most), 1.0)
        return f"{x:.1f},{height - bottom - (height - bottom - top) * ratio / high:.1f}"

    parts = [
        f'<svg {SVG} viewBox="0 0 {width} {height}" font-family="system-ui,sans-serif" '
        f'font-size="12"><text x="{left}" y="18" font-size="14">{html.escape(_headline(plan))}</text>'
    ]
    for i in range(int(high * 2) + 1):
        ratio = i / 2
        y = at(1, ratio).split(",")[1]
        stroke = "#333" if ratio == 1.0 else "#ccc"
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y}" y2="{y}" stroke="{stroke}"/>')
        parts.append(f'<text x="{left - 8}" y="{y}" dy="4" text-anchor="end">{ratio:g}x</text>')
    for rows in sorted({r for points in lines.values() for r, _ in points}):
        x = at(rows, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{rows}</text>')
    parts.append(f'<text x="{left}" y="{height - 8}">rows at once; tokens a second over AR at the best k</text>')
    for i, (acceptance, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(at(r, x) for r, x in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        place = f'x="{width - right + 12}" y="{top + 18 * i + 10}"'
        parts.append(f'<text {place} fill="{colour}">acceptance {acceptance}</text>')
    return "".join(parts) + "</svg>"


def _lines(plan: Plan) -> dict[float, list[tuple[int, float]]]:
    lines: dict[float, list[tuple[int, float]]] = {}
    for (acceptance, rows), (ratio, _) in sorted(plan.speedup.items()):
        lines.setdefault(acceptance, []).append((rows, ratio))
    return lines


def _headline(plan: Plan) -> str:
    request = plan.request
    pair = f"{_count(request.target.num_parameters)} target, "
    pair += f"{_count(request.draft.num_parameters)} draft" if request.draft else "n-gram"
    return f"{pair}, {request.gpus} x {request.gpu.name}, {request.context} tokens a row"


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    rows = [
        ("target", _gigabytes(memory.target_weights), _kib(memory.target_kv_per_token)),
        ("draft", _gigabytes(memory.draft_weights), _kib(memory.draft_kv_per_token)),
    ]
    note = (
        f"{_gigabytes(memory.device_bytes)} on the device, {memory.headroom:.0%} left alone, "
        f"{_gigabytes(max(memory.kv_bytes(with_draft=True), 0))} for KV."
    )
    return Table("Memory", ("model", "weights", "KV a token"), tuple(rows[: 2 if memory.draft_weights else 1]), note)


def _rows(plan: Plan) -> Table:
    context = plan.request.context
    rows = [("AR, no draft loaded", plan.rows_without_draft), ("AR, draft loaded, one pool", plan.rows_ar)]
    if plan.memory.draft_weights:
        rows.append(("AR, draft's share set aside", plan.rows_static_split))
    rows.append(("speculating", plan.rows_speculative))
    base = max(plan.rows_without_draft, 1)
    cells = tuple((what, str(count), f"{count / base:.2f}x") for what, count in rows)
    return Table(f"Rows of {context} tokens that fit", ("mode", "rows", "of AR"), cells)


def _speedup(plan: Plan) -> Table:
    acceptances = sorted({a for a, _ in plan.speedup})
    batches = sorted({b for _, b in plan.speedup})
    cells = tuple(
        (str(b), *(f"{plan.speedup[a, b][0]:.2f}x k={plan.speedup[a, b][1]}" for a in acceptances)) for b in batches
    )
    header = ("rows", *(f"a={a}" for a in acceptances))
    return Table("Tokens a second over AR on the same rows, at the best k", header, cells)


def _full(plan: Plan) -> Table:
    cells = tuple((str(a), f"{x:.2f}x", str(k)) for a, (x, k) in sorted(plan.full.items()))
    note = f"{plan.rows_speculative} rows speculating against {plan.rows_ar} in AR."
    return Table("The same with the memory full", ("acceptance", "over AR", "k"), cells, note)


def _limits(plan: Plan) -> Table:
    rows = []
    for acceptance, most in plan.crossover.items():
        rows.append((f"pays up to, at acceptance {acceptance}", "never" if most is None else f"{most} rows"))
    for batch, least in plan.break_even.items():
        rows.append((f"pays from, at {batch} rows", "never" if least is None else f"acceptance {least:.2f}"))
    return Table("Where it crosses", ("speculation", ""), tuple(rows))


def _rules(plan: Plan) -> Table:
    cells = tuple((rule.text, "holds" if rule.holds else "does not hold", rule.found) for rule in plan.rules)
    return Table("Rules of thumb, tested", ("rule", "here", "because"), cells)


def _text(table: Table) -> str:
    lines: Sequence[tuple[str, ...]] = (table.header, *table.rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]

    def show(line: tuple[str, ...]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        return "  ".join(cells).rstrip()

    body = [show(line) for line in lines]
    body.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join([table.title, *body, *([table.note] if table.note else [])])


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _kib(count: int) -> str:
    return f"{count / 1024:g} KiB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
