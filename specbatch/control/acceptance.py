"""How much of what a speculator proposes is accepted: counts, decayed, by shard, method, k in force and draft position.

Owns the estimates and their uncertainty. Knows nothing of time, cost or the choice.

p_j is the chance that draft j is accepted given that those before it were; a row-step that proposes k drafts commits
E_k = 1 + sum_j prod_{i<=j} p_i tokens. One number alpha for all positions would misprice an n-gram proposer (first
position 0.1, later ones 0.8), and whether it has a proposal at all is a variable of its own, `match`.

Counts are kept by the k they were made under. Acceptance comes in runs, and a larger k swallows a run in fewer
rounds, so the p_j seen at k = 8 are not those of k = 2. What was counted at a k decides for that k; the other k lend
it a prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specbatch.control.beta import beta_interval
from specbatch.control.counts import Counts
from specbatch.control.records import (
    METHOD_DRAFT,
    METHOD_DRAFT_SHADOW,
    METHOD_NGRAM,
    METHOD_NGRAM_SHADOW,
    AcceptanceSample,
)

SHADOWS: Final = {METHOD_NGRAM_SHADOW: METHOD_NGRAM, METHOD_DRAFT_SHADOW: METHOD_DRAFT}
EARLIER_SHARDS: Final = 16.0  # pseudo-counts what earlier shards found is worth in a new one
OTHER_K: Final = 24.0  # pseudo-counts what other k found is worth, less what was counted at this one
NEXT_POSITION: Final = 8.0  # pseudo-counts p_{j-1} is worth for p_j
SHARED: Final = 0.3  # of the doubt about a position, what is left when two k are compared that both have it
OVERDISPERSION: Final = 2.0  # rounds of one row are alike: variances are this much above binomial
SHARD_SD: Final = 0.25  # how far apart shards may be, and the rounds that settle where this one is
SHARD_ROUNDS: Final = 8.0
STALE_SD: Final = 0.15  # what p_1 may drift to while nobody looks, and the steps that takes
STALE_STEPS: Final = 150.0
IDLE_STEPS: Final = 300.0  # steps in which counts nobody adds to lose half their weight
FAST: Final = 6.0  # the fast memory is this much shorter
POOL_ROUNDS: Final = 32768.0
CHANGE_Z: Final = 4.0  # standard errors between the fast and the slow memory that count as a change

DEFAULT_MATCH: Final = {METHOD_NGRAM: 0.35}
DEFAULT_FIRST: Final = {METHOD_NGRAM: 0.45}
DEFAULT_ACCEPT: Final = 0.65
NGRAM_LATER: Final = 0.7  # a match that held once tends to hold: what to expect of its second position


def expected_tokens(accept: Sequence[float], k: int) -> float:
    """Committed tokens of a round that proposes k drafts: E_k; accept[j] = p_{j+1}, the last one repeated."""
    total, product = 1.0, 1.0
    for j in range(k):
        product *= accept[min(j, len(accept) - 1)]
        total += product
    return total


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Posterior of one shard and method at one k."""

    match: float  # chance that there is a proposal
    match_count: float  # rounds (and pseudo-rounds) behind it
    accept: tuple[float, ...]  # [k] p_j, means
    count: tuple[float, ...]  # [k] offers (and pseudo-offers) behind each
    evidence: float  # rounds really counted, decayed, at any k
    unknown: float = 0.0  # variance of p_1 on top: shards differ, and this one is hardly known

    @property
    def k(self) -> int:
        return len(self.accept)

    def tokens(self) -> float:
        """Expected committed tokens a row-step, row-steps without a proposal included."""
        return 1.0 + self.match * (expected_tokens(self.accept, self.k) - 1.0) if self.accept else 1.0

    def tokens_sd(self, shared: int = 0) -> float:
        """Standard deviation of `tokens` from what is not known yet (delta method).

        shared: first positions that another k has too; in a comparison with it most of their doubt cancels.
        """
        prefix, gain, product = [], 0.0, 1.0
        for p in self.accept:
            product *= p
            prefix.append(product)
            gain += product
        match, count, kept = self.match, self.count, SHARED**2
        variance = gain * gain * _beta_variance(match, self.match_count) * (kept if shared else 1.0)
        tail = 0.0
        for j in range(len(prefix) - 1, -1, -1):
            tail += prefix[j]
            mean = self.accept[j]
            slope = match * tail / max(mean, 1e-6)
            doubt = OVERDISPERSION * mean * (1.0 - mean) / (count[j] + 1.0)
            if j == 0:
                doubt += self.unknown
            variance += slope * slope * doubt * (kept if j < shared else 1.0)
        return math.sqrt(variance)

    def interval(self, position: int, mass: float = 0.9) -> tuple[float, float]:
        """Equal-tailed credible interval of p_{position + 1}."""
        n = self.count[position] / OVERDISPERSION
        return beta_interval(self.accept[position] * n, (1.0 - self.accept[position]) * n, mass)


