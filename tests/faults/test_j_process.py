"""FAULTS J, as far as the job goes: a hung step, signals, deadlines, error budgets, out of memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch.errors import ExitCode, Interrupted, ResourceError, SpecbatchError
from specbatch.job.lock import OutputLock
from specbatch.job.options import JobEvents, JobOptions, JobProgress
from specbatch.job.run import run_job
from specbatch.job.shards import SAMPLE_BITS
from specbatch.job.signals import Watchdog
from specbatch.requests import EngineProgress, FinishedRows, RequestBatch
from specbatch.sampling_params import SamplingParams
from specbatch.standin import StandInEngine, StandInSettings
from tests.jobs import Factory, Recorder, answers, finish, parts, prompts, read, run, start, target, write

SLOW = "capacity=5,delay=0.05"


def running(out: Path, process: subprocess.Popen[str], ready: Callable[[], bool] = lambda: True) -> None:
    """Wait until the job has finished some rows."""
    while not (list(out.glob("_specbatch/spool/*")) and ready()):
        assert process.poll() is None, finish(process)
        time.sleep(0.01)


def hanging(out: Path, process: subprocess.Popen[str]) -> None:
    """Wait until the job is in the step that never returns: its last answers are older than a flush."""
    manifest = out / "_specbatch" / "manifest.json"
    while not (manifest.exists() and time.time() - manifest.stat().st_mtime > 1.5):
        assert process.poll() is None, finish(process)
        time.sleep(0.05)


class TestJ36Stall:
    def test_a_step_that_never_returns(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(50)})
        process = start(table, "-o", tmp_path / "out", "--stall-timeout", "1", standin="capacity=5,hang_after=3")
        code, _, err = finish(process)
        assert code == ExitCode.UNEXPECTED
        assert "no progress" in err
        assert re.search(r"rows 1[0-5]/50", err), err  # the state
        assert "standin.py" in err  # where it hangs
        code, _, err = finish(start(table, "-o", tmp_path / "out"))
        assert code == ExitCode.OK, err

    def test_steps_that_move_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An engine that steps for ever without a token is a stall too."""

        class Idle(StandInEngine):
            def step(self) -> bool:
                time.sleep(0.01)
                return True

        ended: list[int] = []

        def leave(code: int) -> None:
            ended.append(code)
            os.kill(os.getpid(), signal.SIGINT)  # the watchdog's thread cannot end this process: the test does

        monkeypatch.setattr("specbatch.job.signals.os._exit", leave)
        monkeypatch.setattr("specbatch.job.signals.faulthandler.dump_traceback", lambda **keywords: None)
        table = write(tmp_path / "in.parquet", {"prompt": prompts(5)})
        stalled: list[SpecbatchError] = []
        events = Recorder()
        monkeypatch.setattr(events, "ending", stalled.append, raising=False)
        result = run_job(
            JobOptions(inputs=(str(table),), output=tmp_path / "out", stall_timeout=0.5, grace=0.2),
            target=target(),
            make_engine=Factory(make=lambda context: Idle()),
            events=events,
            handle_signals=True,
        )
        assert ended[0] == ExitCode.UNEXPECTED
        assert "rows 0/5" in stalled[0].message
        assert result.exit_code == ExitCode.INTERRUPTED  # what the test itself did instead of ending

    def test_a_watchdog_that_does_not_own_the_process_only_tells(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specbatch.job.signals.faulthandler.dump_traceback", lambda **keywords: None)
        stalled: list[SpecbatchError] = []
        quiet = Watchdog(60.0, lambda: "", stalled.append, end=False)
        dog = Watchdog(0.2, lambda: "the state", stalled.append, end=False)
        try:
            quiet.look(1)
            while not stalled:
                dog.look("same")
                time.sleep(0.01)
            dog.rest()
            time.sleep(0.1)
            said = len(stalled)
            assert all("the state" in error.message for error in stalled)
            time.sleep(0.6)
            assert len(stalled) == said
        finally:
            dog.close()
            quiet.close()


class TestJ37Signals:
    def test_the_first_drains(self, tmp_path: Path) -> None:
        number = signal.SIGTERM
        table = write(tmp_path / "in.parquet", {"prompt": prompts(600)}, row_group_size=100)
        out = tmp_path / "out"
        process = start(
            table, "-o", out, "--shard-rows", "100", "--grace", "10", "--json", "--progress", "none", standin=SLOW
        )
        running(out, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if children.exists():  # KILL would leave nothing behind: there are none
            assert children.read_text().split() == []
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        process.send_signal(number)
        before = time.monotonic()
        code, text, err = finish(process)
        assert code == 128 + number, err
        assert time.monotonic() - before < 30
        assert "Traceback" not in err
        assert re.search(r"/600|of 600", err.split("SIGTERM")[0].split("generating")[1]), err  # what USR1 asked for
        summary = json.loads(text.splitlines()[-1])
        assert (summary["exit_code"], summary["reason"]) == (code, number.name)
        assert not (out / "_SUCCESS").exists()
        manifest = json.loads((out / "_specbatch" / "manifest.json").read_text())
        assert manifest["starts"][-1]["exit_code"] == code
        assert finish(start(table, "-o", out, "--shard-rows", "100"))[0] == ExitCode.OK
        run(table, tmp_path / "clean", shard_rows=100)
        assert answers(out) == answers(tmp_path / "clean")

    def test_the_second_ends_it_at_once(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(50)})
        process = start(table, "-o", tmp_path / "out", standin="capacity=5,hang_after=3")
        hanging(tmp_path / "out", process)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (128 + signal.SIGTERM, -signal.SIGTERM)
        finish(process)

    @pytest.mark.slow
    def test_a_step_that_hangs_does_not_outlive_the_grace_period(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(50)})
        options = ["--grace", "0", "--json"]
        process = start(table, "-o", tmp_path / "out", *options, standin="capacity=5,hang_after=3")
        hanging(tmp_path / "out", process)
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
        assert code == 128 + signal.SIGTERM
        assert json.loads(out.splitlines()[-1])["error"]["code"] == "interrupted"
        assert "error: stopped by SIGTERM, but a call did not return for 8 s [exit 143]" in err


