"""What a job will do, from options, inputs and target alone: sources, columns, shards, fingerprint. Writes nothing.

Everything that can be refused before a model is loaded is refused here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specbatch.errors import OutputMismatch, UsageError
from specbatch.job.columns import OutputPlan, PromptSource, find_source, is_text, plan_output
from specbatch.job.inputs import FileState, digests, expand_inputs
from specbatch.job.manifest import InputEntry, Manifest
from specbatch.job.options import JobOptions, Target
from specbatch.job.reader import InputSet
from specbatch.job.shards import FILE_BITS, ROW_BITS
from specbatch.requests import Tokenizer
from specbatch.sampling_params import SamplingParams


@dataclass(slots=True)
class Plan:
    """Resolved inputs and columns of a job."""

    options: JobOptions
    target: Target
    inputs: InputSet
    source: PromptSource
    output: OutputPlan
    tokenizer: LazyTokenizer

    @property
    def sampling(self) -> SamplingParams:
        """The run's defaults as engines get them."""
        return replace(self.options.sampling, logprobs=self.options.logprobs)

    @property
    def part_columns(self) -> tuple[str, ...]:
        """Input columns that are read again when a part is written."""
        if self.options.format == "parquet":
            return self.output.kept
        if self.inputs.is_jsonl:
            return ("custom_id", "request")
        names = self.inputs.schema.names
        has_id = "custom_id" in names and is_text(self.inputs.schema.field("custom_id").type)
        return ("custom_id",) if has_id else ()


class LazyTokenizer:
    """Made when it is first asked for, once."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @cached_property
    def get(self) -> Tokenizer:
        return self._target.make_tokenizer()


def make_plan(options: JobOptions, target: Target) -> Plan:
    """Open the inputs and decide. Raises UsageError, SchemaError, InputMissing, InputUnreadable."""
    if options.sampling.max_tokens >= target.max_model_len:
        raise UsageError(
            f"--max-tokens {options.sampling.max_tokens} leaves no room for a prompt in the model's context "
            f"of {target.max_model_len} tokens"
        )
    specs = expand_inputs(options.inputs, options.output)
    if len(specs) >= 1 << FILE_BITS:
        raise UsageError(f"{len(specs)} input files; at most {(1 << FILE_BITS) - 1} can be done in one run")
    inputs = InputSet(specs, [FileState.of(spec.path) for spec in specs])
    for spec, rows in zip(specs, inputs.rows, strict=True):
        if rows >= 1 << ROW_BITS:
            raise UsageError(f"{spec.path} has {rows} rows; at most {(1 << ROW_BITS) - 1} can be done")
    tokenizer = LazyTokenizer(target)
    source = find_source(
        inputs.schema,
        options,
        inputs.is_jsonl,
        lambda: tokenizer.get.has_chat_template,
        lambda: tokenizer.get.prefers_chat,
    )
    return Plan(options, target, inputs, source, plan_output(inputs.schema, options), tokenizer)


def input_entries(plan: Plan, earlier: Manifest | None) -> list[InputEntry]:
    """Identity of every input; files unchanged since `earlier` by size and time are not read again."""
    known: dict[tuple[str, int, int], str] = {}
    for entry in earlier.inputs if earlier is not None else ():
        known[entry.path, entry.size, entry.mtime_ns] = entry.digest
    paths = [str(spec.path.resolve()) for spec in plan.inputs.specs]
    states = plan.inputs.states
    found = [known.get((path, state.size, state.mtime_ns)) for path, state in zip(paths, states, strict=True)]
    values = digests([Path(path) for path in paths], found)
    rows = plan.inputs.rows
    return [
        InputEntry(path, state.size, state.mtime_ns, digest, count)
        for path, state, digest, count in zip(paths, states, values, rows, strict=True)
    ]


def require_same_inputs(output: Path, earlier: Sequence[InputEntry], now: Sequence[InputEntry]) -> None:
    """Raise OutputMismatch naming the file that was edited, or the numbers of files."""
    hint = "use another output directory, or --restart (--reuse takes over the rows that are still the same)"
    if len(earlier) != len(now):
        message = f"{output} was started with {len(earlier)} input files, now there are {len(now)}"
        raise OutputMismatch(message, field="inputs", hint=hint)
    for before, after in zip(earlier, now, strict=True):
        if before.digest != after.digest:
            same = "was edited since" if before.path == after.path else f"is not the {before.path} of"
            message = f"input {after.path} {same} {output} was started: its content differs"
            raise OutputMismatch(message, field="inputs", hint=hint)


def answer_fingerprint(plan: Plan) -> dict[str, Any]:
    """What, besides prompt tokens, parameters and seed, an answer depends on: equal for rows that may be reused."""
    own = {"context_length": plan.target.max_model_len, "n": plan.options.n, "version": package_version()}
    return {**plan.target.fingerprint, **own}


def sampling_fields(plan: Plan) -> dict[str, Any]:
    """The run's sampling defaults and seed, JSON types."""
    sampling = {spec.name: getattr(plan.sampling, spec.name) for spec in fields(SamplingParams) if spec.name != "seed"}
    sampling["logit_bias"] = sorted([int(k), float(v)] for k, v in plan.sampling.logit_bias.items())
    sampling["stop"], sampling["stop_token_ids"] = list(plan.sampling.stop), list(plan.sampling.stop_token_ids)
    return {**sampling, "seed": plan.options.seed}


def run_fingerprint(plan: Plan, inputs: Sequence[InputEntry]) -> dict[str, Any]:
    """Everything that changes the output table, by name. Flat, JSON types."""
    options = plan.options
    combined = json.dumps([(entry.digest, spec.hive) for entry, spec in zip(inputs, plan.inputs.specs, strict=True)])
    return {
        **answer_fingerprint(plan),
        "prompt": plan.source.description,
        "template": options.template,
        "system_prompt": options.system_prompt,
        "params_column": options.params_column,
        **sampling_fields(plan),
        "overlong": options.overlong,
        "max_row_bytes": options.max_row_bytes,
        "limit": options.limit,
        "format": options.format,
        "columns": plan.output.as_text,
        "inputs": hashlib.blake2b(combined.encode(), digest_size=16).hexdigest(),
    }


def run_id(fingerprint: dict[str, Any]) -> str:
    """Short name of a fingerprint: what parts and spools say they belong to."""
    return hashlib.blake2b(json.dumps(fingerprint, sort_keys=True).encode(), digest_size=16).hexdigest()


def package_version() -> str:
    try:
        return version("specbatch")
    except PackageNotFoundError:
        return "unknown"
