"""specbatch: offline batch inference over Parquet that uses speculative decoding exactly when it pays.

Importing this package loads neither torch nor the Rust core; names come when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbatch.api import Completion, Engine
    from specbatch.job_api import run
    from specbatch.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Completion", "Engine", "SamplingParams", "__version__", "run"]

_HOME = {
    "Engine": "specbatch.api",
    "Completion": "specbatch.api",
    "SamplingParams": "specbatch.sampling_params",
    "run": "specbatch.job_api",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'specbatch' has no attribute {name!r}")
