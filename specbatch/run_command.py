"""`specbatch run`: from settings to the job, and from its result to what people and programs see.

Owns stderr and stdout of a run and its exit code. Knows neither typer nor rich (console.py is loaded when needed).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbatch import __version__, config, wording
from specbatch.config import Settings
from specbatch.errors import (
    DiskFull,
    ExitCode,
    OutOfMemory,
    ResourceError,
    SpecbatchError,
    UsageError,
    panics_as_errors,
)
from specbatch.garbage import lasting_objects
from specbatch.streams import SafeStream, is_smart, printable

_BAD_PATH = (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EISDIR)


def run(command_line: Mapping[str, Any], inputs: Sequence[str]) -> int:
    """The whole command. Returns the exit code."""
    early = Ending(as_json=bool(command_line.get("json")), log_json=command_line.get("log-format") == "json")
    try:
        settings = config.resolve(command_line, inputs, os.environ)
        from specbatch.settings import build

        options = build(settings)
        if options.view.print_config:
            return _print_config(settings, as_json=options.view.json)
        early = replace(
            early,
            as_json=options.view.json,
            log_json=options.view.log_format == "json" or options.view.progress == "json",
        )
        _require_folder(options.view.metrics_file)
        ending = early
        if not options.view.dry_run:
            ending = replace(early, metrics_file=options.view.metrics_file, output=str(options.job.output))
    except SpecbatchError as error:
        return early.failed(error)
    try:
        with panics_as_errors():  # also those of other packages' Rust code
            if options.view.dry_run:
                from specbatch.dry_run import dry_run

                return dry_run(options, settings)
            with _deaf_to_usr1():
                return _run_job(settings, options, ending)
    except SpecbatchError as error:
        return ending.failed(error)
    except KeyboardInterrupt:  # before the job took the signals over
        SafeStream(sys.stderr).line("interrupted before anything was computed [exit 130]")
        return ExitCode.INTERRUPTED
    except Exception as error:
        return ending.failed(unexpected(error))


@contextlib.contextmanager
def _deaf_to_usr1() -> Iterator[None]:
    """Who asks for progress before the job listens gets none; without this the signal would end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _run_job(settings: Settings, options: Any, ending: Ending) -> int:
    with lasting_objects():
        from specbatch.job.run import run_job
        from specbatch.target import make_target

        target, make_engine = make_target(options.engine)
    if options.job.restart and not options.view.yes:
        _confirm_restart(options.job.output)
    with _events(options.view, ending) as events:
        if (line := wording.settings_line(settings)) is not None:
            events.say("settings", line, settings=config.as_dict(settings))
        for note in settings.notes:
            events.warning("settings", note)
        result = run_job(options.job, target=target, make_engine=make_engine, events=events, handle_signals=True)
    if options.view.show:
        from specbatch.show import show_rows

        show_rows(SafeStream(sys.stderr), options.job, options.view.show)
    return ending.finished(result, settings, show_shards=events.is_live)


@contextlib.contextmanager
def _events(view: Any, ending: Ending) -> Iterator[Any]:
    """The observer of the job that fits stderr and the options; whatever it drew is put away afterwards."""
    from specbatch.lines import LineEvents, Log

    stderr = SafeStream(sys.stderr)
    as_json = view.log_format == "json" or view.progress == "json"
    wants_bar = view.progress in ("auto", "bar") and not as_json
    if wants_bar and is_smart(stderr, os.environ):
        from specbatch.console import LiveEvents

        with LiveEvents(stderr, ending=ending.failed) as live:
            yield live
        return
    log = Log(stderr, "json" if as_json else "text")
    yield LineEvents(log, interval=view.log_interval, show_progress=view.progress != "none", ending=ending.failed)


def _print_config(settings: Settings, *, as_json: bool) -> int:
    stdout = SafeStream(sys.stdout)
    if as_json:
        stdout.line(json.dumps(config.as_dict(settings)))
    else:
        stdout.line(config.as_toml(settings, ascii_only=stdout.plain).rstrip("\n"))
    stdout.require_delivered()
    return ExitCode.OK


def _require_folder(metrics_file: Path | None) -> None:
    """The night is too long to find out at its end that the metrics have no place to go."""
    if metrics_file is not None and not os.access(metrics_file.absolute().parent, os.W_OK | os.X_OK):
        raise UsageError(f"--metrics-file {metrics_file}: its directory is not there or cannot be written to")
    if metrics_file is not None and metrics_file.exists() and not metrics_file.is_file():
        raise UsageError(f"--metrics-file {metrics_file} is not a regular file")  # a rename would replace a device


