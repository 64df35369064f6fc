"""Functions as captured graphs: captured once a key, replayed whenever the key comes again.

Owns capture, and what graphs cost. Knows nothing of steps: see decode_graphs.py. A capture that fails turns graphs off,
says why once, and the same functions go on eagerly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

import torch

Function = Callable[[], None]

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
        # What torch keeps for later would hide what a graph takes: a capture gives it back to the driver.
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
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
        self.capture_seconds = 0.0

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
        start, before = time.perf_counter(), self._capturer.memory()
        try:
            self._graphs[key] = self._capturer.capture(function)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self.turn_off(f"capturing {key} failed: {_first_line(error)}")
            logger.warning("CUDA graphs are off, the run goes on without them: %s", self.off_reason)
            return False
        self.memory_bytes += max(self._capturer.memory() - before, 0)
        self.capture_seconds += time.perf_counter() - start
        return True


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
