"""The Beta distribution: its distribution function and equal-tailed intervals, in plain Python.

Owns the numerics. Knows nothing of what is counted.
"""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache(maxsize=4096)
def beta_interval(a: float, b: float, mass: float = 0.9) -> tuple[float, float]:
    """Equal-tailed interval holding `mass` of Beta(a, b), by bisection of the regularised incomplete beta function."""
    a, b = max(a, 1e-3), max(b, 1e-3)
    return _beta_quantile(a, b, (1.0 - mass) / 2), _beta_quantile(a, b, (1.0 + mass) / 2)


def _beta_quantile(a: float, b: float, mass: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if beta_cdf(middle, a, b) < mass:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def beta_cdf(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b) by its continued fraction (DLMF 8.17.22, modified Lentz)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_cdf(1.0 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-12:
            break
    return front * value
