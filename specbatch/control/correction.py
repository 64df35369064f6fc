"""Corrects predicted step times by the steps that ran: one small Kalman filter, cheap enough for every decision.

Owns the belief about how wrong the cost model is, part by part. Knows nothing of acceptance or of the choice.

A decode step is predicted as fixed + tokens + context + draft seconds. The filter holds a log factor for each:

    log(seconds) = g + log((fixed + tokens e^v + context e^c) e^(u + r) + draft e^d) + noise

g is the machine as a whole (it drifts: clocks, neighbours), v and c the slopes in tokens and context, u what every
verifying step costs on top of plain decoding, r what is special about one (method, k), d the draft model. When two
modes are compared g cancels, so a machine that is 30 % slower than its profile changes no decision, while a verify
pass that is 30 % dearer does, after a few steps. What has not been tried stays uncertain, and the filter says how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

G, TOKENS, CONTEXT, VERIFY, DRAFT = range(5)
PRIOR_SD: Final = (0.7, 0.25, 0.25, 0.15, 0.35)
ARM_SD: Final = 0.045
STEP_NOISE: Final = 0.06  # relative, one step
FLOOR_NOISE: Final = 0.012  # relative, what averaging does not remove
DRIFT_SD: Final = (0.02, 0.004, 0.004, 0.004, 0.004)  # random walk an observation
OUTLIER: Final = 3.0

Arm = tuple[int, int]  # (method, k)


@dataclass(frozen=True, slots=True)
class Parts:
    """Predicted seconds of one decode step by cause, uncorrected."""

    fixed: float
    tokens: float
    context: float
    draft: float = 0.0

    @property
    def total(self) -> float:
        return self.fixed + self.tokens + self.context + self.draft


class CostCorrection:
    """The filter. Arms (method, k) get a state of their own when first seen; AR is the reference and has none."""

    def __init__(self) -> None:
        self._arms: dict[Arm, int] = {}
        self._mean: NDArray[np.float64] = np.zeros(5)
        self._cov: NDArray[np.float64] = np.diag(np.square(PRIOR_SD))
        self.observations = 0

    def advance(self, steps: float = 1.0) -> None:
        """Time goes on: everything is a little less certain, never more uncertain than at the start."""
        self._cov[range(5), range(5)] += np.square(DRIFT_SD) * steps
        self._limit()

    def new_tier(self) -> None:
        """The live batch is of another size now: what was special about an arm may not be any more."""
        for i in self._arms.values():
            self._forget(i, 0.5, ARM_SD)
        self._forget(VERIFY, 0.9, PRIOR_SD[VERIFY])
        self._limit()

    def observe(self, arm: Arm, parts: Parts, seconds: float, steps: int, draft_seconds: float = 0.0) -> None:
        """`steps` like steps took `seconds` each on average; draft_seconds of that in the draft, 0 where not known."""
        if seconds <= 0.0 or steps <= 0 or parts.total <= 0.0:
            return
        self.observations += 1
        noise = STEP_NOISE**2 / steps + FLOOR_NOISE**2
        if parts.draft > 0.0 and 0.0 < draft_seconds < seconds:
            target = Parts(parts.fixed, parts.tokens, parts.context)
            self._update(*self._model(arm, target), math.log(seconds - draft_seconds), noise)
            gradient = {G: 1.0, DRAFT: 1.0}
            value = self._mean[G] + self._mean[DRAFT] + math.log(parts.draft)
            self._update(value, gradient, math.log(draft_seconds), noise)
        else:
            self._update(*self._model(arm, parts), math.log(seconds), noise)

    def predict(self, arm: Arm, parts: Parts) -> float:
        """Corrected seconds of a step."""
        return math.exp(self._model(arm, parts)[0])

    def difference_sd(self, arm_a: Arm, parts_a: Parts, arm_b: Arm, parts_b: Parts) -> float:
        """Standard deviation of log(seconds of a / seconds of b)."""
        return self.spread([(1.0, arm_a, parts_a), (-1.0, arm_b, parts_b)])

    def spread(self, kinds: Iterable[tuple[float, Arm, Parts]]) -> float:
        """Standard deviation of the sum of weight x log(seconds) of kinds of step."""
        gradients = [(weight, self._model(arm, parts)[1]) for weight, arm, parts in kinds]  # may add an arm's state
        slope = np.zeros(len(self._mean))
        for weight, gradient in gradients:
            for i, value in gradient.items():
                slope[i] += weight * value
        return math.sqrt(max(float(slope @ self._cov @ slope), 0.0))

    def factors(self) -> dict[str, float]:
        """The belief in plain words: what each part is multiplied by."""
        names = ("machine", "tokens", "context", "verify", "draft")
        return {name: math.exp(float(self._mean[i])) for i, name in enumerate(names)}

    def _model(self, arm: Arm, parts: Parts) -> tuple[float, dict[int, float]]:
        """Mean of log(seconds) and its gradient in the states."""
        mean = self._mean
        tokens = parts.tokens * math.exp(mean[TOKENS])
        context = parts.context * math.exp(mean[CONTEXT])
        draft = parts.draft * math.exp(mean[DRAFT])
        extra, own = 1.0, -1
        if arm[1] > 0:
            own = self._index(arm)
            mean = self._mean
            extra = math.exp(mean[VERIFY] + mean[own])
        target = (parts.fixed + tokens + context) * extra
        total = target + draft
        gradient = {G: 1.0, TOKENS: tokens * extra / total, CONTEXT: context * extra / total}
        if own >= 0:
            gradient[VERIFY] = gradient[own] = target / total
        if draft > 0.0:
            gradient[DRAFT] = draft / total
        return float(mean[G]) + math.log(total), gradient

    def _index(self, arm: Arm) -> int:
        index = self._arms.get(arm)
        if index is None:
            index = self._arms[arm] = len(self._mean)
            self._mean = np.append(self._mean, 0.0)
            cov = np.zeros((index + 1, index + 1))
            cov[:index, :index] = self._cov
            cov[index, index] = ARM_SD**2
            self._cov = cov
        return index

    def _update(self, value: float, gradient: dict[int, float], observed: float, noise: float) -> None:
        slope = np.zeros(len(self._mean))
        for i, s in gradient.items():
            slope[i] = s
        gain = self._cov @ slope
        spread = float(slope @ gain)
        surprise = observed - value
        far = abs(surprise) / math.sqrt(spread + noise)
        if far > OUTLIER:  # one long step is noise; a run of them moves the belief all the same
            noise *= (far / OUTLIER) ** 2
        gain /= spread + noise
        self._mean += gain * surprise
        self._cov -= np.outer(gain, slope @ self._cov)
        self._cov = (self._cov + self._cov.T) / 2

    def _forget(self, index: int, keep: float, sd: float) -> None:
        """Pull one state towards its prior: mean and correlations shrink by `keep`, variance goes back up."""
        self._mean[index] *= keep
        variance = keep**2 * float(self._cov[index, index]) + (1 - keep**2) * sd**2
        self._cov[index, :] *= keep
        self._cov[:, index] *= keep
        self._cov[index, index] = variance

    def _limit(self) -> None:
        for i, sd in enumerate(PRIOR_SD):
            if self._cov[i, i] > sd**2:
                scale = sd / math.sqrt(float(self._cov[i, i]))
                self._cov[i, :] *= scale
                self._cov[:, i] *= scale