def _confirm_restart(output: Path) -> None:
    """On a terminal, ask before finished rows are discarded; a script that says --restart means it."""
    from specbatch.job.manifest import Manifest

    if not (sys.stdin and sys.stdin.isatty() and sys.stderr and sys.stderr.isatty()):
        return
    try:
        manifest = Manifest.load(output)
    except SpecbatchError:
        return
    rows = sum(part.rows for part in manifest.parts if part is not None) if manifest is not None else 0
    if rows == 0:
        return
    sys.stderr.write(f"--restart discards {wording.plural(rows, 'finished row')} in {output}. Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was done", hint="leave --restart out to continue where the run stopped")


def unexpected(error: Exception) -> SpecbatchError:
    """A resource that ran out, else a defect: said in one line, its traceback only when SPECBATCH_DEBUG is set."""
    if os.environ.get("SPECBATCH_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, MemoryError):
        return OutOfMemory("out of memory", hint="fewer rows at once (--max-num-seqs) or less KV (--kv-memory)")
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        limits = "memory and the number of processes are limited (ulimit -v, ulimit -u, the cgroup)"
        return ResourceError("cannot start a thread", hint=limits)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no space left: {error}", hint="free some space and run again: finished rows are kept")
    if isinstance(error, OSError) and error.errno is not None:
        name = "" if error.filename is None else f"{error.filename}: "
        kind = UsageError if error.errno in _BAD_PATH else ResourceError
        return kind(f"{name}{os.strerror(error.errno)}")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    hint = "this is a defect: set SPECBATCH_DEBUG=1 and run again for the traceback; finished rows are kept"
    return SpecbatchError(f"unexpected {type(error).__name__}: {error}{where}", hint=hint)


@dataclass(frozen=True, slots=True)
class Ending:
    """The last words of a run: final line on stderr, object on stdout, metrics file, exit code."""

    as_json: bool = False
    log_json: bool = False
    metrics_file: Path | None = None
    output: str = ""

    def finished(self, result: Any, settings: Settings, *, show_shards: bool) -> int:
        """After a run that came to an end of its own."""
        from specbatch.job import summary

        stderr = SafeStream(sys.stderr)
        if show_shards:
            from specbatch.console import print_summary

            print_summary(stderr, result)
        elif not self.log_json:
            stderr.line(printable(summary.final_line(result)))
        content = summary.result_object(result, version=__version__, settings=config.as_dict(settings))
        if self.log_json:
            self._log("end", summary.final_line(result), content)
        return self._deliver(content, result, int(result.exit_code))

    def failed(self, error: SpecbatchError) -> int:
        """After an error that ended the run, or kept it from beginning."""
        from specbatch.job import summary

        content = summary.error_object(error, version=__version__)
        if self.log_json:
            self._log("error", error.message, content)
        else:
            stderr = SafeStream(sys.stderr)
            stderr.line(printable(summary.error_line(error)))
            if error.hint:
                stderr.line(f"hint: {printable(error.hint)}")
        return self._deliver(content, None, int(error.exit_code))

    def _log(self, event: str, message: str, content: Mapping[str, Any]) -> None:
        from specbatch.lines import Log

        Log(SafeStream(sys.stderr), "json").say(event, message, result=dict(content))

    def _deliver(self, content: Mapping[str, Any], result: Any, code: int) -> int:
        """Metrics file and stdout. What was asked for and cannot be written turns success into exit 13."""
        from specbatch.job import summary

        problems = []
        if self.metrics_file is not None:
            try:
                summary.write_metrics(self.metrics_file, result, exit_code=code, output=self.output)
            except (SpecbatchError, OSError) as error:
                problems.append(f"metrics file: {error}")
        if self.as_json:
            try:
                sys.stdout.write(json.dumps(content) + "\n")
                sys.stdout.flush()
            except BrokenPipeError:
                pass  # nobody wants it any more
            except (OSError, ValueError, AttributeError) as error:
                problems.append(f"--json: cannot write to stdout: {error}")
        for problem in problems:
            SafeStream(sys.stderr).line(f"error: {problem}")
        return int(ExitCode.RESOURCE) if problems and code in (ExitCode.OK, ExitCode.ROW_ERRORS) else code
