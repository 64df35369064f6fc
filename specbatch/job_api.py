"""`specbatch.run(...)`: the command's job from Python, in the same words, with a tqdm bar.

Knows how options become a job; the job does the rest.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from typing import Any

from specbatch.errors import UsageError
from specbatch.job.options import JobEvents, JobPlan, JobProgress, JobResult


def run(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, progress: bool = True, **options: Any
) -> JobResult:
    """Complete every prompt of a table; the options are those of `specbatch run`, with underscores.

        specbatch.run("prompts.parquet", output="answers", model="path/to/model", max_tokens=64)

    Returns the JobResult: exit_code 0, or 3 when some rows ended with an error of their own. Raises SpecbatchError for what
    the command would exit with otherwise (UsageError naming the option and the fix, OutputLocked, DiskFull ...).
    Environment variables and config files are not read.
    """
    from specbatch import config
    from specbatch.job.run import run_job
    from specbatch.options import BY_NAME
    from specbatch.settings import build
    from specbatch.target import make_target

    single = isinstance(inputs, (str, os.PathLike))
    paths = [os.fspath(inputs)] if single else [os.fspath(i) for i in inputs]  # type: ignore[arg-type, union-attr]
    given = {name.replace("_", "-"): os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in options.items()}
    unknown = [name for name in given if name not in BY_NAME]
    if unknown:
        close = difflib.get_close_matches(unknown[0], BY_NAME, n=1)
        raise UsageError(f"no option {unknown[0]!r}", hint=f"did you mean {close[0]!r}?" if close else None)
    built = build(config.resolve(given, paths, {}))
    target, make_engine = make_target(built.engine)
    events = TqdmEvents() if progress else JobEvents()
    try:
        return run_job(built.job, target=target, make_engine=make_engine, events=events)
    finally:
        if isinstance(events, TqdmEvents):
            events.close()


class TqdmEvents(JobEvents):
    """Rows done as a tqdm bar, tokens a second and acceptance beside it."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._make = tqdm
        self._bar: Any = None

    def plan(self, plan: JobPlan) -> None:
        self._bar = self._make(total=plan.rows, initial=plan.rows_done, unit="row", desc="specbatch")

    def tick(self, progress: JobProgress) -> None:
        if self._bar is None:
            return
        self._bar.n = progress.rows_done
        engine = progress.engine
        if engine is not None:
            rate = engine.completion_tokens / max(engine.busy_seconds, 1e-9)
            shown = {"tok/s": f"{rate:.0f}"}
            if engine.drafted:
                shown["acceptance"] = f"{engine.accepted / engine.drafted:.0%}"
            self._bar.set_postfix(shown, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
