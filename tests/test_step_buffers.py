"""Step arrays: shapes, one allocation, buckets, and views cut or padded to a step."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from specbatch.engine.step_buffers import Bucket, StepArrays, row_buckets


def make() -> StepArrays:
    return StepArrays(
        max_num_seqs=10, max_num_tokens=40, max_num_logits=30, pages_per_row=5, draft_pages_per_row=2, device="cpu"
    )


INFO = SimpleNamespace(
    num_rows=3,
    num_tokens=7,
    max_query_len=4,
    max_seq_len=20,
    draft_num_tokens=2,
    draft_max_query_len=1,
    draft_max_seq_len=9,
)


def test_arrays_are_disjoint_aligned_slices_of_one_tensor() -> None:
    arrays = make()
    start = arrays.packed_host.data_ptr()
    spans = []
    for number, (name, array) in enumerate(arrays.host.items(), 1):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        offset = array.__array_interface__["data"][0] - start
        assert offset % 128 == 0
        spans.append((offset, offset + array.nbytes))
        assert arrays.device[name].data_ptr() == start + offset
        array[...] = number
    spans.sort()
    assert all(end <= following for (_, end), (following, _) in pairwise(spans))
    assert [int(a.max()) for a in arrays.host.values()] == list(range(1, len(arrays.host) + 1))


def test_the_core_accepts_them() -> None:
    pytest.importorskip("specbatch._core")
    arrays = make()
    assert arrays.core is arrays.core


def test_metadata_is_cut_to_the_step_or_padded_to_a_bucket() -> None:
    arrays = make()
    cut = arrays.metadata(INFO)
    assert [len(t) for t in (cut.query_start_loc, cut.seq_lens, cut.positions, cut.slot_mapping)] == [4, 3, 7, 7]
    assert cut.block_tables.shape == (3, 5)
    assert (cut.num_rows, cut.num_tokens, cut.max_query_len, cut.max_seq_len) == (3, 7, 4, 20)
    draft = arrays.metadata(INFO, draft=True)
    assert draft.block_tables.shape == (3, 2)
    assert (draft.num_tokens, draft.max_query_len, draft.max_seq_len) == (2, 1, 9)
    padded = arrays.metadata(INFO, bucket=Bucket(4, 4))
    assert [len(t) for t in (padded.query_start_loc, padded.seq_lens, padded.positions)] == [5, 4, 16]
    assert (padded.num_rows, padded.num_tokens) == (3, 7)
    assert padded.positions.data_ptr() == arrays.device["positions"].data_ptr()


def test_buckets_hold_the_step_and_are_the_smallest_that_do() -> None:
    arrays = make()
    assert arrays.row_buckets == (1, 2, 4, 8, 10)
    assert arrays.bucket_for(1, 1) == Bucket(1, 1)
    assert arrays.bucket_for(3, 6) == Bucket(4, 7)
    assert arrays.bucket_for(9, 2) == Bucket(10, 2)
    assert arrays.bucket_for(9, 5) is None, "50 tokens are more than the buffers hold"
    assert arrays.bucket_for(11, 1) is None
    assert arrays.bucket_for(1, 10) is None


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100, 256, 700])
def test_row_buckets_rise_to_the_maximum(most: int) -> None:
    buckets = row_buckets(most)
    assert buckets[-1] == most
    assert list(buckets) == sorted(set(buckets))
    assert all(b <= 2 * a or b - a <= 4 for a, b in pairwise(buckets))
