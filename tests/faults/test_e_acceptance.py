"""E: acceptance misreported. Counts of the real scheduler over rows whose truth is known, and what is made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specbatch.control.acceptance import AcceptanceBook, expected_tokens
from specbatch.control.controller import FixedPolicy
from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM, AcceptanceSample, Decision, Observation
from specbatch.control.simulate import SimDevice, Workload, simulate
from specbatch.control.workloads import constant, workload
from specbatch.engine.simulated import CoreRows


class Asking(FixedPolicy):
    """A forced mode that is asked every few steps, so that counts are drained as in a run; keeps them."""

    def __init__(self, method: int, k: int) -> None:
        super().__init__(method, k)
        self.samples: list[AcceptanceSample] = []

    def due(self, step: int, running: int, waiting: int) -> bool:
        return step % 8 == 0

    def decide(self, observation: Observation) -> Decision:
        self.samples.extend(observation.acceptance)
        return super().decide(observation)


def counts(work: Workload, method: int, k: int) -> list[AcceptanceSample]:
    rows = CoreRows(work, pages=4_000, max_num_seqs=32, draft_block_size=64)
    policy = Asking(method, k)
    simulate(rows, policy, SimDevice(), work.tokens)
    policy.samples.extend(rows.take_acceptance())
    return policy.samples


def total(samples: list[AcceptanceSample], name: str) -> int:
    return sum(getattr(s, name) for s in samples)


def test_e1_the_denominator_is_what_was_really_proposed() -> None:
    """Half of the rows may produce three tokens only and draft at most two; the others draft four. Every draft the
    model makes is right, so acceptance is 1 at every position that was offered, not 3 in 4."""
    work = workload(40, accept=constant(1.0), prompt=32, output=60, persistence=0.0)
    short = np.arange(40) % 2 == 0
    work = replace(work, output=np.where(short, 3, work.output))
    samples = counts(work, METHOD_DRAFT, 4)
    offered = np.sum([s.offered for s in samples], axis=0)
    accepted = np.sum([s.accepted for s in samples], axis=0)
    assert offered[0] > 0
    assert (offered == accepted).all()
    assert offered[0] > offered[3]  # the short rows are not in the denominator of positions they never had
    book = AcceptanceBook()
    for sample in samples:
        book.add(sample, 4)
    assert min(book.estimate(0, METHOD_DRAFT, 4).accept) > 0.97


def test_e1_rows_without_a_match_are_rounds_but_not_offers() -> None:
    work = workload(16, accept=constant(0.5), prompt=32, output=60, persistence=0.0)
    samples = counts(work, METHOD_NGRAM, 4)  # tokens of these rows never repeat: there is nothing to propose
    assert total(samples, "rounds") > 0
    assert total(samples, "proposed") == 0
    assert np.sum([s.offered for s in samples]) == 0
    book = AcceptanceBook()
    for sample in samples:
        book.add(sample, 4)
    estimate = book.estimate(0, METHOD_NGRAM, 4)
    assert estimate.match < 0.01
    assert estimate.tokens() == pytest.approx(1.0, abs=0.02)


def test_e2_acceptance_of_a_perfect_draft_is_one_and_stays_there() -> None:
    work = workload(8, accept=constant(1.0), prompt=32, output=512, persistence=0.0)
    samples = counts(work, METHOD_DRAFT, 3)
    for sample in samples:
        assert sample.accepted == sample.offered
    assert total(samples, "committed") / total(samples, "rounds") == pytest.approx(4.0, rel=0.02)


def test_e3_only_committed_tokens_are_counted() -> None:
    """A row that ends inside an accepted run: what came after its end was never accepted by anyone."""
    work = workload(24, accept=constant(1.0), prompt=32, output=7, persistence=0.0)
    samples = counts(work, METHOD_DRAFT, 8)
    # prefill commits the first token of each row, speculating row-steps all the others that had a draft
    assert total(samples, "committed") <= work.tokens - len(work)
    assert np.sum([s.accepted for s in samples]) <= total(samples, "committed")


def test_counts_agree_with_what_is_true() -> None:
    truth = 0.7
    work = workload(120, accept=constant(truth), prompt=32, output=120, persistence=0.0)
    samples = counts(work, METHOD_DRAFT, 4)
    offered = np.sum([s.offered for s in samples], axis=0)[:4]
    accepted = np.sum([s.accepted for s in samples], axis=0)[:4]
    assert accepted / offered == pytest.approx(np.full(4, truth), abs=0.03)
    committed = total(samples, "committed") / total(samples, "rounds")
    assert committed == pytest.approx(expected_tokens([truth] * 4, 4), rel=0.04)
