"""Tokens a second over rows at once x speculator x k: one engine, every setting in turn, round after round.

Owns the order of measuring and the figures. Knows neither where prompts come from nor how results are shown.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np

from specbatch.control.choice import name as mode_name
from specbatch.control.records import (
    METHOD_DRAFT,
    METHOD_EXTERNAL,
    METHOD_NGRAM,
    METHOD_NONE,
    STEP_DECODE,
    STEP_PREFILL,
    Policy,
)
from specbatch.requests import BatchEngine, FinishedRows, RequestBatch
from specbatch.sampling_params import SamplingParams

SCHEMA_VERSION: Final = 1
SPECULATORS: Final = {"off": METHOD_NONE, "ngram": METHOD_NGRAM, "draft": METHOD_DRAFT, "external": METHOD_EXTERNAL}
DEFAULT_KS: Final = {"ngram": (1, 2, 4, 8), "draft": (1, 2, 4)}
WARM_UP_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run: a forced method and k, or `auto`."""

    speculator: str  # off, ngram, draft, auto
    k: int = 0  # 0 for off and auto

    @property
    def name(self) -> str:
        """ "off", "ngram k=4", "auto"."""
        return f"{self.speculator} k={self.k}" if self.k else self.speculator

    @property
    def forced(self) -> bool:
        return self.speculator != "auto"


def settings_of(speculators: Sequence[str], ks: Sequence[int] | None) -> tuple[Setting, ...]:
    """All settings of these speculators; ks None: those worth knowing of each. `auto` comes last, beside what it is held to."""
    found = []
    for speculator in dict.fromkeys(speculators):
        many = (0,) if speculator in ("off", "auto") else tuple(dict.fromkeys(ks or DEFAULT_KS[speculator]))
        found += [Setting(speculator, k) for k in many]
    return tuple(sorted(found, key=lambda setting: not setting.forced))


class StepShape(Protocol):
    """The part of specbatch._core.StepInfo that is looked at."""

    @property
    def kind(self) -> int: ...
    @property
    def method(self) -> int: ...
    @property
    def max_draft_tokens(self) -> int: ...


