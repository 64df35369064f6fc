"""How one request is sampled: validated once, the same words on the command line, in a column and in Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of a request. Raises ValueError naming the option, the value and what is allowed.

    temperature 0 is greedy decoding (ties: lowest token id). Penalties follow the usual definitions: repetition
    (Keskar et al., 2019, arXiv:1909.05858) over prompt and output, presence and frequency over the output.
    Values come out in the declared types whatever numbers or sequences they went in as.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # nucleus (Holtzman et al., 2020, arXiv:1904.09751)
    min_p: float = 0.0  # relative to the most likely token (Nguyen et al., 2024, arXiv:2407.01082)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None  # None: taken from the run's seed and the row, so a rerun repeats it
    stop: tuple[str, ...] = ()  # a single string is one stop string
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # stop tokens are held back until this many are out
    logprobs: bool = False

    def __post_init__(self) -> None:
        self._integer("max_tokens", 1, 2**31 - 1, "at least 1")
        self._integer("top_k", 0, None, "at least 0 (0 is off)")
        self._integer("min_tokens", 0, self.max_tokens, "between 0 and max_tokens")
        self._number("temperature", lambda x: x >= 0, "at least 0 (0 is greedy)")
        self._number("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1")
        self._number("min_p", lambda x: 0 <= x <= 1, "between 0 and 1")
        self._number("repetition_penalty", lambda x: x > 0, "above 0")
        self._number("presence_penalty", lambda x: -2 <= x <= 2, "between -2 and 2")
        self._number("frequency_penalty", lambda x: -2 <= x <= 2, "between -2 and 2")
        if self.seed is not None:
            self._integer("seed", 0, 2**63 - 1, "between 0 and 2**63 - 1")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise self._error(name, "true or false")
        self._sequences()

    def _integer(self, name: str, low: int, high: int | None, allowed: str) -> None:
        value = getattr(self, name)
        if not _is_integer(value) or value < low or (high is not None and value > high):
            raise self._error(name, f"an integer, {allowed}")
        self._set(name, int(value))

    def _number(self, name: str, allows: Any, allowed: str) -> None:
        value = getattr(self, name)
        if not _is_finite(value) or not allows(value):
            raise self._error(name, f"a finite number, {allowed}")
        self._set(name, float(value))

    def _sequences(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop)
        if stop is None or not all(isinstance(s, str) and s for s in stop):
            raise self._error("stop", "a non-empty string or a list of them")
        self._set("stop", stop)
        tokens = _as_tuple(self.stop_token_ids)
        if tokens is None or not all(_is_integer(t) and 0 <= t < 2**31 for t in tokens):
            raise self._error("stop_token_ids", "a list of token ids")
        self._set("stop_token_ids", tuple(int(t) for t in tokens))
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            _is_integer(t) and 0 <= t < 2**31 and _is_finite(b) for t, b in bias.items()
        ):
            raise self._error("logit_bias", "a mapping from token ids to finite numbers")
        self._set("logit_bias", {int(t): float(b) for t, b in bias.items()})

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _error(self, name: str, allowed: str) -> ValueError:
        return ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _as_tuple(value: object) -> tuple[Any, ...] | None:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else None
