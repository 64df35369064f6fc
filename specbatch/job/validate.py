"""Checks of job options that need no input file: ranges and contradictions. Raises UsageError."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from specbatch.errors import UsageError

if TYPE_CHECKING:
    from specbatch.job.options import JobOptions

MAX_SECONDS = 1_000_000_000  # 31 years: what every clock takes
MAX_THREADS = 256
MAX_SAMPLES = 1024  # request ids keep ten bits for the sample number


def check_options(options: JobOptions) -> None:
    """Raise UsageError for the first option that cannot be right."""
    from specbatch.job.options import ChatMode, OutputFormat, OverlongPolicy

    def check(ok: bool, name: str, allowed: str) -> None:
        if not ok:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} must be {allowed}, got {getattr(options, name)!r}")

    check(len(options.inputs) > 0, "inputs", "at least one file, glob or directory")
    for name, choices in (("overlong", OverlongPolicy), ("format", OutputFormat), ("chat", ChatMode)):
        check(getattr(options, name) in get_args(choices), name, "one of " + ", ".join(get_args(choices)))
    check(1 <= options.n <= MAX_SAMPLES, "n", f"between 1 and {MAX_SAMPLES}")
    check(0 <= options.seed < 2**63, "seed", "between 0 and 2**63 - 1")
    for name in ("shard_rows", "max_row_bytes", "tokenizer_threads", "read_ahead_rows"):
        check(getattr(options, name) >= 1, name, "at least 1")
    check(options.tokenizer_threads <= MAX_THREADS, "tokenizer_threads", f"at most {MAX_THREADS}")
    check(options.limit is None or options.limit >= 1, "limit", "at least 1")
    for name in ("wait_lock", "grace", "stall_timeout"):
        value = getattr(options, name)
        check(0 <= value <= MAX_SECONDS, name, f"a number of seconds between 0 and {MAX_SECONDS:,}")
    duration = options.max_duration
    allowed = f"a number of seconds above 0 and up to {MAX_SECONDS:,}"
    check(duration is None or 0 < duration <= MAX_SECONDS, "max_duration", allowed)
    check(options.max_errors is None or options.max_errors >= 0, "max_errors", "0 or more")
    check(options.max_error_rate is None or 0 <= options.max_error_rate <= 1, "max_error_rate", "between 0 and 1")
    check(options.compression in ("zstd", "snappy", "none"), "compression", "one of zstd, snappy, none")

    names = ("prompt_column", "messages_column", "template")
    sources = ["--" + name.replace("_", "-") for name in names if getattr(options, name) is not None]
    if len(sources) > 1:
        raise UsageError(f"{' and '.join(sources)} contradict each other", hint="give one of them")
    if options.restart and options.retry_failed:
        raise UsageError(
            "--restart and --retry-failed contradict each other", hint="--restart computes every row again"
        )
    if options.sampling.seed is not None:
        raise UsageError(
            "a seed in the sampling defaults would give every row the same one", hint="set JobOptions.seed"
        )
