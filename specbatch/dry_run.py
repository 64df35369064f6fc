"""`specbatch run --dry-run`: the estimate, printed. Nothing is written and no model is loaded."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from specbatch import wording
from specbatch.config import Settings
from specbatch.errors import ExitCode
from specbatch.job.estimate import Estimate, estimate
from specbatch.streams import SafeStream
from specbatch.target import describe_target, make_target
from specbatch.units import format_bytes, format_count, format_duration, format_percent, format_rate

if TYPE_CHECKING:
    from specbatch.settings import RunOptions

BAR = 32  # characters of the longest bar


def dry_run(options: RunOptions, settings: Settings) -> int:
    """Print rows, tokens, what does not fit, disk and time. Raises SpecbatchError as a run would."""
    stderr, stdout = SafeStream(sys.stderr), SafeStream(sys.stdout)
    for note in settings.notes:
        stderr.line(f"warning: {note}")
    target, _ = make_target(options.engine)
    found = estimate(options.job, target, stage=lambda name: stderr.line(f"{name} ..."))
    if options.view.json:
        stdout.line(json.dumps(found.to_dict() | {"target": describe_target(target)}))
    else:
        for line in report_lines(found, target.name):
            stdout.line(line)
    stdout.require_delivered()
    return ExitCode.OK


def report_lines(found: Estimate, model: str) -> list[str]:
    """The estimate for people, plain text."""
    about = "" if found.sampled_rows >= found.rows else f" (from a sample of {format_count(found.sampled_rows)})"
    lines = [
        f"rows      {format_count(found.rows)} in {wording.plural(found.files, 'file')} "
        f"({format_bytes(found.input_bytes)}), {wording.plural(found.shards, 'shard')}"
        + (f"; {format_count(found.rows_done)} done by earlier starts" if found.rows_done else ""),
        f"prompts   from {found.prompt_source}; model {model}, context {format_count(found.max_model_len)} tokens",
        f"tokens    {format_count(found.prompt_tokens)} in prompts{about}: median {found.prompt_tokens_median}, "
        f"99 % up to {found.prompt_tokens_p99}, longest {found.prompt_tokens_max}",
    ]
    most = max((count for _, _, count in found.histogram), default=1) or 1
    for low, high, count in found.histogram:
        bar = "#" * max(round(BAR * count / most), 1 if count else 0)
        lines.append(f"  {f'{low}-{high}':>13}  {format_count(count):>11}  {bar}".rstrip())
    trouble = [f"{format_count(found.overlong)} too long for the context"] if found.overlong else []
    trouble += [f"{format_count(found.cut_short)} with less room than max-tokens"] if found.cut_short else []
    trouble += [f"{format_count(found.skipped)} skipped"] if found.skipped else []
    trouble += [f"{format_count(n)} {code}" for code, n in found.row_errors.items() if code != "prompt_too_long"]
    lines.append("trouble   " + ("; ".join(trouble) or "none"))
    lines.append(
        f"output    at most {format_count(found.completion_tokens_at_most)} completion tokens, "
        f"about {format_bytes(found.output_bytes_at_most)} on disk at most"
    )
    if found.seconds_at_most is None:
        when = "not known: no earlier start to go by; --limit 200 makes one"
    else:
        left = found.seconds_at_most * (1 - found.rows_done / max(found.rows, 1))
        when = f"at most {format_duration(left)} at the {format_rate(found.tokens_per_second)} tokens/s of an earlier start"
    share = found.tokenize_seconds / found.seconds_at_most if found.seconds_at_most else None
    beside = f" ({format_percent(share)} of it)" if share is not None and share < 1 else ""
    lines.append(f"time      {when}; tokenizing {format_duration(found.tokenize_seconds)} on one thread{beside}")
    return lines