class _Track:
    """One (shard, method): a slow memory by k, a fast one that notices change, and the prior it was born with."""

    def __init__(self, prior: Counts) -> None:
        self.prior = prior
        self.idle = 0.0  # steps since the last counts
        self.evidence = 0.0  # rounds, decayed; those of several k over the same tokens count once
        self.slow: dict[int, Counts] = {}
        self.fast: dict[int, Counts] = {}
        self.changes = 0
        self.known: dict[int, Acceptance] = {}  # estimates by k, until counts change
        self.total: Counts | None = None  # of the slow memory over all k, until counts change

    def add(self, samples: Mapping[int, AcceptanceSample], half_life: float, weight: float) -> None:
        """Rounds by k; where there are several k, of the same tokens."""
        self.idle = 0.0
        self.stale()
        rounds = max(sample.rounds for sample in samples.values()) * weight
        for memory, life in ((self.slow, half_life), (self.fast, half_life / FAST)):
            factor = 0.5 ** (rounds / life)
            for counts in memory.values():
                counts.decay(factor)
            for k, sample in samples.items():
                memory.setdefault(k, Counts(k)).add(sample, weight)
        self.evidence = self.evidence * 0.5 ** (rounds / half_life) + rounds
        least = min(samples)
        if self._changed(least):
            self.changes += 1
            self.slow = {k: self.fast[k].copy() for k in samples}
            self.evidence = self.fast[least].rounds

    def stale(self) -> None:
        """Counts changed: what was worked out from them is no longer true."""
        self.known.clear()
        self.total = None

    def others(self, k: int) -> Counts:
        """The slow memory of all k but this one."""
        if self.total is None:
            self.total = Counts(max(self.slow, default=0))
            for counts in self.slow.values():
                self.total.merge(counts)
        own = self.slow.get(k)
        return self.total.without(own) if own is not None else self.total

    def _changed(self, k: int) -> bool:
        """Whether lately the first position (a match counted in) accepts otherwise than over the long run."""
        slow, fast = self.slow[k], self.fast[k]
        if fast.rounds < 48 or slow.rounds < 2 * fast.rounds:
            return False
        old_rounds = slow.rounds - fast.rounds
        new = fast.accepted[0] / fast.rounds
        old = max(slow.accepted[0] - fast.accepted[0], 0.0) / old_rounds
        mean = min(max(slow.accepted[0] / slow.rounds, 0.02), 0.98)
        spread = OVERDISPERSION * mean * (1 - mean) * (1 / fast.rounds + 1 / old_rounds)
        return abs(new - old) > CHANGE_Z * math.sqrt(spread)


