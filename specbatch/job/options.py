"""Every option of a job, what a caller supplies, and what a job reports. Knows neither the command line nor torch.

Importing this module is cheap (no numpy, no pyarrow): the command line builds its options from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from specbatch.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specbatch.errors import SpecbatchError
    from specbatch.requests import BatchEngine, EngineProgress, Tokenizer

OverlongPolicy = Literal["error", "truncate-left", "truncate-right", "skip"]
OutputFormat = Literal["parquet", "openai-batch"]
ChatMode = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """One job. Fields marked * change results: they belong to the output's fingerprint. Times are seconds.

    Raises UsageError (exit 2) naming the option, its value and what is allowed.
    """

    inputs: tuple[str, ...]  # * files, globs, directories (hive partitions become columns); Parquet or JSON lines
    output: Path  # directory

    # What the prompt is made of. At most one of prompt_column, messages_column, template; none: detected.
    prompt_column: str | None = None  # * any string-like column
    messages_column: str | None = None  # * list<struct<role, content, ...>> or a JSON string
    template: str | None = None  # * "Summarise: {body}": literal text and column names
    chat: ChatMode = "auto"  # * auto: through the model's chat template if it has one; on / off: force
    system_prompt: str | None = None  # * put before the messages when the prompt goes through the chat template
    params_column: str | None = None  # * struct or JSON string: max_tokens, temperature, seed, stop ... of the row

    # How rows are sampled
    sampling: SamplingParams = field(default_factory=SamplingParams)  # * defaults; seed here must be None
    seed: int = 0  # * of the run: a row without a seed of its own takes one made of this, its file and row number
    n: int = 1  # * samples a row; above 1 completion, finish_reason, completion_tokens are lists of n
    overlong: OverlongPolicy = "error"  # * truncation leaves room for max_tokens
    limit: int | None = None  # * only the first rows, over all inputs
    max_row_bytes: int = 16 * 2**20  # * a larger cell in the prompt's columns is a row error

    # The output table
    format: OutputFormat = "parquet"  # *
    keep_columns: tuple[str, ...] | None = None  # * input columns in the output; None: all; (): none
    output_prefix: str = ""  # * before the name of every column that specbatch adds
    output_token_ids: bool = False  # * adds completion_token_ids
    logprobs: bool = False  # * adds completion_logprobs
    shard_rows: int = 10_000  # whole row groups up to this many rows make a shard (a larger one is a shard alone)
    compression: Literal["zstd", "snappy", "none"] = "zstd"

    # What may be taken from earlier work
    reuse: tuple[Path, ...] = ()  # output directories whose equal rows are taken, first one first
    deduplicate: bool = True  # compute equal greedy rows once
    retry_failed: bool = False  # compute again the rows that ended with an error
    restart: bool = False  # discard what the output directory holds

    # When to stop
    wait_lock: float = 0.0  # wait this long for another run on the same output
    grace: float = 20.0  # after the first INT / TERM, and before max_duration
    max_duration: float | None = None
    stall_timeout: float = 600.0  # no progress of the engine for this long ends the process; 0: never
    max_errors: int | None = None  # more row errors than this end the job (exit 4); 0: the first one does
    max_error_rate: float | None = None  # errors / finished rows, looked at from 100 finished rows on and at the end

    # How the host works
    tokenizer_threads: int = 2
    read_ahead_rows: int = 32_768  # prepared rows (tokenised, not yet given to the engine) held at most

    def __post_init__(self) -> None:
        from specbatch.job.validate import check_options

        check_options(self)


@dataclass(frozen=True, slots=True)
class Target:
    """What a job must know of the model before any is loaded."""

    name: str  # as the user named it; shown, and `model` in openai-batch output
    max_model_len: int  # tokens of prompt and answer
    fingerprint: Mapping[str, str]  # what changes results: model, tokenizer, chat_template, dtype, verification ...
    make_tokenizer: Callable[[], Tokenizer]  # called once, after all checks of inputs and options


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What a job gives to whoever makes the engine."""

    log_decision: Callable[[Mapping[str, object]], None]  # one line of _specbatch/decisions.jsonl; never raises
    resolved: Mapping[str, object]  # describe()["resolved"] of this output's first start: choices to repeat
    rows_left: int  # rows still to do at most (reused and skipped ones included)
    say: Callable[[str], None] = lambda name: None  # a slow step of loading begins: JobEvents.stage


