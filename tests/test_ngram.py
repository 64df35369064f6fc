"""The n-gram proposer against its definition by scanning, and inside the scheduler."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specbatch import _core
from tests.paged_device import PagedDevice
from tests.reference_scheduler import scan_ngram
from tests.row_model import Model, Request


def find(tokens: list[int], k: int, shortest: int = 2, longest: int = 4) -> list[int]:
    return _core.find_ngram(np.array(tokens, np.int32), k, shortest, longest).tolist()


def test_the_longest_match_wins_then_the_most_recent() -> None:
    tokens = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert find(tokens, 2) == [9, 2]
    assert find(tokens, 2, longest=2) == [8, 1]


def test_no_match_no_proposal() -> None:
    assert find([1, 2, 3, 4], 4) == []
    assert find([], 4) == []
    assert find([5], 4, 1, 1) == []
    assert find([1, 2, 1, 2], 0) == []


def test_a_repetition_is_continued_past_the_end() -> None:
    assert find([5, 5, 5], 4) == [5, 5, 5, 5]
    assert find([7, 1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]


@given(st.lists(st.integers(0, 3), max_size=150), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
def test_the_index_equals_a_scan(tokens: list[int], k: int, shortest: int, more: int) -> None:
    assert find(tokens, k, shortest, shortest + more) == scan_ngram(tokens, k, shortest, shortest + more)


def test_proposals_in_a_step_are_those_of_the_function() -> None:
    """Whatever happened before (other methods, preemption): the index follows the committed tokens."""
    device = PagedDevice(model=Model(memory=3), max_model_len=128, num_pages=100)
    device.add([Request(i, tuple((i + j * j) % 5 for j in range(12)), max_tokens=80) for i in range(3)])
    checked = 0
    for turn in range(400):
        device.advance()
        assert device.info is not None
        if device.info.method == _core.METHOD_NGRAM:
            for row in range(device.info.num_rows):
                known = device.tokens[int(device.arrays["seq_index"][row])]
                start, stop = device.arrays["query_start_loc"][row : row + 2]
                drafts = device.arrays["input_ids"][start + 1 : stop].tolist()
                assert drafts == find(known, 5)[: len(drafts)]
                assert drafts or not find(known, 5) or len(known) >= 12 + 79
                checked += bool(drafts)
        device.forward()
        if turn % 11 == 10:
            device.preempt(turn % 3)
        device.core.set_speculation(_core.METHOD_NGRAM if turn % 3 else _core.METHOD_NONE, 5)
    assert checked > 20
