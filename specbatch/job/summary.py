"""What is left of a run for people and programs: the last line, the JSON object, the metrics file.

Pure functions of a JobResult (or of the error that ended the run). Knows no terminal.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from specbatch.errors import ExitCode, SpecbatchError
from specbatch.job.durable import write_atomic
from specbatch.job.options import JobResult
from specbatch.units import format_count, format_duration, format_percent, format_rate

SCHEMA_VERSION: Final = 1
COMPLETE: Final = (ExitCode.OK, ExitCode.ROW_ERRORS)


def final_line(result: JobResult) -> str:
    """The last line for people: what happened, to how many rows, how fast, and what to do next. ASCII, no newline."""
    rows = f"{format_count(result.rows_done)} of {format_count(result.rows)} rows in {result.output}"
    parts = [f"{result.reason}: {rows}"]
    if result.row_errors:
        most = sorted(result.row_errors_by_code.items(), key=lambda item: -item[1])
        named = ", ".join(f"{format_count(count)} {code}" for code, count in most[:3])
        more = ", ..." if len(most) > 3 else ""
        errors = "row error" if result.row_errors == 1 else "row errors"
        parts.append(f"{format_count(result.row_errors)} {errors} ({named}{more})")
    for count, word in ((result.skipped, "skipped"), (result.reused, "reused"), (result.deduplicated, "deduplicated")):
        if count:
            parts.append(f"{format_count(count)} {word}")
    if result.rows_computed:
        speed = format_rate(result.completion_tokens_per_second)
        parts.append(f"{format_count(result.completion_tokens)} tokens at {speed} tokens/s")
    if result.acceptance_rate is not None:
        parts.append(f"acceptance {format_percent(result.acceptance_rate)}")
    if result.preemptions:
        parts.append(f"{format_count(result.preemptions)} preemptions")
    parts.append(format_duration(result.wall_seconds))
    if result.failed_shards:
        count = len(result.failed_shards)
        parts.append(f"{count} {'shard' if count == 1 else 'shards'} left out, see the warnings")
    if result.exit_code == ExitCode.ERROR_BUDGET:
        parts.append("the column error says why; go on with a higher budget or --retry-failed")
    elif result.exit_code not in (*COMPLETE, ExitCode.USAGE):
        parts.append("run it again to continue")
    return ", ".join(parts) + f" [exit {result.exit_code}]"


def error_line(error: SpecbatchError) -> str:
    """The same for a run that an error ended."""
    return f"error: {error.message} [exit {int(error.exit_code)}]"


def result_object(result: JobResult, *, version: str, settings: Mapping[str, object]) -> dict[str, Any]:
    """The object of --json: schema_version, then every field of JobResult, then the settings that were given."""
    return {"schema_version": SCHEMA_VERSION, "version": version, **result.to_dict(), "settings": dict(settings)}


def error_object(error: SpecbatchError, *, version: str) -> dict[str, Any]:
    """The object of --json when an error ended the run: exit_code and reason as in a result, and the error."""
    what = {"code": error.code, "message": error.message, "hint": error.hint}
    code = int(error.exit_code)
    return {"schema_version": SCHEMA_VERSION, "version": version, "exit_code": code, "reason": "error", "error": what}


_METRICS: Final = (
    ("last_run_timestamp_seconds", "When the last start ended."),
    ("last_success_timestamp_seconds", "When a start last left a complete table (exit code 0 or 3)."),
    ("last_exit_code", "Exit code of the last start."),
    ("rows", "Rows of the input."),
    ("rows_done", "Rows in committed parts."),
    ("row_errors", "Rows that ended with an error."),
    ("rows_skipped", "Rows without a prompt, or skipped by policy."),
    ("rows_reused", "Rows answered from an earlier output."),
    ("rows_computed", "Rows the engine computed in the last start."),
    ("prompt_tokens", "Prompt tokens of the last start."),
    ("completion_tokens", "Completion tokens of the last start."),
    ("completion_tokens_per_second", "Of the last start, model loading excluded."),
    ("generation_seconds", "Of the last start, model loading excluded."),
    ("wall_seconds", "Of the last start."),
    ("acceptance_rate", "Accepted drafts over drafts proposed, last start."),
    ("preemptions", "Of the last start."),
)


def metrics_text(
    result: JobResult | None, *, exit_code: int, output: str, earlier: str = "", now: float | None = None
) -> str:
    """Prometheus text format. last_success is taken over from `earlier` unless this start succeeded.

    result None: an error ended the run, and only its exit code and time are known.
    """
    time_now = time.time() if now is None else now
    values: dict[str, float] = {"last_run_timestamp_seconds": time_now, "last_exit_code": exit_code}
    success = time_now if exit_code in COMPLETE else _earlier_success(earlier)
    if success is not None:
        values["last_success_timestamp_seconds"] = success
    if result is not None:
        fields = result.to_dict() | {"rows_skipped": result.skipped, "rows_reused": result.reused}
        for name, _ in _METRICS:
            if isinstance(value := fields.get(name), int | float):
                values[name] = value
    label = output.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for name, help_text in _METRICS:
        if name in values:
            full = f"specbatch_{name}"
            lines += [f"# HELP {full} {help_text}", f"# TYPE {full} gauge"]
            lines.append(f'{full}{{output="{label}"}} {_number(values[name])}')
    if result is not None and result.row_errors_by_code:
        full = "specbatch_row_errors_by_code"
        lines += [f"# HELP {full} Rows that ended with an error, by its code.", f"# TYPE {full} gauge"]
        for code, count in sorted(result.row_errors_by_code.items()):
            lines.append(f'{full}{{output="{label}",code="{code}"}} {count}')
    return "\n".join(lines) + "\n"


def write_metrics(path: Path, result: JobResult | None, *, exit_code: int, output: str) -> None:
    """Replace the metrics file (or what a link of that name leads to) atomically, readable by all. Raises DiskFull."""
    path = path.resolve()
    try:
        earlier = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        earlier = ""
    write_atomic(path, metrics_text(result, exit_code=exit_code, output=output, earlier=earlier).encode())


def _earlier_success(text: str) -> float | None:
    found = re.search(r"^specbatch_last_success_timestamp_seconds\{[^\n]*\} (\S+)$", text, re.MULTILINE)
    try:
        return float(found.group(1)) if found else None
    except ValueError:
        return None


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(round(float(value), 6))
