"""Decode steps as captured graphs: captured once a shape, replayed for every step of that shape.

Owns capture, the shapes worth capturing, and the copy of the result to the host. What a step computes is
static_step.py's business. A capture that fails turns graphs off, says why once, and the same functions go on eagerly.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specbatch.engine.row_params import BIASED, LOGPROBS, PENALISED, SAMPLED
from specbatch.engine.static_step import FIRST_PASS_TOKENS, StaticStep
from specbatch.engine.step_buffers import Bucket

Function = Callable[[], None]
_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)

logger = logging.getLogger("specbatch.graphs")


class Capturer(Protocol):
    """Turns a function over fixed buffers into one that repeats its device work."""

    def capture(self, function: Function) -> Function:
        """Run `function` at least once, capture it and return its replay. Raises RuntimeError when that cannot be."""
        ...

    def memory(self) -> int:
        """Bytes of device memory in use, whoever holds them: the difference over a capture is what it took."""
        ...


class CudaCapturer:
    """CUDA graphs that share one memory pool: captured largest first, the others fit into what the largest took."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Function) -> Function:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(
                self._stream
            ):  # kernels compile and libraries take their workspaces outside a capture
                function()
            current.wait_stream(self._stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may drive other devices meanwhile: only this thread's calls are watched.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
            graph.replay()
        replay: Function = graph.replay
        return replay

    def memory(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


class GraphRunner:
    """Runs functions by key: a known key is replayed, a new one captured, and without a capturer all run eagerly.

    A function takes and returns nothing, touches fixed buffers only, and does the same again when it runs twice.
    """

    def __init__(self, capturer: Capturer | None, off_reason: str | None = None) -> None:
        self._capturer = capturer
        self._graphs: dict[Hashable, Function] = {}
        self.off_reason = off_reason if capturer is None else None
        self.memory_bytes = 0
        self.replays = 0

    @property
    def enabled(self) -> bool:
        return self._capturer is not None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, function: Function) -> None:
        """Do `function` once, by replay where it can be."""
        replay = self._graphs.get(key)
        if replay is not None:
            self.replays += 1
            replay()
        elif self._capturer is None or not self._capture(key, function):
            function()

    def prepare(self, functions: Iterable[tuple[Hashable, Function]]) -> int:
        """Capture before the first step, in the order given (largest first). Returns the bytes all graphs hold."""
        for key, function in functions:
            if self._capturer is None or (key not in self._graphs and not self._capture(key, function)):
                break
        return self.memory_bytes

    def turn_off(self, reason: str) -> None:
        """Drop every graph (and the memory they hold) and run eagerly from now on."""
        self._graphs.clear()
        self._capturer = None
        self.memory_bytes = 0
        self.off_reason = reason

    def _capture(self, key: Hashable, function: Function) -> bool:
        assert self._capturer is not None
        before = self._capturer.memory()
        try:
            self._graphs[key] = self._capturer.capture(function)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self.turn_off(f"capturing {key} failed: {_first_line(error)}")
            logger.warning("CUDA graphs are off, the run goes on without them: %s", self.off_reason)
            return False
        self.memory_bytes += max(self._capturer.memory() - before, 0)
        return True


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a decode step committed, on the host. Views: valid until the next step is launched."""

    token_ids: NDArray[np.int32]  # [R, w] -1 past a row's count
    num_sampled: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32] | None  # [T] of the packed samples


class StepShape(Protocol):
    """The numbers of specbatch._core.StepInfo that a decode step needs."""

    num_rows: int
    num_tokens: int
    max_query_len: int
    max_draft_tokens: int
    draft_max_query_len: int


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
        cuda = step.arrays.device_type.type == "cuda"
        self._event = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        on_cpu = not cuda
        self._result = step.result if on_cpu else torch.empty_like(step.result, device="cpu", pin_memory=True)
        self._logprobs = step.logprobs if on_cpu else torch.empty_like(step.logprobs, device="cpu", pin_memory=True)
        self._launched: tuple[Bucket, int, int, bool] | None = None

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
        arrays.to_device()
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

    def launch(self, info: StepShape, *, draft: bool) -> Bucket:
        """Start a decode step whose arrays are filled and whose rows' sampling parameters are gathered.

        `draft`: the draft model proposes first; else drafts, if there are any, are in `input_ids` already.
        """
        step, kind = self.step, self.step.rows.kind
        width = info.max_draft_tokens + 1 if draft else info.max_query_len
        bucket = self.bucket(info.num_rows, max(width, info.max_query_len))
        step.arrays.to_device()
        if draft and info.max_draft_tokens > 0:
            if info.draft_max_query_len > FIRST_PASS_TOKENS:  # a row that fell behind: rare, and of no fixed shape
                step.draft(bucket, info.draft_max_query_len)
            else:
                self.runner.run(self._key("draft", bucket, kind), lambda: step.draft(bucket))
        self.runner.run(self._key("target", bucket, kind), lambda: step.target(bucket))
        with_logprobs = bool(kind & LOGPROBS)
        if self._event is not None:
            self._result[: bucket.rows].copy_(step.result[: bucket.rows], non_blocking=True)
            if with_logprobs:
                self._logprobs[: bucket.tokens].copy_(step.logprobs[: bucket.tokens], non_blocking=True)
            self._event.record()
        self._launched = bucket, info.num_rows, info.num_tokens, with_logprobs
        return bucket

    def wait(self) -> StepResult:
        """The launched step's result, once the device has it."""
        assert self._launched is not None, "no step was launched"
        bucket, rows, tokens, with_logprobs = self._launched
        self._launched = None
        if self._event is not None:
            self._event.synchronize()
        return StepResult(
            token_ids=self._result[:rows, : bucket.tokens_per_row].numpy(),
            num_sampled=self._result[:rows, -1].numpy(),
            logprobs=self._logprobs[:tokens].numpy() if with_logprobs else None,
        )

    def _key(self, name: str, bucket: Bucket, kind: int) -> Hashable:
        reads_tables = kind & (PENALISED | BIASED)
        return name, bucket.rows, bucket.tokens_per_row, kind, self._generation() if reads_tables else 0

    def _of_kind(self, kind: int, function: Callable[[Bucket], None], bucket: Bucket) -> Function:
        def run() -> None:
            self.step.rows.kind = kind
            function(bucket)

        return run


def row_sizes(max_num_seqs: int) -> list[int]:
    """Row counts that steps are padded to, the last one `max_num_seqs`; from 16 on steps of at most a third in size."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < max_num_seqs:
        step = 8 if sizes[-1] < 64 else 16 if sizes[-1] < 256 else 32
        sizes.append(sizes[-1] + step)
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
