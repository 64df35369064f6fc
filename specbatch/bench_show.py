"""A benchmark's result as tables and as a chart. Owns the wording; a made-up acceptance is named in every title."""

from __future__ import annotations

from specbatch.bench import BenchResult
from specbatch.charts import Chart, Table


def tables(result: BenchResult) -> list[Table]:
    """Speed, then acceptance, then what auto did."""
    found = [_speed(result), _acceptance(result), _auto(result)]
    return [table for table in found if table.rows]


def to_text(result: BenchResult) -> str:
    return "\n\n".join(table.to_text() for table in tables(result)) + "\n"


def to_markdown(result: BenchResult) -> str:
    return "\n\n".join(table.to_markdown() for table in tables(result)) + "\n"


def chart(result: BenchResult) -> Chart:
    """Tokens a second over rows at once, a line a setting."""
    lines = {
        setting.name: [
            (float(rows), result.rate(rows, setting)) for rows in result.rows if (rows, setting) in result.runs
        ]
        for setting in result.settings
    }
    title = f"{result.about.get('model', '')}{synthetic_note(result)}"
    return Chart(title, "rows at once", "completion tokens a second", {n: p for n, p in lines.items() if p})


def synthetic_note(result: BenchResult) -> str:
    """ ", SYNTHETIC acceptance 0.75", or nothing."""
    if result.synthetic is None:
        return ""
    return f", SYNTHETIC acceptance {', '.join(f'{p:g}' for p in result.synthetic)}"


def _header(result: BenchResult, first: str) -> tuple[str, ...]:
    return (first, *(f"{rows} at once" for rows in result.rows))


def _speed(result: BenchResult) -> Table:
    lines = []
    for setting in result.settings:
        cells = [f"{result.rate(r, setting):.1f}" if (r, setting) in result.runs else "" for r in result.rows]
        lines.append((setting.name, *cells))
    best = [result.best_forced(rows) for rows in result.rows]
    if any(setting is not None for setting in best) and len(result.settings) > 1:
        lines.append(("best forced", *(setting.name if setting else "" for setting in best)))
    ratios = [result.auto_ratio(rows) for rows in result.rows]
    if any(ratio is not None for ratio in ratios):
        lines.append(("auto over best forced", *("" if x is None else f"{x:.3f}" for x in ratios)))
    rounds = f"{result.rounds} rounds" if result.rounds != 1 else "one round"
    title = f"Completion tokens a second, prefill included, median of {rounds}{synthetic_note(result)}"
    different = max((run.different_rows for runs in result.runs.values() for run in runs), default=0)
    note = ""
    if different and result.synthetic is None:
        note = f"Up to {different} rows of a cell have other tokens than in the first run: near ties, or a defect."
    return Table(title, _header(result, "setting"), tuple(lines), note)


def _acceptance(result: BenchResult) -> Table:
    lines = []
    for setting in result.settings:
        rates = [result.acceptance(rows, setting) for rows in result.rows]
        if any(rate is not None for rate in rates):
            lines.append((setting.name, *("" if rate is None else f"{rate:.2f}" for rate in rates)))
    return Table(f"Drafts accepted{synthetic_note(result)}", _header(result, "setting"), tuple(lines))


def _auto(result: BenchResult) -> Table:
    """Shares of decode steps by mode."""
    lines = []
    for setting in result.settings:
        if not setting.forced:
            for rows in result.rows:
                shares = [f"{mode} {share:.0%}" for mode, share in result.modes(rows, setting).items()]
                if shares:
                    lines.append((f"{rows}", ", ".join(shares[:6])))
    return Table(f"Decode steps of auto by mode{synthetic_note(result)}", ("at once", "modes"), tuple(lines))
