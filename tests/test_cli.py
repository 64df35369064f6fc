"""The command line: parsing, help, exit codes and messages of everything that ends before a job begins."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch import help as pages
from specbatch.cli import build_app, main
from specbatch.commands import BY_COMMAND, COMMANDS
from specbatch.options import PANELS, RUN_OPTIONS


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for option in RUN_OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"id": [1, 2], "prompt": ["a b", "c"]}), path)
    return str(path)


def test_every_option_is_on_the_help_page_in_its_panel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    page = capsys.readouterr().out
    for option in RUN_OPTIONS:
        shown = f"--no-{option.name}" if option.off else option.flag
        assert f"{shown} " in page or f"{shown}\n" in page
        assert option.help.split(".")[0].split()[0] in page
    positions = [page.index(f"\n{panel}\n") for panel in PANELS]
    assert positions == sorted(positions)


@pytest.mark.parametrize("width", [20, 40, 80, 110])
def test_help_pages_fit_their_width(width: int) -> None:
    for command in COMMANDS:
        page = pages.command_help(command, pages.Style(width))
        examples = {line for example in command.examples for line in (f"  {example[0]}", f"  # {example[1]}")}
        long = [line for line in page.splitlines() if len(line) > max(width, 46) and line not in examples]
        assert long == []
        assert page.isascii()


def test_the_quick_page_and_the_parsers_page_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    quick = capsys.readouterr().out
    assert main(["run", "x.parquet", "--max-tokens", "3", "--help"]) == 0
    assert capsys.readouterr().out == quick
    assert pages.quick_answer(["run", "x", "--help"]) is None


def test_typer_knows_exactly_the_options_of_the_table() -> None:
    import typer

    group: Any = typer.main.get_command(build_app())
    assert set(group.commands) == set(BY_COMMAND)
    for command in COMMANDS:
        names = {name for p in group.commands[command.name].params for name in (*p.opts, *p.secondary_opts)}
        for option in command.options:
            assert option.flag in names
            assert not option.short or option.short in names


@pytest.mark.parametrize(
    ("arguments", "code", "error", "hint"),
    [
        (["rnu"], 2, "'rnu' is not a command", "did you mean 'run'?"),
        (["prompts.parquet"], 2, "'prompts.parquet' is not a command", "specbatch run prompts.parquet"),
        (["run"], 2, "no input given", "specbatch run prompts.parquet"),
        (["run", "a", "b"], 2, "--output is needed with 2 inputs", "-o answers"),
        (["run", "a", "--max-token", "3"], 2, "no such option: --max-token", "--max-tokens"),
        (["run", "a", "--max-tokens"], 2, "option '--max-tokens' requires an argument", "specbatch run --help"),
        (["run", "a", "--max-tokens", "0"], 2, "--max-tokens must be an integer, at least 1, got 0", ""),
        (["run", "a", "--max-tokens", "-1"], 2, "--max-tokens must be an integer, at least 1, got -1", ""),
        (["run", "a", "--max-tokens", "many"], 2, "--max-tokens must be an integer, got 'many'", ""),
        (["run", "a", "--max-duration", "soon"], 2, "--max-duration must be a duration such as 90s", ""),
        (["run", "a", "--overlong", "drop"], 2, "--overlong must be one of error, truncate-left", ""),
        (["run", "a", "--temperature", "-1"], 2, "--temperature must be", ""),
        (["run", "a", "--config", "none.toml"], 10, "--config: no such file: none.toml", ""),
        (["run", "a", "--model", "/no/such/model"], 2, "no such model folder: /no/such/model", "nothing is downloaded"),
        (["inspect"], 2, "missing argument 'OUT'", "specbatch inspect --help"),
        (["inspect", "nowhere"], 10, "nowhere: no such directory", ""),
        (["inspect", os.devnull], 10, "/dev/null: no such directory", ""),
        (["run", "", "-o", "x"], 2, "an input must be a path, got ''", ""),
        (["run", "a", "--chat-template", "none.jinja"], 2, "--chat-template: cannot read none.jinja: No such file", ""),
        (["run", "a", "--chat-template", os.devnull], 2, "--chat-template: /dev/null is empty", ""),
    ],
)
def test_what_is_wrong_is_said_with_its_exit_code(
    arguments: list[str], code: int, error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    first, *rest = err.splitlines()
    assert first.startswith(f"error: {error}")
    assert hint in err
    assert len(rest) <= 1
    assert "Traceback" not in err


def test_values_that_look_like_options_and_repeated_options(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "a.parquet", "--system", "--help", "--presence-penalty", "-0.5", "--stop", "x", "--stop", "y"]
    assert main([*arguments, "--no-prefix-cache", "-k", "3", "-n", "2", "--print-config"]) == 0
    settings = tomllib.loads(capsys.readouterr().out)
    assert settings == {
        "input": ["a.parquet"], "system": "--help", "presence-penalty": -0.5, "stop": ["x", "y"],
        "prefix-cache": False, "num-speculative-tokens": 3, "n": 2,
    }  # fmt: skip


def test_print_config_as_json_and_only_when_it_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "a.parquet", "--seed", "3", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"input": ["a.parquet"], "seed": 3, "json": True}
    assert main(["run", "a.parquet", "--max-tokens", "0", "--print-config"]) == 2
    assert capsys.readouterr().out == ""


def test_errors_before_the_job_are_objects_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "a", "--max-tokens", "0", "--json", "--log-format", "json"]) == 2
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert (content["schema_version"], content["exit_code"], content["error"]["code"]) == (1, 2, "usage")
    assert json.loads(err)["event"] == "error"


def test_dry_run_counts_and_writes_nothing(
    prompts: str, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", prompts, "--model", str(tiny_target), "--dry-run"]
    assert main(arguments) == 0
    assert "rows      2 in 1 file" in capsys.readouterr().out
    assert main([*arguments, "--json", "--max-tokens", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["sampled_rows"], found["schema_version"]) == (2, 2, 1)
    assert sum(count for _, _, count in found["histogram"]) == 2
    assert found["completion_tokens_at_most"] == 8
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.parquet"]


def test_a_misspelt_column_is_found_before_the_model_is_loaded(
    prompts: str, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", prompts, "--model", str(tiny_target), "--prompt-column", "promt", "--dry-run"]) == 2
    assert "did you mean 'prompt'?" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--version"], ["--version", "run"]])
def test_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from specbatch import __version__

    assert main(arguments) == 0
    assert capsys.readouterr().out == f"specbatch {__version__}\n"


def test_a_defect_is_one_line_and_its_traceback_only_on_request(
    prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import specbatch.job.run

    def broken(*arguments: object, **options: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(specbatch.job.run, "run_job", broken)
    arguments = ["run", prompts, "--model", "stand-in", "--json"]
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 1
    assert "error: unexpected KeyError: 'oops' (test_cli.py:" in err
    assert "Traceback" not in err
    monkeypatch.setenv("SPECBATCH_DEBUG", "1")
    assert main(arguments) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.delenv("SPECBATCH_DEBUG")
    monkeypatch.setattr("specbatch.inspect_command.report", broken)
    assert main(["inspect", "x"]) == 1  # the other commands too
    assert "Traceback" not in capsys.readouterr().err


def test_usr1_before_the_job_listens_ends_nothing(prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import specbatch.target

    real = specbatch.target.make_target

    def asked_early(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return real(*arguments)

    monkeypatch.setattr(specbatch.target, "make_target", asked_early)
    before = signal.getsignal(signal.SIGUSR1)
    assert main(["run", prompts, "--model", "stand-in"]) == 0
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_runs_out_is_a_resource_not_a_defect(
    prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import specbatch.job.run

    for error in (MemoryError(), OSError(28, "No space left on device"), RuntimeError("can't start new thread")):

        def broken(*arguments: object, error: BaseException = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(specbatch.job.run, "run_job", broken)
        assert main(["run", prompts, "--model", "stand-in"]) == 13
        shown = capsys.readouterr().err
        assert "hint:" in shown
        assert "defect" not in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", "prompts.parquet/sub"], 2, "prompts.parquet/sub"),
        (["-o", "x" * 300], 2, "File name too long"),
        (["-o", "prompts.parquet"], 2, "is a file"),
        (["-o", "link"], 2, "output link is a link to nowhere, which is not there"),
        (["--metrics-file", os.devnull], 2, "--metrics-file /dev/null is not a regular file"),
        (["--metrics-file", "."], 2, "--metrics-file . is not a regular file"),
        (["--metrics-file", "no/such/x.prom"], 2, "--metrics-file no/such/x.prom: its directory is not there"),
    ],
)
def test_places_that_cannot_be_written_to_are_no_defects(
    prompts: str, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("link").symlink_to("nowhere")
    assert main(["run", prompts, "--model", "stand-in", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "defect" not in error


def test_a_name_with_a_line_break_stays_on_its_line(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", prompts, "--model", "stand-in", "-o", "a\nb\x1b[31m"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("done: 2 of 2 rows in a\\nb\\x1b[31m, ")


def test_run_and_inspect_end_to_end(prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", prompts, "--model", "stand-in", "--json", "--metrics-file", "m.prom"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert (result["rows"], result["exit_code"], result["schema_version"]) == (2, 0, 1)
    assert "settings: model stand-in" in err
    assert f"done: 2 of 2 rows in {tmp_path / 'prompts.out'}" in err
    output = str(tmp_path / "prompts.out")
    assert main(["inspect", output]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["inspect", output, "--decisions"]) == 0
    assert "no decision was logged" in capsys.readouterr().out
    assert main(["inspect", output, "--json", "--decisions"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == []
    assert main(["run", prompts, "--model", "stand-in", "--seed", "1"]) == 12
    assert "seed" in capsys.readouterr().err
    assert "specbatch_last_exit_code" in (tmp_path / "m.prom").read_text()


def test_shells_can_complete_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_SPECBATCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "specbatch run --max-t")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["--max-tokens"]


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip


def test_plan_from_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "config.json").write_text(json.dumps(CONFIG))
    assert main(["plan", "-m", "big", "--gpu", "H100", "--context", "2048", "--html", "p.html", "--plot", "p.svg"]) == 0
    text = capsys.readouterr().out
    assert "Rows of 2048 tokens that fit" in text
    assert "<svg" in (tmp_path / "p.html").read_text()
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert main(["plan", "-m", "big", "--json", "--gpus", "2", "--dtype", "int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["gpus"], found["itemsize"], found["gpu"]) == (1, 2, 1, "h100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "abacus"], "--gpu must be one of a10"),
        (["--context", "0"], "--context must be at least 1, got 0"),
        (["--context", "x"], "--context must be an integer, got 'x'"),
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["-m", "nowhere"], "nowhere is not a model folder"),
        (["--draft-model", "d"], "--draft-model needs --model"),
        (["--plot", "x.gif"], "--plot must end in .svg"),
        (["--html", "no/such/p.html"], "cannot write no/such/p.html"),
    ],
)
def test_plan_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
