"""`specbatch bench`: options in, measurements, table, JSON and picture out. What is measured how is in bench.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specbatch import config
from specbatch.commands import BENCH, RUN
from specbatch.errors import ExitCode, UsageError
from specbatch.streams import SafeStream
from specbatch.values import parse_value

if TYPE_CHECKING:
    from specbatch.bench import BenchResult, Setting
    from specbatch.control.records import Policy
    from specbatch.engine.engine import Engine
    from specbatch.settings import RunOptions

DEFAULT_ROWS: Final = (1, 8, 64)
DEFAULT_ROUNDS: Final = 3


def bench(given: Mapping[str, Any], inputs: Sequence[str]) -> int:
    """Measure and show. Raises SpecbatchError as a run does for models, inputs and options."""
    of_run = {option.name for option in RUN.options}
    settings = config.resolve({n: v for n, v in given.items() if n in of_run}, inputs, os.environ)
    own = {
        option.field: parse_value(option, given[option.name], option.flag)
        for option in BENCH.options
        if option.name not in of_run and given[option.name] is not None
    }
    from specbatch.settings import build

    options = build(settings)
    try:
        return _bench(options, own, Path(inputs[0]), as_json=options.view.json)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _bench(options: RunOptions, own: Mapping[str, Any], first_input: Path, *, as_json: bool) -> int:
    from specbatch.bench import BenchResult, enough, run_bench, settings_of
    from specbatch.bench_show import chart, to_markdown, to_text
    from specbatch.charts import require_ending
    from specbatch.job.plan import make_plan
    from specbatch.job.row_requests import RowRequests
    from specbatch.job.shards import plan_shards
    from specbatch.target import make_target

    stderr, stdout = SafeStream(sys.stderr), SafeStream(sys.stdout)
    rows = _counts(own.get("rows_at_once", DEFAULT_ROWS), "--rows-at-once")
    rounds, prompts, name = own.get("rounds", DEFAULT_ROUNDS), own.get("prompts"), own.get("save")
    if rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {rounds}")
    synthetic = own.get("synthetic")
    speculators = _speculators(own.get("speculators"), options, synthetic is not None)
    settings = settings_of(speculators, _counts(own["k"], "--k") if "k" in own else None)
    name = name or first_input.with_name(f"{first_input.name.split('.')[0]}.bench")
    plot = own.get("plot", Path(f"{name}.svg"))
    require_ending(plot)
    if not (folder := name.absolute().parent).is_dir():
        raise UsageError(f"--save {name}: there is no folder {folder}")
    target, _ = make_target(options.engine)
    job = options.job
    if synthetic is not None:  # rows must not end where a made-up token happens to be the end
        job = replace(job, sampling=replace(job.sampling, ignore_eos=True, stop=(), stop_token_ids=()))
    plan = make_plan(job, target)
    shards = plan_shards(plan.inputs.row_groups, job.shard_rows, job.limit)
    requests = RowRequests(plan).first(shards, prompts or max(rows))
    if problem := enough(requests, rows, prompts):
        raise UsageError(problem, hint="fewer --rows-at-once, or more rows in the input")
    engine, make_policy = _engine(options, plan.tokenizer.get, settings, max(rows), synthetic, stderr.line)
    about = {"model": target.name, "input": str(first_input), "max_tokens": job.sampling.max_tokens}
    described = engine.describe()
    about |= {n: described.get(n) for n in ("draft_model", "device", "dtype", "quantize", "threads", "attention")}
    result = BenchResult(rows, settings, tuple(synthetic) if synthetic is not None else None, about)

    def save(result: BenchResult) -> None:
        Path(f"{name}.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
        Path(f"{name}.md").write_text(to_markdown(result), encoding="utf-8")
        chart(result).write(plot)

    try:
        run_bench(
            engine, requests, result, rounds=rounds, prompts=prompts, make_policy=make_policy, say=stderr.line, save=save
        )  # fmt: skip
    except KeyboardInterrupt:
        stderr.line("interrupted: what was measured so far")
        stdout.line(to_text(result).rstrip("\n"))
        return ExitCode.INTERRUPTED
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from None
    engine.close()
    stdout.line(json.dumps(result.to_json()) if as_json else to_text(result).rstrip("\n"))
    stderr.line(f"saved as {name}.json, {name}.md and {plot}")
    stdout.require_delivered()
    return ExitCode.OK


def _engine(
    options: RunOptions, tokenizer: Any, settings: Sequence[Setting], rows: int, synthetic: Any, say: Any
) -> tuple[Engine, Any]:
    """One engine for all settings, and what makes the policy of each."""
    from specbatch.bench import SPECULATORS
    from specbatch.compose import controller_options, step_costs
    from specbatch.control.controller import Controller
    from specbatch.control.fixed import FixedPolicy
    from specbatch.control.records import METHOD_DRAFT, METHOD_NONE
    from specbatch.engine.engine import Engine
    from specbatch.engine.parts import build_parts
    from specbatch.engine.plan import plan_engine
    from specbatch.engine.synthetic import SyntheticEngine

    most = max((setting.k for setting in settings), default=0)
    k = most if most > 8 else None  # beyond what auto tries there is room only if asked for
    chosen = replace(options.engine, speculate="auto", max_num_seqs=rows, num_speculative_tokens=k)
    say("loading model")
    parts = build_parts(plan_engine(chosen), chosen, tokenizer)
    chosen = replace(chosen, num_speculative_tokens=None)
    off = FixedPolicy(METHOD_NONE, 0)
    engine = Engine(parts, off) if synthetic is None else SyntheticEngine(parts, off, synthetic)
    drafting = parts.speculator is not None
    if not drafting and any(setting.speculator == "draft" for setting in settings):
        raise UsageError("there is no draft model to measure", hint="give --draft-model")
    cost = step_costs(chosen, parts, say) if any(not setting.forced for setting in settings) else None

    def make_policy(setting: Setting, rows: int) -> Policy:
        if setting.forced:
            return FixedPolicy(SPECULATORS[setting.speculator], setting.k)
        assert cost is not None
        choice = controller_options(chosen, parts, rows)
        if synthetic is not None:  # the dice are thrown for drafts only; what the models really agree on says nothing
            choice = replace(choice, methods=(METHOD_DRAFT,), can_probe_draft=False)
        return Controller(choice, cost)

    return engine, make_policy


def _speculators(asked: Sequence[str] | None, options: RunOptions, synthetic: bool) -> tuple[str, ...]:
    """Names in the order they are measured; all that there are if none was asked for."""
    draft = options.engine.draft_model is not None or options.engine.model is None
    known = ("off", "ngram", "draft", "auto")
    if synthetic and not draft:
        hint = "any model of the draft's shape will do: what it says does not matter"
        raise UsageError("--synthetic-acceptance needs a draft model to time", hint=hint)
    if asked is None:
        return tuple(n for n in known if (n != "draft" or draft) and not (n == "ngram" and synthetic))
    for name in asked:
        if name not in known:
            raise UsageError(f"--speculators must be among {', '.join(known)}, got {name!r}")
    if synthetic and "ngram" in asked:
        raise UsageError("--synthetic-acceptance is for drafts of a model; leave ngram out of --speculators")
    return tuple(asked)


def _counts(values: Sequence[int], flag: str) -> tuple[int, ...]:
    if not values or min(values) < 1:
        raise UsageError(f"{flag} must be numbers from 1, such as 1,8,64, got {','.join(map(str, values))}")
    return tuple(dict.fromkeys(values))
