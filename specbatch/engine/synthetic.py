"""An engine whose drafts are accepted by the throw of a die: what speculation would cost and bring with a draft of another
quality. Everything is run as ever; only the count of accepted drafts is made up, so its text is worthless.

For timing alone: no command that writes answers uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbatch import _core
from specbatch._core import StepInfo
from specbatch.engine.eager import StepOutcome
from specbatch.engine.engine import Engine
from specbatch.engine.observe import SpeculationPolicy
from specbatch.engine.parts import EngineParts


class SyntheticEngine(Engine):
    """An Engine that accepts draft j + 1 with chance accept[j], given that those before it were; the last chance stands for
    all positions after it. Raises ValueError for none, or for one outside [0, 1]."""

    def __init__(self, parts: EngineParts, policy: SpeculationPolicy, accept: Sequence[float], seed: int = 0) -> None:
        super().__init__(parts, policy)
        if not accept or not all(0.0 <= p <= 1.0 for p in accept):
            raise ValueError(f"synthetic_acceptance must be chances between 0 and 1, got {list(accept)}")
        most = parts.plan.max_speculative_tokens
        self.accept = np.array([accept[min(j, len(accept) - 1)] for j in range(most)])
        self._seed = seed
        self._dice = np.random.default_rng(seed)

    def use_policy(self, policy: SpeculationPolicy, max_num_seqs: int | None = None) -> None:
        super().use_policy(policy, max_num_seqs)
        self._dice = np.random.default_rng(self._seed)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "synthetic_acceptance": self.accept.tolist()}

    def _take(self, info: StepInfo, outcome: StepOutcome, start: float) -> None:
        if info.kind == _core.STEP_DECODE and info.num_draft_tokens:
            outcome = self._made_up(outcome)
        super()._take(info, outcome, start)

    def _made_up(self, outcome: StepOutcome) -> StepOutcome:
        """The same step with other counts. Tokens past what was really accepted are any that the vocabulary has."""
        drafted, tokens = outcome.num_draft, outcome.token_ids
        width = min(tokens.shape[1] - 1, len(self.accept))
        hits = self._dice.random((len(drafted), width)) < self.accept[:width]
        hits &= np.arange(width) < drafted[:, None]
        accepted = np.cumprod(hits, axis=1).sum(axis=1).astype(np.int32)
        real = np.arange(width + 1) < outcome.num_sampled[:, None]
        tokens = np.ascontiguousarray(np.where(real, tokens[:, : width + 1], tokens[:, :1]))
        return StepOutcome(tokens, accepted + 1, drafted, None, outcome.draft_seconds)
