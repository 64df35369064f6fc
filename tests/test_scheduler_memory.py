"""Pages, preemption, admission and limits of the Rust scheduler, one situation a test."""

from __future__ import annotations

import pytest

from specbatch import _core
from tests.paged_device import PagedDevice, add_bare, bare, prompts, result, run
from tests.row_model import Model, Request

NGRAM, DRAFT, EXTERNAL = _core.METHOD_NGRAM, _core.METHOD_DRAFT, _core.METHOD_EXTERNAL


def test_a_row_larger_than_the_pool_fails_and_the_others_go_on() -> None:
    device = PagedDevice(num_pages=6, block_size=4, draft_block_size=4, model=Model(draft_skill=100))
    requests = [
        Request(0, prompts(1, 4)[0], max_tokens=8),
        Request(1, prompts(1, 10)[0], max_tokens=40),  # outgrows 5 pages
        Request(2, tuple(range(30)), max_tokens=4),  # never fits
        Request(3, prompts(1, 5)[0], max_tokens=8),
    ]
    answers = run(device, requests, DRAFT, 4)
    device.check_answer(requests[0])
    device.check_answer(requests[3])
    for request_id in (1, 2):
        assert answers[request_id].reason == _core.FINISH_ERROR
        assert answers[request_id].error == _core.ERROR_TOO_FEW_PAGES
    assert answers[2].tokens == []
    expected = device.model.complete(requests[1], (), 64)[0]
    assert answers[1].tokens == expected[:11], "as far as 5 pages go: 20 tokens computed and one more sampled"


@pytest.mark.parametrize("method", [NGRAM, EXTERNAL, DRAFT])
def test_a_pool_exactly_full_shrinks_k_and_nothing_waits_for_ever(method: int) -> None:
    """Two rows of two pages fill four pages; there is no slot for drafts past them."""
    device = PagedDevice(num_pages=5, block_size=8, draft_block_size=8, model=Model(draft_skill=100, memory=2))
    requests = [Request(i, p, max_tokens=9) for i, p in enumerate(prompts(2, 7))]
    device.core.set_speculation(method, 4)
    device.add(requests)
    device.run(most=200)
    for request in requests:
        device.check_answer(request)


def test_a_tiny_pool_preempts_between_draft_and_verify() -> None:
    device = PagedDevice(num_pages=14, block_size=2, draft_block_size=2, max_num_seqs=4)
    requests = [Request(i, p, max_tokens=12) for i, p in enumerate(prompts(6, 4))]
    device.core.set_speculation(EXTERNAL, 3)
    device.add(requests)
    for turn in range(2000):
        info = device.step()
        if info.kind == _core.STEP_IDLE:
            break
        if turn % 5 == 4 and device.found:
            assert device.preempt(sorted(device.found)[0])
    answers = device.finished
    for request in requests:
        device.check_answer(request)
    assert sum(answer.preempted for answer in answers.values()) > 5
    assert sum(answer.wasted for answer in answers.values()) > 5


def test_two_rows_do_not_preempt_each_other_for_ever() -> None:
    """Each row alone fits, both together do not: the older one runs through."""
    device = PagedDevice(num_pages=9, block_size=2, max_num_seqs=2, model=Model(vocabulary=50))
    requests = [Request(i, p, max_tokens=10) for i, p in enumerate(prompts(2, 6))]
    device.add(requests)
    device.run(most=100)
    for request in requests:
        device.check_answer(request)
    assert device.finished[0].preempted == 0


def test_the_draft_leaves_first_and_does_not_come_back_at_once() -> None:
    """Pages run out: draft tables are dropped before any row is preempted, and their rows go on without."""
    device = PagedDevice(
        num_pages=31, block_size=2, draft_block_size=2, max_num_seqs=3, prefix_cache=False, model=Model(draft_skill=20)
    )
    requests = [Request(i, p, max_tokens=14) for i, p in enumerate(prompts(3, 4))]
    device.core.set_speculation(DRAFT, 2)
    device.add(requests)
    dropped, catch_ups_after = 0, 0
    while device.step().kind != _core.STEP_IDLE:
        assert device.info is not None
        assert device.info.num_preempted == 0
        catch_ups_after += dropped > 0 and device.info.kind == _core.STEP_DRAFT_PREFILL
        dropped += device.info.num_draft_dropped
    assert dropped > 0
    assert catch_ups_after == 0, "16 decode steps must pass first"
    for request in requests:
        device.check_answer(request)


