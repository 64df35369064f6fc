"""Slices as token ids ready for an engine: tokenise, apply the over-long policy, derive seeds and keys.

Pure work on one slice, done ahead of the engine on several threads. Knows no queues, no engine, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.job.keys import Keys, row_keys
from specbatch.job.options import JobOptions
from specbatch.job.params import RowParams
from specbatch.job.prompts import Outcomes, PromptBuilder, Prompts
from specbatch.job.ragged import cut, take, text_buffers
from specbatch.job.reader import Slice
from specbatch.job.shards import SAMPLE_BITS, Shard
from specbatch.requests import Tokenizer
from specbatch.sampling_params import SamplingParams

GREEDY_SEED = -1


@dataclass(slots=True)
class Prepared:
    """Rows [start, start + count) of a shard. Arrays over the m rows to compute, `rows` counted in the shard."""

    start: int
    count: int
    outcomes: Outcomes  # rows counted in the slice
    rows: NDArray[np.int64]  # [m]
    values: NDArray[np.int32]
    offsets: NDArray[np.int64]  # [m + 1], from 0
    params: list[SamplingParams] | SamplingParams
    seeds: NDArray[np.int64]  # [m] of sample 0; GREEDY_SEED where none is needed
    keys: Keys  # [m, 2]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: NDArray[np.int64]) -> Prepared:
        """Only the rows at `index`, with the same outcomes."""
        values, offsets = take(self.values, self.offsets, index)
        params = self.params if isinstance(self.params, SamplingParams) else [self.params[i] for i in index.tolist()]
        return Prepared(
            self.start,
            self.count,
            self.outcomes,
            self.rows[index],
            values,
            offsets,
            params,
            self.seeds[index],
            self.keys[index],
        )


class Preparer:
    """Makes Prepared of slices. Used from several threads at once."""

    def __init__(self, options: JobOptions, builder: PromptBuilder, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._options = options
        self._builder = builder
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._encode_utf8 = getattr(tokenizer, "encode_utf8", None)

    def prepare(self, shard: Shard, start: int, piece: Slice) -> Prepared:
        prompts = self._builder.build(piece)
        values, offsets = self._tokenise(prompts)
        params: Sequence[RowParams] = prompts.params if isinstance(prompts.params, list) else [prompts.params]
        shared = len(params) == 1 and not isinstance(prompts.params, list)
        seeds = _seeds(self._options.seed, shard, start + prompts.rows, params, shared)
        work = Prepared(
            start,
            piece.rows,
            prompts.outcomes,
            start + prompts.rows,
            values,
            offsets,
            params[0].sampling if shared else [item.sampling for item in params],
            seeds,
            np.zeros((len(prompts.rows), 2), np.uint64),
        )
        good = self._fit(work)
        if good is not None:
            work = work.select(good)
            params = params if shared else [params[i] for i in good.tolist()]
        greedy = bool((work.seeds == GREEDY_SEED).all())
        work.keys = row_keys(work.values, work.offsets, [p.key for p in params], None if greedy else work.seeds)
        return work

    # -- token ids

    def _tokenise(self, prompts: Prompts) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of all texts; a text the tokenizer refuses gets an outcome and no ids."""
        special = prompts.special
        if isinstance(special, bool):
            return self._encode(prompts, prompts.texts, prompts.rows, special)
        order = np.argsort(special, kind="stable")
        split = int(np.count_nonzero(~special))
        parts = [
            self._encode(prompts, prompts.texts.take(order[part]), prompts.rows[order[part]], flag)
            for part, flag in ((slice(0, split), False), (slice(split, None), True))
        ]
        values = np.concatenate([values for values, _ in parts])
        offsets = np.concatenate([parts[0][1], parts[1][1][1:] + parts[0][1][-1]])
        return take(values, offsets, np.argsort(order, kind="stable"))

    def _encode(
        self, prompts: Prompts, texts: Any, rows: NDArray[np.int64], special: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        if len(texts) == 0:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        try:
            if self._encode_utf8 is not None:
                values, offsets = self._encode_utf8(*text_buffers(texts), add_special_tokens=special)
            else:
                values, offsets = self._tokenizer.encode(texts.to_pylist(), add_special_tokens=special)
            return values, offsets
        except Exception:  # one text of many: find it
            return self._encode_one_by_one(prompts, texts, rows, special)

    def _encode_one_by_one(
        self, prompts: Prompts, texts: Any, rows: NDArray[np.int64], special: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        pieces: list[NDArray[np.int32]] = []
        for row, text in zip(rows.tolist(), texts.to_pylist(), strict=True):
            try:
                pieces.append(self._tokenizer.encode([text], add_special_tokens=special)[0])
            except Exception as error:  # the tokenizer is somebody else's
                prompts.outcomes.error(row, "tokenizer_error", f"{type(error).__name__}: {error}")
                pieces.append(np.zeros(0, np.int32))
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        return np.concatenate(pieces), offsets

    # -- what fits the context

    def _fit(self, work: Prepared) -> NDArray[np.int64] | None:
        """Truncate in place; give outcomes to rows that cannot run. Returns the others, None when that is all."""
        limit, policy = self._max_model_len, self._options.overlong
        lengths = np.diff(work.offsets)
        empty = lengths == 0
        if policy in ("truncate-left", "truncate-right"):
            if isinstance(work.params, SamplingParams):
                room: Any = limit - work.params.max_tokens
            else:
                room = limit - np.array([p.max_tokens for p in work.params], np.int64)
            kept = np.minimum(lengths, room)
            if not np.array_equal(kept, lengths):
                starts = work.offsets[:-1] + (lengths - kept if policy == "truncate-left" else 0)
                work.values, work.offsets = cut(work.values, starts, kept)
            too_long = np.zeros(len(work), np.bool_)
        else:
            too_long = lengths >= limit
        if not (empty.any() or too_long.any()):
            return None
        known = set(work.outcomes.rows)
        for i in np.flatnonzero(empty).tolist():
            row = int(work.rows[i]) - work.start
            if row not in known:
                work.outcomes.error(row, "empty_prompt", "the tokenizer makes no token of this prompt", 0)
        for i in np.flatnonzero(too_long).tolist():
            row, length = int(work.rows[i]) - work.start, int(lengths[i])
            if policy == "skip":
                work.outcomes.skip(row, length)
            else:
                message = (
                    f"the prompt has {length} tokens, the context of {limit} has room for {limit - 1} and an answer"
                )
                work.outcomes.error(row, "prompt_too_long", message, length)
        return np.flatnonzero(~(empty | too_long))


def _seeds(
    run_seed: int, shard: Shard, rows: NDArray[np.int64], params: Sequence[RowParams], shared: bool
) -> NDArray[np.int64]:
    """Seed of each row's first sample: its own, or one made of the run's seed, file and row number."""
    if shared:
        if params[0].sampling.is_greedy:
            return np.full(len(rows), GREEDY_SEED, np.int64)
        return mix_seeds(run_seed, shard.first_key + rows)
    own = np.array([-1 if p.seed is None else p.seed for p in params], np.int64)
    greedy = np.array([p.sampling.is_greedy for p in params], np.bool_)
    seeds = np.where(own >= 0, own, mix_seeds(run_seed, shard.first_key + rows))
    return np.where(greedy, GREEDY_SEED, seeds)


def mix_seeds(seed: int | NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """63-bit seeds that differ in every bit for neighbouring keys (splitmix64; Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        state = np.asarray(seed, np.int64).astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
        state = state + (keys.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return ((state ^ state >> np.uint64(31)) >> np.uint64(1)).astype(np.int64)


def sample_seeds(seeds: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Seed of each sample: sample 0 has its row's seed, the others have their own. Greedy rows need none (0)."""
    mixed = np.where(samples == 0, seeds, mix_seeds(seeds, samples << SAMPLE_BITS))
    return np.where(seeds == GREEDY_SEED, 0, mixed)
