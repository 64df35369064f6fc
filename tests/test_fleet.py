"""Several engines as one: rows dealt out evenly, lost devices, rows at fault, memory that runs out on one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch.engine_options import EngineOptions
from specbatch.errors import ExitCode, OutOfMemory, ResourceError, UsageError
from specbatch.job.driver import join_finished
from specbatch.job.fleet import MAX_FAULTS, Fleet
from specbatch.job.options import JobOptions
from specbatch.job.run import run_job
from specbatch.requests import DeviceLost, FinishedRows, RequestBatch
from specbatch.sampling_params import SamplingParams
from specbatch.standin import StandInEngine, StandInSettings
from specbatch.target import make_fleet, make_target
from specbatch.wording import engine_lines
from tests.driving import add, make_engine
from tests.jobs import Recorder, answers, prompts, read, target, write

Script = Callable[["Scripted", int], None]


class Scripted(StandInEngine):
    """A stand-in whose steps may fail; notes which rows it finished, and from which thread it is driven."""

    def __init__(self, script: Script | None = None, capacity: int = 4, delay: float = 0.001) -> None:
        super().__init__(StandInSettings(capacity=capacity, delay=delay), max_model_len=500)
        self.script = script
        self.calls = 0
        self.answered: list[int] = []
        self.threads = {threading.get_ident()}
        self.resolved: Any = None

    def step(self) -> bool:
        self.calls += 1
        self.threads.add(threading.get_ident())
        if self.script is not None:
            self.script(self, self.calls)
        return super().step()

    def take_finished(self) -> FinishedRows | None:
        rows = super().take_finished()
        if rows is not None:
            self.answered += rows.request_id.tolist()
        return rows

    def holds(self, text: str) -> bool:
        return any(text.encode() in b.prompt_values.astype(np.uint8).tobytes() for b in self._queue)


class Fleeted:
    """A fleet of scripted engines, its warnings, and what comes out of it."""

    def __init__(self, *scripts: Script | None) -> None:
        self.engines = [Scripted(script) for script in scripts]
        self.fleet = Fleet([(f"d{i}", lambda _, e=e: e) for i, e in enumerate(self.engines)])  # type: ignore[misc]
        self.warnings: list[tuple[str, str]] = []
        self.fleet.on_warning = lambda code, message: self.warnings.append((code, message))

    def finish(self) -> list[int]:
        done: list[int] = []
        while self.fleet.num_unfinished:
            self.fleet.step()
            rows = self.fleet.take_finished()
            if rows is not None:
                done += rows.request_id.tolist()
        return sorted(done)


def batch(count: int, first: int = 0, shard: int = 0, text: str = "row") -> RequestBatch:
    lines = [f"{text} {i}".encode() for i in range(first, first + count)]
    offsets = np.concatenate(([0], np.cumsum([len(line) for line in lines]))).astype(np.int64)
    values = np.frombuffer(b"".join(lines), np.uint8).astype(np.int32)
    return RequestBatch(np.arange(first, first + count), shard, values, offsets, SamplingParams(max_tokens=20))


def lose(at: int) -> Script:
    def script(engine: Scripted, call: int) -> None:
        if call >= at:
            raise DeviceLost("fell off the bus")

    return script


def test_rows_are_dealt_evenly_and_each_engine_has_a_thread() -> None:
    work = Fleeted(None, None, None)
    work.fleet.add(batch(90))
    assert [len(m.open) for m in work.fleet._members] == [30, 30, 30]
    assert work.finish() == list(range(90))
    assert [len(e.answered) for e in work.engines] == [30, 30, 30]
    drivers = [e.threads - {threading.get_ident()} for e in work.engines]
    assert [len(d) for d in drivers] == [1, 1, 1]
    assert len(set().union(*drivers)) == 3
    progress = work.fleet.progress
    assert progress.completion_tokens == sum(e.progress.completion_tokens for e in work.engines)
    assert work.fleet.describe()["devices"] == ["d0", "d1", "d2"]
    work.fleet.close()


def test_a_lost_device_does_not_lose_its_rows() -> None:
    work = Fleeted(None, lose(3))
    work.fleet.add(batch(60))
    assert work.finish() == list(range(60))
    assert [code for code, _ in work.warnings] == ["device_lost"]
    assert "d1 is lost (fell off the bus); its 22 rows go on on d0" in work.warnings[0][1]
    assert len(work.engines[1].answered) == 8
    work.fleet.add(batch(10, 60))
    assert work.finish() == list(range(60, 70))
    assert work.fleet.progress.completion_tokens == sum(e.progress.completion_tokens for e in work.engines)
    work.fleet.close()


def test_the_last_device_lost_ends_the_run() -> None:
    work = Fleeted(lose(2), lose(2))
    work.fleet.add(batch(60))
    with pytest.raises(ResourceError, match="no device is left"):
        work.finish()


def test_rows_that_fail_everywhere_are_the_callers_affair() -> None:
    def poisoned(engine: Scripted, call: int) -> None:
        if engine.holds("row 13"):
            raise RuntimeError("cannot digest this")

    work = Fleeted(poisoned, poisoned)
    work.fleet.add(batch(40))
    with pytest.raises(RuntimeError, match="cannot digest"):
        work.finish()
    assert [code for code, _ in work.warnings] == ["engine_error"]
    work.fleet.abort_all()
    assert work.fleet.num_unfinished == 0
    work.fleet.add(batch(30, 100))
    assert work.finish() == list(range(100, 130))


def test_an_engine_that_fails_with_good_rows_is_left_out() -> None:
    def broken(engine: Scripted, call: int) -> None:
        raise RuntimeError("a kernel of this device only")

    work = Fleeted(None, broken)
    for round_number in range(MAX_FAULTS + 2):
        work.fleet.add(batch(12, 12 * round_number))
        assert work.finish() == list(range(12 * round_number, 12 * round_number + 12))
    assert Counter(code for code, _ in work.warnings) == {"engine_error": MAX_FAULTS, "device_lost": 1}
    assert work.engines[1].answered == []


def test_memory_that_runs_out_concerns_one_engine() -> None:
    def once(engine: Scripted, call: int) -> None:
        if call == 2:
            raise OutOfMemory("too many rows")

    work = Fleeted(None, once)
    work.fleet.add(batch(60))
    with pytest.raises(OutOfMemory):
        work.finish()
    assert work.fleet.reduce_batch() == 2
    work.finish()
    assert [e._capacity for e in work.engines] == [4, 2]
    assert sorted(work.engines[0].answered + work.engines[1].answered) == list(range(60))


def test_a_device_that_cannot_start_is_left_out() -> None:
    def fails(resolved: object) -> Any:
        raise ResourceError("no memory for the weights")

    good = Scripted()
    fleet = Fleet([("d0", fails), ("d1", lambda _: good)])
    warnings: list[str] = []
    fleet.on_warning = lambda code, message: warnings.append(message)
    fleet.add(batch(5))
    while fleet.num_unfinished:
        fleet.step()
        fleet.take_finished()
    assert "d0 is left out" in warnings[0]
    with pytest.raises(ResourceError, match="no memory for the weights"):
        Fleet([("d0", fails), ("d1", fails)])

    def misused(resolved: object) -> Any:
        raise UsageError("no such model")

    with pytest.raises(UsageError):
        Fleet([("d0", lambda _: good), ("d1", misused)])


def test_joined_rows_keep_their_pieces() -> None:
    parts = []
    for first, wants in ((0, False), (3, True)):
        engine = StandInEngine(StandInSettings(), max_model_len=100)
        one = batch(3, first)
        engine.add(
            RequestBatch(one.request_id, 0, one.prompt_values, one.prompt_offsets, SamplingParams(logprobs=wants))
        )
        engine.step()
        rows = engine.take_finished()
        assert rows is not None
        parts.append(rows)
    joined = join_finished(parts)
    assert joined.request_id.tolist() == [0, 1, 2, 3, 4, 5]
    for i in range(6):
        part, row = parts[i // 3], i % 3
        mine = slice(*joined.token_offsets[i : i + 2])
        theirs = slice(*part.token_offsets[row : row + 2])
        assert joined.token_values[mine].tolist() == part.token_values[theirs].tolist()
        assert joined.logprobs is not None
        assert np.isnan(joined.logprobs[mine]).all() == (part.logprobs is None)


def test_a_job_on_several_devices_gives_what_one_gives(tmp_path: Path) -> None:
    """One of them is lost on the way, one row raises everywhere: the table is whole all the same."""
    table = write(
        tmp_path / "in.parquet", {"prompt": [*prompts(3000), "poison", *prompts(500, "more")]}, row_group_size=400
    )

    def poisoned(engine: Scripted, call: int) -> None:
        if engine.holds("poison"):
            raise RuntimeError("cannot digest this")

    def lost(engine: Scripted, call: int) -> None:
        poisoned(engine, call)
        lose(5)(engine, call)

    engines = [Scripted(script, capacity=60, delay=0.0) for script in (poisoned, lost, poisoned)]
    recorder = Recorder()
    result = run_job(
        JobOptions(inputs=(str(table),), output=tmp_path / "several", shard_rows=400),
        target=target(),
        make_engine=lambda context: Fleet([(f"d{i}", lambda _, e=e: e) for i, e in enumerate(engines)]),  # type: ignore[misc]
        events=recorder,
    )
    assert (result.exit_code, result.rows_done, result.row_errors) == (ExitCode.ROW_ERRORS, 3501, 1)
    assert "device_lost" in {code for code, _ in recorder.warnings}
    assert all(len(e.answered) > 100 for e in engines)
    alone = Scripted(poisoned, capacity=60)
    run_job(
        JobOptions(inputs=(str(table),), output=tmp_path / "one", shard_rows=400),
        target=target(),
        make_engine=lambda context: alone,
    )
    assert answers(tmp_path / "several") == answers(tmp_path / "one")


def test_devices_of_the_command_line_make_a_fleet(tmp_path: Path) -> None:
    table = write(tmp_path / "in.parquet", {"prompt": prompts(50)})
    described: list[Any] = []

    class Watch(Recorder):
        def engine_ready(self, description: Any) -> None:
            described.append(description)

    made, factory = make_target(EngineOptions(model="stand-in", devices=(0, 3)))
    result = run_job(
        JobOptions(inputs=(str(table),), output=tmp_path / "out"), target=made, make_engine=factory, events=Watch()
    )
    assert result.exit_code == ExitCode.OK
    assert described[0]["devices"] == ["stand-in 0", "stand-in 3"]
    assert len(read(tmp_path / "out")) == 50


def test_an_engine_says_when_its_device_is_gone(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is, the device is asked: another error leaves the engine usable."""
    engine = make_engine(tiny_target)
    add(engine, [[1, 2, 3]])
    monkeypatch.setattr("specbatch.engine.eager.EagerSteps.prefill", broken_forward)
    with pytest.raises(RuntimeError, match="an illegal address") as usual:
        engine.step()
    assert not isinstance(usual.value, DeviceLost)
    monkeypatch.setattr("specbatch.engine.engine.is_lost", lambda device: True)
    with pytest.raises(DeviceLost, match="cpu no longer works: an illegal address"):
        engine.step()
    engine.abort_all()
    assert engine.num_unfinished == 0