EngineFactory: TypeAlias = "Callable[[EngineContext], BatchEngine]"
"""Called once, only when there is a row to compute.

Two optional additions to BatchEngine are used when present:
* `reduce_batch() -> int`: after OutOfMemory, halve the rows that run at once (unfinished rows go back to the queue,
  none is lost) and return the new number; at 1 already, end the running row with FINISH_ERROR "out_of_memory" and
  return 0. Without it the job retries the rows in halves itself.
* `describe()["resolved"]`: choices made at run time that change results (the dtype that "auto" became): kept in the
  manifest, given back to the next start through EngineContext.resolved, and compared there (exit 12).
"""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What is about to happen; reported before any model is loaded."""

    output: Path
    inputs: int  # files
    input_bytes: int
    rows: int
    shards: int
    shards_done: int  # committed by earlier starts
    rows_done: int
    prompt_source: str  # "column prompt", "messages column chat", "template 'Summarise: {body}'" ...
    kept_columns: tuple[str, ...]
    added_columns: tuple[str, ...]  # (): the output has no columns, it is JSON lines
    resumed: bool
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class JobProgress:
    """Live figures; rows count the whole table, earlier starts included."""

    rows_total: int = 0
    rows_done: int = 0
    row_errors: int = 0
    skipped: int = 0
    reused: int = 0
    deduplicated: int = 0
    shards_total: int = 0
    shards_done: int = 0
    shards_live: tuple[int, ...] = ()
    rows_this_start: int = 0
    elapsed: float = 0.0
    stopping: str | None = None  # why no new rows are admitted: "SIGTERM", "max-duration", "error budget"
    engine: EngineProgress | None = None  # None until there is one


class JobEvents:
    """Callbacks of a running job, on the thread that called run_job. Override what you need; do not raise."""

    def plan(self, plan: JobPlan) -> None: ...

    def stage(self, name: str) -> None:
        """A slow step begins: "hashing inputs", "loading tokenizer", "loading model", "generating"."""

    def engine_ready(self, description: Mapping[str, object]) -> None: ...

    def shard_started(self, shard: int, rows: int) -> None: ...

    def shard_committed(self, shard: int, rows: int, errors: int, part: str) -> None: ...

    def tick(self, progress: JobProgress) -> None:
        """At most ten times a second."""

    def report(self, progress: JobProgress) -> None:
        """SIGUSR1: print progress now."""

    def warning(self, code: str, message: str) -> None: ...

    def stopping(self, reason: str, seconds: float) -> None:
        """No new rows from now on; what runs has this many seconds."""

    def ending(self, error: SpecbatchError) -> None:
        """The process is about to end in the middle of run_job: a stall, or a signal that it could not drain after.

        NOTE: called on another thread, while the calling one hangs; a stall in a process of somebody else only says so.
        """
        print(error.message, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended. Counts of rows are of the whole table; tokens and times of this start, unless named total_."""

    exit_code: int
    reason: str  # "done", "done with row errors", "SIGTERM", "max-duration", "error budget", "unreadable input"
    output: str
    rows: int  # rows of the input (after --limit)
    rows_done: int  # in committed parts
    row_errors: int
    row_errors_by_code: dict[str, int]
    skipped: int
    reused: int
    deduplicated: int
    shards: int
    shards_done: int
    rows_this_start: int  # finished by this start
    rows_computed: int  # by the engine, in this start
    prompt_tokens: int
    completion_tokens: int
    generation_seconds: float  # from the first request to the last finished row; no loading, no profiling
    completion_tokens_per_second: float
    engine_busy_seconds: float  # inside the engine's steps; the rest of generation_seconds it waited
    wall_seconds: float
    steps: int
    drafted: int
    accepted: int
    acceptance_rate: float | None  # None: nothing was drafted
    preemptions: int
    total_prompt_tokens: int
    total_completion_tokens: int
    prompt_source: str
    engine: dict[str, object]  # describe(); empty when no engine was needed
    failed_shards: dict[int, str] = field(default_factory=dict)  # input that could not be read

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types, every field."""
        return asdict(self)
