"""What the engine asks of a speculator that proposes in Python. (The n-gram proposer lives in Rust: its drafts are in
the step's arrays when the step begins.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from specbatch._core import StepInfo
from specbatch.engine.sampling_state import RowParams
from specbatch.engine.step_buffers import StepArrays


class KVNeed(Enum):
    """Where a speculator keeps its keys and values."""

    NONE = "none"
    DRAFT = "draft"  # its own, in the draft tenant of the pool
    TARGET = "target"  # the target's: it writes into the row's reserved slots, which the verify pass overwrites


@dataclass(slots=True)
class Proposal:
    """Drafts are written into the step's `input_ids`; what the verification needs beyond them is here."""

    num_draft: Tensor  # [R] int32 drafts really proposed, at most those reserved
    probs: Tensor | None = (
        None  # [R, k, vocab] float32 the drafts were drawn from (rejection verification); None: one-hot
    )


class Speculator(Protocol):
    """One method of drafting. Rows are packed: row r's drafts stand right after its committed token in `input_ids`."""

    name: str
    kv: KVNeed

    def propose(self, info: StepInfo, arrays: StepArrays, params: RowParams) -> Proposal:
        """Fill `arrays.device["input_ids"]` behind each row's committed token with up to num_draft_tokens[r] drafts."""
        ...

    def prefill(self, info: StepInfo, arrays: StepArrays) -> None:
        """Catch up: run over committed tokens the speculator has not seen (the draft_* arrays of a STEP_DRAFT_PREFILL)."""
        ...
