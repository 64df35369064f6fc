"""The job from start to exit code: plan, lock, manifest, then the loop. Knows neither the command line nor torch."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from specbatch.errors import ExitCode, Interrupted, OutputLocked, ResourceError, SpecbatchError
from specbatch.job import output as outputs
from specbatch.job.lock import OutputLock
from specbatch.job.loop import JobLoop
from specbatch.job.manifest import DIRECTORY, Manifest, PartEntry, differing_fields, require_same
from specbatch.job.options import EngineFactory, JobEvents, JobOptions, JobPlan, JobProgress, JobResult, Target
from specbatch.job.pipeline import Pipeline
from specbatch.job.plan import (
    Plan,
    input_entries,
    make_plan,
    package_version,
    require_same_inputs,
    run_fingerprint,
    run_id,
)
from specbatch.job.reuse import open_earlier
from specbatch.job.shards import plan_shards
from specbatch.job.signals import Interrupts

_KEPT_STARTS = 100
_OF_INPUTS = {"inputs", "columns", "prompt"}  # fields that follow an edited input


def run_job(
    options: JobOptions,
    *,
    target: Target,
    make_engine: EngineFactory,
    events: JobEvents | None = None,
    handle_signals: bool = False,
) -> JobResult:
    """Do the job, or as much of it as signals, deadline and error budget allow.

    Returns a JobResult whose exit_code is 0, 3, 4, 5, 130, 143, or 2 when a part of the input could not be read (the
    rest is done). Raises SpecbatchError (with its exit_code) for everything else: usage and schema (before make_engine
    is called), missing input, lock, another run's output, resources. `handle_signals`: take INT, TERM and USR1 over
    while the job runs (main thread only).
    """
    started = time.monotonic()
    events = events or JobEvents()
    with Interrupts(active=handle_signals, grace=options.grace, ending=events.ending) as interrupts:
        plan = make_plan(options, target)
        outputs.create(options.output)
        lock = OutputLock(options.output / DIRECTORY / "lock")
        try:
            lock.acquire(options.wait_lock, lambda: interrupts.received is not None)
        except OutputLocked:
            if interrupts.received is None:
                raise
            raise Interrupted(interrupts.received) from None
        with lock:
            return _Job(plan, make_engine, events, interrupts, started).run()


class _Job:
    """One start on a locked output."""

    def __init__(
        self, plan: Plan, make_engine: EngineFactory, events: JobEvents, interrupts: Interrupts, started: float
    ) -> None:
        self.plan = plan
        self.options = plan.options
        self.output = plan.options.output
        self.make_engine = make_engine
        self.events = events
        self.interrupts = interrupts
        self.started = started

    def run(self) -> JobResult:
        if self.options.restart:
            outputs.discard(self.output)
        outputs.clean(self.output)
        manifest, resumed = self._manifest()
        pending = [
            shard
            for shard, part in zip(manifest.shards, manifest.parts, strict=True)
            if part is None or (self.options.retry_failed and part.errors)
        ]
        earlier = open_earlier(self.plan, manifest.resolved) if pending else None
        for problem in earlier.problems if earlier is not None else ():
            self.events.warning("reuse", problem)
        if earlier is not None and earlier.outputs and not manifest.resolved:
            manifest.resolved = dict(earlier.resolved)
        self._report_plan(manifest, resumed, len(pending))
        outputs.drop_spools(self.output, {shard.part_stem for shard in pending})
        if not pending:
            return self._finish(manifest, None, dict(manifest.starts[-1]) if manifest.starts else {})
        outputs.unmark_success(self.output)
        start: dict[str, Any] = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "exit_code": None,
        }
        manifest.starts = [*manifest.starts[-_KEPT_STARTS + 1 :], start]
        manifest.save(self.output)
        assert earlier is not None
        pipeline = Pipeline(self.plan, manifest, pending, earlier, self.make_engine, self.events)
        progress = JobProgress(
            rows_total=manifest.rows,
            rows_done=sum(
                p.rows for s, p in zip(manifest.shards, manifest.parts, strict=True) if p and s not in pending
            ),
            row_errors=sum(
                p.errors for s, p in zip(manifest.shards, manifest.parts, strict=True) if p and s not in pending
            ),
            shards_total=len(manifest.shards),
            shards_done=len(manifest.shards) - len(pending),
        )
        loop = pipeline.make_loop(self.interrupts, progress, self.started)
        code: int = ExitCode.UNEXPECTED
        try:
            loop.run()
            result = self._finish(manifest, loop, start)
            code = result.exit_code
            return result
        except MemoryError as error:
            code = ExitCode.RESOURCE
            raise ResourceError(f"not enough memory on this machine: {error}") from error
        except SpecbatchError as error:
            code = error.exit_code
            raise
        finally:
            pipeline.close(loop, start | {"exit_code": code})

    # -- the manifest

    def _manifest(self) -> tuple[Manifest, bool]:
        """The output's manifest, checked against this run, or a new one; and whether it was there."""
        plan, options = self.plan, self.options
        earlier = Manifest.load(self.output)
        self.events.stage("hashing inputs")
        entries = input_entries(plan, earlier)
        fingerprint = run_fingerprint(plan, entries)
        if earlier is None:
            shards = plan_shards(plan.inputs.row_groups, options.shard_rows, options.limit)
            columns = {
                "prompt": plan.source.description,
                "kept": list(plan.output.kept),
                "added": list(plan.output.added),
                "prefix": options.output_prefix,
                "source": {
                    "inputs": [os.path.abspath(item) for item in options.inputs],
                    "prompt_column": options.prompt_column,
                    "messages_column": options.messages_column,
                    "chat": options.chat,
                },
            }
            manifest = Manifest(
                version=package_version(),
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                target=plan.target.name,
                format=options.format,
                n=options.n,
                fingerprint=fingerprint,
                columns=columns,
                inputs=entries,
                shards=shards,
                parts=[None] * len(shards),
            )
            return manifest, False
        differing = set(differing_fields(earlier.fingerprint, fingerprint))
        if "inputs" in differing and differing <= _OF_INPUTS:
            require_same_inputs(self.output, earlier.inputs, entries)
        require_same(self.output, earlier.fingerprint, fingerprint)
        earlier.inputs = entries
        earlier.parts, problems = outputs.verified_parts(self.output, earlier, run_id(fingerprint))
        for problem in problems:
            self.events.warning("part", problem)
        return earlier, True

    def _report_plan(self, manifest: Manifest, resumed: bool, pending: int) -> None:
        plan = self.plan
        done = [part for part in manifest.parts if part is not None]
        self.events.plan(
            JobPlan(
                output=self.output,
                inputs=len(manifest.inputs),
                input_bytes=sum(entry.size for entry in manifest.inputs),
                rows=manifest.rows,
                shards=len(manifest.shards),
                shards_done=len(manifest.shards) - pending,
                rows_done=sum(part.rows for part in done),
                prompt_source=plan.source.description,
                kept_columns=plan.output.kept if plan.options.format == "parquet" else (),
                added_columns=plan.output.added if plan.options.format == "parquet" else (),
                resumed=resumed,
            )
        )

    # -- the end

    def _finish(self, manifest: Manifest, loop: JobLoop | None, start: dict[str, Any]) -> JobResult:
        """Decide the exit code, write _SUCCESS, and sum up. `loop` None: there was nothing to do."""
        parts = [part for part in manifest.parts if part is not None]
        errors = sum(part.errors for part in parts)
        options = self.options
        failed = loop.tally.failed_shards if loop is not None else {}
        over_budget = (options.max_errors is not None and errors > options.max_errors) or (
            options.max_error_rate is not None and errors > options.max_error_rate * manifest.rows
        )
        stop = loop.stop if loop is not None else None
        whole = manifest.complete and (loop is None or loop.progress.shards_done == len(manifest.shards))
        if whole and not over_budget:
            code, reason = (ExitCode.ROW_ERRORS, "done with row errors") if errors else (ExitCode.OK, "done")
            outputs.mark_success(self.output)
        elif stop is not None:
            code, reason = stop.exit_code, stop.reason
        elif failed:
            code, reason = ExitCode.USAGE, "unreadable input"
        elif over_budget:
            code, reason = ExitCode.ERROR_BUDGET, "error budget"
        else:
            missing = sum(part is None for part in manifest.parts)
            raise AssertionError(f"{missing} shards were neither committed nor given up")
        return self._result(manifest, parts, loop, int(code), reason)

    def _result(
        self, manifest: Manifest, parts: list[PartEntry], loop: JobLoop | None, code: int, reason: str
    ) -> JobResult:
        engine = loop.driver.engine.progress if loop is not None and loop.driver is not None else None
        seconds = 0.0
        if loop is not None and loop.tally.first_request is not None:
            seconds = max(0.0, loop.tally.last_finished - loop.tally.first_request)
        driver = loop.driver if loop is not None else None
        tokens = driver.completion_tokens if driver else 0
        codes: Counter[str] = Counter()
        for part in parts:
            codes.update(part.row_errors)
        return JobResult(
            exit_code=code,
            reason=reason,
            output=str(self.output),
            rows=manifest.rows,
            rows_done=sum(part.rows for part in parts),
            row_errors=codes.total(),
            row_errors_by_code=dict(codes),
            skipped=sum(part.skipped for part in parts),
            reused=sum(part.reused for part in parts),
            deduplicated=sum(part.deduplicated for part in parts),
            shards=len(manifest.shards),
            shards_done=len(parts),
            rows_this_start=loop.progress.rows_this_start if loop is not None else 0,
            rows_computed=driver.computed if driver else 0,
            prompt_tokens=driver.prompt_tokens if driver else 0,
            completion_tokens=tokens,
            generation_seconds=seconds,
            completion_tokens_per_second=tokens / seconds if seconds else 0.0,
            engine_busy_seconds=engine.busy_seconds if engine else 0.0,
            wall_seconds=time.monotonic() - self.started,
            steps=engine.steps if engine else 0,
            drafted=engine.drafted if engine else 0,
            accepted=engine.accepted if engine else 0,
            acceptance_rate=engine.accepted / engine.drafted if engine and engine.drafted else None,
            preemptions=engine.preemptions if engine else 0,
            total_prompt_tokens=sum(part.prompt_tokens for part in parts),
            total_completion_tokens=sum(part.completion_tokens for part in parts),
            prompt_source=self.plan.source.description,
            engine=dict(manifest.engine) if engine else {},
            failed_shards=dict(loop.tally.failed_shards) if loop is not None else {},
        )
