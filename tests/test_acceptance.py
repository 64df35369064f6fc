"""Acceptance estimates: the formula, counting over existing tokens, decay, priors, change, intervals."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.control.acceptance import AcceptanceBook, expected_tokens
from specbatch.control.beta import beta_cdf, beta_interval
from specbatch.control.counts import chain_counts, draft_shadow
from specbatch.control.records import METHOD_DRAFT, METHOD_DRAFT_SHADOW, METHOD_NGRAM, AcceptanceSample
from specbatch.plan import round_tokens


def sample(
    rng: np.random.Generator,
    accept: list[float],
    rounds: int,
    *,
    shard: int = 0,
    method: int = METHOD_DRAFT,
    match: float = 1.0,
) -> AcceptanceSample:
    """Counts of `rounds` independent rounds."""
    k = len(accept)
    live = int(rng.binomial(rounds, match))
    proposed, offered, accepted = live, [0] * k, [0] * k
    for j, p in enumerate(accept):
        offered[j] = live
        live = accepted[j] = int(rng.binomial(live, p))
    return AcceptanceSample(shard, method, rounds, proposed, tuple(offered), tuple(accepted))


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(0.88, 4, 3.94), (0.55, 4, 2.11), (0.75, 4, 3.05), (0.0, 8, 1.0)])
def test_expected_tokens_of_a_round(alpha: float, k: int, tokens: float) -> None:
    assert expected_tokens([alpha] * k, k) == pytest.approx(tokens, abs=0.005)
    assert round_tokens(alpha, k) == pytest.approx(expected_tokens([alpha] * k, k))


def test_positions_differ() -> None:
    # an n-gram proposer: 1 + 0.1 + 0.1 * 0.8 + 0.1 * 0.8 * 0.8
    assert expected_tokens([0.1, 0.8, 0.8], 3) == pytest.approx(1.244)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 6))
def test_chain_counts_are_those_of_real_rounds(hits: list[bool], k: int) -> None:
    rounds, offered, accepted = chain_counts(hits, k)
    t, lengths = 0, []
    while t < len(hits):  # the same by hand: a run of hits, then a token of the target
        run = 0
        while run < k and t + run < len(hits) and hits[t + run]:
            run += 1
        lengths.append(run)
        t += run + 1
    assert rounds == len(lengths)
    assert list(accepted) == [sum(run > j for run in lengths) for j in range(k)]
    assert all(o >= a for o, a in zip(offered, accepted, strict=True))


def test_chain_counts_skip_the_bonus_token() -> None:
    # hit, hit, then position 2 is the target's own after full acceptance: its miss is nobody's
    assert chain_counts([True, True, False, True, True, False], 2) == (2, (2, 2), (2, 2))
    assert chain_counts([True, True, False, True, True, False], 3) == (2, (2, 2, 2), (2, 2, 0))


def test_estimates_converge_position_by_position() -> None:
    rng, book, truth = np.random.default_rng(0), AcceptanceBook(), [0.8, 0.6, 0.9, 0.3]
    for _ in range(40):
        book.add(sample(rng, truth, 200), 4, half_life=1e6)
    estimate = book.estimate(0, METHOD_DRAFT, 4)
    assert estimate.accept == pytest.approx(truth, abs=0.03)
    assert estimate.tokens() == pytest.approx(expected_tokens(truth, 4), rel=0.03)


def test_rows_that_did_not_draft_are_not_in_the_denominator() -> None:
    """E1: half of the rows skip drafting; acceptance stays that of the drafts really proposed."""
    rng, book = np.random.default_rng(1), AcceptanceBook()
    for _ in range(30):
        book.add(sample(rng, [0.9, 0.9], 100, method=METHOD_NGRAM, match=0.5), 2, half_life=1e6)
    estimate = book.estimate(0, METHOD_NGRAM, 2)
    assert estimate.accept[0] == pytest.approx(0.9, abs=0.03)
    assert estimate.match == pytest.approx(0.5, abs=0.03)
    assert estimate.tokens() == pytest.approx(1 + 0.5 * (0.9 + 0.81), rel=0.04)


def test_perfect_acceptance_stays_perfect() -> None:
    """E2: hundreds of tokens of draft = target do not wear the estimate down."""
    rng, book = np.random.default_rng(2), AcceptanceBook()
    seen = []
    for _ in range(64):
        book.add(sample(rng, [1.0] * 4, 8), 4, half_life=256)
        seen.append(book.estimate(0, METHOD_DRAFT, 4).tokens())
    assert seen[-1] > 4.85
    assert all(b >= a - 1e-9 for a, b in pairwise(seen[:20]))


def test_old_counts_fade() -> None:
    rng, book = np.random.default_rng(3), AcceptanceBook()
    for p in [0.9] * 20 + [0.5] * 20:
        book.add(sample(rng, [p], 100), 1, half_life=400)
    assert book.estimate(0, METHOD_DRAFT, 1).accept[0] == pytest.approx(0.5, abs=0.06)


def test_a_sudden_change_is_noticed_before_the_slow_memory_has_faded() -> None:
    def after_change(half_life: float) -> tuple[float, int]:
        rng, book = np.random.default_rng(4), AcceptanceBook()
        for p in [0.9] * 60 + [0.2] * 4:
            book.add(sample(rng, [p], 100), 1, half_life)
        return book.estimate(0, METHOD_DRAFT, 1).accept[0], book.changes(0, METHOD_DRAFT)

    estimate, changes = after_change(2000)
    assert changes >= 1
    assert estimate < 0.6
    # what decay alone would say after 400 of 2,000 rounds' half-life
    assert 0.2 + 0.7 * 0.5 ** (400 / 2000) > 0.75


def test_steady_acceptance_is_not_taken_for_a_change() -> None:
    rng, book = np.random.default_rng(5), AcceptanceBook()
    for _ in range(400):
        book.add(sample(rng, [0.6], 64), 1, half_life=1500)
    assert book.changes(0, METHOD_DRAFT) == 0


def test_earlier_shards_are_a_prior_and_no_more() -> None:
    rng, book = np.random.default_rng(6), AcceptanceBook()
    for _ in range(20):
        book.add(sample(rng, [0.05], 200, shard=1), 1)
    assert book.estimate(2, METHOD_DRAFT, 1).accept[0] < 0.2
    book.add(sample(rng, [0.9], 100, shard=2), 1)
    assert book.estimate(2, METHOD_DRAFT, 1).accept[0] > 0.7
    assert book.estimate(1, METHOD_DRAFT, 1).accept[0] < 0.1
    book.forget(2)
    assert book.estimate(2, METHOD_DRAFT, 1).evidence == 0


def test_a_new_shard_is_not_taken_as_known() -> None:
    """A7: after a hopeless shard the next one must still be worth a look."""
    rng, book = np.random.default_rng(7), AcceptanceBook()
    for _ in range(20):
        book.add(sample(rng, [0.02], 200, shard=1), 1)
    known, fresh = book.estimate(1, METHOD_DRAFT, 1), book.estimate(2, METHOD_DRAFT, 1)
    assert fresh.tokens_sd() > 0.2 > 5 * known.tokens_sd()


def test_counts_at_one_k_decide_for_that_k() -> None:
    rng, book = np.random.default_rng(8), AcceptanceBook()
    for _ in range(20):
        book.add(sample(rng, [0.2] * 8, 100), 8, half_life=1e5)
    only_large = book.estimate(0, METHOD_DRAFT, 2).accept[0]
    for _ in range(20):
        book.add(sample(rng, [0.6] * 2, 100), 2, half_life=1e5)
    assert only_large < 0.35
    assert book.estimate(0, METHOD_DRAFT, 2).accept[0] > 0.5
    assert book.estimate(0, METHOD_DRAFT, 8).accept[0] < 0.3


def test_shadow_counts_speak_for_the_method() -> None:
    rng, book = np.random.default_rng(9), AcceptanceBook()
    book.add(sample(rng, [0.9] * 4, 400, method=METHOD_DRAFT_SHADOW), 4)
    assert book.estimate(0, METHOD_DRAFT, 4).accept[0] > 0.85


def test_rounds_of_several_k_over_the_same_tokens_are_one_evidence() -> None:
    rng, book, one = np.random.default_rng(12), AcceptanceBook(), AcceptanceBook()
    for _ in range(10):
        found = {k: sample(rng, [0.6] * k, 50) for k in (1, 2, 4, 8)}
        book.add_each(found, half_life=200.0)
        one.add(found[4], 4, half_life=200.0)
    assert book.evidence(0, METHOD_DRAFT) == pytest.approx(one.evidence(0, METHOD_DRAFT))
    for k in (1, 2, 4, 8):
        estimate = book.estimate(0, METHOD_DRAFT, k)
        assert estimate.tokens() == pytest.approx(expected_tokens([0.6] * k, k), rel=0.15)
        assert estimate.count[0] > 100  # its own rounds, not what others lend


def test_a_pass_over_produced_tokens_counts_every_k() -> None:
    rows = [(3, [True, True, False, True]), (3, [False]), (5, [True] * 5), (5, [])]
    found = {(s.shard, s.k): s for s in draft_shadow(rows, 3)}
    assert sorted(found) == [(3, 1), (3, 2), (3, 3), (5, 1), (5, 2), (5, 3)]
    for (shard, k), line in found.items():
        counts = [chain_counts(hits, k) for number, hits in rows if number == shard and hits]
        assert line.rounds == line.proposed == sum(c[0] for c in counts)
        assert line.offered == tuple(np.sum([c[1] for c in counts], axis=0))
        assert line.accepted == tuple(np.sum([c[2] for c in counts], axis=0))
    assert {s.method for s in found.values()} == {METHOD_DRAFT_SHADOW}


def test_what_nobody_looks_at_grows_uncertain() -> None:
    rng, book = np.random.default_rng(10), AcceptanceBook()
    for _ in range(20):
        book.add(sample(rng, [0.5], 100), 1)
    before = book.estimate(0, METHOD_DRAFT, 1).tokens_sd()
    book.fade_idle(set(), 400)
    assert book.estimate(0, METHOD_DRAFT, 1).tokens_sd() > 2 * before


def test_the_book_survives_as_json() -> None:
    rng, book = np.random.default_rng(11), AcceptanceBook()
    for _ in range(10):
        book.add(sample(rng, [0.7, 0.5], 100, shard=3), 2)
    again = AcceptanceBook.from_json(book.to_json())
    assert again.estimate(9, METHOD_DRAFT, 2) == book.estimate(9, METHOD_DRAFT, 2)
    with pytest.raises(KeyError):
        AcceptanceBook.from_json({"2": {"rounds": 1}})


@given(st.floats(0.2, 60), st.floats(0.2, 60), st.floats(0.001, 0.999))
@settings(max_examples=60)
def test_beta_distribution(a: float, b: float, x: float) -> None:
    assert beta_cdf(x, a, b) == pytest.approx(1 - beta_cdf(1 - x, b, a), abs=1e-9)
    assert beta_cdf(x, a, 1) == pytest.approx(x**a, rel=1e-9)
    n, k = round(a) + 3, round(a)  # P(Beta(k + 1, n - k) <= x) = P(Binomial(n, x) > k)
    tail = sum(math.comb(n, i) * x**i * (1 - x) ** (n - i) for i in range(k + 1, n + 1))
    assert beta_cdf(x, k + 1, n - k) == pytest.approx(tail, abs=1e-9)


def coverage(width: float) -> float:
    """How often an interval made from 60 rounds, its width scaled, holds the truth it was drawn from."""
    rng, hits = np.random.default_rng(12), 0
    for _ in range(400):
        p = rng.uniform(0.1, 0.9)
        accepted = rng.binomial(60, p)
        low, high = beta_interval(accepted + 1.0, 61.0 - accepted, 0.9)
        middle, half = (low + high) / 2, (high - low) / 2 * width
        hits += middle - half <= p <= middle + half
    return hits / 400


def test_credible_intervals_hold_what_they_promise() -> None:
    assert 0.86 < coverage(1.0) < 0.94
    assert coverage(0.5) < 0.8  # the twin that is too sure fails the same check
