"""Decode steps put on the device as graphs, and their results fetched when the host has nothing else to do.

Owns the shapes that steps are padded to, the one copy of a step's result, and how long the device took. What a step computes is
static_step.py's business, whether it is captured graphs.py's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specbatch.engine.graphs import Function, GraphRunner
from specbatch.engine.row_params import BIASED, LOGPROBS, PENALISED, SAMPLED
from specbatch.engine.static_step import FIRST_PASS_TOKENS, StaticStep
from specbatch.engine.step_buffers import Bucket, StepSizes

_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
_MARKS = ("start", "drafted", "end")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a decode step committed, on the host. Views: valid until the next step is launched."""

    token_ids: NDArray[np.int32]  # [R, w] contiguous; past a row's count anything
    num_sampled: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32] | None  # [T] of the packed samples
    seconds: float  # on the device, launches and captures left out; 0 where the launch itself did the work
    draft_seconds: float  # of the step: the draft model's share


class DecodeGraphs:
    """Decode steps of one engine, padded to shapes that repeat.

    `launch` puts a whole step on the device and returns at once; `wait` gives its result. Host work that does not need
    the result belongs between the two.
    """

    def __init__(
        self, step: StaticStep, runner: GraphRunner, *, max_num_seqs: int, generation: Callable[[], int] = lambda: 0
    ) -> None:
        """`generation`: SamplingState's, which grows when tables that a graph read have moved."""
        self.step = step
        self.runner = runner
        self._row_sizes = row_sizes(max_num_seqs)
        self._widths = [*(w for w in _WIDTHS if w < step.max_width), step.max_width]
        self._generation = generation
        self._clock = DeviceClock(step.arrays.device_type)
        self._result = _on_host(step.result)
        self._logprobs = _on_host(step.logprobs)
        self._result_array, self._logprobs_array = self._result.numpy(), self._logprobs.numpy()
        # A view of a tensor costs the host as much as a copy: those of a step's result are made once a size.
        self._result_views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._launched: tuple[Bucket, StepSizes, bool] | None = None

    @property
    def in_flight(self) -> bool:
        """A step was launched and nobody waited for it."""
        return self._launched is not None

    def bucket(self, num_rows: int, tokens_per_row: int) -> Bucket:
        """The smallest shape that holds a step. Raises ValueError beyond the engine's largest."""
        if num_rows > self._row_sizes[-1] or tokens_per_row > self._widths[-1]:
            raise ValueError(
                f"{num_rows} rows of {tokens_per_row} tokens, at most {self._row_sizes[-1]} of {self._widths[-1]}"
            )
        return Bucket(
            self._row_sizes[bisect_left(self._row_sizes, num_rows)],
            self._widths[bisect_left(self._widths, tokens_per_row)],
        )

    def prepare(self, kinds: Iterable[int] = (0, SAMPLED)) -> int:
        """Capture the largest step of each kind of sampling, the rest when first met. Returns the bytes graphs hold.

        Call before the first step: it fills the step arrays with padding, so that no page is written.
        """
        arrays = self.step.arrays
        for name, array in arrays.host.items():
            array.fill(-1 if name.endswith("slot_mapping") else 0)
        arrays.packed_device.copy_(arrays.packed_host)
        kind_before = self.step.rows.kind
        functions: list[tuple[Hashable, Function]] = []
        for kind in sorted(kinds, reverse=True):
            for bucket in (Bucket(self._row_sizes[-1], self._widths[-1]), Bucket(self._row_sizes[-1], 1)):
                functions.append((self._key("target", bucket, kind), self._of_kind(kind, self.step.target, bucket)))
                if self.step.draft_runner is not None and bucket.tokens_per_row > 1:
                    functions.append((self._key("draft", bucket, kind), self._of_kind(kind, self.step.draft, bucket)))
        try:
            return self.runner.prepare(functions)
        finally:
            self.step.rows.kind = kind_before

    def launch(self, info: StepSizes, *, draft: bool) -> Bucket:
        """Start a decode step whose arrays are filled and whose rows' sampling parameters are gathered.

        `draft`: the draft model proposes first; else drafts, if there are any, are in `input_ids` already.
        """
        assert self._launched is None, "the step before was not waited for"
        step, kind = self.step, self.step.rows.kind
        draft = draft and info.max_draft_tokens > 0
        bucket = self.bucket(info.num_rows, max(info.max_draft_tokens + 1 if draft else 1, info.max_query_len))
        step.arrays.to_device(info)
        self._clock.mark("start")
        if draft:
            if info.draft_max_query_len > FIRST_PASS_TOKENS:  # a row that fell behind: rare, and of no fixed shape
                step.draft(bucket, info.draft_max_query_len)
            else:
                self.runner.run(self._key("draft", bucket, kind), lambda: step.draft(bucket))
        self._clock.mark("drafted")
        self.runner.run(self._key("target", bucket, kind), lambda: step.target(bucket))
        with_logprobs = bool(kind & LOGPROBS)
        target, source = self._views(bucket.rows)
        target.copy_(source, non_blocking=True)
        if with_logprobs:
            self._logprobs[: bucket.tokens].copy_(step.logprobs[: bucket.tokens], non_blocking=True)
        self._clock.mark("end")
        self._launched = bucket, info, with_logprobs
        return bucket

    def wait(self) -> StepResult:
        """The launched step's result, once the device has it."""
        assert self._launched is not None, "no step was launched"
        _, info, with_logprobs = self._launched
        self._launched = None
        rows = info.num_rows
        seconds, draft_seconds = self._clock.read()
        return StepResult(
            token_ids=self._result_array[:rows],
            num_sampled=self._result_array[:rows, -1],
            logprobs=self._logprobs_array[: info.num_tokens] if with_logprobs else None,
            seconds=seconds,
            draft_seconds=draft_seconds,
        )

    def drop(self) -> None:
        """Wait for a launched step, whatever became of it: nobody wants its result."""
        if self._launched is not None:
            self._launched = None
            self._clock.read()

    def describe(self) -> dict[str, Any]:
        """Whether graphs are on, why not, and what they hold."""
        runner = self.runner
        return {
            "enabled": runner.enabled,
            "reason": runner.off_reason,
            "graphs": runner.num_graphs,
            "memory_bytes": runner.memory_bytes,
        }

    def _views(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        views = self._result_views.get(rows)
        if views is None:
            views = self._result_views[rows] = self._result[:rows], self.step.result[:rows]
        return views

    def _key(self, name: str, bucket: Bucket, kind: int) -> Hashable:
        reads_tables = kind & (PENALISED | BIASED)
        return name, bucket.rows, bucket.tokens_per_row, kind, self._generation() if reads_tables else 0

    def _of_kind(self, kind: int, function: Callable[[Bucket], None], bucket: Bucket) -> Function:
        def run() -> None:
            self.step.rows.kind = kind
            function(bucket)

        return run


class DeviceClock:
    """Marks in a device's stream of work: events on CUDA; elsewhere the work is done when a mark is passed."""

    def __init__(self, device: torch.device) -> None:
        self._events: dict[str, Any] | None = None
        if device.type == "cuda":
            self._events = {name: torch.cuda.Event(enable_timing=True) for name in _MARKS}  # type: ignore[no-untyped-call]
        self._times = dict.fromkeys(_MARKS, 0.0)

    def mark(self, name: str) -> None:
        if self._events is not None:
            self._events[name].record()
        else:
            self._times[name] = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Wait for the last mark. Seconds from start to end that passed on the device alone, and start to drafted."""
        if self._events is None:
            return 0.0, self._times["drafted"] - self._times["start"]
        start, drafted, end = (self._events[name] for name in _MARKS)
        end.synchronize()
        return start.elapsed_time(end) / 1e3, start.elapsed_time(drafted) / 1e3


def row_sizes(max_num_seqs: int) -> list[int]:
    """Row counts that steps are padded to, the last one `max_num_seqs`; from 16 on steps of at most a third in size."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < max_num_seqs:
        step = 8 if sizes[-1] < 64 else 16 if sizes[-1] < 256 else 32
        sizes.append(sizes[-1] + step)
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
