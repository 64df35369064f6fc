"""The teacher-forced draft probe: what the draft model would have proposed of the tokens that rows produced without it.

One pass of the draft over a few rows' committed tokens, on pages lent for it and given back at once. Owns the pass and
the counts. Knows nothing of when it is worth doing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specbatch._core import StepInfo
from specbatch.control.counts import draft_shadow
from specbatch.control.records import AcceptanceSample
from specbatch.engine.parts import EngineParts
from specbatch.engine.row_params import PENALTY_SLOT
from specbatch.engine.sampler import sample_draft
from specbatch.engine.sampling_state import RowParams
from specbatch.speculators.draft_model import DraftModelSpeculator, as_wide_as

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Probe:
    """What one pass found and took."""

    samples: tuple[AcceptanceSample, ...]  # by shard
    rows: int
    tokens: int  # fed to the draft
    context: int  # sum of the rows' lengths
    seconds: float


class DraftProbe:
    """Runs the draft of an engine over what its rows have produced.

    A draft is drawn as a real one would be: with the row's own parameters, and when sampling with the noise of the position
    it stands at, so a token counts as a hit exactly when coupled verification would have accepted it. (Rejection verification
    accepts a little more.) Rows with penalties are passed over: the counts kept for them are of all they have produced.
    """

    def __init__(self, parts: EngineParts, speculator: DraftModelSpeculator) -> None:
        self.parts = parts
        self.speculator = speculator
        self._params: RowParams | None = None
        plan = parts.plan
        # The logits of a decode step at its widest are budgeted for, and no more.
        self._most_logits = plan.max_num_seqs * (plan.max_speculative_tokens + 1)

    def run(self, rows: int, k: int, prompt: Ints, shard: Ints) -> Probe | None:
        """Probe up to `rows` rows and count rounds of 1 to k drafts. `prompt`, `shard`: prompt tokens and shard by handle. None: no
        row has produced enough, or there is no room. To be called between two steps."""
        start = time.perf_counter()
        core, arrays = self.parts.core, self.parts.arrays
        info = core.lend_draft(rows, arrays.core)
        if info.num_rows == 0:
            return None
        handles = arrays.host["seq_index"][: info.num_rows].copy()
        try:
            samples = self._count(info, handles, k, prompt, shard)
        except torch.OutOfMemoryError:
            samples = ()
        finally:
            for handle in handles.tolist():
                core.drop_draft(handle)
        if not samples:
            return None
        lengths = arrays.host["draft_seq_lens"][: info.num_rows]
        seconds = time.perf_counter() - start
        return Probe(samples, info.num_rows, info.draft_num_tokens, int(lengths.sum()), seconds)

    @torch.inference_mode()
    def _count(self, info: StepInfo, handles: Ints, k: int, prompt: Ints, shard: Ints) -> tuple[AcceptanceSample, ...]:
        """Acceptance by shard over the rows lent."""
        arrays, count = self.parts.arrays, info.num_rows
        if self._params is None:
            self._params = self.parts.sampling.new_rows(self.parts.plan.max_num_seqs)
        params = self.parts.sampling.gather(handles, self._params)
        starts = arrays.host["draft_query_start_loc"][: count + 1].astype(np.int64)
        ids = arrays.host["draft_input_ids"][: info.draft_num_tokens].copy()
        plain = params.host[:count, PENALTY_SLOT] == 0 if params.any_penalty else np.ones(count, np.bool_)
        share = max(self._most_logits // count, 1)
        # The last token is not read, so what a row is judged by are its output tokens but the first and the last.
        first = np.maximum(starts[:-1] + prompt[handles], starts[1:] - 1 - share)
        wanted = [np.arange(first[r], starts[r + 1] - 1) if plain[r] else np.zeros(0, np.int64) for r in range(count)]
        index = np.concatenate(wanted)
        if len(index) == 0:
            return ()
        arrays.to_device(info)
        device = arrays.device["draft_input_ids"].device
        at = torch.from_numpy(index).to(device)
        row = torch.from_numpy(np.repeat(np.arange(count), [len(w) for w in wanted])).to(device)
        logits = self.speculator.runner.forward(
            arrays.device["draft_input_ids"][: info.draft_num_tokens],
            arrays.metadata(info, draft=True),
            at.to(torch.int32),
        )
        positions = arrays.device["draft_positions"][at]
        drafted, _ = sample_draft(as_wide_as(logits, params.vocab), params, row, positions)
        hits = drafted.cpu().numpy() == ids[index + 1]
        by_row = np.split(hits, np.cumsum([len(w) for w in wanted])[:-1])
        return draft_shadow([(s, row.tolist()) for s, row in zip(shard[handles].tolist(), by_row, strict=True)], k)


def draft_probe(parts: EngineParts) -> DraftProbe | None:
    """The probe of an engine that has a draft model with KV of its own."""
    speculator = parts.speculator
    return DraftProbe(parts, speculator) if isinstance(speculator, DraftModelSpeculator) else None
