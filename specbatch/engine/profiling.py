"""Times one step of a model as the engine would run it: what the cost model asks for at start-up.

Runs over the real pages, which nobody owns yet, with made-up tokens. Knows nothing of which points are worth timing.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from specbatch.attention.backend import AttentionMetadata
from specbatch.engine.graphs import CudaCapturer, Function, GraphRunner
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.parts import EngineParts

PASSES = 4  # of a draft that runs them in one call, of which each is a part


@dataclass(frozen=True, slots=True)
class _DraftStep:
    """Sizes of a step that drafts; the part of StepInfo that PackedDecoder.draft reads."""

    num_rows: int
    num_tokens: int
    draft_num_tokens: int


class StepMeasure:
    """`specbatch.control.profiler.Measure` over an engine's own models and pages."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._repeated: tuple[Hashable, GraphRunner] | None = None  # the graph of the shape timed last
        self._captured: Function | None = None

    def __call__(self, kind: Literal["target", "draft"], rows: int, tokens_per_row: int, context: int) -> float:
        """Seconds of one pass with logits (and, for the target, the choice of tokens) of all packed tokens."""
        runner, block_size, limit = self._model(kind)
        context = max(min(context, limit), tokens_per_row)
        if kind == "draft" and tokens_per_row == 1 and runner.model.packed is not None and limit > PASSES:
            return self._draft_passes(runner, block_size, rows, min(context, limit - PASSES))
        ids, metadata = self._step(runner, block_size, rows, tokens_per_row, context)
        # A draft's first pass wants the logits of each row's last token only.
        wanted = torch.arange(rows * tokens_per_row, dtype=torch.int32, device=ids.device)
        if kind == "draft":
            wanted = wanted[tokens_per_row - 1 :: tokens_per_row].contiguous()

        def run() -> None:
            if runner.can_choose:  # as greedy rows go
                runner.greedy(ids, metadata, wanted, runner.vocab_size)
            else:
                runner.forward(ids, metadata, wanted).argmax(dim=-1)

        shape = kind, rows, tokens_per_row, context
        graphs = self._graphs(shape, ids)
        if graphs.enabled and graphs.num_graphs == 0:
            graphs.run(shape, run)
            self._captured = run  # keeps alive the tensors that the graph reads
        self._synchronize()
        start = time.perf_counter()
        graphs.run(shape, run)
        self._synchronize()
        return time.perf_counter() - start

    def _draft_passes(self, runner: ModelRunner, block_size: int, rows: int, context: int) -> float:
        """Seconds of one of the passes of a packed draft, which go in one call, after the target had the caches."""
        packed = runner.model.packed
        assert packed is not None
        ids, metadata = self._step(runner, block_size, rows, 1, context, room=PASSES)
        each = np.arange(rows + 1, dtype=np.int32)
        host = {
            "draft_input_ids": ids.numpy(),
            "draft_positions": metadata.positions.numpy(),
            "draft_slot_mapping": metadata.slot_mapping.numpy(),
            "draft_query_start_loc": each,
            "draft_seq_lens": metadata.seq_lens.numpy(),
            "draft_block_tables": metadata.block_tables.numpy(),
            "num_draft_tokens": np.full(rows, PASSES, np.int32),
            "query_start_loc": each * (PASSES + 1),
            "input_ids": np.zeros(rows * (PASSES + 1), np.int32),
        }
        info = _DraftStep(rows, rows * (PASSES + 1), rows)
        self("target", rows, 1, context)
        start = time.perf_counter()
        packed.draft(info, host, runner.vocab_size)
        return (time.perf_counter() - start) / PASSES

    def _graphs(self, shape: tuple[str, int, int, int], ids: torch.Tensor) -> GraphRunner:
        """What runs a shape: a graph where the engine would use one, for decode steps."""
        decode = shape[2] <= self.parts.plan.max_speculative_tokens + 1
        if self.parts.graphs is None or not self.parts.graphs.runner.enabled or not decode:
            return GraphRunner(None)
        if self._repeated is None or self._repeated[0] != shape:
            self._repeated = self._captured = None  # its memory first
            self._repeated = shape, GraphRunner(CudaCapturer(ids.device))
        return self._repeated[1]

    def _model(self, kind: str) -> tuple[ModelRunner, int, int]:
        layout, plan = self.parts.plan.layout, self.parts.plan
        if kind == "target":
            return self.parts.runner, layout.block_size, plan.max_model_len
        runner = getattr(self.parts.speculator, "runner", None)
        if not isinstance(runner, ModelRunner):
            raise ValueError("there is no draft model to time")
        return runner, layout.draft_block_size, plan.draft_max_model_len

    def _step(
        self, runner: ModelRunner, block_size: int, rows: int, tokens_per_row: int, context: int, room: int = 0
    ) -> tuple[torch.Tensor, AttentionMetadata]:
        """Made-up tokens at the end of `context` tokens a row, with pages for `room` tokens more."""
        device = self.parts.plan.device
        pages = -(-(context + room) // block_size)
        # Rows share pages where the pool is too small for all: times hardly differ, and nothing is kept.
        table = 1 + torch.arange(rows * pages, device=device) % (self.parts.plan.num_pages - 1)
        tables = table.view(rows, pages).to(torch.int32)
        tokens = rows * tokens_per_row
        position = torch.arange(context - tokens_per_row, context, device=device)
        slots = tables[:, position // block_size] * block_size + position % block_size
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, min(runner.vocab_size, 256), (tokens,), generator=generator)
        metadata = AttentionMetadata(
            query_start_loc=torch.arange(0, tokens + 1, tokens_per_row, dtype=torch.int32, device=device),
            seq_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
            positions=position.repeat(rows).to(torch.int32),
            slot_mapping=slots.reshape(-1).to(torch.int32),
            block_tables=tables,
            num_rows=rows,
            num_tokens=tokens,
            max_query_len=tokens_per_row,
            max_seq_len=context,
        )
        return ids.to(torch.int32).to(device), metadata

    def _synchronize(self) -> None:
        if self.parts.plan.device.type == "cuda":
            torch.cuda.synchronize(self.parts.plan.device)
