"""Requests of chosen rows of a job, made exactly as a run makes them: for commands that look at rows without a run.

Owns reading and preparing single rows. Knows no output and no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from specbatch.job.params import ParamsParser
from specbatch.job.plan import Plan
from specbatch.job.prepare import GREEDY_SEED, Prepared, Preparer, sample_seeds
from specbatch.job.prompts import PromptBuilder
from specbatch.job.reader import Slice
from specbatch.job.shards import SAMPLE_BITS, Shard
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams


class RowRequests:
    """Reads the inputs of a plan. Raises what a run raises for tokenizer, options and inputs."""

    def __init__(self, plan: Plan) -> None:
        options, tokenizer = plan.options, plan.tokenizer.get
        self._inputs, self._columns = plan.inputs, plan.source.columns
        builder = PromptBuilder(
            plan.source,
            ParamsParser(plan.sampling, plan.target.max_model_len),
            tokenizer.render,
            max_row_bytes=options.max_row_bytes,
            n=options.n,
            logprobs=options.logprobs,
        )
        self._preparer = Preparer(options, builder, tokenizer, plan.target.max_model_len)

    def rows(self, shard: Shard, wanted: Iterable[int] | None = None) -> Iterator[tuple[int, RequestBatch]]:
        """(row of the shard, its request) of each row in `wanted` (None: of all) that can be computed, in order; sample 0."""
        left = None if wanted is None else set(wanted)
        start = 0
        for piece in self._inputs.read(shard, self._columns):
            for row in range(piece.rows):
                if left is not None and start + row not in left:
                    continue
                one = Slice(1, {name: column.slice(row, 1) for name, column in piece.columns.items()})
                work = self._preparer.prepare(shard, start + row, one)
                if len(work):
                    yield start + row, _request(shard, work)
            start += piece.rows

    def first(self, shards: Sequence[Shard], count: int) -> RequestBatch:
        """The first `count` rows that can be computed, as requests of one shard; fewer where there are fewer."""
        every = itertools.chain.from_iterable(self.rows(shard) for shard in shards)
        return merge([request for _, request in itertools.islice(every, count)])


def _request(shard: Shard, work: Prepared) -> RequestBatch:
    ids = (shard.first_key + work.rows) << SAMPLE_BITS
    greedy = bool((work.seeds == GREEDY_SEED).all())
    seeds = None if greedy else sample_seeds(work.seeds, np.zeros(len(work), np.int64))
    return RequestBatch(ids, shard.index, work.values, work.offsets, work.params, seeds)


def merge(requests: Sequence[RequestBatch], shard: int = 0) -> RequestBatch:
    """One batch of several, in their order."""
    if not requests:
        none = np.zeros(0, np.int64)
        return RequestBatch(none, shard, np.zeros(0, np.int32), np.zeros(1, np.int64), SamplingParams())
    lengths = np.concatenate([np.diff(r.prompt_offsets) for r in requests])
    params = [p for r in requests for p in ([r.params] * len(r) if isinstance(r.params, SamplingParams) else r.params)]
    zeros = [np.zeros(len(r), np.int64) if r.seeds is None else r.seeds for r in requests]
    return RequestBatch(
        np.concatenate([r.request_id for r in requests]),
        shard,
        np.concatenate([r.prompt_values for r in requests]),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        params[0] if all(p == params[0] for p in params) else params,
        None if all(r.seeds is None for r in requests) else np.concatenate(zeros),
    )