class BenchEngine(BatchEngine, Protocol):
    """An engine that can start again under another policy."""

    on_step: Callable[[Any, float], None] | None

    def use_policy(self, policy: Any, max_num_seqs: int | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement. Seconds from the first request to the last finished row."""

    seconds: float
    processor_seconds: float  # of this process, all threads: what neighbours on a busy machine do not lengthen
    prefill_seconds: float
    prompt_tokens: int
    completion_tokens: int
    drafted: int
    accepted: int
    decode_steps: dict[str, int]  # by mode
    different_rows: int  # rows whose tokens are not those of the first run with as many rows

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.seconds


@dataclass(slots=True)
class BenchResult:
    """All measurements so far."""

    rows: tuple[int, ...]  # rows at once
    settings: tuple[Setting, ...]
    synthetic: tuple[float, ...] | None  # acceptance was made up: by draft position
    about: dict[str, Any]  # model, device, prompts ...
    runs: dict[tuple[int, Setting], list[Run]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Rounds that every cell has been through."""
        return min((len(self.runs.get((r, s), ())) for r in self.rows for s in self.settings), default=0)

    def rate(self, rows: int, setting: Setting) -> float:
        """Completion tokens a second, the median over the rounds."""
        return statistics.median(run.tokens_per_second for run in self.runs[rows, setting])

    def best_forced(self, rows: int) -> Setting | None:
        """The fastest forced setting; None when nothing was forced."""
        forced = [s for s in self.settings if s.forced and (rows, s) in self.runs]
        return max(forced, key=lambda setting: self.rate(rows, setting), default=None)

    def auto_ratio(self, rows: int) -> float | None:
        """auto over the best forced setting; None when one of them was not run."""
        auto, best = Setting("auto"), self.best_forced(rows)
        if best is None or (rows, auto) not in self.runs:
            return None
        return self.rate(rows, auto) / self.rate(rows, best)

    def acceptance(self, rows: int, setting: Setting) -> float | None:
        """Drafts accepted over drafts verified, all rounds; None where nothing was drafted."""
        drafted = sum(run.drafted for run in self.runs.get((rows, setting), ()))
        return sum(run.accepted for run in self.runs[rows, setting]) / drafted if drafted else None

    def modes(self, rows: int, setting: Setting) -> dict[str, float]:
        """Share of decode steps by mode, all rounds."""
        steps: Counter[str] = Counter()
        for run in self.runs.get((rows, setting), ()):
            steps.update(run.decode_steps)
        return {mode: count / steps.total() for mode, count in steps.most_common()}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        cells = []
        for (rows, setting), runs in self.runs.items():
            acceptance = self.acceptance(rows, setting)
            cells.append(
                {
                    "rows_at_once": rows,
                    "setting": setting.name,
                    "speculator": setting.speculator,
                    "k": setting.k,
                    "tokens_per_second": round(self.rate(rows, setting), 3),
                    "rounds": [round(run.tokens_per_second, 3) for run in runs],
                    "seconds": [round(run.seconds, 4) for run in runs],
                    "processor_seconds": [round(run.processor_seconds, 4) for run in runs],
                    "prefill_seconds": [round(run.prefill_seconds, 4) for run in runs],
                    "prompt_tokens": runs[0].prompt_tokens,
                    "completion_tokens": [run.completion_tokens for run in runs],
                    "acceptance_rate": None if acceptance is None else round(acceptance, 4),
                    "decode_steps": {mode: round(share, 4) for mode, share in self.modes(rows, setting).items()},
                    "different_rows": max(run.different_rows for run in runs),
                }
            )
        ratios = {rows: self.auto_ratio(rows) for rows in self.rows if (rows, self.settings[-1]) in self.runs}
        best = {rows: self.best_forced(rows) for rows in ratios}
        return {
            "schema_version": SCHEMA_VERSION,
            "synthetic_acceptance": None if self.synthetic is None else list(self.synthetic),
            **self.about,
            "rounds": self.rounds,
            "cells": cells,
            "auto_over_best_forced": [
                {
                    "rows_at_once": r,
                    "ratio": None if x is None else round(x, 4),
                    "best": b.name if (b := best[r]) else None,
                }
                for r, x in ratios.items()
            ],
        }


def run_bench(
    engine: BenchEngine,
    requests: RequestBatch,
    result: BenchResult,
    *,
    rounds: int,
    prompts: int | None = None,
    make_policy: Callable[[Setting, int], Policy],
    say: Callable[[str], None],
    save: Callable[[BenchResult], None] = lambda result: None,
) -> BenchResult:
    """Fill `result`: each round runs every setting at every number of rows, the settings in another order each time, so that
    a machine that drifts slows all of them. prompts: rows of a cell, as many as run at once if None. `save` after a round."""
    first_tokens: dict[int, list[bytes]] = {}
    for number in range(rounds):
        for rows in result.rows:
            cell = part_of(requests, prompts or rows)
            if number == 0:
                _warm_up(engine, cell, rows, result.settings, make_policy)
            turn = number * 2 % len(result.settings)
            for setting in (*result.settings[turn:], *result.settings[:turn]):
                run, tokens = measure(engine, cell, make_policy(setting, rows), rows)
                known = first_tokens.setdefault(rows, tokens)
                run = replace(run, different_rows=sum(a != b for a, b in zip(known, tokens, strict=True)))
                result.runs.setdefault((rows, setting), []).append(run)
                say(
                    f"round {number + 1}/{rounds}, {rows} at once, {setting.name}: {run.tokens_per_second:.1f} tokens/s"
                )
        save(result)
    return result


def measure(engine: BenchEngine, requests: RequestBatch, policy: Policy, rows: int) -> tuple[Run, list[bytes]]:
    """Run all requests, at most `rows` at once, and return the figures and each request's token ids."""
    engine.use_policy(policy, rows)
    before = replace(engine.progress)
    prefill, steps = 0.0, Counter[str]()

    def note(info: StepShape, seconds: float) -> None:
        nonlocal prefill
        if info.kind == STEP_PREFILL:
            prefill += seconds
        elif info.kind == STEP_DECODE:
            steps[mode_name((info.method, info.max_draft_tokens))] += 1

    engine.on_step = note
    answers: dict[int, bytes] = {}
    completion = prompt = 0
    start, processor = time.perf_counter(), time.process_time()
    try:
        engine.add(requests)
        for done in _run(engine):
            for i, request in enumerate(done.request_id.tolist()):
                answers[request] = done.token_values[done.token_offsets[i] : done.token_offsets[i + 1]].tobytes()
            completion += int(done.completion_tokens.sum())
            prompt += int(done.prompt_tokens.sum())
    finally:
        engine.on_step = None
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    now = engine.progress
    drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
    run = Run(seconds, processor, prefill, prompt, completion, drafted, accepted, dict(steps), 0)
    return run, [answers[request] for request in requests.request_id.tolist()]


def _run(engine: BenchEngine) -> Iterator[FinishedRows]:
    while engine.num_unfinished:
        engine.step()
        done = engine.take_finished()
        if done is not None:
            yield done


def part_of(requests: RequestBatch, count: int) -> RequestBatch:
    """The first `count` requests."""
    params = requests.params if isinstance(requests.params, SamplingParams) else requests.params[:count]
    end = int(requests.prompt_offsets[count])
    return RequestBatch(
        requests.request_id[:count],
        requests.shard,
        requests.prompt_values[:end],
        requests.prompt_offsets[: count + 1],
        params,
        None if requests.seeds is None else requests.seeds[:count],
    )


def _warm_up(
    engine: BenchEngine,
    requests: RequestBatch,
    rows: int,
    settings: Sequence[Setting],
    make_policy: Callable[[Setting, int], Policy],
) -> None:
    """A few tokens of each forced setting: what is made on first use is not what is measured."""
    many = [requests.params] * len(requests) if isinstance(requests.params, SamplingParams) else requests.params
    short = replace(requests, params=[replace(p, max_tokens=WARM_UP_TOKENS, min_tokens=0) for p in many])
    short = part_of(short, min(rows, len(short)))
    for setting in settings:
        if setting.forced:
            measure(engine, short, make_policy(setting, rows), rows)


def enough(requests: RequestBatch, rows: Sequence[int], prompts: int | None) -> str | None:
    """What is wrong with the number of prompts; None: nothing."""
    needed = prompts or max(rows, default=0)
    have = int(np.asarray(requests.request_id).size)
    return None if have >= needed else f"{needed} prompts are needed, the input has {have} that can be run"