def broken_forward(*args: object, **kwargs: object) -> None:
    raise RuntimeError("an illegal address was met")


def test_two_real_engines_answer_as_one(tmp_path: Path, tiny_target: Path) -> None:
    table = write(tmp_path / "in.parquet", {"prompt": prompts(30)}, row_group_size=10)
    options = EngineOptions(
        model=str(tiny_target), dtype="float32", profile=False, kv_memory_bytes=4 << 20, device="cpu", threads=1
    )
    made, factory = make_target(options)
    job: dict[str, Any] = {"inputs": (str(table),), "sampling": SamplingParams(temperature=1.0, max_tokens=12)}
    run_job(JobOptions(output=tmp_path / "one", **job), target=made, make_engine=factory)
    resolved: list[Any] = []

    def make(context: Any, chosen: EngineOptions) -> Any:
        resolved.append(dict(context.resolved))
        return factory(context)

    run_job(
        JobOptions(output=tmp_path / "two", **job),
        target=made,
        make_engine=lambda context: make_fleet([("a", options), ("b", options)], context, make),
    )
    assert resolved == [{}, {"dtype": "float32"}]
    assert answers(tmp_path / "one") == answers(tmp_path / "two")


def test_devices_and_graphs_are_shown() -> None:
    plan: dict[str, Any] = {"model": "m", "device": "cuda:0", "dtype": "bfloat16", "devices": ["cuda:0", "cuda:1"]}
    on = {"cuda_graphs": {"enabled": True, "reason": None}, "graph_bytes": 3 << 30}
    assert engine_lines(plan | on) == ["model: m on cuda:0, cuda:1, bfloat16", "CUDA graphs: on, 3.0 GiB"]
    off = {"cuda_graphs": {"enabled": False, "reason": "asked for"}}
    assert engine_lines(plan | off)[-1] == "CUDA graphs: off (asked for)"
    assert len(engine_lines({"model": "m", "device": "cpu"} | off)) == 1
