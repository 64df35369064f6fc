"""What crosses between the job and an engine: requests in, finished rows out, as arrays.

Knows nothing of Parquet, torch or the Rust core, so a stand-in engine can serve the job and a notebook can
drive a real engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specbatch.errors import ResourceError
from specbatch.sampling_params import SamplingParams


class DeviceLost(ResourceError):
    """Raised by an engine's add() or step() when its device answers nothing any more: what it had must run elsewhere."""

    code = "no_device"


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Requests of one shard, ready for an engine (tokenised, validated)."""

    request_id: NDArray[np.int64]  # [n] unique among unfinished requests; chosen by the caller
    shard: int
    prompt_values: NDArray[np.int32]
    prompt_offsets: NDArray[np.int64]  # [n + 1]
    params: SamplingParams | Sequence[SamplingParams]  # one for all, or one a request
    seeds: NDArray[np.int64] | None = None  # [n] seed of each request; goes before params.seed, which it spares

    def __len__(self) -> int:
        return len(self.request_id)


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Finished requests in the order they ended."""

    request_id: NDArray[np.int64]  # [n]
    finish_reason: NDArray[np.uint8]  # [n] FINISH_* of specbatch._core: 1 stop, 2 length, 3 error, 4 aborted
    error: list[tuple[str, str] | None]  # [n] (stable code, message with the numbers) where finish_reason is 3
    prompt_tokens: NDArray[np.int32]
    completion_tokens: NDArray[np.int32]  # stop token included
    token_values: NDArray[np.int32]
    token_offsets: NDArray[np.int64]  # [n + 1]
    text_values: NDArray[np.uint8]  # UTF-8 with replacement characters already in place
    text_offsets: NDArray[np.int64]  # [n + 1]
    steps: NDArray[np.int32]  # decode steps the row took part in
    drafted: NDArray[np.int32]
    accepted: NDArray[np.int32]
    wasted: NDArray[np.int32]
    preemptions: NDArray[np.int32]
    cached_tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None  # of token_values, same offsets; None: nobody asked

    def __len__(self) -> int:
        return len(self.request_id)


@dataclass(slots=True)
class EngineProgress:
    """Live figures for the progress display; counters only grow."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    busy_seconds: float = 0.0  # inside step(), model loading and profiling excluded
    mode: dict[int, str] = field(default_factory=dict)  # live shard -> "ar" | "ngram k=4" | "draft k=3"


class Tokenizer(Protocol):
    """Text to ids; no torch needed."""

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids as values and offsets [n + 1]."""
        ...

    def render(self, messages: Sequence[dict[str, object]]) -> str:
        """One conversation through the chat template, generation prompt included. Raises ValueError."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def prefers_chat(self) -> bool:
        """Whether a plain prompt should go through the template too, as one user message (`--chat auto`)."""
        ...


class BatchEngine(Protocol):
    """One device's engine as the job sees it. Not thread-safe: one thread drives it."""

    max_model_len: int

    def add(self, batch: RequestBatch) -> None: ...

    def step(self) -> bool:
        """Run one engine step; False when nothing is left to run."""
        ...

    def take_finished(self) -> FinishedRows | None:
        """Rows that ended since the last call, None when there are none."""
        ...

    def abort_all(self) -> None:
        """Drop every unfinished row; nothing of them is returned."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def progress(self) -> EngineProgress: ...

    def describe(self) -> dict[str, object]:
        """The resolved plan (device, dtype, pages, maximum rows, speculators ...): printed and kept in the manifest."""
        ...

    def close(self) -> None: ...