def test_a_common_prefix_is_computed_once_even_within_one_burst() -> None:
    shared = tuple(range(32))
    requests = [Request(i, (*shared, i), max_tokens=4) for i in range(8)]
    device = PagedDevice(num_pages=100, max_num_seqs=8, max_num_batched_tokens=256, model=Model(vocabulary=5))
    device.add(requests)
    first = device.step()
    assert (first.kind, first.num_rows, first.num_tokens) == (_core.STEP_PREFILL, 1, 33)
    second = device.step()
    assert (second.kind, second.num_rows, second.num_tokens) == (_core.STEP_PREFILL, 7, 7)
    device.run()
    for request in requests:
        device.check_answer(request)
    assert sorted(answer.cached for answer in device.finished.values()) == [0] + [32] * 7


def test_identical_prompts_leave_one_token_to_compute() -> None:
    requests = [Request(i, tuple(range(16)), max_tokens=2) for i in range(3)]
    device = PagedDevice(max_num_seqs=3)
    device.add(requests)
    assert [device.step().num_tokens for _ in range(2)] == [16, 8]
    device.run()
    for request in requests:
        device.check_answer(request)


def test_rows_with_a_common_prefix_run_together() -> None:
    """Three documents, asked about in turn: the questions to one document are neighbours."""
    documents = [tuple(range(d, d + 8)) for d in (0, 10, 20)]
    requests = [Request(i, (*documents[i % 3], i), max_tokens=2) for i in range(9)]
    device = PagedDevice(max_num_seqs=1, num_pages=12)
    device.add(requests)
    device.run()
    assert [request_id % 3 for request_id in device.finished] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sum(answer.cached for answer in device.finished.values()) == 6 * 8


def test_row_order_is_stable_while_nobody_joins_or_leaves() -> None:
    device = PagedDevice(max_num_seqs=4)
    device.core.set_speculation(EXTERNAL, 3)
    device.add([Request(i, p, max_tokens=30) for i, p in enumerate(prompts(4))])
    orders = set()
    for _ in range(12):
        info = device.step()
        if info.kind == _core.STEP_DECODE and info.num_rows == 4:
            orders.add(tuple(device.arrays["seq_index"][:4].tolist()))
    assert len(orders) == 1


def test_a_long_prompt_is_computed_in_chunks() -> None:
    device = PagedDevice(max_num_batched_tokens=7)
    request = Request(0, tuple(i % 5 for i in range(23)), max_tokens=3)
    device.add([request])
    lengths = [device.step().num_tokens for _ in range(4)]
    assert lengths == [7, 7, 7, 2]
    device.run()
    device.check_answer(request)


def test_surplus_rows_are_preempted_when_fewer_may_run() -> None:
    device = PagedDevice(max_num_seqs=4)
    requests = [Request(i, p, max_tokens=12) for i, p in enumerate(prompts(4))]
    device.add(requests)
    while device.step().kind != _core.STEP_DECODE:
        pass
    device.abort_step()
    device.core.set_max_num_seqs(1)
    assert (device.core.num_running, device.core.num_waiting, device.core.max_num_seqs) == (1, 3, 1)
    assert device.step().num_running == 1
    device.core.set_max_num_seqs(4)
    device.run()
    for request in requests:
        device.check_answer(request)
    assert device.finished[0].preempted == 0


def test_late_results_of_gone_rows_do_not_land() -> None:
    """A row aborted, taken and its handle given to another row, all while its step is under way."""
    core, arrays, buffers = bare(max_num_seqs=2)
    add_bare(core, max_tokens=8, request_id=1)
    info = core.step(0, *PagedDevice.nothing(), buffers)
    info = core.step(info.step_id, *result([[9]], [0]), buffers)
    handle = int(arrays["seq_index"][0])
    assert core.abort(handle)
    assert not core.abort(handle)
    assert core.take_finished().finish_reason.tolist() == [_core.FINISH_ABORTED]
    assert add_bare(core, max_tokens=2, request_id=2) == handle
    info = core.step(info.step_id, *result([[55]], [0]), buffers)
    assert info.kind == _core.STEP_PREFILL
    info = core.step(info.step_id, *result([[5]], [0]), buffers)
    core.step(info.step_id, *result([[6]], [0]), buffers)
    rows = core.take_finished()
    assert rows.request_id.tolist() == [2]
    assert rows.token_values.tolist() == [5, 6]
