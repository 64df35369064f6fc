"""How one request is sampled: validated once, the same words on the command line, in a column and in Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of a request. Raises ValueError naming the option, the value and what is allowed.

    temperature 0 is greedy decoding (ties: lowest token id). Penalties follow the usual definitions: repetition
    (Keskar et al., 2019, arXiv:1909.05858) over prompt and output, presence and frequency over the output.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # nucleus (Holtzman et al., 2020, arXiv:1904.09751)
    min_p: float = 0.0  # relative to the most likely token (Nguyen et al., 2024, arXiv:2407.01082)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: taken from the run's seed and the row, so a rerun repeats it
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        for name in ("max_tokens", "top_k", "min_tokens"):
            value = getattr(self, name)
            check(isinstance(value, int) and not isinstance(value, bool), name, "an integer")
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, float):
                check(math.isfinite(value), spec.name, "a finite number")
        check(1 <= self.max_tokens <= 2**31 - 1, "max_tokens", "at least 1")
        check(self.temperature >= 0, "temperature", "at least 0 (0 is greedy)")
        check(self.top_k >= 0, "top_k", "at least 0 (0 is off)")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(self.repetition_penalty > 0, "repetition_penalty", "above 0")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        check(all(isinstance(s, str) and s for s in self.stop), "stop", "a list of non-empty strings")
        check(all(math.isfinite(b) for b in self.logit_bias.values()), "logit_bias", "token ids to finite numbers")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