class TestInThisProcess:
    """The same signals without the cost of a process."""

    def test_int_drains_and_gives_the_handlers_back(self, tmp_path: Path) -> None:
        class Pressing(StandInEngine):
            def step(self) -> bool:
                if self.progress.steps == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                return super().step()

        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        table = write(tmp_path / "in.parquet", {"prompt": prompts(300)}, row_group_size=50)
        result = run_job(
            JobOptions(inputs=(str(table),), output=tmp_path / "out", shard_rows=50, grace=60.0),
            target=target(),
            make_engine=Factory(make=lambda context: Pressing(StandInSettings(capacity=20))),
            handle_signals=True,
        )
        assert (result.exit_code, result.reason) == (ExitCode.INTERRUPTED, "SIGINT")
        assert 0 < result.rows_this_start < 300
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
        run(table, tmp_path / "out", shard_rows=50)
        run(table, tmp_path / "clean", shard_rows=50)
        assert answers(tmp_path / "out") == answers(tmp_path / "clean")

    def test_term_ends_the_wait_for_a_lock(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a"]})
        (tmp_path / "out" / "_specbatch").mkdir(parents=True)
        with OutputLock(tmp_path / "out" / "_specbatch" / "lock") as lock:
            lock.acquire()
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(Interrupted, match="SIGTERM") as caught:
                run_job(
                    JobOptions(inputs=(str(table),), output=tmp_path / "out", wait_lock=600.0),
                    target=target(),
                    make_engine=Factory(),
                    handle_signals=True,
                )
        assert caught.value.exit_code == ExitCode.TERMINATED


class TestDeadline:
    def test_stops_admitting_in_time_and_exits_5(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(2000)}, row_group_size=100)
        settings = StandInSettings(capacity=10, delay=0.02)
        before = time.monotonic()
        result = run(table, tmp_path / "out", settings=settings, shard_rows=100, max_duration=1.5)
        assert time.monotonic() - before < 5
        assert (result.exit_code, result.reason) == (ExitCode.DEADLINE, "max-duration")
        assert 0 < result.rows_this_start < 2000
        assert run(table, tmp_path / "out", shard_rows=100, max_duration=600.0).exit_code == ExitCode.OK
        run(table, tmp_path / "clean", shard_rows=100)
        assert answers(tmp_path / "out") == answers(tmp_path / "clean")


