"""`--dry-run`: what a job would do, from its inputs and the tokenizer alone: rows, tokens, what fits, disk and time.

Reads and tokenises, computes nothing, writes nothing. A large table is looked at through a sample of its rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specbatch.errors import SpecbatchError
from specbatch.job.manifest import Manifest
from specbatch.job.options import JobOptions, Target
from specbatch.job.params import ParamsParser
from specbatch.job.plan import make_plan
from specbatch.job.prepare import Prepared, Preparer
from specbatch.job.prompts import PromptBuilder
from specbatch.job.reader import InputSet
from specbatch.job.shards import Shard, plan_shards
from specbatch.sampling_params import SamplingParams

SCHEMA_VERSION: Final = 1
SAMPLE_ROWS: Final = 20_000  # tables up to this are read whole
TEXT_BYTES_PER_TOKEN: Final = 2.0  # compressed: English has about 4 bytes a token under common vocabularies


@dataclass(slots=True)
class Estimate:
    """Counts are of the whole table; where only a sample was read they are scaled up from it."""

    rows: int
    files: int
    input_bytes: int
    shards: int
    rows_done: int  # by earlier starts
    prompt_source: str
    output_columns: list[str]
    sampled_rows: int  # rows read; all of them when equal to `rows`
    prompt_tokens: int
    prompt_tokens_min: int
    prompt_tokens_median: int
    prompt_tokens_p99: int
    prompt_tokens_max: int
    histogram: list[tuple[int, int, int]]  # tokens from, to (inclusive), rows
    overlong: int  # rows that do not fit the model's context, whatever --overlong makes of them
    cut_short: int  # rows that fit, but not with max_tokens to follow
    skipped: int
    row_errors: dict[str, int]
    completion_tokens_at_most: int
    output_bytes_at_most: int
    tokens_per_second: float | None  # of the last start on this output or one given with --reuse
    seconds_at_most: float | None
    tokenize_seconds: float  # one thread, for all rows
    max_model_len: int
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON types, schema_version first."""
        return {"schema_version": SCHEMA_VERSION} | asdict(self)


def estimate(options: JobOptions, target: Target, *, stage: Callable[[str], None] = lambda name: None) -> Estimate:
    """Look at the inputs. Raises what a run would raise for inputs, schema and options."""
    stage("loading tokenizer")
    plan = make_plan(options, target)
    inputs, tokenizer = plan.inputs, plan.tokenizer.get
    shards = plan_shards(inputs.row_groups, options.shard_rows, options.limit)
    rows = sum(shard.rows for shard in shards)
    builder = PromptBuilder(
        plan.source,
        ParamsParser(plan.sampling, target.max_model_len),
        tokenizer.render,
        max_row_bytes=options.max_row_bytes,
        n=options.n,
        logprobs=options.logprobs,
    )
    # Whatever the policy, lengths are looked at before it: truncated rows are over-long too.
    preparer = Preparer(replace(options, overlong="error"), builder, tokenizer, target.max_model_len)
    stage("counting tokens")
    counts = _Counts(options, target.max_model_len)
    began = time.perf_counter()
    for shard in _sample(shards, rows):
        start = 0
        for piece in inputs.read(shard, plan.source.columns):
            counts.add(preparer.prepare(shard, start, piece))
            start += piece.rows
    seconds = time.perf_counter() - began
    scale = rows / counts.rows if counts.rows else 1.0
    lengths = np.concatenate([*counts.lengths, np.zeros(0, np.int64)])
    low, median, p99, high = map(int, np.quantile(lengths, (0, 0.5, 0.99, 1))) if len(lengths) else (0, 0, 0, 0)
    completion = round(counts.completion * scale) * options.n
    speed = _earlier_speed(options)
    manifest = _manifest(options.output)
    return Estimate(
        rows=rows,
        files=len(inputs.specs),
        input_bytes=sum(state.size for state in inputs.states),
        shards=len(shards),
        rows_done=sum(part.rows for part in manifest.parts if part) if manifest and not options.restart else 0,
        prompt_source=plan.source.description,
        output_columns=plan.output.as_text,
        sampled_rows=counts.rows,
        prompt_tokens=round(int(lengths.sum()) * scale),
        prompt_tokens_min=low,
        prompt_tokens_median=median,
        prompt_tokens_p99=p99,
        prompt_tokens_max=high,
        histogram=[(first, last, round(count * scale)) for first, last, count in histogram(lengths)],
        overlong=round(counts.overlong * scale),
        cut_short=round(counts.cut_short * scale),
        skipped=round(counts.skipped * scale),
        row_errors={code: max(1, round(count * scale)) for code, count in counts.errors.most_common()},
        completion_tokens_at_most=completion,
        output_bytes_at_most=_kept_bytes(inputs, plan.output.kept, rows) + round(completion * TEXT_BYTES_PER_TOKEN),
        tokens_per_second=speed,
        seconds_at_most=completion / speed if speed else None,
        tokenize_seconds=seconds * scale,
        max_model_len=target.max_model_len,
    )


