"""A panic of Rust code, which PyO3 raises as a BaseException: rows are tried again, and a run that ends says so properly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbatch.cli import main
from specbatch.errors import ExitCode, InternalError, panic_as_error
from specbatch.standin import StandInEngine, StandInSettings
from tests.driving import add, make_engine
from tests.jobs import Factory, prompts, run, write

PanicException = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


def panic(*args: Any, **keywords: Any) -> Any:
    raise PanicException("index out of bounds")


def command(tmp_path: Path, model: Path, *more: str) -> int:
    table = write(tmp_path / "in.parquet", {"prompt": prompts(40)})
    options = [
        "--json",
        "--metrics-file",
        tmp_path / "x.prom",
        "--progress",
        "none",
        "--max-tokens",
        4,
        "--dtype",
        "float32",
    ]
    options += ["--kv-memory", "4MiB", "--speculate", "off", "--no-profile", *more]
    return main(list(map(str, ["run", table, "-o", tmp_path / "out", "--model", model, *options])))


@pytest.mark.parametrize(
    "place",
    [
        "specbatch.engine.parts.load_for_cpu",  # loading, whether the model was proved before or not
        "specbatch.engine.eager.EagerSteps.prefill",  # every step, until the job gives up
        "specbatch.engine.engine.core_arrays",  # a call of the engine other than a step
        "specbatch.models.tokenizer.HFTokenizer.__init__",  # somebody else's Rust code, before the job
    ],
)
def test_a_run_that_a_panic_ends_ends_as_any_other(
    place: str, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, panic)
    assert command(tmp_path, tiny_target) == ExitCode.UNEXPECTED
    out, err = capfd.readouterr()
    content = json.loads(out)
    assert (content["exit_code"], content["error"]["code"]) == (1, "unexpected")
    assert "Rust code panicked, which is a defect: index out of bounds" in content["error"]["message"]
    assert "(test_j_panics.py:" in content["error"]["message"]  # where the panic came from
    assert "[exit 1]" in err
    assert "Traceback" not in err
    assert "specbatch_last_exit_code" in (tmp_path / "x.prom").read_text()


def test_rows_of_a_step_that_panicked_once_run_again(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from specbatch.engine.eager import EagerSteps

    prefill, calls = EagerSteps.prefill, []

    def once(*args: Any) -> Any:
        calls.append(None)
        return panic() if len(calls) == 1 else prefill(*args)

    monkeypatch.setattr(EagerSteps, "prefill", once)
    assert command(tmp_path, tiny_target) == ExitCode.OK
    assert "InternalError" in capfd.readouterr().err
    assert len(calls) > 1


@pytest.mark.parametrize("poisoned", [False, True])
def test_the_engine_tells_the_panic(poisoned: bool, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the core panicked and from then on refuses to clean up."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("the scheduler panicked in an earlier call")

    engine = make_engine(tiny_target)
    add(engine, [[1, 2, 3]])
    monkeypatch.setattr(engine, "_advance", panic)
    if poisoned:
        monkeypatch.setattr(engine, "_forget_step", refuse)
    with pytest.raises(InternalError, match="a defect: index out of bounds") as caught:
        engine.step()
    assert type(caught.value.__cause__) is PanicException


def test_an_engine_that_cannot_drop_its_rows_ends_the_job(tmp_path: Path) -> None:
    """With what it said first."""

    class Broken(StandInEngine):
        panicked = False

        def step(self) -> bool:
            if self.panicked:
                raise RuntimeError("panicked in an earlier call")
            self.panicked = True
            raise InternalError("the first word")

        def abort_all(self) -> None:
            raise RuntimeError("panicked in an earlier call")

    table = write(tmp_path / "in.parquet", {"prompt": prompts(5)})
    with pytest.raises(InternalError, match="the first word"):
        run(table, tmp_path / "out", factory=Factory(make=lambda context: Broken(StandInSettings())))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), RuntimeError("no"), GeneratorExit()])
def test_nothing_else_is_taken_for_a_panic(error: BaseException) -> None:
    assert panic_as_error(error) is None