class Counted(JobEvents):
    """Remembers the figures of every tick."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.errors: list[int] = []

    def tick(self, progress: JobProgress) -> None:
        self.rows.append(progress.rows_done)
        self.errors.append(progress.row_errors)


class Failing(StandInEngine):
    """Every sample of the rows 3, 13, 23, ... fails, or of rows with a prompt that holds `text`."""

    def __init__(self, text: str = "") -> None:
        super().__init__(StandInSettings(capacity=400))
        self._text = text.encode()
        self._bad: set[int] = set()

    def add(self, batch: RequestBatch) -> None:
        for i, number in enumerate(batch.request_id.tolist()):
            prompt = batch.prompt_values[batch.prompt_offsets[i] : batch.prompt_offsets[i + 1]].astype(np.uint8)
            if self._text in prompt.tobytes() if self._text else (number >> SAMPLE_BITS) % 10 == 3:
                self._bad.add(number)
        super().add(batch)

    def take_finished(self) -> FinishedRows | None:
        rows = super().take_finished()
        if rows is None:
            return None
        bad = np.array([number in self._bad for number in rows.request_id.tolist()])
        reasons = np.where(bad, 3, rows.finish_reason).astype(rows.finish_reason.dtype)
        return replace(rows, finish_reason=reasons, error=[("engine_error", "no") if b else None for b in bad])


class TestErrorBudget:
    def table(self, tmp_path: Path) -> Path:
        return write(tmp_path / "in.parquet", {"prompt": ["" if i % 10 == 3 else f"p {i}" for i in range(1000)]},
                     row_group_size=100)  # fmt: skip

    def test_stops(self, tmp_path: Path) -> None:
        result = run(self.table(tmp_path), tmp_path / "out", shard_rows=100, max_errors=20, read_ahead_rows=100)
        assert (result.exit_code, result.reason) == (ExitCode.ERROR_BUDGET, "error budget")
        assert 0 < result.rows_done < 1000
        assert not (tmp_path / "out" / "_SUCCESS").exists()
        result = run(self.table(tmp_path), tmp_path / "out", shard_rows=100)
        assert (result.exit_code, result.row_errors) == (ExitCode.ROW_ERRORS, 100)

    @pytest.mark.parametrize(("rate", "code"), [(0.05, 4), (0.2, 3)])
    def test_rate(self, tmp_path: Path, rate: float, code: int) -> None:
        assert run(self.table(tmp_path), tmp_path / "out", shard_rows=100, max_error_rate=rate).exit_code == code

    @pytest.mark.parametrize(("rate", "code"), [(0.05, 4), (0.12, 3)])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_rate_is_of_rows_not_of_samples(self, tmp_path: Path, temperature: float, rate: float, code: int) -> None:
        """A greedy row has one answer for its n samples, and so has a row without a prompt."""
        result = run(self.table(tmp_path), tmp_path / "out", shard_rows=100, read_ahead_rows=100, n=4,
                     max_error_rate=rate, sampling=SamplingParams(temperature=temperature))  # fmt: skip
        assert result.exit_code == code
        assert (result.rows_done == 1000) == (code == ExitCode.ROW_ERRORS)

    @pytest.mark.parametrize("budget", [{"max_error_rate": 0.12}, {"max_errors": 100}])
    def test_a_row_fails_once_however_many_samples_do(self, tmp_path: Path, budget: dict[str, Any]) -> None:
        """Every sample of a tenth of the rows ends with an error of the engine."""
        table = write(tmp_path / "in.parquet", {"prompt": prompts(1000)}, row_group_size=100)
        events = Counted()
        result = run(table, tmp_path / "out", factory=Factory(make=lambda context: Failing()), events=events,
                     shard_rows=100, n=4, sampling=SamplingParams(temperature=1.0), **budget)  # fmt: skip
        assert (result.exit_code, result.row_errors, result.rows_done) == (ExitCode.ROW_ERRORS, 100, 1000)
        assert events.errors[-1] == 100

    @pytest.mark.parametrize("how", ["reuse", "deduplicate"])
    def test_rows_taken_over_are_finished_rows(self, tmp_path: Path, how: str) -> None:
        """800 rows of 1000 take over an answer; 20 of the others fail."""
        same = prompts(800) if how == "reuse" else ["the same"] * 800
        rest = ["" if i % 10 == 3 else f"other {i}" for i in range(200)]
        earlier = write(tmp_path / "earlier.parquet", {"prompt": same})
        table = write(tmp_path / "in.parquet", {"prompt": same + rest}, row_group_size=100)
        options: dict[str, Any] = {"shard_rows": 100, "read_ahead_rows": 100}
        if how == "reuse":
            run(earlier, tmp_path / "before", shard_rows=100)
            options["reuse"] = (tmp_path / "before",)
        result = run(table, tmp_path / "out", max_error_rate=0.03, **options)
        assert (result.exit_code, result.row_errors) == (ExitCode.ROW_ERRORS, 20)
        assert result.reused + result.deduplicated >= 799

    def test_copies_of_a_failed_row_are_errors(self, tmp_path: Path) -> None:
        """They are known once their shard is written: in time to stop, and none is missing in the last figure."""
        texts = ["the same 3" if i % 10 == 3 else f"p {i}" for i in range(1000) if i % 10 == 3 or i % 10 < 3]
        table = write(tmp_path / "in.parquet", {"prompt": texts}, row_group_size=100)
        events = Counted()
        factory = Factory(make=lambda context: Failing("the same"))
        result = run(table, tmp_path / "out", factory=factory, events=events, shard_rows=100)
        assert (result.row_errors, events.errors[-1]) == (100, 100)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_rows_are_counted_over_starts(self, tmp_path: Path, temperature: float) -> None:
        """What a stopped start left in spools is not the next start's work, and is done all the same."""
        table = write(tmp_path / "in.parquet", {"prompt": prompts(400)})
        options: dict[str, Any] = {"n": 4, "sampling": SamplingParams(temperature=temperature)}
        slow = StandInSettings(capacity=40 if temperature == 0 else 160, delay=0.1)
        first = run(table, tmp_path / "out", settings=slow, max_duration=0.7, **options)
        assert first.exit_code == ExitCode.DEADLINE
        assert 0 < first.rows_this_start < 400
        events = Counted()
        second = run(table, tmp_path / "out", events=events, **options)
        assert (second.rows_done, events.rows[-1]) == (400, 400)
        assert first.rows_this_start + second.rows_this_start == 400
        assert second.rows_computed >= second.rows_this_start

    def test_enough_budget(self, tmp_path: Path) -> None:
        result = run(self.table(tmp_path), tmp_path / "out", shard_rows=100, max_errors=100)
        assert result.exit_code == ExitCode.ROW_ERRORS


