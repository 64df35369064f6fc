"""Faults of class B, output that differs from plain decoding, where sampling and verification alone can cause them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specbatch.sampling_params import SamplingParams
from tests.chi_squared import chi_squared_z, joint_counts
from tests.sampling_rounds import Rounds, exact_joint, random_table

VOCAB = 8
ROWS = 20_000
LENGTH = 3
PASSES, FAILS = 4.0, 10.0  # standard deviations; the seeds are fixed

OPTIONS = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.0, top_k=4),
    "top-p": SamplingParams(temperature=1.2, top_p=0.8),
    "all": SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.03),
}
PAIRS = {  # target, draft
    "near": (random_table(VOCAB, 1), random_table(VOCAB, 1) + random_table(VOCAB, 2, 0.5)),
    "apart": (random_table(VOCAB, 3), random_table(VOCAB, 4)),
    "sharp": (random_table(VOCAB, 5, 1.0), random_table(VOCAB, 6, 4.0)),
}


def excess(rounds: Rounds, params: SamplingParams, run_seed: int = 0) -> float:
    """How far the joint distribution of three tokens in a row is from the exact one, in standard deviations."""
    tokens, _ = rounds.run(params, ROWS, LENGTH, run_seed=run_seed)
    return chi_squared_z(joint_counts(*tokens.T, size=VOCAB), exact_joint(rounds.target, params, LENGTH))


class TestB8ExactDistribution:
    """Whole rounds have the target's distribution, for any draft, jointly over positions."""

    # Each method with every k and every kind of options, each of those twice.
    @pytest.mark.parametrize(
        ("k", "options"),
        [
            (1, "temperature"),
            (1, "top-p"),
            (2, "top-k"),
            (2, "all"),
            (3, "temperature"),
            (3, "top-p"),
            (4, "top-k"),
            (4, "all"),
        ],
    )
    @pytest.mark.parametrize("method", ["coupled", "rejection"])
    def test_joint_distribution(self, method: str, options: str, k: int) -> None:
        pair = list(PAIRS)[(k + list(OPTIONS).index(options)) % len(PAIRS)]
        target, draft = PAIRS[pair]
        rounds = Rounds(target, draft, k=k, method=method, static=k in (1, 2))
        assert excess(rounds, OPTIONS[options], run_seed=k) < PASSES

    @pytest.mark.parametrize("method", ["coupled", "rejection"])
    def test_drafts_without_probabilities(self, method: str) -> None:
        """An n-gram's proposals: the same token whatever the row's noise."""

        def propose(last: Tensor) -> Tensor:
            return torch.stack((last * 3 + 1, last + 2), dim=1) % VOCAB

        rounds = Rounds(PAIRS["near"][0], k=2, method=method, propose=propose)
        assert excess(rounds, OPTIONS["temperature"]) < PASSES

    @pytest.mark.parametrize("options", OPTIONS)
    def test_control_another_q_than_reported(self, options: str) -> None:
        target, draft = PAIRS["near"]
        rounds = Rounds(target, draft, k=2, method="rejection", draw_from=random_table(VOCAB, 9))
        assert excess(rounds, OPTIONS[options]) > FAILS

    def test_control_coupled_drafts_accepted_by_their_own_chance(self) -> None:
        """Accepting drafts that are not the target's sample."""
        target, draft = PAIRS["near"]
        generator = torch.Generator().manual_seed(0)

        def accepts(drafts: Tensor, samples: Tensor) -> Tensor:
            return (drafts == samples) | (torch.rand(drafts.shape, generator=generator) < 0.2)

        rounds = Rounds(target, draft, k=2, accepts=accepts)
        assert excess(rounds, OPTIONS["temperature"]) > FAILS

    def test_control_noise_reused_between_positions(self) -> None:
        """Each position alone looks right; only the joint distribution shows it."""
        target, draft = PAIRS["near"]
        params = OPTIONS["temperature"]
        rounds = Rounds(target, draft, k=2, noise_position=torch.zeros_like)
        tokens, _ = rounds.run(params, ROWS, LENGTH)
        first = joint_counts(tokens[:, 0], size=VOCAB)
        assert chi_squared_z(first, exact_joint(target, params, 1)) < PASSES
        assert chi_squared_z(joint_counts(*tokens.T, size=VOCAB), exact_joint(target, params, LENGTH)) > FAILS

    def test_control_rejection_without_the_residual(self) -> None:
        """Resampling from p after a rejection, where norm(max(0, p - q)) is due: the same as coupling to fresh noise
        with drafts accepted by min(1, p / q)."""
        target, draft = PAIRS["apart"]
        p, q = target.softmax(-1), draft.softmax(-1)
        generator = torch.Generator().manual_seed(0)

        def accepts(drafts: Tensor, samples: Tensor) -> Tensor:
            ratio = (p[0] / q[0])[drafts.long()]
            return torch.rand(drafts.shape, generator=generator) < ratio

        rounds = Rounds(target, draft, k=1, accepts=accepts)
        tokens, _ = rounds.run(SamplingParams(temperature=1.0), ROWS, 1)
        exact = exact_joint(target, SamplingParams(temperature=1.0), 1)
        assert chi_squared_z(joint_counts(tokens[:, 0], size=VOCAB), exact) > FAILS


