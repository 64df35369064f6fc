"""Settings: precedence, parsing of every kind, config files, --print-config, and complaints in the user's words."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.config import Origin, as_dict, as_toml, resolve
from specbatch.errors import InputMissing, UsageError
from specbatch.options import BY_NAME, RUN_OPTIONS
from specbatch.settings import build, default_output
from specbatch.units import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_rate,
    parse_duration,
    parse_fraction,
    parse_size,
)
from specbatch.values import parse_value


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "night.toml"
    path.write_text(text)
    return str(path)


def test_command_line_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'max-tokens = 1\ntemperature = 0.1\nseed = 1\nmodel = "m"\n')
    environ = {"SPECBATCH_MAX_TOKENS": "2", "SPECBATCH_TEMPERATURE": "0.2"}
    settings = resolve({"max-tokens": "3", "config": file}, ["a.parquet"], environ)
    assert settings.value("max-tokens") == 3
    assert settings.value("temperature") == 0.2
    assert settings.value("seed") == 1
    assert [settings.origin(n) for n in ("max-tokens", "temperature", "seed", "n")] == [
        Origin.COMMAND_LINE,
        Origin.ENVIRONMENT,
        Origin.FILE,
        Origin.DEFAULT,
    ]
    options = build(settings)
    assert options.job.sampling.max_tokens == 3
    assert options.job.seed == options.engine.seed == 1


def test_config_file_may_name_the_inputs_and_the_variable_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'input = ["a.parquet", "b.parquet"]\noutput = "o"\nlimit = 5\n')
    settings = resolve({}, [], {"SPECBATCH_CONFIG": file})
    assert build(settings).job.inputs == ("a.parquet", "b.parquet")
    assert build(settings).job.limit == 5
    assert resolve({}, ["c.parquet"], {"SPECBATCH_CONFIG": file}).inputs == ("c.parquet",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-token = 3", "max-token in night.toml is not an option; did you mean max-tokens?"),
        ("max-tokens = 'x'", "max-tokens in night.toml must be an integer, got 'x'"),
        ("max-tokens = [1, 2]", "max-tokens in night.toml takes one value, got [1, 2]"),
        ("progress = 'blue'", "progress in night.toml must be one of auto, bar, line, json, none, got 'blue'"),
        ("config = 'x'", "config in night.toml: a file cannot set this"),
        ("input = 3", "input in night.toml must be a path or a list of paths, got 3"),
        ("max-tokens = ", "night.toml is not TOML: Invalid value"),
        ("[run]\nmax-tokens = 3", "[run in night.toml]: options are not in sections"),
        ("top-k = 3\ntop_k = 4", "top_k in night.toml is there a second time, as top-k"),
        ('output = "a\\u0000b"', "output in night.toml must be a path, got 'a\\x00b'"),
        ('reuse = ["a", ""]', "reuse in night.toml must be a path, got ['a', '']"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve({"config": write(tmp_path, text)}, ["a.parquet"], {})
    assert message in error.value.message


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, "\ufeffmax-tokens = 3\n")
    assert resolve({"config": file}, ["a.parquet"], {}).value("max-tokens") == 3


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--config: cannot read .*: Is a directory"):
        resolve({"config": str(tmp_path)}, ["a.parquet"], {})


def test_an_empty_input_is_not_the_current_directory() -> None:
    """specbatch run "$FILES" with FILES unset."""
    for item in ("", " ", "a\0b"):
        with pytest.raises(UsageError, match="an input must be a path"):
            build(resolve({"output": "o"}, [item], {}))


def test_what_is_no_text_is_refused() -> None:
    """As the interpreter hands over bytes of the shell that are not UTF-8."""
    with pytest.raises(UsageError, match=r"an input must be text in UTF-8, got 'a\\udcff'"):
        build(resolve({"output": "o"}, ["a\udcff"], {}))
    for name, value in (("template", "{a} \udcff"), ("stop", ["\udcff"]), ("output", "\udcff"), ("reuse", ["\udcff"])):
        with pytest.raises(UsageError, match=f"--{name} must be text in UTF-8"):
            resolve({name: value}, ["a"], {})


def test_a_missing_file_is_missing_input() -> None:
    with pytest.raises(InputMissing, match=r"--config: no such file: nowhere\.toml"):
        resolve({"config": "nowhere.toml"}, [], {})


def test_a_misspelt_variable_is_pointed_out_and_foreign_ones_are_left_alone() -> None:
    settings = resolve({}, ["a"], {"SPECBATCH_MAX_TOKEN": "3", "SPECBATCH_TEST_MODEL": "x", "HOME": "/"})
    assert settings.notes == ["SPECBATCH_MAX_TOKEN is not an option; did you mean SPECBATCH_MAX_TOKENS?"]
    assert resolve({}, ["a"], {"SPECBATCH_MODEL": ""}).given == {}


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", '["\\n", "END"]', ("\n", "END")),
        ("stop", "[x", ("[x",)),
        ("keep-columns", "a, b,a", ("a", "b")),
        ("keep-columns", ["none"], ()),
        ("keep-columns", "all", None),
        ("logit-bias", ["5=-100", "7=1.5"], {5: -100.0, 7: 1.5}),
        ("logit-bias", {"5": -1}, {5: -1.0}),
        ("stop-token-id", "1,2", (1, 2)),
        ("devices", "0,1", (0, 1)),
        ("devices", "all", "all"),
        ("kv-memory", "auto", None),
        ("kv-memory", "50%", 0.5),
        ("kv-memory", "4GiB", 4 << 30),
        ("max-duration", "6h", 21600.0),
        ("max-error-rate", "1%", 0.01),
        ("max-row-bytes", 1024, 1024),
        ("prefix-cache", "off", False),
        ("overlong", "truncate_left", "truncate-left"),
    ],
)
def test_values_as_written(name: str, raw: object, value: object) -> None:
    assert parse_value(BY_NAME[name], raw, "x") == value


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("max-tokens", "1.5"),
        ("max-tokens", True),
        ("max-tokens", ""),
        ("temperature", "warm"),
        ("kv-memory", "50q"),
        ("kv-memory", "120%"),
        ("logit-bias", "5"),
        ("devices", "a"),
        ("max-duration", "6 fortnights"),
        ("max-error-rate", "2"),
        ("prefix-cache", "perhaps"),
        ("stop", [1]),
        ("stop", '["a'),
    ],
)
def test_a_wrong_value_names_option_value_and_what_is_allowed(name: str, raw: object) -> None:
    with pytest.raises(UsageError, match=r"^SPECBATCH_X must (be|not be empty)"):
        parse_value(BY_NAME[name], raw, "SPECBATCH_X")


EVERY: dict[str, object] = {
    "output": "o", "format": "parquet", "keep-columns": ["a,b"], "output-prefix": "sb_", "output-token-ids": True,
    "logprobs": True, "compression": "snappy", "shard-rows": "7", "prompt-column": "p", "chat": "on",
    "system": "be brief",
    "params-column": "q", "limit": "3", "overlong": "skip", "max-row-bytes": "1MiB", "max-tokens": "9",
    "min-tokens": "1",
    "temperature": "0.5", "top-k": "4", "top-p": "0.9", "min-p": "0.1", "repetition-penalty": "1.1",
    "presence-penalty": "-0.5", "frequency-penalty": "0.5", "logit-bias": ["3=-100"], "seed": "5", "stop": ["a\n\"b"],
    "stop-token-id": ["2"], "ignore-eos": True, "n": "2", "model": "m", "draft-model": "d", "device": "cuda",
    "devices": "0,1", "dtype": "float16", "quantize": "int8", "attention": "reference", "threads": "2",
    "speculate": "draft", "num-speculative-tokens": "3", "verification": "rejection", "profile": False,
    "max-num-seqs": "8", "max-num-batched-tokens": "99", "max-model-len": "77", "kv-memory": "25%", "block-size": "8",
    "prefix-cache": False, "cuda-graphs": "off", "tokenizer-threads": "3", "read-ahead-rows": "11", "restart": True,
    "reuse": ["x", "y"], "deduplicate": False, "max-duration": "1h", "grace": "5s", "stall-timeout": "1m",
    "wait-lock": "2s", "max-errors": "4", "max-error-rate": "0.5", "yes": True, "show": "2", "json": True,
    "progress": "line",
    "log-interval": "9s", "log-format": "text", "metrics-file": "m.prom", "dry-run": True,
}  # fmt: skip
# Options that contradict one of the above; tested with the others in test_a_options.py.
ELSEWHERE = {"chat-template", "messages-column", "template", "retry-failed", "config", "print-config"}


def test_print_config_is_a_file_that_gives_the_same_settings(tmp_path: Path) -> None:
    assert set(EVERY) | ELSEWHERE == {option.name for option in RUN_OPTIONS}
    settings = resolve(EVERY, ["a.parquet"], {})
    text = as_toml(settings)
    tomllib.loads(text)
    again = resolve({"config": write(tmp_path, text)}, [], {})
    assert build(again).job == build(settings).job
    assert build(again).engine == build(settings).engine
    assert again.inputs == ("a.parquet",)
    assert as_dict(again) == as_dict(settings)


def test_print_config_names_the_source_and_the_defaults() -> None:
    text = as_toml(resolve({"max-tokens": "9"}, ["a.parquet"], {"SPECBATCH_SEED": "3"}))
    assert "max-tokens = 9  # command line" in text
    assert "seed = 3  # SPECBATCH_SEED" in text
    assert "# temperature: 0" in text
    for option in RUN_OPTIONS:
        assert option.name in ("config", "print-config") or option.name in text


def test_variables_take_every_option() -> None:
    def as_text(value: object) -> str:
        return str(value[0] if isinstance(value, list) else value)

    environ = {BY_NAME[name].variable: as_text(value) for name, value in EVERY.items()}
    settings = resolve({}, ["a.parquet"], environ)
    assert set(settings.given) == set(EVERY)
    assert not settings.notes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max-tokens": "0"}, "--max-tokens must be an integer, at least 1, got 0"),
        ({"max-tokens": "-1"}, "--max-tokens must be an integer, at least 1, got -1"),
        ({"seed": "-1"}, "--seed must be between 0 and 2**63 - 1, got -1"),
        ({"grace": "99999d"}, "--grace must be a number of seconds between 0 and 1,000,000,000, got 8639913600"),
        ({"max-duration": "99999d"}, "--max-duration must be a number of seconds above 0 and up to 1,000,000,000"),
        ({"tokenizer-threads": "9999"}, "--tokenizer-threads must be at most 256, got 9999"),
        ({"n": "0"}, "--n must be between 1 and 1024, got 0"),
        ({"device": "tpu"}, "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"num-speculative-tokens": "99"}, "--num-speculative-tokens must be 0 to 16, got 99"),
        ({"block-size": "7"}, "--block-size must be a power of two"),
        ({"prompt-column": "a", "template": "{b}"}, "--prompt-column and --template contradict"),
        ({"speculate": "draft", "model": "m"}, "--speculate 'draft' needs --draft-model"),
        ({"progress": "bar", "log-format": "json"}, "--progress bar and --log-format json contradict"),
        ({"progress": "json", "log-format": "text"}, "--progress json and --log-format text contradict"),
        ({"speculate": "off", "num-speculative-tokens": "3"}, "--num-speculative-tokens has no effect"),
        ({"top-p": "0.9"}, "--top-p has no effect: decoding is greedy at temperature 0"),
        ({"log-interval": "3s", "progress": "none"}, "--log-interval has no effect"),
        ({"keep-columns": ["a"], "format": "openai-batch"}, "--keep-columns has no effect: the output is JSON lines"),
        ({"output-prefix": "p_", "format": "openai-batch"}, "--output-prefix has no effect"),
        ({"keep-columns": [""]}, "--keep-columns must be column names, all or none, got ''"),
        ({"restart": True, "retry-failed": True}, "--restart and --retry-failed contradict"),
    ],
)
def test_complaints_are_in_the_words_of_the_command_line(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        build(resolve(given, ["a.parquet"], {}))
    assert error.value.message.startswith(message)
    assert error.value.exit_code == 2


def test_complaints_name_the_variable_or_the_key(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^SPECBATCH_MAX_TOKENS must be an integer, at least 1, got 0"):
        build(resolve({}, ["a"], {"SPECBATCH_MAX_TOKENS": "0"}))
    with pytest.raises(UsageError, match=r"^max-tokens in night\.toml must be an integer, at least 1, got 0"):
        build(resolve({"config": write(tmp_path, "max-tokens = 0")}, ["a"], {}))


def test_a_more_specific_source_sets_an_option_aside_instead_of_contradicting_it(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "m"\ndraft-model = "d"\ntemperature = 0.7\ntop-p = 0.9\n')
    settings = resolve({"config": file, "speculate": "off", "temperature": "0"}, ["a"], {})
    options = build(settings)
    assert options.engine.draft_model is None
    assert options.job.sampling.top_p == 1.0
    assert any("draft-model in night.toml is set aside: --speculate says otherwise" in note for note in settings.notes)


def test_the_output_is_named_after_the_input(tmp_path: Path) -> None:
    assert default_output(("in/prompts.parquet",)) == Path("in/prompts.out")
    assert default_output(("in/prompts.snappy.parquet",)) == Path("in/prompts.out")
    (tmp_path / "table.v1").mkdir()
    assert default_output((str(tmp_path / "table.v1"),)) == tmp_path / "table.v1.out"
    for inputs in (("a", "b"), ("in/*.parquet",), ("/",), (".",), ("..",)):
        with pytest.raises(UsageError, match="--output is needed"):
            default_output(inputs)


def test_durations_and_sizes() -> None:
    assert [parse_duration(t) for t in ("90", "90s", "10m", "1h30m", "2d", "500ms", "1.5 h")] == [
        90, 90, 600, 5400, 172800, 0.5, 5400]  # fmt: skip
    assert [parse_size(t) for t in ("10", "4GiB", "4G", "10GB", "1.5 KiB", "2kb")] == [
        10, 4 << 30, 4 << 30, 10**10, 1536, 2000]  # fmt: skip
    assert parse_fraction("5%") == parse_fraction("0.05") == 0.05
    for parse, text in ((parse_duration, "-3s"), (parse_duration, "m"), (parse_size, "-1"), (parse_fraction, "nan")):
        with pytest.raises(ValueError):  # noqa: PT011
            parse(text)


@given(st.text(max_size=12))
def test_parsers_give_a_finite_value_or_say_what_they_want(text: str) -> None:
    for parse in (parse_duration, parse_size, parse_fraction):
        try:
            value = parse(text)
        except ValueError as error:
            refused = str(error)
        else:
            refused, value = "", float(value)
            assert 0 <= value < float("inf")
        assert refused == "" or "such as" in refused


def test_figures_for_people() -> None:
    assert [format_duration(s) for s in (0.44, 59.6, 75, 3700, 90000, None, float("nan"))] == [
        "0.4 s", "1m 00s", "1m 15s", "1h 01m", "1d 01h", "?", "?"]  # fmt: skip
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert [format_percent(p) for p in (0, 0.001, 0.714, 0.9999, 1, None)] == [
        "0 %", "<1 %", "71 %", "99 %", "100 %", "-"]  # fmt: skip
    assert [format_rate(r) for r in (3.21, 570.4, None)] == ["3.2", "570", "-"]
    assert format_count(1234567) == "1,234,567"
