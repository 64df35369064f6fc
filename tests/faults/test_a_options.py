"""A6: no option is silently ignored. Each changes what is resolved and is read by the code that does the work, or it is
refused; and what is in force is printed."""

from __future__ import annotations

import ast
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from specbatch import config, wording
from specbatch.config import resolve
from specbatch.engine_options import EngineOptions
from specbatch.errors import UsageError
from specbatch.job.options import JobOptions
from specbatch.options import BY_NAME, RUN_OPTIONS
from specbatch.sampling_params import SamplingParams
from specbatch.settings import ViewOptions, build, unreachable_fields

PACKAGE = Path(__file__).parent.parent.parent / "specbatch"

# A value other than the default for every option, and what it needs beside it to make sense.
VALUES: dict[str, tuple[object, dict[str, object]]] = {
    "output": ("elsewhere", {}), "format": ("openai-batch", {}), "keep-columns": (["none"], {}),
    "output-prefix": ("p_", {}), "output-token-ids": (True, {}), "logprobs": (True, {}), "compression": ("snappy", {}),
    "shard-rows": ("5", {}), "prompt-column": ("p", {}), "messages-column": ("m", {}), "template": ("a {b}", {}),
    "chat": ("on", {}), "system": ("be brief", {"chat": "on"}), "params-column": ("q", {}), "limit": ("3", {}),
    "overlong": ("skip", {}), "max-row-bytes": ("1KiB", {}), "max-tokens": ("5", {}), "min-tokens": ("2", {}),
    "temperature": ("0.7", {}), "top-k": ("5", {"temperature": "1"}), "top-p": ("0.9", {"temperature": "1"}),
    "min-p": ("0.1", {"temperature": "1"}), "repetition-penalty": ("1.2", {}), "presence-penalty": ("0.1", {}),
    "frequency-penalty": ("0.1", {}), "logit-bias": (["3=-100"], {}), "seed": ("7", {}), "stop": (["x"], {}),
    "stop-token-id": (["2"], {}), "ignore-eos": (True, {}), "n": ("2", {}), "model": ("m", {}),
    "draft-model": ("d", {"model": "m"}), "device": ("cpu", {}), "devices": ("0,1", {}), "dtype": ("float16", {}),
    "quantize": ("int8", {}), "attention": ("reference", {}), "threads": ("3", {}), "speculate": ("off", {}),
    "num-speculative-tokens": ("2", {}), "verification": ("rejection", {}), "profile": (False, {}),
    "max-num-seqs": ("7", {}), "max-num-batched-tokens": ("99", {}), "max-model-len": ("99", {}),
    "kv-memory": ("10%", {}), "block-size": ("8", {}), "prefix-cache": (False, {}), "cuda-graphs": ("off", {}),
    "tokenizer-threads": ("3", {}), "read-ahead-rows": ("9", {}), "restart": (True, {}), "retry-failed": (True, {}),
    "reuse": (["r"], {}), "deduplicate": (False, {}), "max-duration": ("1h", {}), "grace": ("1s", {}),
    "stall-timeout": ("1s", {}), "wait-lock": ("1s", {}), "max-errors": ("1", {}), "max-error-rate": ("0.1", {}),
    "yes": (True, {}), "show": ("2", {}), "json": (True, {}), "progress": ("line", {}), "log-interval": ("5s", {}),
    "log-format": ("json", {}), "metrics-file": ("m.prom", {}), "print-config": (True, {}), "dry-run": (True, {}),
}  # fmt: skip
WITH_FILES = {"chat-template", "config"}


def resolved(given: dict[str, object]) -> dict[str, Any]:
    options = build(resolve(given, ["a.parquet"], {}))
    return {"job": asdict(options.job), "engine": asdict(options.engine), "view": asdict(options.view)}


