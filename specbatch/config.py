"""Where a setting comes from: command line, SPECBATCH_* variables, a TOML file, defaults, in this order.

Owns precedence and --print-config. Knows the table in options.py; what a value may be is for the dataclasses that
settings.py builds from it.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from specbatch.errors import InputMissing, UsageError
from specbatch.options import BY_NAME, PANELS, RUN_OPTIONS, OptionSpec
from specbatch.values import parse_value

PREFIX = "SPECBATCH_"


class Origin(IntEnum):
    """How specific a setting is: the higher wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force and where it was given."""

    spec: OptionSpec
    value: object
    origin: Origin
    label: str  # as the user wrote its name: --max-tokens, SPECBATCH_MAX_TOKENS, "max-tokens in night.toml"


@dataclass(slots=True)
class Settings:
    """Everything that was given, by option name; an absent name is at its default."""

    inputs: tuple[str, ...] = ()
    given: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # worth a warning, not an error

    def value(self, name: str, default: object = None) -> object:
        setting = self.given.get(name)
        return default if setting is None else setting.value

    def origin(self, name: str) -> Origin:
        setting = self.given.get(name)
        return Origin.DEFAULT if setting is None else setting.origin

    def label(self, name: str) -> str:
        setting = self.given.get(name)
        return BY_NAME[name].flag if setting is None else setting.label


def resolve(command_line: Mapping[str, object], inputs: Iterable[str], environ: Mapping[str, str]) -> Settings:
    """All sources together. Raises UsageError naming the option as it was written, InputMissing for --config."""
    settings = Settings(inputs=tuple(inputs))
    found: list[Setting] = []
    for name, raw in command_line.items():
        if raw is not None and raw != []:
            spec = BY_NAME[name]
            found.append(Setting(spec, parse_value(spec, raw, spec.flag), Origin.COMMAND_LINE, spec.flag))
    known = {spec.variable: spec for spec in RUN_OPTIONS}
    for variable in sorted(environ):
        if variable in known and environ[variable] != "":
            spec = known[variable]
            found.append(Setting(spec, parse_value(spec, environ[variable], variable), Origin.ENVIRONMENT, variable))
        elif variable.startswith(PREFIX) and variable not in known:
            close = _closest(variable.removeprefix(PREFIX), (name.removeprefix(PREFIX) for name in known))
            if close:
                settings.notes.append(f"{variable} is not an option; did you mean {PREFIX}{close[0]}?")
    for setting in found:
        current = settings.given.get(setting.spec.name)
        if current is None or setting.origin > current.origin:
            settings.given[setting.spec.name] = setting
    if (path := settings.value("config")) is not None:
        _read_file(Path(str(path)), settings)
    return settings


def _read_file(path: Path, settings: Settings) -> None:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputMissing(f"{settings.label('config')}: no such file: {path}") from None
    except OSError as error:
        raise UsageError(f"{settings.label('config')}: cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    if (inputs := content.pop("input", None)) is not None:
        items = [inputs] if isinstance(inputs, str) else inputs
        if not (isinstance(items, list) and items and all(isinstance(item, str) for item in items)):
            raise UsageError(f"input in {path.name} must be a path or a list of paths, got {inputs!r}")
        settings.inputs = settings.inputs or tuple(items)
    seen: dict[str, str] = {}
    for key, raw in content.items():
        name = key.replace("_", "-")
        label = f"{key} in {path.name}"
        if seen.setdefault(name, key) != key:
            raise UsageError(f"{label} is there a second time, as {seen[name]}")
        if name not in BY_NAME and isinstance(raw, dict):
            raise UsageError(f"[{label}]: options are not in sections", hint="write them above the first [section]")
        if name not in BY_NAME:
            raise UsageError(f"{label} is not an option{_did_you_mean(name, BY_NAME)}")
        if name in ("config", "print-config"):
            raise UsageError(f"{label}: a file cannot set this", hint=f"use --{name} on the command line")
        if settings.origin(name) <= Origin.FILE:
            spec = BY_NAME[name]
            settings.given[name] = Setting(spec, parse_value(spec, raw, label), Origin.FILE, label)


def _closest(name: str, known: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = _closest(name, known)
    return f"; did you mean {close[0]}?" if close else ""


def as_toml(settings: Settings, *, ascii_only: bool = False) -> str:
    """The settings in force, as a file that --config takes; what is at its default is a comment."""
    lines = ["# specbatch settings: command line, then SPECBATCH_* variables, then file, then defaults"]
    if settings.inputs:
        lines += [f"input = {_toml(list(settings.inputs))}"]
    for panel in PANELS:
        body = []
        for spec in RUN_OPTIONS:
            setting = settings.given.get(spec.name)
            if spec.panel != panel or spec.name in ("config", "print-config"):
                continue
            if setting is None:
                body.append(f"# {spec.name}: {spec.default or ('on' if spec.off else 'not set')}")
            else:
                body.append(f"{spec.name} = {_toml(_plain(spec, setting.value))}  # {_where(setting)}")
        lines += ["", f"# {panel}", *body] if body else []
    text = "\n".join(lines) + "\n"
    return re.sub(r"[^\x00-\x7f]", lambda match: f"\\U{ord(match[0]):08x}", text) if ascii_only else text


def as_dict(settings: Settings) -> dict[str, object]:
    """The same for --print-config --json: what was given, by name, as JSON holds it."""
    given = {n: _plain(s.spec, s.value) for n, s in settings.given.items() if n not in ("config", "print-config")}
    return {"input": list(settings.inputs), **given}


def _where(setting: Setting) -> str:
    return "command line" if setting.origin == Origin.COMMAND_LINE else setting.label


def _plain(spec: OptionSpec, value: object) -> object:
    """A parsed value as a config file would write it."""
    if spec.kind == "columns" and not value:
        return "all" if value is None else "none"
    if spec.kind == "memory":
        return "auto" if value is None else f"{value * 100:g}%" if isinstance(value, float) else value
    if isinstance(value, tuple):
        return [str(item) if isinstance(item, Path) else item for item in value]
    if isinstance(value, dict):
        return {str(key): bias for key, bias in value.items()}
    return str(value) if isinstance(value, Path) else value


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    return repr(value)
