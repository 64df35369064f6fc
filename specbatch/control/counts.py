"""What is counted of proposals: rounds of k drafts over tokens that exist, and decayed sums of such rounds.

Owns the counting. Knows nothing of shards, methods or what the counts are taken to mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbatch.control.records import METHOD_DRAFT_SHADOW, AcceptanceSample


def chain_counts(hits: Sequence[bool], k: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Rounds, offered and accepted a speculator of k drafts would have had over tokens that exist already.

    hits[t]: the speculator, given the true tokens before t, proposes token t. A round accepts the hits up to the first
    miss or to k, then one more token comes from the target, as in a real round.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    rounds, t = 0, 0
    offered, accepted = [0] * k, [0] * k
    while t < len(hits):
        rounds += 1
        for j in range(k):
            if t >= len(hits):
                break
            offered[j] += 1
            t += 1
            if not hits[t - 1]:
                break
            accepted[j] += 1
        else:
            t += 1  # the bonus token after full acceptance
    return rounds, tuple(offered), tuple(accepted)


def draft_shadow(rows: Sequence[tuple[int, Sequence[bool]]], most: int) -> tuple[AcceptanceSample, ...]:
    """Rounds of 1, 2 ... `most` drafts over each row's (shard, hits), summed by shard and k."""
    sums: dict[tuple[int, int], list[int]] = {}
    for shard, hits in rows:
        for k in range(1, most + 1) if hits else ():
            rounds, offered, accepted = chain_counts(hits, k)
            line = sums.setdefault((shard, k), [0] * (2 * k + 1))
            for i, value in enumerate((rounds, *offered, *accepted)):
                line[i] += value
    return tuple(
        AcceptanceSample(shard, METHOD_DRAFT_SHADOW, n[0], n[0], tuple(n[1 : k + 1]), tuple(n[k + 1 :]), k=k)
        for (shard, k), n in sums.items()
    )


class Counts:
    """Decayed counts of one (shard, method, k)."""

    __slots__ = ("accepted", "offered", "proposed", "rounds")

    def __init__(self, k: int) -> None:
        self.rounds = 0.0
        self.proposed = 0.0
        self.offered = [0.0] * k
        self.accepted = [0.0] * k

    def decay(self, factor: float) -> None:
        self.rounds *= factor
        self.proposed *= factor
        self.offered = [v * factor for v in self.offered]
        self.accepted = [v * factor for v in self.accepted]

    def add(self, sample: AcceptanceSample, weight: float) -> None:
        self.rounds += sample.rounds * weight
        self.proposed += sample.proposed * weight
        for j in range(min(len(self.offered), len(sample.offered))):
            self.offered[j] += sample.offered[j] * weight
            self.accepted[j] += sample.accepted[j] * weight

    def merge(self, other: Counts) -> None:
        while len(self.offered) < len(other.offered):
            self.offered.append(0.0)
            self.accepted.append(0.0)
        self.rounds += other.rounds
        self.proposed += other.proposed
        for j, (n, a) in enumerate(zip(other.offered, other.accepted, strict=True)):
            self.offered[j] += n
            self.accepted[j] += a

    def without(self, part: Counts) -> Counts:
        """These counts less those of a part of them."""
        rest = Counts(0)
        rest.rounds, rest.proposed = max(self.rounds - part.rounds, 0.0), max(self.proposed - part.proposed, 0.0)
        both = len(part.offered)
        rest.offered = [max(n - m, 0.0) for n, m in zip(self.offered, part.offered, strict=False)] + self.offered[both:]
        rest.accepted = [max(n - m, 0.0) for n, m in zip(self.accepted, part.accepted, strict=False)]
        rest.accepted += self.accepted[both:]
        return rest

    def copy(self) -> Counts:
        twin = Counts(len(self.offered))
        twin.merge(self)
        return twin
