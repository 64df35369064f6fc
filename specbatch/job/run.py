"""The job from start to exit code. Knows neither the command line nor torch."""

from __future__ import annotations

from specbatch.job.options import EngineFactory, JobEvents, JobOptions, JobResult, Target


def run_job(
    options: JobOptions,
    *,
    target: Target,
    make_engine: EngineFactory,
    events: JobEvents | None = None,
    handle_signals: bool = False,
) -> JobResult:
    """Do the job, or as much of it as signals, deadline and error budget allow.

    Returns a JobResult whose exit_code is 0, 3, 4, 5, 130 or 143. Raises SpecbatchError (with its exit_code) for
    everything else: usage and schema (before make_engine is called), missing input, lock, another run's output,
    resources. `handle_signals`: take INT, TERM and USR1 over while the job runs (main thread only).
    """
    raise NotImplementedError
