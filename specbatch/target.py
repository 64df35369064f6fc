"""From engine options to what a job needs to know before anything is loaded, and to the factory of its engine.

Reads configs, tokenizers and the headers of weights; imports torch only inside the factory. Knows which model names
are special: none is the built-in pair, "stand-in" the test engine.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.engine_options import EngineOptions
from specbatch.errors import UsageError
from specbatch.garbage import lasting_objects
from specbatch.job.options import EngineContext, EngineFactory, Target

if TYPE_CHECKING:
    from specbatch.requests import BatchEngine

STAND_IN = "stand-in"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_CONFIG_FILES = ("config.json", "generation_config.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16


def make_target(options: EngineOptions) -> tuple[Target, EngineFactory]:
    """What the job must know of the model, and how to make its engine. Raises UsageError naming model and fix."""
    if options.model == STAND_IN:
        from specbatch.standin import make_stand_in

        return make_stand_in(options)
    try:
        return _local_model(options)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _local_model(options: EngineOptions) -> tuple[Target, EngineFactory]:
    from specbatch.models.builtin import builtin_paths
    from specbatch.models.support import model_shape
    from specbatch.models.tokenizer import HFTokenizer
    from specbatch.models.tokenizer_compare import compare_folders

    own = options.model is not None
    folder = Path(str(options.model)) if own else Path(builtin_paths()[0])
    for path in (folder, *([Path(options.draft_model)] if options.draft_model else [])):
        if not path.is_dir():
            hint = "give the path of a local folder; nothing is downloaded"
            raise UsageError(f"no such model folder: {path}", hint=hint)
    shape = model_shape(folder)
    if options.max_model_len is not None and options.max_model_len > shape.max_model_len:
        raise ValueError(f"--max-model-len {options.max_model_len} is beyond the model's {shape.max_model_len} tokens")
    tokenizer = HFTokenizer(folder, chat_template=options.chat_template)
    if options.draft_model:
        draft = options.draft_model
        comparison = compare_folders(folder, draft, model_shape(draft).vocab_size, tokenizer)
        if not comparison.compatible:
            message = f"draft model {options.draft_model} does not fit {folder}: {comparison.reason}"
            raise UsageError(message, hint="use a draft model of the same family")
    target = Target(
        name=folder.name if own else "built-in",
        max_model_len=min(options.max_model_len or shape.max_model_len, shape.max_model_len),
        fingerprint=_fingerprint(options, folder, tokenizer.chat_template),
        make_tokenizer=lambda: tokenizer,
    )

    def make(context: EngineContext, chosen: EngineOptions) -> BatchEngine:
        resolved = context.resolved.get("dtype")
        if chosen.dtype == "auto" and resolved:
            chosen = replace(chosen, dtype=resolved)  # type: ignore[arg-type]
        with lasting_objects():
            from specbatch.compose import make_engine

            try:
                return make_engine(chosen, log_decision=context.log_decision, tokenizer=tokenizer, say=context.say)
            except ValueError as error:
                raise UsageError(str(error)) from error

    return target, lambda context: _on_devices(options, context, make)


def _on_devices(
    options: EngineOptions, context: EngineContext, make: Callable[[EngineContext, EngineOptions], BatchEngine]
) -> BatchEngine:
    """One engine, or several as one: what --device and --devices ask for."""
    if not options.devices:
        return make(context, options)
    numbers = options.devices
    if numbers == "all":
        from specbatch.engine.device import count_cuda_devices

        numbers = tuple(range(count_cuda_devices()))
    if not numbers:
        raise UsageError("--devices all: torch sees no CUDA device", hint="see: specbatch doctor")
    if len(numbers) == 1:
        return make(context, options.for_device(numbers[0]))
    return make_fleet([(f"cuda:{n}", options.for_device(n)) for n in numbers], context, make)


def make_fleet(
    devices: Sequence[tuple[str, EngineOptions]],
    context: EngineContext,
    make: Callable[[EngineContext, EngineOptions], BatchEngine],
) -> BatchEngine:
    """An engine a (name, options), driven as one. What they decide goes to one log, with the device's name."""
    lock = threading.Lock()

    def maker(name: str, chosen: EngineOptions) -> Callable[[Mapping[str, object]], BatchEngine]:
        def log(record: Mapping[str, object]) -> None:
            with lock:
                context.log_decision({"device": name, **record})

        def build(resolved: Mapping[str, object]) -> BatchEngine:
            own = replace(context, log_decision=log, resolved={**resolved, **context.resolved})
            return make(own, chosen)

        return build

    from specbatch.job.fleet import Fleet

    return Fleet([(name, maker(name, chosen)) for name, chosen in devices])


def _fingerprint(options: EngineOptions, folder: Path, chat_template: str | None) -> dict[str, str]:
    """Everything of the model and the engine that changes results, as short digests."""
    values = {
        "model": _digest_of_model(folder),
        "tokenizer": _digest_of_files(folder / name for name in _TOKENIZER_FILES),
        "chat_template": _short(chat_template.encode()) if chat_template else "none",
        "dtype": options.dtype,
        "quantize": options.quantize,
        "max_model_len": str(options.max_model_len or "model"),
        "verification": options.verification,
    }
    if options.verification == "rejection":  # the realisation depends on the drafts
        k = options.num_speculative_tokens
        values["drafts"] = f"{options.speculate}, k {'auto' if k is None else k}"
        values["draft_model"] = _digest_of_model(Path(options.draft_model)) if options.draft_model else "none"
    return values


def _digest_of_model(folder: Path) -> str:
    """Configs whole; weights by size and samples of their bytes, so that a 100 GB model is identified in a moment."""
    digest = hashlib.sha256(_digest_of_files(folder / name for name in _CONFIG_FILES).encode())
    for path in sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES):
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with open(path, "rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _digest_of_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes() if path.exists() else b""
        digest.update(json.dumps([path.name, len(content)]).encode() + content)
    return digest.hexdigest()[:16]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def describe_target(target: Target) -> dict[str, Any]:
    """The target as JSON holds it, for --dry-run."""
    return {"name": target.name, "max_model_len": target.max_model_len, "fingerprint": dict(target.fingerprint)}
