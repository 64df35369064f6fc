"""Chi-squared tests by plain numpy: what several tests of random choices share."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def chi_squared_z(counts: NDArray[np.int64], probs: NDArray[np.float64] | None = None) -> float:
    """How many standard deviations a chi-squared statistic lies above what `probs` (default: uniform) predict.

    By Wilson and Hilferty's cube root. Infinite when something happened that cannot happen. Cells
    expected less than five times are counted together.
    """
    observed = np.asarray(counts, np.float64).ravel()
    if probs is None:
        probs = np.full(observed.shape, 1 / observed.size)
    expected = probs.ravel() * observed.sum()
    if observed[expected == 0].any():
        return math.inf
    rare = (expected > 0) & (expected < 5)
    observed = np.append(observed[expected >= 5], observed[rare].sum())
    expected = np.append(expected[expected >= 5], expected[rare].sum())
    observed, expected = observed[expected >= 5], expected[expected >= 5]
    freedom = len(expected) - 1
    if freedom == 0:
        return 0.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def joint_counts(*columns: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """How often each combination of values 0..size-1 occurs: shape (size,) * len(columns)."""
    flat = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        flat = flat * size + column
    return np.bincount(flat, minlength=size ** len(columns)).reshape((size,) * len(columns))
