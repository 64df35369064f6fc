"""Counter-based random numbers: functions of (seed, position, purpose, vocabulary index), never of a state.

So a row draws the same numbers whatever its batch, its step, its device or the drafts beside it. Knows nothing of
rows, logits or verification. Static shapes and no host sync: everything here may be captured in a CUDA graph.

Each (seed, position, purpose) is a block of Philox4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy
as 1, 2, 3"): seeds, positions and purposes are independent as far as Philox is. A whole vocabulary of noise would
cost ten rounds of 64-bit products an entry, so the four words of that block key a cheaper mixer over the vocabulary
index: two rounds of multiply and xor-shift (the form of MurmurHash3's finaliser) over an already scattered index,
the first multiplier itself drawn from the key. Integers only, so the uniforms agree bit for bit between devices.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57  # multipliers and Weyl constants of Salmon et al., table 2
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

_UNIT_SCALE = 2.0**-31 * (1 - 2.0**-23)  # 31 bits to the open interval (0, 1): the largest stays 2**-23 below 1 ...
_UNIT_SHIFT = 2.0**-32  # ... and the smallest is 2**-32


class Purpose(IntEnum):
    """What a number is for: streams of one (seed, position) that must not meet."""

    SAMPLE = 0  # the target's Gumbel noise; a coupled draft reads it too
    DRAFT = 1  # a draft's own proposal under rejection verification
    ACCEPT = 2  # the uniform of the acceptance test
    RESIDUAL = 3  # the token after a rejection, and the bonus token


def philox_4x32(counter: Tensor, key: Tensor, rounds: int = 10) -> Tensor:
    """Philox4x32: counter int64 [4, n], key int64 [2, n] (32-bit words in the low half) -> words int64 [4, n]."""
    even, odd = counter[0::2], counter[1::2]  # [2, n]: words (0, 2) and (1, 3)
    multiplier = _pair(_PHILOX_M0, _PHILOX_M1, key)
    weyl = _pair(_PHILOX_W0, _PHILOX_W1, key)
    for _ in range(rounds):
        # NOTE: only the low 32 bits of every word are kept right; bits above them are dropped where they would matter.
        product = ((even & _WORD) * multiplier).flip(0)
        even, odd = (product >> 32) ^ odd ^ key, product
        key = key + weyl
    return torch.stack((even[0], odd[0], even[1], odd[1])) & _WORD


def _pair(first: int, second: int, like: Tensor) -> Tensor:
    """Constants [2, 1], made by fills because a copy from the host cannot be captured."""
    return torch.cat((like.new_full((1, 1), first), like.new_full((1, 1), second)))


def stream_keys(seed: Tensor, position: Tensor, purpose: int) -> Tensor:
    """The block of (seed int64 [n], position [n] of any integer type, purpose): int64 [4, n] words below 2**32."""
    zero = torch.zeros_like(seed)
    counter = torch.stack((position.to(torch.int64), zero + int(purpose), zero, zero))
    return philox_4x32(counter, torch.stack((seed & _WORD, (seed >> 32) & _WORD)))


def uniform(seed: Tensor, position: Tensor, purpose: int) -> Tensor:
    """Float32 [n] strictly inside (0, 1), 31 bits; seed int64 [n], position [n] of any integer type."""
    return _to_unit(stream_keys(seed, position, purpose)[0] >> 1)


def gumbel(seed: Tensor, position: Tensor, purpose: int, vocab: int) -> Tensor:
    """Standard Gumbel noise float32 [n, vocab] of every vocabulary index, between -2.8 and 22.2."""
    index = torch.arange(vocab, dtype=torch.int32, device=seed.device)
    return gumbel_at(stream_keys(seed, position, purpose), index)


def gumbel_at(keys: Tensor, index: Tensor) -> Tensor:
    """Gumbel noise [n, m] of chosen vocabulary indices: keys [4, n] of `stream_keys`, index int32 [m] or [n, m]."""
    return gumbel_from_bits(vocabulary_bits(keys, index))


def vocabulary_bits(keys: Tensor, index: Tensor) -> Tensor:
    """31 random bits int32 [n, m] for each row's key and vocabulary index (int32 [m] or [n, m])."""
    return keyed_bits(keys, scatter_index(index))


def keyed_bits(keys: Tensor, scattered: Tensor) -> Tensor:
    """As `vocabulary_bits`, for indices that went through `scatter_index` already: once serves many rows."""
    word = _to_int32(keys)[:, :, None]  # [4, n, 1]
    bits = scattered ^ word[0]
    bits.mul_(word[1] | 1)
    scratch = torch.bitwise_right_shift(bits, 15).bitwise_and_(0x1FFFF)
    bits.bitwise_xor_(scratch).mul_(0x2C1B3C6D).bitwise_xor_(word[2])
    torch.bitwise_right_shift(bits, 12, out=scratch)
    bits.bitwise_xor_(scratch.bitwise_and_(0xFFFFF)).mul_(0x297A2D39).add_(word[3])
    # An arithmetic shift clears the sign here: 32 bits fall evenly, two to one, on 31.
    torch.bitwise_right_shift(bits, 15, out=scratch)
    return bits.bitwise_xor_(scratch)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """-log(-log(u)) with u = 1 - unit(bits): the far right tail, where maxima are decided, comes from small units."""
    unit = _to_unit(bits)
    return unit.neg_().log1p_().neg_().log_().neg_()


def _to_unit(bits: Tensor) -> Tensor:
    # NOTE: two operations, never fused, so every device rounds alike.
    return bits.to(torch.float32).mul_(_UNIT_SCALE).add_(_UNIT_SHIFT)


def _to_int32(words: Tensor) -> Tensor:
    """Low 32 bits of int64 words as int32, two's complement (a plain cast past the range is not defined everywhere)."""
    return (((words & _WORD) ^ 0x80000000) - 0x80000000).to(torch.int32)


def scatter_index(index: Tensor) -> Tensor:
    """A fixed bijection of 32-bit integers that spreads neighbouring vocabulary indices (int32, any shape)."""
    bits = index * -1640531527 + 0x3C6EF372  # the Weyl constant 0x9E3779B9 as int32
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2073254261
    return bits ^ ((bits >> 16) & 0xFFFF)
