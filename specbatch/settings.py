"""Settings as the options of a run: JobOptions, EngineOptions and what the terminal shows.

Owns which option would have no effect beside another (refused, or overridden by a more specific source), and that
every complaint names the option as the user wrote it. Imports neither torch nor pyarrow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from specbatch.config import Origin, Setting, Settings
from specbatch.engine_options import EngineOptions
from specbatch.errors import UsageError
from specbatch.job.options import JobOptions
from specbatch.options import BY_FIELD, BY_NAME
from specbatch.sampling_params import SamplingParams
from specbatch.values import as_path


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """What people and other programs see of a run; no effect on its result. Raises UsageError for show below 0."""

    json: bool = False
    show: int = 0
    progress: Literal["auto", "bar", "line", "json", "none"] = "auto"
    log_format: Literal["text", "json"] = "text"
    log_interval: float = 60.0
    metrics_file: Path | None = None
    config: Path | None = None
    print_config: bool = False
    dry_run: bool = False
    yes: bool = False

    def __post_init__(self) -> None:
        if self.show < 0:
            raise UsageError(f"show must be at least 0, got {self.show}")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """One `specbatch run`, resolved as far as that is possible without looking at a file."""

    job: JobOptions
    engine: EngineOptions
    view: ViewOptions


def build(settings: Settings) -> RunOptions:
    """The options of a run. Raises UsageError (exit 2) for the first that cannot be right."""
    if not settings.inputs:
        raise UsageError("no input given", hint="specbatch run prompts.parquet")
    for item in settings.inputs:
        _require_path(item)
    _settle_idle(settings)
    parts: dict[str, dict[str, Any]] = {"job": {}, "sampling": {}, "engine": {}, "view": {}}
    for setting in settings.given.values():
        part, _, name = setting.spec.field.partition(".")
        parts[part][name] = _content(setting) if setting.spec.kind == "file" else setting.value
    if "kv_memory" in parts["engine"]:
        memory = parts["engine"].pop("kv_memory")
        if isinstance(memory, int):
            parts["engine"]["kv_memory_bytes"] = memory
        elif memory is not None:
            parts["engine"]["kv_memory_fraction"] = memory
    parts["engine"]["seed"] = parts["job"].get("seed", 0)
    parts["sampling"]["logprobs"] = parts["job"].get("logprobs", False)
    if "output" not in parts["job"]:
        parts["job"]["output"] = default_output(settings.inputs)
    view = _make(settings, "view", lambda: ViewOptions(**parts["view"]))
    if (view.progress, settings.value("log-format")) in (("bar", "json"), ("json", "text")):
        _contradict(settings, "progress", "log-format")
    sampling = _make(settings, "sampling", lambda: SamplingParams(**parts["sampling"]))
    engine = _make(settings, "engine", lambda: EngineOptions(**parts["engine"]))
    job = _make(settings, "job", lambda: JobOptions(inputs=settings.inputs, sampling=sampling, **parts["job"]))
    return RunOptions(job, engine, view)


def _require_path(item: str) -> None:
    """An empty name would be the current directory: what a script with an unset variable does not mean."""
    try:
        as_path(item)
    except ValueError as error:
        raise UsageError(f"an input must be {error}, got {item!r}") from None


def default_output(inputs: tuple[str, ...]) -> Path:
    """Beside the only input, named after it: prompts.parquet -> prompts.out. Raises UsageError for several inputs."""
    if len(inputs) > 1 or any(c in inputs[0] for c in "*?["):
        what = f"{len(inputs)} inputs" if len(inputs) > 1 else f"the pattern {inputs[0]!r}"
        raise UsageError(f"--output is needed with {what}", hint="say where the answers go: -o answers")
    path = Path(inputs[0])
    stem = path.name.split(".")[0] if path.suffix and not path.is_dir() else path.name
    if stem in ("", ".", ".."):
        raise UsageError(f"--output is needed: no name can be made from {inputs[0]!r}", hint="-o answers")
    return path.with_name(f"{stem}.out")


def _content(setting: Setting) -> str:
    """The text of a file that an option names."""
    try:
        text = Path(str(setting.value)).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{setting.label}: cannot read {setting.value}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{setting.label}: {setting.value} is not UTF-8: {error}") from None
    if not text.strip():
        raise UsageError(f"{setting.label}: {setting.value} is empty")
    return text


_Pair = tuple[tuple[str, ...], str, Callable[[Settings], bool], str]
_IDLE: Final[tuple[_Pair, ...]] = (
    (("top-k", "top-p", "min-p"), "temperature",
     lambda s: float(str(s.value("temperature", 0.0))) == 0.0 and s.value("params-column") is None,
     "decoding is greedy at temperature 0"),
    (("draft-model",), "speculate", lambda s: s.value("speculate") in ("off", "ngram"), "no draft model is used"),
    (("num-speculative-tokens", "verification"), "speculate", lambda s: s.value("speculate") == "off",
     "nothing is drafted"),
    (("log-interval",), "progress", lambda s: s.value("progress") in ("none", "bar"), "no lines are printed"),
    (("show",), "log-format", lambda s: s.value("log-format") == "json", "every line on stderr is an object"),
    (("compression", "keep-columns", "output-prefix"), "format", lambda s: s.value("format") == "openai-batch",
     "the output is JSON lines of one shape"),
    (("system",), "chat", lambda s: s.value("chat") == "off", "prompts are used as they are"),
)  # fmt: skip
_NEUTRAL: Final = {"top-k": 0, "top-p": 1.0, "min-p": 0.0, "num-speculative-tokens": 0}


def _settle_idle(settings: Settings) -> None:
    """An option that cannot have an effect: refused, or dropped where a more specific source took its effect away."""
    for names, cause, applies, why in _IDLE:
        if not applies(settings):
            continue
        for name in names:
            setting = settings.given.get(name)
            if setting is None or setting.value == _NEUTRAL.get(name, object()):
                continue
            if settings.origin(cause) > setting.origin:
                del settings.given[name]
                settings.notes.append(f"{setting.label} is set aside: {settings.label(cause)} says otherwise")
            else:
                by_default = settings.origin(cause) == Origin.DEFAULT
                shown = "" if by_default else f" ({settings.label(cause)} {settings.value(cause)})"
                hint = f"set --{cause}, or leave {setting.label} out" if by_default else "leave one of them out"
                raise UsageError(f"{setting.label} has no effect: {why}{shown}", hint=hint)


def _contradict(settings: Settings, one: str, other: str) -> NoReturn:
    shown = [f"{settings.label(name)} {settings.value(name)}" for name in (one, other)]
    raise UsageError(f"{shown[0]} and {shown[1]} contradict each other", hint="leave one of them out")


def _make(settings: Settings, part: str, make: Callable[[], Any]) -> Any:
    """Build one part; a complaint about a field becomes one about the option, as it was written."""
    try:
        return make()
    except UsageError as error:
        raise UsageError(_in_words_of_user(settings, part, error.message), hint=error.hint) from None
    except ValueError as error:
        raise UsageError(_in_words_of_user(settings, part, str(error))) from None


def _in_words_of_user(settings: Settings, part: str, message: str) -> str:
    """Field names (max_tokens) and flags (--max-tokens) become what the user wrote (SPECBATCH_MAX_TOKENS)."""
    labels = {f"--{name}": settings.label(name) for name in BY_NAME}
    if part != "job":
        for spec in BY_FIELD.values():
            if spec.field.startswith(f"{part}."):
                labels[spec.field.partition(".")[2]] = settings.label(spec.name)
        if part == "engine":
            labels |= dict.fromkeys(("kv_memory_bytes", "kv_memory_fraction"), settings.label("kv-memory"))
            labels["seed"] = settings.label("seed")
    quoted = re.split(r"(, got .*$)", message, maxsplit=1, flags=re.DOTALL)
    names = "|".join(re.escape(name) for name in sorted(labels, key=len, reverse=True))

    def named(match: re.Match[str]) -> str:
        word, at_start = match.group(), match.start() == 0
        an_option = at_start or "_" in word or word.startswith("--") or message[match.end() :].startswith(" '")
        return labels[word] if an_option else word  # "model" in the middle of a sentence is just a word

    return re.sub(rf"(?<![\w-])(?:{names})(?![\w-])", named, quoted[0]) + "".join(quoted[1:])


def unreachable_fields() -> list[str]:
    """Fields of the options that no option of the command line sets (a test holds this list empty)."""
    made_here = {"job.inputs", "job.sampling", "sampling.seed", "sampling.logprobs", "engine.seed",
                 "engine.kv_memory_bytes", "engine.kv_memory_fraction"}  # fmt: skip
    parts = {"job": JobOptions, "sampling": SamplingParams, "engine": EngineOptions, "view": ViewOptions}
    names = {f"{part}.{f.name}" for part, cls in parts.items() for f in fields(cls)}
    return sorted(names - set(BY_FIELD) - made_here)
