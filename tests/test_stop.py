"""Stop conditions through the scheduler: the same place, whatever the number of tokens a step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch import _core
from tests.paged_device import PagedDevice, prompts, run
from tests.row_model import Model, Request

STOPS = st.lists(st.text("abc", min_size=1, max_size=5).map(str.encode), max_size=3)


@settings(max_examples=40, deadline=None)
@given(STOPS, st.integers(0, 12), st.booleans(), st.sampled_from([0, 1, 3, 5]), st.sampled_from([None, 1, 2]))
def test_rows_stop_where_they_would_alone(
    stops: list[bytes], min_tokens: int, ignore_eos: bool, k: int, memory: int | None
) -> None:
    device = PagedDevice(model=Model(draft_skill=90, memory=memory), eos=(3,))
    requests = [
        Request(
            i,
            prompt,
            max_tokens=25,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_tokens=(4,) if i % 2 else (),
            stop_strings=tuple(stops),
        )
        for i, prompt in enumerate(prompts(4))
    ]
    run(device, requests, _core.METHOD_EXTERNAL, k)
    for request in requests:
        device.check_answer(request)


@pytest.mark.parametrize("k", [0, 4])
def test_a_match_that_ends_before_min_tokens_does_not_count(k: int) -> None:
    model = Model(vocabulary=1, draft_skill=100)  # token 0, "a", for ever
    device = PagedDevice(model=model, eos=())
    requests = [
        Request(0, (0,), max_tokens=9, min_tokens=5, stop_strings=(b"aa",)),
        Request(1, (0,), max_tokens=9, min_tokens=5, stop_strings=(b"aaaaaaa",)),
        Request(2, (0,), max_tokens=9, min_tokens=5, stop_tokens=(0,)),
    ]
    run(device, requests, _core.METHOD_EXTERNAL, k)
    found = {i: (len(answer.tokens), answer.text, answer.stop_token) for i, answer in device.finished.items()}
    assert found == {0: (5, b"aaa", -1), 1: (7, b"", -1), 2: (5, b"aaaa", 0)}


def test_eos_as_the_first_token_is_an_empty_answer() -> None:
    device = PagedDevice(model=Model(vocabulary=1), eos=(0,))
    run(device, [Request(0, (0,), max_tokens=9)])
    answer = device.finished[0]
    assert (answer.tokens, answer.text, answer.reason, answer.stop_token) == ([0], b"", _core.FINISH_STOP, 0)
