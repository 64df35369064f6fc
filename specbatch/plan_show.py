"""A plan as text tables, as a picture and as one self-contained HTML page.

Owns the wording. Knows no arithmetic beyond rounding, and of drawing only what is to be drawn.
"""

from __future__ import annotations

from pathlib import Path

from specbatch.charts import Chart, Table, write_page
from specbatch.plan import Plan


def tables(plan: Plan) -> list[Table]:
    """Memory, rows, speed-up, break-even and the rules, in the order they are read."""
    return [_memory(plan), _rows(plan), _speedup(plan), _full(plan), _limits(plan), _rules(plan)]


def to_text(plan: Plan) -> str:
    """All tables in plain text."""
    return "\n\n".join(table.to_text() for table in tables(plan)) + "\n"


def chart(plan: Plan) -> Chart:
    """Speed-up over rows, a line an acceptance."""
    lines = {f"acceptance {acceptance}": points for acceptance, points in _lines(plan).items()}
    return Chart(_headline(plan), "rows at once", "tokens a second over AR, at the best k", lines, 1.0, "x")


def write_html(plan: Plan, path: str | Path) -> None:
    """One page with the picture and the tables, nothing loaded from elsewhere."""
    write_page(path, "specbatch plan", chart(plan), tables(plan))


def _lines(plan: Plan) -> dict[float, list[tuple[float, float]]]:
    lines: dict[float, list[tuple[float, float]]] = {}
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


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _kib(count: int) -> str:
    return f"{count / 1024:g} KiB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