PENALTIES = {
    "repetition": SamplingParams(repetition_penalty=1.6),
    "frequency": SamplingParams(frequency_penalty=0.7),
    "presence": SamplingParams(presence_penalty=1.5),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.4),
}


class TestB4PenaltiesInsideAVerifyPass:
    """A penalty counts the drafts before each position, so speculation changes nothing."""

    # A token likes to follow itself best, its successor nearly as well: any penalty on it turns the choice.
    repetitive = torch.eye(30) * 3 + torch.eye(30).roll(1, dims=1) * 2.7 + random_table(30, 11, 0.1)

    @pytest.mark.parametrize("k", [1, 3, 5])
    @pytest.mark.parametrize("penalty", PENALTIES)
    def test_equals_plain_decoding(self, penalty: str, k: int) -> None:
        params = PENALTIES[penalty]
        expected, _ = Rounds(self.repetitive).run(params, 12, 20)
        actual, accepted = Rounds(self.repetitive, self.repetitive, k=k).run(params, 12, 20)
        assert np.array_equal(actual, expected)
        assert accepted.min() == k  # the draft is the target and sees the same penalties

    @pytest.mark.parametrize("penalty", PENALTIES)
    def test_control_counting_committed_tokens_only(self, penalty: str) -> None:
        expected, _ = Rounds(self.repetitive).run(PENALTIES[penalty], 12, 20)
        broken = Rounds(self.repetitive, self.repetitive, k=5, with_prior=False)
        actual, _ = broken.run(PENALTIES[penalty], 12, 20)
        assert not np.array_equal(actual, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_b5_a_banned_token_never_appears(temperature: float, method: str) -> None:
    target, draft = PAIRS["near"]
    free, _ = Rounds(target).run(SamplingParams(temperature=temperature), 400, 6)
    banned = int(np.bincount(free.ravel(), minlength=VOCAB).argmax())
    params = SamplingParams(temperature=temperature, logit_bias={banned: -100.0})

    def propose(last: Tensor) -> Tensor:
        return torch.full((len(last), 3), banned, dtype=torch.int32)

    for rounds in (
        Rounds(target, draft, k=3, method=method),
        Rounds(target, k=3, method=method, propose=propose),
    ):
        tokens, accepted = rounds.run(params, 400, 6)
        assert banned in free
        assert banned not in tokens
        assert rounds.propose is None or accepted.max() == 0


class TestB7ARowsTokensAreItsOwn:
    """Half of the rows have a seed; another order, another batch, other drafts: the same tokens."""

    vocab = 300
    target = random_table(vocab, 21, 2.0)
    draft = target + random_table(vocab, 22, 1.0)
    params = tuple(
        SamplingParams(
            temperature=1.0, seed=i if i % 2 else None, top_p=(1.0, 0.9, 0.6)[i % 3], top_k=(0, 0, 0, 40)[i % 4]
        )
        for i in range(8)
    )

    def run(self, rounds: Rounds, order: list[int]) -> dict[int, list[int]]:
        params = [self.params[i] for i in order]
        tokens, _ = rounds.run(params, len(order), 12, request_id=np.array(order) + 1000, run_seed=5)
        return dict(zip(order, tokens.tolist(), strict=True))

    @pytest.mark.parametrize("k", [0, 4])
    def test_same_tokens_in_any_batch(self, k: int) -> None:
        expected = self.run(Rounds(self.target), list(range(8)))
        rounds = Rounds(self.target, self.draft if k else None, k=k)
        assert self.run(rounds, [5, 2, 7, 0, 1, 6, 3, 4]) == expected
        assert self.run(rounds, [3, 6]) == {i: expected[i] for i in (3, 6)}
        static = Rounds(self.target, self.draft if k else None, k=k, static=True)
        assert self.run(static, list(range(8))) == expected

    def test_wrong_drafts_change_nothing(self) -> None:
        expected = self.run(Rounds(self.target), list(range(8)))

        def propose(last: Tensor) -> Tensor:
            return torch.stack((last * 7 + 1, last * 5 + 3, last), dim=1) % self.vocab

        assert self.run(Rounds(self.target, k=3, propose=propose), list(range(8))) == expected

    def test_another_run_seed_changes_only_rows_without_a_seed(self) -> None:
        first = self.run(Rounds(self.target), list(range(8)))
        tokens, _ = Rounds(self.target).run(list(self.params), 8, 12, request_id=np.arange(8) + 1000, run_seed=6)
        same = [tokens[i].tolist() == first[i] for i in range(8)]
        assert same == [i % 2 == 1 for i in range(8)]

    def test_identical_prompts_are_independent_samples(self) -> None:
        tokens, _ = Rounds(self.target).run(SamplingParams(temperature=1.0), 50, 20)
        assert len({tuple(row) for row in tokens.tolist()}) == 50

    def test_control_noise_keyed_by_the_place_in_the_batch(self) -> None:
        place = Rounds(self.target)
        tokens, _ = place.run([self.params[i] for i in (2, 4)], 2, 20, request_id=np.arange(2))
        swapped, _ = place.run([self.params[i] for i in (4, 2)], 2, 20, request_id=np.arange(2))
        assert tokens[0].tolist() != swapped[1].tolist()