def differences(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name in one:
        if (
            isinstance(one[name], dict)
            and isinstance(other[name], dict)
            and name in ("job", "engine", "view", "sampling")
        ):
            found |= differences(one[name], other[name], f"{name}." if name != "sampling" else "sampling.")
        elif one[name] != other[name]:
            found.add(f"{prefix}{name}")
    return found


def test_the_table_of_this_test_is_complete() -> None:
    assert set(VALUES) | WITH_FILES == {option.name for option in RUN_OPTIONS}


@pytest.mark.parametrize("name", sorted(VALUES))
def test_every_option_changes_what_is_resolved_and_nothing_else(name: str) -> None:
    value, beside = VALUES[name]
    changed = differences(resolved(beside), resolved(beside | {name: value}))
    also = {"job.seed": {"engine.seed"}, "job.logprobs": {"sampling.logprobs"}}
    field = BY_NAME[name].field
    expected = {field} | also.get(field, set())
    if name == "kv-memory":
        expected = {"engine.kv_memory_fraction"}
    assert changed == expected


def test_a_chat_template_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert resolved({"chat-template": str(tmp_path / "t.jinja")})["engine"]["chat_template"] == "{{ messages }}"
    with pytest.raises(UsageError, match="--chat-template: cannot read"):
        resolved({"chat-template": str(tmp_path / "none")})


def test_every_field_of_the_options_can_be_set() -> None:
    assert unreachable_fields() == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top-k": "5"}, "--top-k has no effect"),
        ({"top-p": "0.5"}, "--top-p has no effect"),
        ({"min-p": "0.5"}, "--min-p has no effect"),
        ({"speculate": "off", "num-speculative-tokens": "4"}, "--num-speculative-tokens has no effect"),
        ({"speculate": "off", "verification": "rejection"}, "--verification has no effect"),
        ({"speculate": "ngram", "model": "m", "draft-model": "d"}, "--draft-model has no effect"),
        ({"draft-model": "d"}, "--draft-model needs"),
        ({"format": "openai-batch", "compression": "none"}, "--compression has no effect"),
        ({"chat": "off", "system": "x"}, "--system has no effect"),
        ({"device": "cpu", "devices": "0,1"}, "--devices are CUDA devices"),
        ({"log-format": "json", "show": "3"}, "--show has no effect"),
        ({"show": "-1"}, "--show must be at least 0, got -1"),
        ({"progress": "none", "log-interval": "5s"}, "--log-interval has no effect"),
        ({"progress": "bar", "log-interval": "5s"}, "--log-interval has no effect"),
    ],
)
def test_an_option_that_could_have_no_effect_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        resolved(given)
    assert error.value.message.startswith(message)


def test_with_a_parameters_column_sampling_options_are_defaults_of_rows() -> None:
    assert resolved({"top-p": "0.5", "params-column": "q"})["job"]["sampling"]["top_p"] == 0.5


def attributes_read(folders: list[str], but: set[str]) -> set[str]:
    """Names read as attributes (x.name) or asked for by getattr(x, "name") in the package's files."""
    names: set[str] = set()
    for folder in folders:
        for path in [PACKAGE / folder] if folder.endswith(".py") else (PACKAGE / folder).rglob("*.py"):
            if path.name in but:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    names.add(node.attr)
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                    names |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return names


@pytest.mark.parametrize(
    ("options", "folders"),
    [
        (JobOptions, ["job"]),
        (SamplingParams, ["engine", "job"]),
        (ViewOptions, ["run_command.py", "dry_run.py", "config.py", "settings.py"]),
    ],
)
def test_every_field_is_read_by_the_code_that_does_the_work(options: Any, folders: list[str]) -> None:
    read = attributes_read(folders, but={"options.py", "validate.py", "sampling_params.py", "engine_options.py"})
    here = {"config", "seed"} if options is not JobOptions else set()  # read before there are options; of a row
    assert {f.name for f in fields(options)} - read - here == set()
    assert "never_read_by_anyone" not in read


def test_engine_options_are_acted_on() -> None:
    """The engine reads a field, or target.py turns it into what the engine reads."""
    read = attributes_read(["engine", "compose.py"], but={"engine_options.py"})
    unread = {f.name for f in fields(EngineOptions)} - read
    turned = {"devices", "chat_template"}  # into `device`, and into the tokenizer
    assert unread == turned


def test_what_was_given_is_printed_with_its_source(tmp_path: Path) -> None:
    (tmp_path / "night.toml").write_text("temperature = 0.7\n")
    given = {"max-tokens": "5", "stop": ["x"], "prefix-cache": False, "kv-memory": "4GiB", "max-duration": "6h"}
    settings = resolve(given | {"config": str(tmp_path / "night.toml")}, ["a"], {"SPECBATCH_SEED": "3"})
    assert wording.settings_line(settings) == (
        "settings: max-tokens 5, stop 'x', no-prefix-cache, kv-memory 4.0 GiB, max-duration 6h 00m, "
        "seed 3 (SPECBATCH_SEED), temperature 0.7 (temperature in night.toml)"
    )
    assert wording.settings_line(resolve({}, ["a"], {})) is None
    everything = {name: value for name, (value, _) in VALUES.items()}
    shown = wording.settings_line(resolve(everything, ["a"], {})) or ""
    hidden = {"output", "json", "progress", "log-format", "log-interval", "yes", "metrics-file"}
    for name in everything.keys() - hidden:
        assert name in shown
    assert config.as_dict(settings)["kv-memory"] == 4 << 30
