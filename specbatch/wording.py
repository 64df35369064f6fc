"""What a run says, as plain sentences: the same words in a cron log, above the live display and in messages.

Text only, ASCII, one line each. Knows nothing of streams, colours or rich.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specbatch.config import Settings
from specbatch.job.options import JobPlan
from specbatch.meter import Reading
from specbatch.units import format_bytes, format_count, format_duration, format_percent, format_rate


def plural(count: int, word: str) -> str:
    """1 -> "1 row", 1200 -> "1,200 rows"."""
    return f"{format_count(count)} {word}{'' if count == 1 else 's'}"


def settings_line(settings: Settings) -> str | None:
    """What was given beyond the defaults and, where not on the command line, by whom."""
    hidden = ("output", "json", "progress", "log-format", "log-interval", "config", "yes", "metrics-file")
    parts = []
    for name, setting in settings.given.items():
        if name in hidden:
            continue
        value = setting.value
        if isinstance(value, bool):
            shown = name if value else f"no-{name}"
        elif isinstance(value, tuple):
            shown = f"{name} " + ",".join(str(item) if not isinstance(item, str) else repr(item) for item in value)
        elif value is None:
            shown = f"{name} {'auto' if setting.spec.kind == 'memory' else 'all'}"
        elif setting.spec.kind == "duration":
            shown = f"{name} {format_duration(float(str(value)))}"
        elif setting.spec.kind in ("size", "memory"):
            shown = f"{name} {format_bytes(value) if isinstance(value, int) else format_percent(float(str(value)))}"
        else:
            shown = f"{name} {value!r}" if setting.spec.kind == "text" and " " in str(value) else f"{name} {value}"
        parts.append(shown if setting.label.startswith("--") else f"{shown} ({setting.label})")
    return "settings: " + ", ".join(parts) if parts else None


def plan_lines(plan: JobPlan) -> list[str]:
    """What is about to happen: input, prompts, output, and where it goes on."""
    size = f" ({format_bytes(plan.input_bytes)})" if plan.input_bytes else ""
    columns = f"{_names(plan.kept_columns)} + {_names(plan.added_columns)}"
    lines = [
        f"input: {plural(plan.rows, 'row')} in {plural(plan.inputs, 'file')}{size}, {plural(plan.shards, 'shard')}; "
        f"prompts from {plan.prompt_source}",
        f"output: {plan.output}, {columns if plan.added_columns else 'JSON lines in the OpenAI batch shape'}",
    ]
    if plan.resumed:
        lines.append(
            f"continuing: {plan.shards_done} of {plural(plan.shards, 'shard')} done earlier "
            f"({plural(plan.rows_done, 'row')})"
        )
    return lines


def _names(names: Sequence[str], most: int = 6) -> str:
    if not names:
        return "no input columns"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def engine_lines(description: Mapping[str, Any]) -> list[str]:
    """The resolved plan of an engine (its describe()); keys it does not have are left out."""
    get = description.get
    model = _short_path(get("model"))
    draft = f" + draft {_short_path(get('draft_model'))}" if get("draft_model") else ""
    reason = f" ({get('dtype_reason')})" if get("dtype_reason") else ""
    devices = get("devices")
    where = f" on {', '.join(devices) if devices else get('device')}" if devices or get("device") else ""
    rounded = f", {get('quantize')} layers" if get("quantize") not in (None, "none") else ""
    lines = [f"model: {model}{draft}{where}" + (f", {get('dtype')}{reason}{rounded}" if get("dtype") else "")]
    memory = []
    if get("kv_bytes"):
        pages = f" in {plural(int(get('num_pages', 0)), 'page')} of {get('block_size')} tokens"
        memory.append(f"KV {format_bytes(int(get('kv_bytes', 0)))}{pages if get('num_pages') else ''}")
    if get("max_num_seqs"):
        memory.append(f"up to {plural(int(get('max_num_seqs', 0)), 'row')} at once")
    if (most := get("max_rows_ar")) is not None:
        both = f", {get('max_rows_speculative')} with a draft each" if most and get("draft_model") else ""
        memory.append(f"{plural(int(most), 'row') if most else 'no row'} at full context{both}")
    if get("max_model_len"):
        memory.append(f"context {format_count(int(get('max_model_len', 0)))} tokens")
    if memory:
        lines.append("memory: " + "; ".join(memory))
    if get("attention"):
        lines.append(f"attention: {get('attention')}")
    graphs = get("cuda_graphs")
    if graphs and str(get("device")).startswith("cuda"):
        held = f"on, {format_bytes(int(get('graph_bytes', 0)))}" if get("graph_bytes") else "on"
        lines.append(f"CUDA graphs: {held if graphs['enabled'] else 'off (' + str(graphs['reason']) + ')'}")
    return lines


def _short_path(path: object) -> str:
    """The last part of a folder's path is its name for people; what ships in this package is "built-in"."""
    if Path(str(path)).is_relative_to(Path(__file__).parent):
        return "built-in"
    return Path(str(path)).name or str(path)


def progress_line(reading: Reading) -> str:
    """One line an interval, figures in a fixed order."""
    parts = [
        f"{format_percent(reading.share)} ({format_count(reading.rows_done)} of {plural(reading.rows_total, 'row')})"
    ]
    if reading.row_errors:
        parts.append(plural(reading.row_errors, "error"))
    if reading.tokens_per_second is not None:
        parts.append(f"{format_rate(reading.tokens_per_second)} tokens/s")
    if reading.acceptance_rate is not None:
        parts.append(f"acceptance {format_percent(reading.acceptance_rate)}")
    if reading.kv_share is not None:
        parts.append(f"KV {format_percent(reading.kv_share)}")
    if reading.running or reading.waiting:
        parts.append(f"{reading.running} running, {reading.waiting} waiting")
    if reading.preemptions:
        parts.append(plural(reading.preemptions, "preemption"))
    if reading.modes:
        parts.append("mode " + mode_summary(reading))
    parts.append(f"{format_duration(reading.elapsed)} elapsed, {format_duration(reading.seconds_left)} left")
    if reading.stopping:
        parts.append(f"stopping ({reading.stopping})")
    return ", ".join(parts)


def mode_summary(reading: Reading) -> str:
    """ "ar" when all live shards agree, else "ar 3, ngram k=4 1"."""
    counts = reading.mode_counts
    return counts[0][0] if len(counts) == 1 else ", ".join(f"{mode} x{count}" for mode, count in counts)


def stopping_line(reason: str, seconds: float) -> str:
    """Said once, when no new rows are admitted any more."""
    again = " (a second signal ends it now)" if reason.startswith("SIG") else ""
    running = f"running rows have up to {format_duration(seconds)}" if seconds > 0 else "running rows are dropped"
    return f"{reason}: no new rows; {running}{again}"
