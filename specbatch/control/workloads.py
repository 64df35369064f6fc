"""Made-up workloads for the simulated device: how long rows are, and where a draft would be right.

Owns the random processes. Everything is drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbatch.control.simulate import Workload

Accept = NDArray[np.float64]
Process = Callable[[NDArray[np.float64], NDArray[np.float64]], Accept]


def markov_hits(rng: np.random.Generator, accept: Accept, persistence: float) -> NDArray[np.bool_]:
    """[N, L] hits with chance accept[n, t] each, in runs: with `persistence` a token repeats its neighbour's fate."""
    draw = rng.random(accept.shape) < accept
    if persistence <= 0.0:
        return draw
    stay = rng.random(accept.shape) < persistence
    for t in range(1, accept.shape[1]):
        draw[:, t] = np.where(stay[:, t], draw[:, t - 1], draw[:, t])
    return draw


def workload(
    rows: int,
    *,
    accept: Process,
    prompt: int = 512,
    output: int = 256,
    shards: int = 1,
    persistence: float = 0.3,
    ngram_accept: float = 0.05,
    ngram_persistence: float = 0.85,
    ngram_match: float = 0.4,
    long_tail: float = 0.0,
    seed: int = 0,
) -> Workload:
    """`rows` rows around the given lengths. accept(u, t): draft acceptance of the row at place u in [0, 1) of the
    input, [N, 1], at output position t, [1, L]. long_tail: sigma of the log of the output length (0: even lengths)."""
    rng = np.random.default_rng(seed)
    prompts = np.maximum(1, rng.normal(prompt, 0.15 * prompt, rows)).astype(np.int64)
    if long_tail > 0.0:
        outputs = output * np.exp(rng.normal(0.0, long_tail, rows) - long_tail**2 / 2)
    else:
        outputs = rng.uniform(0.6, 1.4, rows) * output
    outputs = np.maximum(1, outputs).astype(np.int64)
    longest = int(outputs.max())
    where = np.broadcast_to((np.arange(rows) / rows)[:, None], (rows, longest))
    position = np.broadcast_to(np.arange(longest, dtype=np.float64)[None, :], (rows, longest))
    draft_hits = markov_hits(rng, np.broadcast_to(accept(where, position), (rows, longest)), persistence)
    ngram_hits = markov_hits(rng, np.full((rows, longest), ngram_accept), ngram_persistence)
    match = ngram_hits | (rng.random((rows, longest)) < ngram_match)
    return Workload(
        prompt=prompts,
        output=outputs,
        shard=np.arange(rows) * shards // rows,
        draft_hits=draft_hits,
        ngram_hits=ngram_hits,
        ngram_match=match,
        max_tokens=longest,
    )


def constant(p: float) -> Process:
    """The same acceptance everywhere."""
    return lambda where, position: np.full(where.shape, p)


def bimodal(low: float, high: float, share: float = 0.5) -> Process:
    """A share of the rows, spread over the input, is easy; the rest is hard."""

    def accept(where: NDArray[np.float64], position: NDArray[np.float64]) -> Accept:
        easy = np.floor(where * where.shape[0] * share) != np.floor((where * where.shape[0] - 1) * share)
        return np.where(easy, high, low)

    return accept


def drifting(*levels: float) -> Process:
    """Acceptance goes through `levels` from the first row to the last, in equal stretches."""

    def accept(where: NDArray[np.float64], position: NDArray[np.float64]) -> Accept:
        return np.array(levels)[np.minimum((where * len(levels)).astype(np.int64), len(levels) - 1)]

    return accept
