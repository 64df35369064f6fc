"""How many pages a device holds, found by trying: what a full prefill step and the graphs take, and what is left.

Owns the trial. Plans by arithmetic are plan.py's business; this replaces their guess where memory can be measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from specbatch.attention.backend import AttentionMetadata
from specbatch.engine.graphs import Capturer, CudaCapturer
from specbatch.engine.parts import EngineParts, Models, assemble, make_graphs, why_no_graphs
from specbatch.engine.plan import GIB, EnginePlan, kv_share, wanted_pages, with_pages
from specbatch.engine_options import EngineOptions
from specbatch.models.tokenizer import HFTokenizer

SCRATCH_PAGES = 16  # of the trial: enough for the check of models that nobody proved
GRAPHS_MARGIN = 1.5  # the largest graphs are captured in the trial, the smaller ones as they are met


class Meter(Protocol):
    """Memory of one device, in bytes."""

    def free(self) -> int:
        """What can be had now, whoever holds the rest."""
        ...

    def peak_of(self, function: Callable[[], object]) -> int:
        """What `function` needs at its height, above what is held before and after."""
        ...


class CudaMeter:
    """Implements Meter with torch's allocator and the driver's figures."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self) -> int:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def peak_of(self, function: Callable[[], object]) -> int:
        before = self.free()
        function()
        torch.cuda.synchronize(self.device)
        # The driver's figure: torch keeps what it ever reserved, and libraries take workspaces beside it.
        return max(before - int(torch.cuda.mem_get_info(self.device)[0]), 0)


def fit_pages(
    plan: EnginePlan, options: EngineOptions, models: Models, tokenizer: HFTokenizer, meter: Meter
) -> EnginePlan:
    """The plan with as many pages as the device has room for beside the loaded models, a full prefill step and the graphs.

    Raises ValueError when not even one fits.
    """
    with_graphs = not why_no_graphs(plan, options, models)
    activation, graphs = _try(
        assemble(with_pages(plan, SCRATCH_PAGES), options, models, tokenizer),
        meter,
        CudaCapturer(plan.device) if with_graphs else None,
    )
    return fitted(plan, options, free=meter.free(), activation=activation, graphs=graphs)


def _try(trial: EngineParts, meter: Meter, capturer: Capturer | None) -> tuple[int, int]:
    """Bytes that a full prefill step and the largest graphs take. Leaves nothing behind but what libraries keep."""
    activation = meter.peak_of(lambda: full_prefill(trial))
    graphs = 0
    if capturer is not None:
        trial.graphs = make_graphs(trial, capturer)
        graphs = trial.graphs.prepare()
    trial.free()
    return activation, graphs


def fitted(plan: EnginePlan, options: EngineOptions, *, free: int, activation: int, graphs: int) -> EnginePlan:
    """The plan with the pages that fit into a share of `free` bytes less what steps and graphs need."""
    reserved = activation + int(graphs * GRAPHS_MARGIN)
    budget = kv_share(options, plan.device, max(free - reserved, 0))
    pages = min(plan.layout.pages_for(budget), wanted_pages(plan))
    if pages < 2:
        raise ValueError(
            f"beside the weights there are {free / GIB:.2f} GiB free; a step takes {activation / GIB:.2f} and graphs "
            f"{graphs / GIB:.2f} of them, and what is left holds no page of {plan.layout.page_bytes} bytes: use a smaller "
            "model, --max-num-seqs or --max-num-batched-tokens, or --cuda-graphs off"
        )
    return replace(with_pages(plan, pages), activation_bytes=activation, graph_bytes=graphs)


@torch.inference_mode()
def full_prefill(parts: EngineParts) -> None:
    """The largest prefill step there can be, on the null page: nothing is written."""
    plan, arrays = parts.plan, parts.arrays
    tokens = plan.max_num_batched_tokens
    rows = min(plan.max_num_seqs, tokens)
    device = arrays.device_type

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lengths = [tokens // rows + (1 if row < tokens % rows else 0) for row in range(rows)]
    lengths = [min(length, plan.max_model_len) for length in lengths]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    total = sum(lengths)
    metadata = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=numbers(*lengths),
        positions=torch.zeros(total, dtype=torch.int32, device=device),
        slot_mapping=torch.full((total,), -1, dtype=torch.int32, device=device),
        block_tables=arrays.device["block_tables"][:rows],
        num_rows=rows,
        num_tokens=total,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )
    ids = torch.zeros(total, dtype=torch.int32, device=device)
    logits = parts.runner.forward(ids, metadata, starts[1:] - 1)
    torch.softmax(logits, dim=-1)  # what sampling keeps beside the logits
    wide = min(plan.max_num_seqs * (plan.max_speculative_tokens + 1), len(arrays.device["logits_indices"]), total)
    torch.softmax(parts.runner.forward(ids, metadata, torch.arange(wide, dtype=torch.int32, device=device)), dim=-1)