class Stubborn(StandInEngine):
    """Knows no reduce_batch: the job has to halve by itself."""

    def __getattribute__(self, name: str) -> Any:
        if name == "reduce_batch":
            raise AttributeError(name)
        return super().__getattribute__(name)


class TestJ40OutOfMemory:
    @pytest.mark.parametrize("make", [StandInEngine, Stubborn])
    def test_above_two_rows(self, tmp_path: Path, make: Any) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(40)}, row_group_size=10)
        events = Recorder()
        factory = Factory(make=lambda context: make(StandInSettings(oom_above=2)))
        result = run(table, tmp_path / "out", factory=factory, events=events, shard_rows=10)
        assert (result.exit_code, result.row_errors) == (ExitCode.OK, 0)
        run(table, tmp_path / "clean", shard_rows=10)
        assert answers(tmp_path / "out") == answers(tmp_path / "clean")
        assert events.warnings

    @pytest.mark.parametrize("make", [StandInEngine, Stubborn])
    def test_at_batch_one_a_row_error(self, tmp_path: Path, make: Any) -> None:
        texts = [*prompts(20), "huge", *prompts(20, "more")]
        table = write(tmp_path / "in.parquet", {"prompt": texts})
        factory = Factory(make=lambda context: make(StandInSettings(oom_on="huge")))
        result = run(table, tmp_path / "out", factory=factory)
        assert result.row_errors_by_code == {"out_of_memory": 1}
        assert [row["prompt"] for row in read(tmp_path / "out") if row["error"]] == ["huge"]

    def test_for_ever(self, tmp_path: Path) -> None:
        class Hopeless(StandInEngine):
            def reduce_batch(self) -> int:
                return 1

        table = write(tmp_path / "in.parquet", {"prompt": prompts(5)})
        factory = Factory(make=lambda context: Hopeless(StandInSettings(oom_above=1)))
        with pytest.raises(ResourceError, match="again and again"):
            run(table, tmp_path / "out", factory=factory)


