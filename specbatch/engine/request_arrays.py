"""Requests as the core takes them: one array an option, values and offsets for what has no fixed length.

Knows the core's arguments, nothing of sampling: what the core does not ask for is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams


def core_arrays(batch: RequestBatch, params: Sequence[SamplingParams]) -> dict[str, Any]:
    """Arguments of specbatch._core.Scheduler.add_requests for a batch and its params [n], one a request."""
    count = len(batch)
    return {
        "request_id": batch.request_id,
        "shard": np.full(count, batch.shard, np.int32),
        "prompt_values": batch.prompt_values,
        "prompt_offsets": batch.prompt_offsets,
        "max_tokens": np.fromiter((p.max_tokens for p in params), np.int32, count),
        "min_tokens": np.fromiter((p.min_tokens for p in params), np.int32, count),
        "ignore_eos": np.fromiter((p.ignore_eos for p in params), np.bool_, count),
        **stop_arrays(params),
    }


def stop_arrays(params: Sequence[SamplingParams]) -> dict[str, Any]:
    """Stop tokens and stop strings of requests, as values and offsets; {} when there are none."""
    arrays: dict[str, Any] = {}
    if any(p.stop_token_ids for p in params):
        arrays["stop_token_values"] = np.array([t for p in params for t in p.stop_token_ids], np.int32)
        arrays["stop_token_offsets"] = _offsets(len(p.stop_token_ids) for p in params)
    if any(p.stop for p in params):
        strings = [s.encode() for p in params for s in p.stop]
        arrays["stop_string_values"] = np.frombuffer(b"".join(strings), np.uint8)
        arrays["stop_string_offsets"] = _offsets(len(s) for s in strings)
        arrays["stop_string_rows"] = _offsets(len(p.stop) for p in params)
    return arrays


def _offsets(lengths: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(np.fromiter(lengths, np.int64)))).astype(np.int64)
