"""Parameters of single rows: from a struct or JSON column, over the run's defaults, checked by SamplingParams.

Knows no prompts. Equal parameters are one object, so that a million rows with three settings hold three.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import pyarrow as pa

from specbatch.errors import SchemaError
from specbatch.sampling_params import SamplingParams

KEYS: Final = tuple(spec.name for spec in fields(SamplingParams) if spec.name != "logprobs")
_INTEGERS: Final = frozenset({"max_tokens", "top_k", "min_tokens", "seed"})
_CACHE_SIZE: Final = 16_384


@dataclass(frozen=True, slots=True)
class RowParams:
    """What a row is sampled with. `seed` is the row's own, kept apart so that `sampling` can be shared."""

    sampling: SamplingParams  # seed is None
    seed: int | None
    key: bytes  # equal for equal `sampling`, in every run


def check_params_type(name: str, kind: Any, text: bool) -> None:
    """Raise SchemaError unless a column of this (storage) type can hold parameters."""
    if text:
        return
    if not pa.types.is_struct(kind):
        raise SchemaError(
            f"column {name!r} is {kind}, which holds no parameters", hint="parameters are a struct or a JSON object"
        )
    unknown = [kind.field(i).name for i in range(kind.num_fields) if kind.field(i).name not in KEYS]
    if unknown:
        raise SchemaError(
            f"column {name!r} has unknown parameters: {', '.join(unknown)}", hint=f"known: {', '.join(KEYS)}"
        )


def sampling_key(sampling: SamplingParams) -> bytes:
    """Canonical bytes of everything that shapes the answer but the seed."""
    values = {
        spec.name: getattr(sampling, spec.name) for spec in fields(sampling) if spec.name not in ("seed", "logprobs")
    }
    values["logit_bias"] = sorted((int(k), float(v)) for k, v in sampling.logit_bias.items())
    return json.dumps(values, sort_keys=True).encode()


class ParamsParser:
    """Makes RowParams. Safe to use from several threads (a lost cache entry is only made again)."""

    def __init__(self, defaults: SamplingParams, max_model_len: int) -> None:
        self.defaults = RowParams(defaults, None, sampling_key(defaults))
        self._max_model_len = max_model_len
        self._by_text: dict[str, RowParams] = {}

    def parse(self, value: Any) -> RowParams:
        """One cell: None, a mapping or JSON text. Raises ValueError with the name, the value and what is allowed."""
        if value is None:
            return self.defaults
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"parameters are not JSON: {error}") from None
        if value is None:
            return self.defaults
        if not isinstance(value, Mapping):
            raise ValueError(f"parameters must be an object, got {json.dumps(value)[:80]}")
        given = {str(name): item for name, item in value.items() if not _is_missing(item)}
        seed = given.pop("seed", None)
        if seed is not None:
            seed = _integer("seed", seed)
            if not 0 <= seed < 2**63:
                raise ValueError(f"seed must be between 0 and 2**63 - 1, got {seed}")
        text = repr(given)
        shared = self._by_text.get(text) if given else self.defaults
        if shared is None:
            sampling = self._build(given)
            shared = RowParams(sampling, None, sampling_key(sampling))
            if len(self._by_text) >= _CACHE_SIZE:
                self._by_text.clear()
            self._by_text[text] = shared
        return shared if seed is None else RowParams(shared.sampling, seed, shared.key)

    def _build(self, given: Mapping[str, Any]) -> SamplingParams:
        unknown = [name for name in given if name not in KEYS]
        if unknown:
            raise ValueError(f"unknown parameter {unknown[0]!r}; known: {', '.join(KEYS)}")
        sampling = replace(self.defaults.sampling, **{name: _convert(name, item) for name, item in given.items()})
        if sampling.max_tokens >= self._max_model_len:
            raise ValueError(
                f"max_tokens {sampling.max_tokens} leaves no room for a prompt in a context of {self._max_model_len}"
            )
        return sampling


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _integer(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)  # nullable integers come out of pandas as floats
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return value


def _convert(name: str, value: Any) -> Any:
    """A cell's value as SamplingParams wants it; ValueError for a type that cannot be meant."""
    if name in _INTEGERS:
        return _integer(name, value)
    if name == "stop":
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"stop must be a string or a list of strings, got {value!r}")
        return tuple(items)
    if name == "stop_token_ids":
        if not isinstance(value, list | tuple):
            raise ValueError(f"stop_token_ids must be a list of integers, got {value!r}")
        return tuple(_integer(name, item) for item in value)
    if name == "logit_bias":
        return _logit_bias(value)
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise ValueError(f"ignore_eos must be true or false, got {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _logit_bias(value: Any) -> dict[int, float]:
    pairs = value.items() if isinstance(value, Mapping) else value  # an Arrow map comes as a list of pairs
    try:
        return {int(token): float(bias) for token, bias in pairs if bias is not None}
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, got {value!r}") from None
