"""Tables of text and line charts over a logarithmic axis, as plain text, SVG, HTML, or (with matplotlib) PNG and PDF.

Owns drawing. Knows nothing of what is shown. SVG and HTML need nothing beyond Python and load nothing from elsewhere.
"""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SVG = 'xmlns="http://www.w3.org/2000/svg"'
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#555555")
WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT, TOP = 760, 400, 66, 46, 170, 34
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem}td,th{padding:.15rem .7rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#8881}"
    "th{border-bottom:1px solid #888}svg{max-width:100%;height:auto;background:#fff}"
)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells; the first column is left aligned, the others right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def to_text(self) -> str:
        lines: Sequence[tuple[str, ...]] = (self.header, *self.rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def show(line: tuple[str, ...]) -> str:
            cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            cells[0] = line[0].ljust(widths[0])
            return "  ".join(cells).rstrip()

        body = [show(line) for line in lines]
        body.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join([self.title, *body, *([self.note] if self.note else [])])

    def to_markdown(self) -> str:
        """As GitHub renders it, the title in bold above."""
        ruler = ["---", *["--:"] * (len(self.header) - 1)]
        lines = [self.header, ruler, *self.rows]
        body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        return "\n".join([f"**{self.title}**", "", *body, *(["", self.note] if self.note else [])])

    def to_html(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in self.rows)
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<h2>{html.escape(self.title)}</h2><table><tr>{head}</tr>{body}</table>{note}"


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over x (drawn by its logarithm). reference: a value of y to draw a stronger line at."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    reference: float | None = None
    unit: str = ""  # behind the labels of the y axis

    def to_svg(self) -> str:
        points = [p for line in self.lines.values() for p in line]
        if not points:
            return f'<svg {SVG} viewBox="0 0 {WIDTH} 30"><text x="8" y="20">nothing to show</text></svg>'
        most = max(x for x, _ in points)
        step = nice_step(max(*(y for _, y in points), self.reference or 0.0))
        high = step * math.ceil(max(*(y for _, y in points), self.reference or 0.0) / step)

        def at(x: float, y: float) -> tuple[str, str]:
            across = LEFT + (WIDTH - LEFT - RIGHT) * math.log2(max(x, 1)) / max(math.log2(most), 1.0)
            return f"{across:.1f}", f"{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y / high:.1f}"

        parts = [
            f'<svg {SVG} viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui,sans-serif" '
            f'font-size="12"><text x="{LEFT}" y="18" font-size="14">{html.escape(self.title)}</text>'
        ]
        for i in range(round(high / step) + 1):
            y = at(1, i * step)[1]
            stroke = "#333" if self.reference is not None and i * step == self.reference else "#ccc"
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="{stroke}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{i * step:g}{self.unit}</text>')
        parts += [
            f'<text x="{at(x, 0)[0]}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>'
            for x in sorted({x for x, _ in points})
        ]
        parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{html.escape(f"{self.x}; {self.y}")}</text>')
        for i, (name, line) in enumerate(self.lines.items()):
            colour = COLOURS[i % len(COLOURS)]
            path = " ".join(",".join(at(x, y)) for x, y in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            place = f'x="{WIDTH - RIGHT + 12}" y="{TOP + 18 * i + 10}"'
            parts.append(f'<text {place} fill="{colour}">{html.escape(name)}</text>')
        return "".join(parts) + "</svg>"

    def write(self, path: str | Path) -> None:
        """To a file, by its ending. Raises ValueError for one that is not .svg, .png or .pdf, or where matplotlib, needed for
        the latter two, is not installed; OSError."""
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(self.to_svg(), encoding="utf-8")
            return
        require_ending(path)
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for i, (name, line) in enumerate(self.lines.items()):
            axes.plot(*zip(*line, strict=True), marker="o", color=COLOURS[i % len(COLOURS)], label=name)
        if self.reference is not None:
            axes.axhline(self.reference, color="#666", linewidth=1)
        axes.set(xlabel=self.x, ylabel=self.y, title=self.title)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path)


def require_ending(path: Path) -> None:
    """Raises ValueError when no picture can be written to a file of that name. Cheap: to be asked before long work."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"plot must end in .svg, .png or .pdf, got {path.name!r}")
    if path.suffix != ".svg":
        try:
            importlib.import_module("matplotlib.figure")
        except ImportError:
            hint = "(pip install 'specbatch[plot]'); .svg needs nothing"
            raise ValueError(f"{path.suffix} needs matplotlib {hint}") from None


def write_page(path: str | Path, title: str, chart: Chart, tables: Sequence[Table]) -> None:
    """One HTML page with the picture and the tables. Raises OSError."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    body = [f"<h1>{html.escape(chart.title)}</h1>", chart.to_svg(), *(table.to_html() for table in tables)]
    Path(path).write_text("\n".join([head, *body]) + "</html>\n", encoding="utf-8")


def nice_step(most: float) -> float:
    """A round distance between grid lines: four to ten of them up to `most`."""
    if most <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * f for f in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if most / (power * f) <= 10.0)
