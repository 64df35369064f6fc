"""Puts the working pieces of one start together: feeder, intake, spools, engine driver, committer. Decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from specbatch.errors import OutputMismatch, UsageError
from specbatch.job import output as outputs
from specbatch.job.answers import ERROR, answer_schema
from specbatch.job.committer import Committer
from specbatch.job.driver import EngineDriver
from specbatch.job.feeder import Feeder, PreviousGood
from specbatch.job.intake import MAX_OWN_KEYS, Intake
from specbatch.job.keys import PREVIOUS, KeyTable
from specbatch.job.live import AnswerStore, LiveShard
from specbatch.job.loop import JobLoop
from specbatch.job.manifest import DIRECTORY, Manifest
from specbatch.job.options import EngineContext, EngineFactory, JobEvents, JobProgress
from specbatch.job.params import ParamsParser
from specbatch.job.part_writer import BatchPart, ParquetPart, PartWriter
from specbatch.job.plan import Plan, run_id
from specbatch.job.prepare import Preparer
from specbatch.job.prompts import PromptBuilder
from specbatch.job.reuse import EarlierOutputs, PartOpener, own_keys
from specbatch.job.shards import Shard
from specbatch.job.signals import Interrupts
from specbatch.job.spool import Spool


class Pipeline:
    """Made once a start, when there is something to do."""

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        pending: Sequence[Shard],
        earlier: EarlierOutputs,
        make_engine: EngineFactory,
        events: JobEvents,
    ) -> None:
        options = plan.options
        self._plan = plan
        self._options = options
        self._manifest = manifest
        self._pending = pending
        self._make_engine = make_engine
        self._events = events
        self._schema = answer_schema(options.output_token_ids, options.logprobs)
        self._run_id = run_id(manifest.fingerprint)
        self._log = outputs.DecisionLog(options.output / DIRECTORY / outputs.DECISIONS)
        self._opener = PartOpener(options, manifest, self._run_id, earlier, self._schema)
        self._store = AnswerStore(options.n, self._schema, self._opener)
        self._committer = Committer(
            options.output,
            manifest,
            plan.inputs,
            plan.part_columns,
            self._store,
            self._open_writer,
            self._run_id,
        )
        self._feeder = self._make_feeder(earlier)

    def make_loop(self, interrupts: Interrupts, progress: JobProgress, started: float) -> JobLoop:
        return JobLoop(
            self._options,
            self._feeder,
            self._committer,
            self._store,
            self._make_driver,
            self._events,
            interrupts,
            progress,
            started,
        )

    def close(self, loop: JobLoop, start: dict[str, Any]) -> None:
        """Free the engine; note in the manifest how this start ended. Nothing here hides an earlier failure."""
        with contextlib.suppress(Exception):
            self._log.flush()
        with contextlib.suppress(Exception):
            tokens = loop.driver.completion_tokens if loop.driver is not None else 0
            first = loop.tally.first_request
            seconds = loop.tally.last_finished - first if first is not None else 0.0
            self._manifest.starts[-1] = start | {
                "wall_seconds": round(loop.progress.elapsed, 3),
                "rows": loop.progress.rows_this_start,
                "completion_tokens": tokens,
                "completion_tokens_per_second": round(tokens / seconds, 3) if seconds > 0 else None,
            }
            self._committer.save()
        if loop.driver is not None:
            with contextlib.suppress(Exception):
                loop.driver.engine.close()

    # -- pieces

    def _make_feeder(self, earlier: EarlierOutputs) -> Feeder:
        plan, options = self._plan, self._options
        self._events.stage("loading tokenizer")
        tokenizer = plan.tokenizer.get
        builder = PromptBuilder(
            plan.source,
            ParamsParser(plan.sampling, plan.target.max_model_len),
            tokenizer.render,
            max_row_bytes=options.max_row_bytes,
            n=options.n,
            logprobs=options.logprobs,
        )
        readable = options.format == "parquet"
        own: KeyTable | None = None
        if options.deduplicate:
            pending = {shard.index for shard in self._pending}
            parts = [None if i in pending else part for i, part in enumerate(self._manifest.parts)]
            shards = self._manifest.shards
            own = own_keys(options.output, shards, parts, MAX_OWN_KEYS) if readable else KeyTable(MAX_OWN_KEYS)
        return Feeder(
            self._pending,
            plan.inputs,
            plan.source.columns,
            Preparer(options, builder, tokenizer, plan.target.max_model_len),
            Intake(n=options.n, reuse=earlier.table, own=own, own_per_shard=not readable),
            self._open_shard,
            threads=options.tokenizer_threads,
            rows_ahead=options.read_ahead_rows,
        )

    def _open_shard(self, shard: Shard) -> tuple[LiveShard, PreviousGood]:
        """On the feeder's thread. A spool of an earlier start is taken over; with --retry-failed without its errors."""
        retry = self._options.retry_failed
        spool = Spool(
            outputs.spool_path(self._options.output, shard),
            f"{self._run_id} {shard}",
            shard.rows * self._options.n,
            self._schema,
        )
        recovered = spool.recover(_without_errors if retry else None)
        previous_good: PreviousGood = None
        if self._manifest.parts[shard.index] is not None and self._options.format == "parquet":
            part = self._opener(PREVIOUS, shard.index)
            previous_good = ~part.failed()
            part.close()
        return LiveShard(shard, spool, self._options.n, recovered), previous_good

    def _open_writer(self, live: LiveShard) -> PartWriter:
        """On the committer's thread."""
        options = self._options
        path = outputs.part_path(options.output, live.shard, options.format)
        if options.format == "parquet":
            return ParquetPart(path, self._plan.output, options)
        created = int(datetime.fromisoformat(self._manifest.created).timestamp())
        chat = self._plan.source.chat
        return BatchPart(path, options, model=self._plan.target.name, created=created, chat=chat, file=live.shard.file)

    def _make_driver(self) -> EngineDriver:
        """Load the engine; what it resolved is kept, or compared with what it was before. Raises OutputMismatch."""
        self._events.stage("loading model")
        done = sum(part.rows for part in self._manifest.parts if part is not None)
        context = EngineContext(
            log_decision=self._log.write,
            resolved=dict(self._manifest.resolved),
            rows_left=self._manifest.rows - done,
            say=self._events.stage,
        )
        engine = self._make_engine(context)
        description = outputs.as_json(engine.describe())
        resolved = description.get("resolved") or {}
        before = self._manifest.resolved
        for name in before:
            if before[name] != resolved.get(name):
                engine.close()
                raise OutputMismatch(
                    f"{self._options.output} was started with {name} resolved to {before[name]}, "
                    f"here it becomes {resolved.get(name)}",
                    field=name,
                    hint=f"give {name} explicitly on every start, or use another output directory",
                )
        if engine.max_model_len < 2:
            raise UsageError(f"the engine has a context of {engine.max_model_len} tokens")

        with self._committer.lock:  # made durable now when it binds later starts, else with the next part
            self._manifest.engine = description
            changed = self._manifest.resolved != resolved
            self._manifest.resolved = resolved
        if changed:
            self._committer.save()
        self._events.engine_ready(description)
        return EngineDriver(engine, self._events.warning)


def _without_errors(answers: Any) -> Any:
    return np.asarray(answers.column("reason")) != ERROR
