"""Names of attention backends and the choice among them, with the reason in words.

Imports a backend only when it is picked, so that a missing kernel library costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

import torch

from specbatch.attention.backend import AttentionBackend


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model asks of its attention beyond plain causal attention."""

    head_dim: int
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    tree: bool = False


@dataclass(frozen=True, slots=True)
class BackendChoice:
    backend: AttentionBackend
    reason: str


# A backend module offers `create(device, dtype, needs) -> AttentionBackend` and raises RuntimeError or ImportError with
# the reason when it cannot serve. Order is preference.
_MODULES: dict[str, str] = {
    "triton": "specbatch.attention.triton_paged",
    "cpu": "specbatch.attention.cpu_paged",
    "reference": "specbatch.attention.reference",
}
_DEVICES: dict[str, tuple[str, ...]] = {"triton": ("cuda",), "cpu": ("cpu",), "reference": ("cpu", "cuda")}


def backend_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def create_backend(name: str, device: torch.device, dtype: torch.dtype, needs: AttentionNeeds) -> AttentionBackend:
    """The named backend. Raises ValueError for an unknown name, RuntimeError with the reason when it cannot serve."""
    if name not in _MODULES:
        raise ValueError(f"unknown attention backend {name!r}, there are: {', '.join(_MODULES)}")
    if device.type not in _DEVICES[name]:
        raise RuntimeError(f"{name} runs on {' or '.join(_DEVICES[name])}, not on {device.type}")
    try:
        module = import_module(_MODULES[name])
    except ImportError as error:
        raise RuntimeError(f"{name} cannot be imported: {error}") from error
    create = cast("Callable[[torch.device, torch.dtype, AttentionNeeds], AttentionBackend]", module.create)
    return create(device, dtype, needs)


def pick_backend(device: torch.device, dtype: torch.dtype, needs: AttentionNeeds, name: str = "auto") -> BackendChoice:
    """The named backend, or with "auto" the first that serves; the reason says what was passed over and why."""
    if name != "auto":
        return BackendChoice(create_backend(name, device, dtype, needs), f"{name}: asked for")
    passed_over = []
    for candidate in _MODULES:
        if device.type not in _DEVICES[candidate]:
            continue
        try:
            backend = create_backend(candidate, device, dtype, needs)
        except RuntimeError as error:
            passed_over.append(str(error))
            continue
        return BackendChoice(backend, "; ".join([f"{candidate}: first that serves {device.type}", *passed_over]))
    raise RuntimeError("no attention backend serves here: " + "; ".join(passed_over))
