"""A finished output looked at again: its options from the manifest, rows of it at random, their answers and requests.

Owns what the record of a run says about how to make its rows again. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from specbatch.errors import InputMissing, OutputMismatch, UsageError
from specbatch.job.answers import answer_schema
from specbatch.job.manifest import Manifest, require_same
from specbatch.job.options import JobOptions, Target
from specbatch.job.output import part_path
from specbatch.job.part_answers import PartAnswers
from specbatch.job.plan import Plan, input_entries, make_plan, require_same_inputs, run_fingerprint
from specbatch.job.row_requests import RowRequests
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams

# Of the fingerprint, what names how a run drafted: looked at again, rows are never drafted for.
DRAFTING: Final = ("drafts", "draft_model")
HINT: Final = "give what the run was given: --model, --chat-template ..."


@dataclass(frozen=True, slots=True)
class Recorded:
    """One row as the output has it, and the request that would make it again. Of several samples, the first."""

    shard: int
    row: int  # of the input file
    file: str
    request: RequestBatch
    text: str
    reason: int  # FINISH_* of specbatch._core
    tokens: int
    token_ids: tuple[int, ...] | None  # where the output has them


def load_manifest(output: Path) -> Manifest:
    """The record of an output with rows. Raises InputMissing, OutputMismatch, UsageError for one that cannot be read back."""
    manifest = Manifest.load(output)
    if manifest is None:
        raise InputMissing(f"{output}: no run has written here (no _specbatch/manifest.json)")
    if manifest.format != "parquet":
        raise UsageError(f"{output} has the format {manifest.format}, which cannot be read back")
    if not any(part is not None and part.rows for part in manifest.parts):
        raise UsageError(f"{output} has no finished rows yet")
    return manifest


def recorded_options(manifest: Manifest, output: Path) -> JobOptions:
    """The options of the run, as far as they shape its rows."""
    print_, columns = manifest.fingerprint, manifest.columns
    source: Mapping[str, Any] = columns.get("source", {})
    params = {
        name: print_[name]
        for name in SamplingParams.__dataclass_fields__
        if name in print_ and name not in ("logprobs", "seed")
    }
    params |= {"stop": tuple(params["stop"]), "stop_token_ids": tuple(params["stop_token_ids"])}
    params["logit_bias"] = {int(token): float(bias) for token, bias in params["logit_bias"]}
    added, prefix = columns["added"], columns["prefix"]
    return JobOptions(
        inputs=tuple(source.get("inputs") or (entry.path for entry in manifest.inputs)),
        output=output,
        prompt_column=source.get("prompt_column"),
        messages_column=source.get("messages_column"),
        chat=source.get("chat", "auto"),
        template=print_["template"],
        system_prompt=print_["system_prompt"],
        params_column=print_["params_column"],
        sampling=SamplingParams(**params),
        seed=print_["seed"],
        n=manifest.n,
        overlong=print_["overlong"],
        limit=print_["limit"],
        max_row_bytes=print_["max_row_bytes"],
        keep_columns=tuple(columns["kept"]),
        output_prefix=prefix,
        output_token_ids=prefix + "completion_token_ids" in added,
        logprobs=print_["logprobs"],
    )


def open_plan(options: JobOptions, target: Target, manifest: Manifest) -> Plan:
    """The plan of the run. Raises OutputMismatch naming what is not as it was: model, tokenizer, template, inputs."""
    plan = make_plan(options, target)
    entries = input_entries(plan, manifest)
    now = run_fingerprint(plan, entries)
    one, other = ({n: v for n, v in side.items() if n not in DRAFTING} for side in (manifest.fingerprint, now))
    require_same_inputs(options.output, manifest.inputs, entries)
    try:
        require_same(options.output, one, other)
    except OutputMismatch as error:
        raise OutputMismatch(error.message, field=error.field, hint=HINT) from None
    return plan


def sample_rows(plan: Plan, manifest: Manifest, count: int, seed: int) -> list[Recorded]:
    """Up to `count` rows with an answer, at random over all finished parts, in their order. Raises as reading does."""
    dice = np.random.default_rng(seed)
    parts = [(shard, part) for shard, part in zip(manifest.shards, manifest.parts, strict=True) if part is not None]
    total = sum(part.rows for _, part in parts)
    # Rows that failed or were skipped have no answer: more are drawn, so that enough are left.
    bad = sum(part.errors + part.skipped for _, part in parts)
    draws = min(total, count if not bad else int(count * total / max(total - bad, 1) * 1.2) + 8)
    chosen = np.sort(dice.permutation(total)[:draws])
    reader, schema = RowRequests(plan), answer_schema(plan.options.output_token_ids, False)
    found: list[Recorded] = []
    first = 0
    for shard, part in parts:
        rows = chosen[(chosen >= first) & (chosen < first + part.rows)] - first
        first += part.rows
        if not len(rows):
            continue
        reading = PartAnswers(
            part_path(plan.options.output, shard, "parquet"), schema, manifest.n, plan.options.output_prefix
        )
        answers = reading.take(rows).filter(np.tile(np.arange(manifest.n) == 0, len(rows))).to_pylist()
        reading.close()
        by_row = {row: a for row, a in zip(rows.tolist(), answers, strict=True) if a["reason"] in (1, 2)}
        for row, request in reader.rows(shard, by_row):
            answer = by_row[row]
            ids = answer.get("token_ids")
            found.append(
                Recorded(
                    shard.index,
                    shard.first_row + row,
                    manifest.inputs[shard.file].path,
                    request,
                    answer["text"],
                    answer["reason"],
                    answer["completion_tokens"],
                    None if ids is None else tuple(ids),
                )
            )
    if len(found) > count:
        keep = np.sort(dice.permutation(len(found))[:count])
        found = [found[i] for i in keep.tolist()]
    return found
