"""What a run leaves to people and programs when it ends: also when a watchdog ends it, or rows failed by the hundred."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specbatch.cli import main
from specbatch.errors import ExitCode
from specbatch.job.driver import MAX_TOLD
from specbatch.sampling_params import SamplingParams
from specbatch.standin import StandInSettings
from tests.jobs import Recorder, finish, parts, prompts, read, run, start, write


def specbatch(*arguments: str | Path) -> int:
    return main(["run", *map(str, arguments), "--model", "stand-in", "--progress", "none"])


@pytest.mark.parametrize("log", ["text", "json"])
def test_a_stall_is_told_to_programs_too(tmp_path: Path, log: str) -> None:
    """The process is ended by its watchdog: --json, the metrics file and the last line are there all the same."""
    table, metrics = write(tmp_path / "in.parquet", {"prompt": prompts(50)}), tmp_path / "x.prom"
    options = ["--stall-timeout", "1", "--json", "--metrics-file", metrics, "--log-format", log]
    process = start(table, "-o", tmp_path / "out", *options, standin="capacity=5,hang_after=3")
    code, out, err = finish(process)
    assert code == ExitCode.UNEXPECTED
    content = json.loads(out.splitlines()[-1])
    assert (content["exit_code"], content["error"]["code"]) == (code, "stalled")
    assert "no progress" in content["error"]["message"]
    assert f'specbatch_last_exit_code{{output="{tmp_path / "out"}"}} 1\n' in metrics.read_text()
    if log == "json":
        last = json.loads(err.splitlines()[-1])
        assert (last["event"], last["result"]) == ("error", content)
    else:
        assert re.search(r"error: no progress .* \[exit 1\]$", err.splitlines()[-2])
        assert err.splitlines()[-1].startswith("hint: ")


def test_an_error_says_its_exit_code_as_a_result_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert specbatch(tmp_path / "nothing.parquet") == ExitCode.INPUT_MISSING
    assert capsys.readouterr().err.splitlines()[-1].endswith("nothing.parquet does not exist [exit 10]")


def test_a_budget_that_is_spent_says_what_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Running it again as it was would only end the same way."""
    table = write(tmp_path / "in.parquet", {"prompt": ["a", "", "b"]})
    assert specbatch(table, "-o", tmp_path / "out", "--max-errors", "0") == ExitCode.ERROR_BUDGET
    shown = capsys.readouterr().err.splitlines()
    assert shown[-2].endswith("error budget: no new rows; running rows are dropped")
    assert "1 row error (1 empty_prompt)" in shown[-1]
    assert "--retry-failed [exit 4]" in shown[-1]
    assert "run it again" not in shown[-1]


def test_the_same_warning_does_not_fill_the_log(tmp_path: Path) -> None:
    texts = [text for i in range(3 * MAX_TOLD) for text in (f"good {i}", f"poison {i}")]
    table = write(tmp_path / "in.parquet", {"prompt": texts})
    events = Recorder()
    result = run(table, tmp_path / "out", settings=StandInSettings(oom_on="poison", capacity=1), events=events)
    assert result.row_errors_by_code == {"out_of_memory": 3 * MAX_TOLD}
    told = [message for code, message in events.warnings if code == "out_of_memory"]
    assert len(told) == MAX_TOLD
    assert "not shown" in told[-1]
    assert sum("not shown" in message for message in told) == 1


@pytest.mark.parametrize(("temperature", "answers"), [(0.0, 1), (1.0, 4)])
def test_rows_computed_are_rows(tmp_path: Path, temperature: float, answers: int) -> None:
    """Also where one answer serves all samples of a greedy row."""
    table = write(tmp_path / "in.parquet", {"prompt": prompts(5)})
    result = run(table, tmp_path / "out", n=4, sampling=SamplingParams(temperature=temperature))
    assert result.rows_computed == 5
    assert [len(set(row["completion"])) for row in read(tmp_path / "out")] == [answers] * 5
    assert [row["completion_tokens"] is not None for row in read(tmp_path / "out")] == [True] * 5


def test_a_batch_output_is_not_described_by_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "in.parquet", {"prompt": ["a"]})
    assert specbatch(table, "-o", tmp_path / "out", "--format", "openai-batch") == ExitCode.OK
    shown = capsys.readouterr().err
    assert f"output: {tmp_path / 'out'}, JSON lines in the OpenAI batch shape" in shown
    assert parts(tmp_path / "out")[0].suffix == ".jsonl"