class AcceptanceBook:
    """Acceptance of every shard and method. Counts only what was really proposed and committed."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[int, int], _Track] = {}
        self._pool: dict[int, Counts] = {}  # all shards, by method; a new shard's prior is a snapshot of it

    def add(self, sample: AcceptanceSample, k: int, half_life: float = 2048.0, weight: float = 1.0) -> None:
        """Counts drained since the last call.

        k: the num_speculative_tokens in force (of a shadow: its own). half_life: rounds after which counts weigh half;
        a few tens of steps of the live batch, since what changes acceptance is rows coming and going. weight: what a
        round counts for.
        """
        self.add_each({k: sample}, half_life, weight)

    def add_each(self, samples: Mapping[int, AcceptanceSample], half_life: float = 2048.0, weight: float = 1.0) -> None:
        """Counts of rounds of several k over the same tokens of one shard and method: every k is known as if it had been
        in force, and the evidence is that of one."""
        samples = {k: sample for k, sample in samples.items() if sample.rounds > 0 and k >= 1}
        if not samples:
            return
        most = max(samples)
        sample = samples[most]
        method = SHADOWS.get(sample.method, sample.method)
        self._track(sample.shard, method).add(samples, half_life, weight)
        pool = self._pool.setdefault(method, Counts(0))
        pool.decay(0.5 ** (sample.rounds * weight / POOL_ROUNDS))
        fresh = Counts(most)
        fresh.add(sample, weight)
        pool.merge(fresh)

    def estimate(self, shard: int, method: int, k: int) -> Acceptance:
        """The posterior for `shard`, `method` at k; a shard never seen gets the prior."""
        track = self._tracks.get((shard, method))
        if track is None:
            return self._estimate(None, method, k)
        known = track.known.get(k)
        if known is None:
            known = track.known[k] = self._estimate(track, method, k)
        return known

    def _estimate(self, track: _Track | None, method: int, k: int) -> Acceptance:
        prior = track.prior if track is not None else self._pool.get(method)
        own = track.slow.get(k) if track is not None else None
        others = track.others(k) if track is not None else Counts(0)
        lent = max(OTHER_K - own.rounds, 2.0) if own is not None else OTHER_K
        match, match_count = _layers(
            DEFAULT_MATCH.get(method, 0.98),
            2.0,
            (prior.proposed, prior.rounds, EARLIER_SHARDS) if prior is not None else None,
            (others.proposed, others.rounds, lent),
            (own.proposed, own.rounds, math.inf) if own is not None else None,
        )
        accept, count = [], []
        before, strength = DEFAULT_FIRST.get(method, DEFAULT_ACCEPT), 2.0
        for j in range(k):
            if j == 1 and method == METHOD_NGRAM:
                before, strength = max(before, NGRAM_LATER), 2.0
            mean, n = _layers(
                before,
                strength,
                _at(prior, j, EARLIER_SHARDS),
                _at(others, j, lent),
                _at(own, j, math.inf),
            )
            accept.append(mean)
            count.append(n)
            before, strength = mean, NEXT_POSITION
        evidence = track.evidence if track is not None else 0.0
        stale = 1.0 - 0.5 ** (track.idle / STALE_STEPS) if track is not None else 0.0
        unknown = (SHARD_SD / (1.0 + evidence / SHARD_ROUNDS)) ** 2 + (STALE_SD * stale) ** 2
        return Acceptance(match, match_count, tuple(accept), tuple(count), evidence, unknown)

    def evidence(self, shard: int, method: int) -> float:
        """Rounds counted for the shard and method, decayed."""
        track = self._tracks.get((shard, method))
        return track.evidence if track is not None else 0.0

    def changes(self, shard: int, method: int) -> int:
        """How often acceptance was found to have changed within the shard."""
        track = self._tracks.get((shard, method))
        return track.changes if track is not None else 0

    def fade_idle(self, refreshed: set[tuple[int, int]], steps: float) -> None:
        """Trust the counts of every (shard, method) not in `refreshed` less: nobody looked, and times change."""
        factor = 0.5 ** (steps / IDLE_STEPS)
        for key, track in self._tracks.items():
            if key not in refreshed:
                track.idle += steps
                track.stale()
                track.evidence *= factor
                for counts in (*track.slow.values(), *track.fast.values()):
                    counts.decay(factor)

    def forget(self, shard: int) -> None:
        """Drop a finished shard; what it taught stays in the prior of shards to come."""
        for key in [key for key in self._tracks if key[0] == shard]:
            del self._tracks[key]

    def to_json(self) -> dict[str, Any]:
        """The pooled counts: the prior the next run may start from."""
        return {
            str(method): {"rounds": c.rounds, "proposed": c.proposed, "offered": c.offered, "accepted": c.accepted}
            for method, c in sorted(self._pool.items())
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AcceptanceBook:
        """A book whose prior is an earlier run's. Raises KeyError or ValueError on other data."""
        book = cls()
        for method, values in data.items():
            counts = Counts(len(values["offered"]))
            counts.rounds, counts.proposed = float(values["rounds"]), float(values["proposed"])
            counts.offered = [float(v) for v in values["offered"]]
            counts.accepted = [float(v) for v in values["accepted"]]
            book._pool[int(method)] = counts
        return book

    def _track(self, shard: int, method: int) -> _Track:
        track = self._tracks.get((shard, method))
        if track is None:
            pool = self._pool.get(method)
            track = self._tracks[shard, method] = _Track(pool.copy() if pool is not None else Counts(0))
        return track


def _at(counts: Counts | None, position: int, cap: float) -> tuple[float, float, float] | None:
    if counts is None or position >= len(counts.offered):
        return None
    return counts.accepted[position], counts.offered[position], cap


def _layers(mean: float, strength: float, *layers: tuple[float, float, float] | None) -> tuple[float, float]:
    """Beta mean and pseudo-count after layers of (successes, trials, most pseudo-counts the layer may hand on)."""
    for layer in layers:
        if layer is None or layer[1] <= 0.0:
            continue
        successes, trials, cap = layer
        mean = (mean * strength + successes) / (strength + trials)
        strength = min(strength + trials, cap) if cap > strength else min(strength + trials, strength)
    return mean, strength


def _beta_variance(mean: float, count: float) -> float:
    return OVERDISPERSION * mean * (1.0 - mean) / (count + 1.0)
