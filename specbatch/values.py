"""The text of one option's value as a Python value, by kind: what the command line, a variable or a TOML file holds.

Raises UsageError with the option's name as it was written. Knows nothing of where the text came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from specbatch.errors import UsageError
from specbatch.options import OptionSpec
from specbatch.units import parse_duration, parse_fraction, parse_size

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_value(spec: OptionSpec, raw: object, label: str) -> object:
    """`raw` (a string, a list of them, or what TOML holds) as the type of `spec`. Raises UsageError with `label`."""
    if isinstance(raw, str) and raw.strip() == "" and spec.kind not in ("text", "list"):
        raise UsageError(f"{label} must not be empty")
    if isinstance(raw, list) and not spec.repeats and spec.kind != "devices":
        raise UsageError(f"{label} takes one value, got {raw!r}")
    try:
        return _PARSERS[spec.kind](spec, raw)
    except ValueError as error:
        raise UsageError(f"{label} must be {error}, got {_shown(raw)}") from None


def _shown(raw: object) -> str:
    single = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
    return repr(single)


def _text(spec: OptionSpec, raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("text in quotes")
    return _utf8(raw)


def _utf8(text: str) -> str:
    """What the shell handed over may be any bytes; nothing here can hold what is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text in UTF-8") from None
    return text


def _path(spec: OptionSpec, raw: object) -> Path:
    return as_path(_text(spec, raw))


def as_path(text: str) -> Path:
    """Raises ValueError for what can be no path."""
    if text.strip() == "" or "\0" in text:
        raise ValueError("a path")
    return Path(_utf8(text))


def _int(spec: OptionSpec, raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise ValueError("an integer")
    try:
        return int(raw)
    except ValueError:
        raise ValueError("an integer") from None


def _float(spec: OptionSpec, raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError("a number")
    try:
        return float(raw)
    except ValueError:
        raise ValueError("a number") from None


def _switch(spec: OptionSpec, raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if str(raw).lower() in _TRUE or str(raw).lower() in _FALSE:
        return str(raw).lower() in _TRUE
    raise ValueError("true or false")


def _choice(spec: OptionSpec, raw: object) -> str:
    text = str(raw).lower().replace("_", "-")
    if text not in spec.choices:
        raise ValueError("one of " + ", ".join(spec.choices))
    return text


def _duration(spec: OptionSpec, raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError("a duration such as 90s, 10m, 1h30m or 2d")
    return parse_duration(str(raw))


def _size(spec: OptionSpec, raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise ValueError("a size such as 512MiB, 4GiB or 10GB")
    return parse_size(str(raw))


def _memory(spec: OptionSpec, raw: object) -> int | float | None:
    """Bytes (int), a share (float), or None for auto."""
    if raw == "auto":
        return None
    try:
        return parse_fraction(raw) if isinstance(raw, str) and raw.strip().endswith("%") else _size(spec, raw)
    except ValueError:
        raise ValueError("auto, a size such as 4GiB, or a share of the free memory such as 50%") from None


def _share(spec: OptionSpec, raw: object) -> float:
    return parse_fraction(str(raw))


def _list(spec: OptionSpec, raw: object) -> tuple[str, ...]:
    """One value, or several: repeated on the command line, a JSON list in one string, a TOML list."""
    items = list(raw) if isinstance(raw, list) else [raw]
    if len(items) == 1 and isinstance(items[0], str) and items[0].startswith('["'):
        try:
            items = json.loads(items[0])
        except ValueError:
            raise ValueError("a text or a JSON list of texts") from None
    if not all(isinstance(item, str) for item in items):
        raise ValueError("a text or a list of texts")
    return tuple(_utf8(str(item)) for item in items)


def _paths(spec: OptionSpec, raw: object) -> tuple[Path, ...]:
    return tuple(as_path(item) for item in _list(spec, raw))


def _columns(spec: OptionSpec, raw: object) -> tuple[str, ...] | None:
    """Names from A,B or repeated; None is all, () is none."""
    items = _list(spec, raw)
    if items == ("all",):
        return None
    if items == ("none",) or raw == []:
        return ()
    if isinstance(raw, str):
        items = (raw,)
    names = [name.strip() for item in items for name in item.split(",")]
    if "" in names:  # as from a variable that is not set: columns are not lost over that
        raise ValueError("column names, all or none")
    return tuple(dict.fromkeys(names))


def _ints(spec: OptionSpec, raw: object) -> tuple[int, ...]:
    items = raw if isinstance(raw, list) else [raw]
    parts = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    return tuple(_int(spec, part) for part in parts)


def _floats(spec: OptionSpec, raw: object) -> tuple[float, ...]:
    items = raw if isinstance(raw, list) else [raw]
    parts = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    return tuple(_float(spec, part) for part in parts)


def _biases(spec: OptionSpec, raw: object) -> dict[int, float]:
    allowed = "token=bias, such as 1234=-100"
    if isinstance(raw, dict):
        pairs = [(str(key), str(value)) for key, value in raw.items()]
    else:
        items = raw if isinstance(raw, list) else [raw]
        texts = [text for item in items for text in str(item).split(",")]
        if not all("=" in text for text in texts):
            raise ValueError(allowed)
        pairs = [(text.partition("=")[0], text.partition("=")[2]) for text in texts]
    try:
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise ValueError(allowed) from None


def _devices(spec: OptionSpec, raw: object) -> tuple[int, ...] | str:
    try:
        return "all" if raw == "all" else _ints(spec, raw)
    except ValueError:
        raise ValueError("all, or numbers such as 0,1") from None


_PARSERS: Final[Mapping[str, Callable[[OptionSpec, object], object]]] = {
    "text": _text, "path": _path, "file": _path, "int": _int, "float": _float, "switch": _switch,
    "choice": _choice, "duration": _duration, "size": _size, "memory": _memory, "share": _share, "list": _list,
    "paths": _paths, "columns": _columns, "ints": _ints, "floats": _floats, "biases": _biases, "devices": _devices,
}  # fmt: skip
