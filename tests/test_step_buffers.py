"""Step arrays: shapes, one allocation, buckets, and views cut or padded to a step."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from specbatch.engine.step_buffers import StepArrays


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


def test_metadata_is_cut_to_the_step() -> None:
    arrays = make()
    cut = arrays.metadata(INFO)
    assert [len(t) for t in (cut.query_start_loc, cut.seq_lens, cut.positions, cut.slot_mapping)] == [4, 3, 7, 7]
    assert cut.block_tables.shape == (3, 5)
    assert (cut.num_rows, cut.num_tokens, cut.max_query_len, cut.max_seq_len) == (3, 7, 4, 20)
    draft = arrays.metadata(INFO, draft=True)
    assert draft.block_tables.shape == (3, 2)
    assert (draft.num_tokens, draft.max_query_len, draft.max_seq_len) == (2, 1, 9)


def test_a_step_copies_its_rows_and_the_columns_it_can_reach() -> None:
    """Over a mirror: what a step may read equals the host's arrays, whatever the widths of its tables."""
    rng = np.random.default_rng(0)
    arrays = StepArrays(
        max_num_seqs=6, max_num_tokens=30, max_num_logits=30, pages_per_row=40, draft_pages_per_row=9,
        block_size=4, draft_block_size=16, mirror=True,
    )  # fmt: skip
    arrays.packed_device.fill_(-7)
    for rows, length, draft_length, drafts in ((6, 160, 0, 0), (3, 13, 15, 2), (2, 30, 140, 4), (1, 1, 1, 1)):
        for array in arrays.host.values():
            array[...] = rng.integers(0, 1000, array.shape)
        info = SimpleNamespace(
            num_rows=rows, max_seq_len=length, draft_num_tokens=rows if drafts else 0,
            draft_max_seq_len=draft_length, max_draft_tokens=drafts,
        )  # fmt: skip
        before = arrays.device["draft_block_tables"].clone()
        arrays.to_device(info)
        arrays.await_copy()
        for name, host in arrays.host.items():
            device = arrays.device[name].numpy()
            if name == "block_tables":
                columns = -(-length // 4)
                assert (device[:rows, :columns] == host[:rows, :columns]).all()
            elif name == "draft_block_tables" and drafts:
                columns = -(-(draft_length + drafts) // 16)
                assert (device[:rows, :columns] == host[:rows, :columns]).all()
            elif name == "draft_block_tables":
                assert (device == before.numpy()).all(), "copied though no draft runs"
            else:
                assert (device == host).all()
