"""Keyed random numbers: known answers, uniformity, independence across every part of the key, the tails."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from specbatch.engine.rng import (
    Purpose,
    gumbel,
    gumbel_at,
    gumbel_from_bits,
    philox_4x32,
    stream_keys,
    uniform,
    vocabulary_bits,
)
from tests.chi_squared import chi_squared_z, joint_counts

BINS = 16
LIMIT = 4.5  # standard deviations; the seeds are fixed, so a pass stays a pass


def binned(bits: Tensor, shift: int = 27) -> np.ndarray:
    return (bits.to(torch.int64).numpy() >> shift) & (BINS - 1)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers that the authors of Philox publish with Random123
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    result = philox_4x32(torch.tensor(counter)[:, None], torch.tensor(key)[:, None])
    assert result[:, 0].tolist() == words


def mixed_by_hand(words: list[int], index: int) -> int:
    """vocabulary_bits of one index in plain integers."""
    mask = 0xFFFFFFFF
    x = (index * 0x9E3779B9 + 0x3C6EF372) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    x ^= x >> 16
    x = ((x ^ words[0]) * (words[1] | 1)) & mask
    x = (((x ^ (x >> 15)) * 0x2C1B3C6D) & mask) ^ words[2]
    x = (((x ^ (x >> 12)) * 0x297A2D39) + words[3]) & mask
    signed = x - (1 << 32) if x >> 31 else x
    return (signed ^ (signed >> 15)) & mask


def test_vocabulary_bits_equal_plain_integers() -> None:
    keys = stream_keys(torch.tensor([0, -1, 7, 2**63 - 1]), torch.tensor([0, 5, 2**31 - 1, 1]), Purpose.SAMPLE)
    index = torch.tensor([0, 1, 2, 49_151, 151_935, 2**31 - 1], dtype=torch.int32)
    expected = [[mixed_by_hand(keys[:, row].tolist(), i) for i in index.tolist()] for row in range(4)]
    assert vocabulary_bits(keys, index).tolist() == expected


def test_numbers_do_not_change() -> None:
    """A recorded output must come out again after an upgrade: these values are part of the format of a seed."""
    keys = stream_keys(torch.tensor([1234567890123456789]), torch.tensor([17]), Purpose.SAMPLE)
    recorded = [429_847_337, 680_625_700, 760_878_583, 2_017_072_244]
    assert vocabulary_bits(keys, torch.arange(4, dtype=torch.int32)).tolist() == [recorded]


def test_seeds_use_all_64_bits() -> None:
    seeds = torch.tensor([5, 5 + 2**32, 5 - 2**63, 5 + 2**62])
    keys = stream_keys(seeds, torch.zeros(4, dtype=torch.int32), Purpose.SAMPLE)
    assert len({tuple(keys[:, i].tolist()) for i in range(4)}) == 4


def test_the_extremes_are_inside_the_open_interval() -> None:
    bits = torch.tensor([0, 1, 2**31 - 65, 2**31 - 1], dtype=torch.int32)
    noise = gumbel_from_bits(bits)
    assert torch.isfinite(noise).all()
    assert noise[0] == pytest.approx(math.log(2**32), abs=1e-4)  # the far right tail exists
    assert noise[1] == pytest.approx(math.log(2**32 / 3), abs=1e-4)
    assert noise[3] < -2.7
    values = uniform(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int32), Purpose.ACCEPT)
    assert 0 < float(values.min()) <= float(values.max()) < 1


def test_uniform_is_uniform_and_independent_across_keys() -> None:
    side = 256
    seed = torch.arange(side).repeat_interleave(side)
    position = torch.arange(side, dtype=torch.int32).repeat(side)
    grids = {
        purpose: (uniform(seed, position, purpose).double().numpy() * BINS).astype(np.int64).reshape(side, side)
        for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL)
    }
    accept, residual = grids.values()
    assert chi_squared_z(np.bincount(accept.ravel(), minlength=BINS)) < LIMIT
    for first, second in (
        (accept[1:], accept[:-1]),  # neighbouring seeds
        (accept[:, 1:], accept[:, :-1]),  # neighbouring positions
        (accept, residual),  # purposes
    ):
        assert chi_squared_z(joint_counts(first.ravel(), second.ravel(), size=BINS)) < LIMIT


def test_vocabulary_noise_is_independent_across_indices_positions_and_seeds() -> None:
    rows = 1 << 16
    index = torch.tensor([0, 1, 2, 3, 256, 257, 4096, 49_151], dtype=torch.int32)
    by_position = stream_keys(torch.full((rows,), 42), torch.arange(rows), Purpose.SAMPLE)
    by_seed = stream_keys(torch.arange(rows), torch.full((rows,), 42), Purpose.SAMPLE)
    for keys in (by_position, by_seed):
        bits = vocabulary_bits(keys, index)
        for shift in (27, 13, 0):  # high, middle and low bits
            cells = binned(bits, shift)
            for i in range(len(index)):
                assert chi_squared_z(np.bincount(cells[:, i], minlength=BINS)) < LIMIT
                assert chi_squared_z(joint_counts(cells[1:, i], cells[:-1, i], size=BINS)) < LIMIT
                for j in range(i):
                    assert chi_squared_z(joint_counts(cells[:, i], cells[:, j], size=BINS)) < LIMIT


def test_a_mixer_without_the_keyed_multiplier_is_caught() -> None:
    """Negative control: one shared permutation, shifted by a key, ties vocabulary entries together."""
    rows = 1 << 16
    keys = stream_keys(torch.full((rows,), 42), torch.arange(rows), Purpose.SAMPLE)
    bits = (torch.tensor([1, 2], dtype=torch.int64)[None, :] * 0x9E3779B9 + keys[0][:, None]) & 0x7FFFFFFF
    cells = binned(bits)
    assert chi_squared_z(np.bincount(cells[:, 0], minlength=BINS)) < LIMIT
    assert chi_squared_z(joint_counts(cells[:, 0], cells[:, 1], size=BINS)) > 100


def test_every_row_of_noise_looks_like_a_sample_of_its_own() -> None:
    vocab, rows = 49_152, 12
    bits = vocabulary_bits(
        stream_keys(torch.arange(rows), torch.full((rows,), 9), Purpose.SAMPLE), torch.arange(vocab, dtype=torch.int32)
    )
    high, middle = binned(bits), binned(bits, 15)
    for row in range(rows):
        assert chi_squared_z(joint_counts(high[row, 1:], high[row, :-1], size=BINS)) < LIMIT
        assert chi_squared_z(joint_counts(high[row], middle[row], size=BINS)) < LIMIT
    repeats = sum(vocab - len(np.unique(row)) for row in bits.numpy())
    assert repeats < 2 * rows * vocab * vocab / 2 / 2**31


def test_gumbel_noise_has_gumbels_distribution_and_tail() -> None:
    noise = gumbel(torch.arange(64), torch.full((64,), 3, dtype=torch.int32), Purpose.SAMPLE, 49_152).numpy().ravel()
    edges = -np.log(-np.log(np.arange(1, 64) / 64))
    assert chi_squared_z(np.bincount(np.searchsorted(edges, noise), minlength=64)) < LIMIT
    for level in (8.0, 11.0):  # maxima over a vocabulary live here
        expected = noise.size * -math.expm1(-math.exp(-level))
        assert abs((noise > level).sum() - expected) < 4 * math.sqrt(expected)


def test_the_maximum_falls_on_every_index_alike() -> None:
    vocab, rows = 96, 1 << 16
    noise = gumbel(torch.full((rows,), 3), torch.arange(rows), Purpose.SAMPLE, vocab)
    winners = noise.argmax(dim=1).numpy()
    assert chi_squared_z(np.bincount(winners, minlength=vocab)) < LIMIT
    assert chi_squared_z(joint_counts(winners[1:] % 16, winners[:-1] % 16, size=16)) < LIMIT


def test_noise_depends_on_nothing_but_its_key() -> None:
    seed, position = torch.arange(11) * 7919, torch.arange(11, dtype=torch.int32) + 100
    whole = gumbel(seed, position, Purpose.SAMPLE, 1003)
    order = torch.tensor([7, 0, 10, 3])
    assert torch.equal(gumbel(seed[order], position[order], Purpose.SAMPLE, 1003), whole[order])
    assert torch.equal(gumbel(seed[4:5], position[4:5].long(), Purpose.SAMPLE, 17), whole[4:5, :17])
    some = torch.tensor([[5, 900, 1002], [1, 0, 3]], dtype=torch.int32)
    chosen = gumbel_at(stream_keys(seed[:2], position[:2], Purpose.SAMPLE), some)
    assert torch.equal(chosen, whole[:2].gather(1, some.long()))
    assert not torch.equal(gumbel(seed, position, Purpose.DRAFT, 1003), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_devices_agree_on_every_bit() -> None:
    seed, position = torch.arange(64) * 7919, torch.arange(64, dtype=torch.int32)
    index = torch.arange(49_152, dtype=torch.int32)
    host = vocabulary_bits(stream_keys(seed, position, Purpose.SAMPLE), index)
    device = vocabulary_bits(stream_keys(seed.cuda(), position.cuda(), Purpose.SAMPLE), index.cuda())
    assert torch.equal(host, device.cpu())
    accept = uniform(seed.cuda(), position.cuda(), Purpose.ACCEPT).cpu()
    assert torch.equal(uniform(seed, position, Purpose.ACCEPT), accept)
    torch.testing.assert_close(gumbel_from_bits(host), gumbel_from_bits(device).cpu(), rtol=1e-6, atol=1e-6)