class TestVanishing:
    def test_an_input_that_vanishes(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(300)}, row_group_size=50)
        out = tmp_path / "out"
        process = start(table, "-o", out, "--shard-rows", "50", "--read-ahead-rows", "1", standin=SLOW)
        running(out, process)
        table.rename(tmp_path / "gone")
        code, _, err = finish(process)
        assert code == ExitCode.INPUT_MISSING, err
        assert "Traceback" not in err
        (tmp_path / "gone").rename(table)
        assert finish(start(table, "-o", out, "--shard-rows", "50"))[0] == ExitCode.OK

    def test_an_input_that_changes(self, tmp_path: Path) -> None:
        class Editing(StandInEngine):
            def add(self, batch: RequestBatch) -> None:
                write(tmp_path / "in.parquet", {"prompt": prompts(6, "edited")}, row_group_size=2)
                super().add(batch)

        table = write(tmp_path / "in.parquet", {"prompt": prompts(6)}, row_group_size=2)
        with pytest.raises(Exception, match="changed while the job was reading it") as caught:
            run(table, tmp_path / "out", factory=Factory(make=lambda context: Editing()), shard_rows=2)
        assert caught.value.exit_code == ExitCode.OTHER_RUN  # type: ignore[attr-defined]
        assert parts(tmp_path / "out") == []


def test_progress_counts_grow_and_end_at_the_total(tmp_path: Path) -> None:
    class Ticks(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[int] = []
            self.engines: list[EngineProgress | None] = []

        def tick(self, progress: Any) -> None:
            self.rows.append(progress.rows_done)
            self.engines.append(progress.engine)

    table = write(tmp_path / "in.parquet", {"prompt": [*prompts(200), None, ""]}, row_group_size=50)
    events = Ticks()
    settings = StandInSettings(capacity=20, delay=0.02)
    result = run(table, tmp_path / "out", settings=settings, events=events, shard_rows=50)
    assert events.rows == sorted(events.rows)
    assert events.rows[-1] == 202 == result.rows_this_start
    assert events.committed == [0, 1, 2, 3, 4]
    assert events.engines[-1] is not None
