"""Rotary frequencies and angles from a config's values: default, linear, Llama 3's and YaRN. Knows no model.

Bit for bit what transformers computes (the tests compare); what it does not know is named, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEFAULT_THETA = 10_000.0

# What each kind may state. A key that is not here could change the meaning, so that such a config is not for us.
_COMMON = frozenset({"rope_type", "type", "rope_theta"})
_REQUIRED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
_OPTIONAL: dict[str, frozenset[str]] = {
    "yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding over whole heads, the same in every layer."""

    kind: str  # default, linear, llama3, yarn
    theta: float
    settings: Mapping[str, Any]


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rotary embedding that a config.json states. Raises ValueError naming what of it is not known here."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        raise ValueError("rope_scaling beside rope_parameters")
    settings = old or new or {}
    if not isinstance(settings, Mapping):
        raise ValueError("rotary settings that are no object")
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(name) is not None:
            raise ValueError(f"{name} beside the rotary settings")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise ValueError(f"rotary type {kind!r}")
    missing = _REQUIRED[kind] - {key for key, value in settings.items() if value is not None}
    odd = settings.keys() - _COMMON - _REQUIRED[kind] - _OPTIONAL.get(kind, frozenset())
    if missing or odd:
        raise ValueError(f"rotary type {kind} " + ", ".join([f"without {m}" for m in sorted(missing)] + sorted(odd)))
    theta = settings.get("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    numbers = {"rope_theta": theta, **{k: v for k, v in settings.items() if k not in ("rope_type", "type", "truncate")}}
    for name, value in numbers.items():
        optional = value is None and name in _OPTIONAL.get(kind, ())
        if not optional and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
            raise ValueError(f"{name} {value!r}")
    if not isinstance(settings.get("truncate", True), bool):
        raise ValueError(f"truncate {settings['truncate']!r}")
    return Rope(kind, theta, settings)


def inverse_frequencies(rope: Rope, dim: int) -> tuple[Tensor, float]:
    """Float32 [dim / 2] radians a position, and the factor of cos and sin (Su et al., 2021, arXiv:2104.09864)."""
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    frequencies = 1.0 / powers
    if rope.kind == "linear":
        return frequencies / rope.settings["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(rope.settings, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, powers, dim)
    return frequencies, 1.0


def angles(rope: Rope, dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Float32 cosines and sines [positions, dim], both halves alike."""
    frequencies, factor = inverse_frequencies(rope, dim)
    turns = torch.arange(positions)[:, None].float() * frequencies
    turns = torch.cat((turns, turns), dim=-1)
    return turns.cos() * factor, turns.sin() * factor


def _llama3(settings: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    """Long waves stretched by `factor`, short ones kept, those between blended (Llama 3.1's model card)."""
    factor, low, high = settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"]
    length = settings["original_max_position_embeddings"]
    wave = 2 * math.pi / frequencies
    stretched = torch.where(wave > length / low, frequencies / factor, frequencies)
    share = (length / wave - low) / (high - low)
    blended = (1 - share) * stretched / factor + share * stretched
    between = (wave >= length / high) & (wave <= length / low)
    return torch.where(between, blended, stretched)


def _yarn(rope: Rope, powers: Tensor, dim: int) -> tuple[Tensor, float]:
    """NTK by parts with attention scaling (Peng et al., 2023, arXiv:2309.00071)."""
    settings = rope.settings
    factor, length = settings["factor"], settings["original_max_position_embeddings"]

    def scaling(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = settings.get("attention_factor")
    if attention is None:
        over, under = settings.get("mscale"), settings.get("mscale_all_dim")
        attention = scaling(over) / scaling(under) if over and under else scaling(1)

    def dimension(rotations: float) -> float:  # that turns so often within the original length
        return (dim * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, attention