def _sample(shards: list[Shard], rows: int) -> list[Shard]:
    """All shards, or the beginnings of shards spread evenly over the table. Shards stay in order."""
    if rows <= SAMPLE_ROWS:
        return shards
    chosen = shards[:: max(1, len(shards) // 20)][:20]
    each = SAMPLE_ROWS // len(chosen)
    return [Shard(s.index, s.file, s.first_group, s.num_groups, s.first_row, min(s.rows, each)) for s in chosen]


class _Counts:
    """Sums over the rows that were looked at."""

    def __init__(self, options: JobOptions, max_model_len: int) -> None:
        self._default = options.sampling.max_tokens
        self._policy = options.overlong
        self._limit = max_model_len
        self.rows = 0
        self.lengths: list[NDArray[np.int64]] = []
        self.overlong = self.cut_short = self.skipped = self.completion = 0
        self.errors: Counter[str] = Counter()

    def add(self, work: Prepared) -> None:
        self.rows += work.count
        lengths = np.diff(work.offsets)
        if isinstance(work.params, SamplingParams):
            wanted = np.full(len(lengths), work.params.max_tokens)
        else:
            wanted = np.array([params.max_tokens for params in work.params], np.int64)
        room = np.minimum(wanted, self._limit - lengths)
        self.completion += int(room.sum())
        self.cut_short += int(np.count_nonzero(room < wanted))
        known = [length for length in work.outcomes.prompt_tokens if length]
        self.lengths.append(np.concatenate([lengths, np.array(known, np.int64)]))
        for code in work.outcomes.codes:
            overlong = code == "prompt_too_long"
            self.overlong += overlong
            if code is None or (overlong and self._policy == "skip"):
                self.skipped += 1
            elif overlong and self._policy != "error":  # truncated, with room for the answer
                self.completion += self._default
            else:
                self.errors[code] += 1


def histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Rows by prompt length in powers of two: (from, to, rows), from the first to the last range that has any."""
    if len(lengths) == 0:
        return []
    bins = np.bincount([int(length).bit_length() for length in lengths])
    used = np.flatnonzero(bins)
    ranges = range(int(used[0]), int(used[-1]) + 1)
    return [(1 << (b - 1) if b else 0, (1 << b) - 1, int(bins[b])) for b in ranges]


def _kept_bytes(inputs: InputSet, kept: tuple[str, ...], rows: int) -> int:
    """Compressed bytes of the input columns that are copied, for `rows` rows."""
    total, seen = 0, sum(inputs.rows)
    for spec, state in zip(inputs.specs, inputs.states, strict=True):
        if inputs.is_jsonl:
            total += state.size if kept else 0
            continue
        metadata = pq.ParquetFile(spec.path).metadata
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                column = metadata.row_group(group).column(index)
                if column.path_in_schema.split(".")[0] in kept:
                    total += column.total_compressed_size
    return round(total * rows / seen) if seen else 0


def _manifest(output: Any) -> Manifest | None:
    try:
        return Manifest.load(output)
    except SpecbatchError:
        return None


def _earlier_speed(options: JobOptions) -> float | None:
    """Completion tokens a second of the latest start that computed something, here or in a --reuse directory."""
    for output in (options.output, *options.reuse):
        manifest = _manifest(output)
        for start in reversed(manifest.starts if manifest else []):
            speed = start.get("completion_tokens_per_second")
            if isinstance(speed, int | float) and speed > 0:
                return float(speed)
    return None
