"""The Rust scheduler through its arrays: random lives against a device in miniature and against the reference scheduler,
and the situations others have got wrong, one test each."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbatch import _core
from tests.paged_device import Finished, Model, PagedDevice, Request
from tests.reference_scheduler import ReferenceScheduler, Row, Step

NONE, NGRAM, DRAFT, EXTERNAL = _core.METHOD_NONE, _core.METHOD_NGRAM, _core.METHOD_DRAFT, _core.METHOD_EXTERNAL


def prompts(count: int, length: int = 6, shared: int = 0) -> list[tuple[int, ...]]:
    """Prompts of different tokens and slightly different lengths, the first `shared` tokens in common."""
    common = tuple(range(shared))
    return [common + tuple((7 * i + j) % 5 for j in range(length + i % 3)) for i in range(count)]


def run(device: PagedDevice, requests: list[Request], method: int = NONE, k: int = 0) -> dict[int, Finished]:
    device.core.set_speculation(method, k)
    device.add(requests)
    return device.run()


# -- random lives ------------------------------------------------------------------------------------------------------


@st.composite
def lives(draw: st.DrawFn) -> tuple[PagedDevice, list[Request], random.Random]:
    rng = draw(st.randoms(use_true_random=False))
    block_size = draw(st.sampled_from([1, 2, 16]))
    max_model_len = draw(st.integers(4, 40))
    draft_block_size = draw(st.sampled_from([0, 1, 3, 16]))
    device = PagedDevice(
        model=Model(draw(st.integers(2, 5)), draw(st.sampled_from([0, 60, 100])), draw(st.sampled_from([None, 2]))),
        num_pages=2 + draw(st.integers(0, 60)) // (1 + block_size // 4),
        block_size=block_size,
        draft_block_size=draft_block_size,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.integers(1, 30)),
        max_model_len=max_model_len,
        draft_max_model_len=draw(st.sampled_from([0, max_model_len // 2])),
        eos=(1,),
        prefix_cache=draw(st.booleans()),
        token_room=draw(st.sampled_from([0, 7, 12])),
        logits_room=draw(st.sampled_from([0, 7, 12])),
    )
    requests = []
    for request_id in range(draw(st.integers(1, 10))):
        length = rng.randint(0, max_model_len + 1)
        shared = rng.randint(0, length)
        prompt = [i % 3 for i in range(shared)] + [rng.randrange(device.model.vocabulary) for _ in range(length - shared)]
        requests.append(
            Request(
                request_id,
                tuple(prompt),
                max_tokens=rng.randint(1, 25),
                shard=rng.randrange(3),
                min_tokens=rng.choice([0, 0, 0, 5]),
                ignore_eos=rng.random() < 0.7,
                may_draft=rng.random() < 0.85,
                stop_tokens=(rng.randrange(5),) if rng.random() < 0.15 else (),
            )
        )
    return device, requests, rng


def reference_of(device: PagedDevice) -> ReferenceScheduler:
    return ReferenceScheduler(
        num_pages=device.num_pages,
        block_size=device.block_size,
        draft_block_size=device.draft_block_size,
        max_num_seqs=device.max_num_seqs,
        max_num_batched_tokens=device.max_num_batched_tokens,
        max_model_len=device.max_model_len,
        draft_max_model_len=device.draft_max_model_len,
        token_room=device.token_room,
        logits_room=device.logits_room,
        eos=device.eos,
        prefix_cache=device.prefix_cache,
    )


def compare(device: PagedDevice, reference: ReferenceScheduler, expected: Step) -> None:
    """The core decided what the reference decided, and its books show the same."""
    info, arrays = device.info, device.arrays
    assert info is not None
    rows = [
        (
            device.requests[int(arrays["seq_index"][i])].request_id,
            int(np.diff(arrays["query_start_loc"])[i]),
            int(arrays["seq_lens"][i]),
            int(arrays["num_draft_tokens"][i]),
            int(np.diff(arrays["draft_query_start_loc"])[i]),
            int(arrays["draft_seq_lens"][i]),
        )
        for i in range(info.num_rows)
    ]
    assert rows == [
        (
            part.row.request_id,
            part.length,
            part.start + part.length if part.length else 0,
            part.num_drafts,
            part.draft_length,
            part.draft_start + part.draft_length if part.draft_length else 0,
        )
        for part in expected.rows
    ]
    if info.method == NGRAM:
        for i, part in enumerate(expected.rows):
            start, stop = arrays["query_start_loc"][i : i + 2]
            assert arrays["input_ids"][start + 1 : stop].tolist() == (part.drafts or [])
    ours = (info.kind, info.method, info.num_running, info.num_waiting, info.num_preempted, info.num_draft_dropped)
    assert ours == (
        expected.kind,
        expected.method,
        len(reference.running),
        len(reference.waiting),
        expected.preempted,
        expected.draft_dropped,
    )
    pages = (info.free_pages, info.cached_pages, info.target_pages, info.draft_pages)
    assert pages == (reference.free, len(reference.idle), reference.target_pages, reference.draft_pages)


def disturb(device: PagedDevice, reference: ReferenceScheduler, rows: dict[int, Row], rng: random.Random) -> None:
    """One of the things callers may do between two steps, on both sides."""
    handles = sorted(device.requests)
    handle = rng.choice(handles) if handles else 0
    row = rows.get(device.requests[handle].request_id) if handles else None
    action = rng.randrange(10)
    if action <= 1 and row:
        running = row in reference.running
        assert device.preempt(handle) == running
        if running:
            reference.preempt(row)
    elif action == 2:
        device.abort_step()
        reference.abort_step()
    elif action <= 4:
        method = rng.choice([NONE, NGRAM, EXTERNAL, DRAFT if device.draft_block_size else NGRAM])
        k, shard = rng.randrange(6), rng.choice([None, 0, 1, 2])
        device.core.set_speculation(method, k, shard)
        reference.set_speculation(method, k, shard)
    elif action == 5 and row:
        device.core.drop_draft(handle)
        reference.drop_draft(row)
    elif action == 6:
        n = rng.randint(1, device.max_num_seqs)
        device.core.set_max_num_seqs(n)
        reference.set_max_num_seqs(n)
        for other in [h for h in device.found if rows[device.requests[h].request_id] not in reference.running]:
            del device.found[other]
    elif action == 7:
        device.core.clear_prefix_cache()
        reference.clear_prefix_cache()
    elif action == 8 and row and rng.random() < 0.2:
        alive = row in reference.running or row in reference.waiting
        assert device.abort(handle) == alive
        if alive:
            reference.end(row, _core.FINISH_ABORTED)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(lives())
def test_the_core_decides_as_the_reference_and_answers_as_the_model(
    life: tuple[PagedDevice, list[Request], random.Random],
) -> None:
    device, requests, rng = life
    reference = reference_of(device)
    rows: dict[int, Row] = {}
    method = rng.choice([NONE, NGRAM, EXTERNAL, DRAFT if device.draft_block_size else EXTERNAL])
    k = rng.randint(0, 5)
    device.core.set_speculation(method, k)
    reference.set_speculation(method, k, None)

    def add(some: list[Request]) -> None:
        device.add(some)
        for request in some:
            row = Row(
                request.request_id,
                request.shard,
                list(request.prompt),
                request.max_tokens,
                request.min_tokens,
                request.ignore_eos,
                request.may_draft,
                request.stop_tokens,
            )
            rows[request.request_id] = row
            reference.add(row)

    later = requests[len(requests) // 2 :]
    add(requests[: len(requests) // 2])
    for turn in range(4000):
        found = {device.requests[handle].request_id: what for handle, what in device.found.items()}
        device.advance()
        reference.apply(found)
        compare(device, reference, reference.schedule())
        assert device.info is not None
        if device.info.kind == _core.STEP_IDLE and not later:
            break
        device.forward()
        if later and (device.info.kind == _core.STEP_IDLE or rng.random() < 0.1):
            add([later.pop()])
        if turn < 1500 and rng.random() < 0.25:
            disturb(device, reference, rows, rng)
    else:
        raise AssertionError("no end")

    assert [row.request_id for row in reference.finished] == list(device.finished)
    for request in requests:
        answer, row = device.finished[request.request_id], rows[request.request_id]
        assert (answer.reason, answer.error) == row.finish
        assert answer.tokens == row.tokens[row.num_prompt :]
        counts = (answer.cached, answer.steps, answer.drafted, answer.accepted, answer.wasted, answer.preempted)
        assert counts == (row.cached, row.steps, row.drafted, row.accepted, row.wasted, row.preempted)
        if answer.reason in (_core.FINISH_STOP, _core.FINISH_LENGTH):
            device.check_answer(request)
        elif request.prompt and len(request.prompt) < device.max_model_len:
            expected = device.model.complete(request, device.eos, device.max_model_len)[0]
            assert answer.tokens == expected[: len(answer.tokens)]
    assert device.info.free_pages + device.info.cached_pages == device.num_pages - 1


def test_the_device_catches_a_wrong_slot_and_a_wrong_token() -> None:
    """Negative control: the checks above fail when the arrays are wrong."""
    for name in ("slot_mapping", "input_ids", "positions", "block_tables", "draft_slot_mapping", "draft_block_tables"):
        device = PagedDevice(draft_block_size=3)
        device.core.set_speculation(DRAFT, 3)
        device.add([Request(i, p, max_tokens=30) for i, p in enumerate(prompts(3))])
        while device.step().kind != _core.STEP_DECODE:
            pass
        device.advance()
        device.arrays[name].flat[0] += 1
        with pytest.raises(AssertionError):
            device.forward()


# -- one situation each --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "k"), [(NONE, 0), (NGRAM, 4), (EXTERNAL, 4), (DRAFT, 1), (DRAFT, 4)])
def test_the_answer_does_not_depend_on_the_method(method: int, k: int) -> None:
    requests = [Request(i, p, max_tokens=20, stop_strings=(b"cab", b"bb")) for i, p in enumerate(prompts(9))]
    device = PagedDevice(num_pages=24, draft_block_size=5, model=Model(memory=3))
    run(device, requests, method, k)
    for request in requests:
        device.check_answer(request)


def test_autoregressive_steps_follow_a_multi_token_acceptance() -> None:
    """Positions come from the committed count: k = 4 with everything accepted, then k = 0, then k = 2."""
    device = PagedDevice(model=Model(draft_skill=100), draft_block_size=4)
    requests = [Request(i, p, max_tokens=40) for i, p in enumerate(prompts(2))]
    device.core.set_speculation(DRAFT, 4)
    device.add(requests)
    widths = set()
    for turn in range(200):
        info = device.step()
        widths.add(info.max_draft_tokens)
        if info.kind == _core.STEP_IDLE:
            break
        if info.kind == _core.STEP_DECODE:
            device.core.set_speculation(*[(DRAFT, 4), (DRAFT, 0), (DRAFT, 2)][turn % 3])
    assert widths >= {0, 2, 4}
    for request in requests:
        device.check_answer(request)


def test_the_draft_model_catches_up_after_an_autoregressive_phase() -> None:
    """Draft = target: after 40 steps without drafts every draft is right again, and stays right."""
    device = PagedDevice(model=Model(draft_skill=100), draft_block_size=4, max_model_len=128, num_pages=200)
    device.add([Request(i, p, max_tokens=100) for i, p in enumerate(prompts(3))])
    for _ in range(40):
        device.step()
    device.core.set_speculation(DRAFT, 3)
    kinds = [device.step().kind for _ in range(8)]
    assert kinds.count(_core.STEP_DRAFT_PREFILL) == 8 - kinds.count(_core.STEP_DECODE) > 0
    assert kinds[-3:] == [_core.STEP_DECODE] * 3, "one catch-up is enough"
    device.run()
    counts = device.core.take_acceptance()
    assert counts.method.tolist() == [DRAFT]
    assert counts.accepted[0].sum() == counts.offered[0].sum() > 100


def test_leaving_the_draft_model_gives_its_pages_back_at_once() -> None:
    device = PagedDevice(draft_block_size=4)
    device.core.set_speculation(DRAFT, 3)
    device.add([Request(i, p, max_tokens=40) for i, p in enumerate(prompts(3))])
    while device.step().kind != _core.STEP_DECODE:
        pass
    assert device.info is not None and device.info.draft_pages > 0
    device.core.set_speculation(DRAFT, 0)
    assert device.step().draft_pages == 0


def test_a_row_ends_at_the_stop_token_inside_an_accepted_run() -> None:
    """[10, 11, STOP, 20, 21] with max_tokens 5: stop, and everything is cut there."""
    core, arrays, buffers = bare(max_num_seqs=1)
    core.set_speculation(EXTERNAL, 4)
    add_bare(core, max_tokens=6, stop_tokens=[3])
    info = core.step(0, *PagedDevice.nothing(), buffers)
    info = core.step(info.step_id, *result([[9]], [0]), buffers)
    assert info.num_draft_tokens == 4
    info = core.step(info.step_id, *result([[10, 11, 3, 20, 21]], [4]), buffers)
    rows = core.take_finished()
    assert rows.token_values.tolist() == [9, 10, 11, 3]
    assert rows.finish_reason.tolist() == [_core.FINISH_STOP] and rows.stop_token.tolist() == [3]
    assert (rows.num_drafted[0], rows.num_accepted[0], rows.num_steps[0]) == (4, 3, 1)
    counts = core.take_acceptance()
    assert counts.offered[0, :5].tolist() == counts.accepted[0, :5].tolist() == [1, 1, 1, 0, 0]
    assert counts.committed.tolist() == [3]
    assert info.kind == _core.STEP_IDLE and info.free_pages + info.cached_pages == 15
    assert (arrays["seq_index"] == -1).all()


def test_counters_count_committed_tokens_when_eos_is_the_first_of_four_accepted() -> None:
    core, _, buffers = bare(max_num_seqs=1, eos=[7])
    core.set_speculation(EXTERNAL, 4)
    add_bare(core, max_tokens=20)
    info = core.step(0, *PagedDevice.nothing(), buffers)
    info = core.step(info.step_id, *result([[9]], [0]), buffers)
    core.step(info.step_id, *result([[7, 8, 9, 10, 11]], [4]), buffers)
    rows = core.take_finished()
    assert rows.token_values.tolist() == [9, 7]
    assert (rows.num_drafted[0], rows.num_accepted[0]) == (4, 1)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_stop_string_may_span_tokens_and_the_earliest_start_wins(k: int) -> None:
    device = PagedDevice(model=Model(draft_skill=100, memory=2))
    requests = [Request(i, p, max_tokens=30, stop_strings=(b"bab", b"abca", b"aab")) for i, p in enumerate(prompts(12))]
    run(device, requests, EXTERNAL, k)
    for request in requests:
        device.check_answer(request)
    assert any(answer.reason == _core.FINISH_STOP for answer in device.finished.values())


def test_max_tokens_and_context_limit_bound_the_drafts() -> None:
    device = PagedDevice(model=Model(draft_skill=100), draft_block_size=4, max_model_len=20, draft_max_model_len=10)
    device.core.set_speculation(DRAFT, 4)
    requests = [
        Request(0, prompts(1, 6)[0], max_tokens=1),
        Request(1, prompts(1, 18)[0], max_tokens=10),  # max_model_len - 2
        Request(2, prompts(1, 6)[0], max_tokens=3),
        Request(3, prompts(1, 4)[0], max_tokens=14),  # passes the draft's limit
    ]
    device.add(requests)
    drafted: dict[int, list[int]] = {}
    while device.step().kind != _core.STEP_IDLE:
        assert device.info is not None
        for i in range(device.info.num_rows):
            request = device.requests[int(device.arrays["seq_index"][i])]
            drafted.setdefault(request.request_id, []).append(int(device.arrays["num_draft_tokens"][i]))
    for request in requests:
        device.check_answer(request)
    assert sum(drafted[0]) == 0, "a single token is never drafted for"
    assert max(drafted[1]) == 0, "beyond the draft's context the row runs autoregressively"
    assert max(drafted[2]) == 1
    assert drafted[3][-1] == 0 and max(drafted[3]) == 4
    assert device.finished[1].reason == _core.FINISH_LENGTH and len(device.finished[1].tokens) == 2


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
        assert (answers[request_id].reason, answers[request_id].error) == (_core.FINISH_ERROR, _core.ERROR_TOO_FEW_PAGES)
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


def test_an_exception_between_draft_and_verify_leaves_no_trace() -> None:
    device = PagedDevice(draft_block_size=4, num_pages=40)
    requests = [Request(i, p, max_tokens=20) for i, p in enumerate(prompts(4))]
    device.core.set_speculation(DRAFT, 4)
    device.add(requests)
    for turn in range(1000):
        if device.step().kind == _core.STEP_IDLE:
            break
        if turn % 3 == 2:
            device.abort_step()
    answers = device.finished
    for request in requests:
        device.check_answer(request)
    assert sum(answer.wasted for answer in answers.values()) > 0


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
    requests = [Request(i, shared + (i,), max_tokens=4) for i in range(8)]
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
    requests = [Request(i, documents[i % 3] + (i,), max_tokens=2) for i in range(9)]
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
    assert core.abort(handle) and not core.abort(handle)
    assert core.take_finished().finish_reason.tolist() == [_core.FINISH_ABORTED]
    assert add_bare(core, max_tokens=2, request_id=2) == handle
    info = core.step(info.step_id, *result([[55]], [0]), buffers)
    assert info.kind == _core.STEP_PREFILL
    info = core.step(info.step_id, *result([[5]], [0]), buffers)
    core.step(info.step_id, *result([[6]], [0]), buffers)
    rows = core.take_finished()
    assert rows.request_id.tolist() == [2] and rows.token_values.tolist() == [5, 6]


def test_acceptance_counts_are_per_shard_method_and_position() -> None:
    core, _, buffers = bare(max_num_seqs=2)
    core.set_speculation(EXTERNAL, 3, shard=5)
    add_bare(core, max_tokens=20, shard=5)
    add_bare(core, max_tokens=20, shard=6)
    info = core.step(0, *PagedDevice.nothing(), buffers)
    info = core.step(info.step_id, *result([[1], [1]], [0, 0]), buffers)
    assert info.num_draft_tokens == 3
    for tokens, draft in [([1, 1, 1, 1], 3), ([1, 1], 3), ([2], 3), ([1], 0), ([1, 2], 1)]:
        info = core.step(info.step_id, *result([tokens, [4]], [draft, 0]), buffers)
    counts = core.take_acceptance()
    assert counts.shard.tolist() == [5] and counts.method.tolist() == [EXTERNAL]
    assert (counts.rounds[0], counts.proposed[0], counts.committed[0]) == (5, 4, 10)
    assert counts.offered[0, :4].tolist() == [4, 2, 1, 0]
    assert counts.accepted[0, :4].tolist() == [3, 1, 1, 0]
    assert len(core.take_acceptance().shard) == 0


def test_rows_that_do_not_draft_are_not_in_the_denominator() -> None:
    device = PagedDevice(model=Model(draft_skill=100))
    requests = [Request(i, p, max_tokens=20, may_draft=i % 2 == 0) for i, p in enumerate(prompts(4))]
    run(device, requests, EXTERNAL, 3)
    counts = device.core.take_acceptance()
    assert counts.offered.sum() == counts.accepted.sum() == sum(a.drafted for a in device.finished.values())
    assert {i for i, answer in device.finished.items() if answer.drafted} == {0, 2}


def test_the_shadow_counts_what_ngram_speculation_would_have_got() -> None:
    """Rounds scored on tokens that AR produced equal the rounds of n-gram speculation itself."""
    requests = [Request(i, p, max_tokens=40) for i, p in enumerate(prompts(3, 9))]
    shadowed = PagedDevice(model=Model(memory=2), num_pages=100)
    shadowed.core.set_shadow_ngram(3)
    run(shadowed, requests)
    real = PagedDevice(model=Model(memory=2), num_pages=100)
    run(real, requests, NGRAM, 3)
    shadow, counts = shadowed.core.take_acceptance(), real.core.take_acceptance()
    assert shadow.method.tolist() == [_core.METHOD_NGRAM_SHADOW] and counts.method.tolist() == [NGRAM]
    assert counts.accepted[0].sum() > 30
    # The shadow scores the first token of a row too, and does not shorten its last proposals.
    assert np.abs(shadow.accepted[0] - counts.accepted[0]).max() <= 2 * len(requests)
    assert abs(int(shadow.committed[0]) - int(counts.committed[0])) <= 2 * len(requests)


def test_methods_of_overlapping_shards_share_a_step_without_mixing() -> None:
    """A step has one method; the rows of the other shard run autoregressively in it."""
    device = PagedDevice(draft_block_size=4, num_pages=100, max_num_seqs=5)
    device.core.set_speculation(DRAFT, 3, shard=0)
    device.core.set_speculation(NGRAM, 3, shard=1)
    requests = [Request(i, p, max_tokens=24, shard=int(i >= 3)) for i, p in enumerate(prompts(5))]
    device.add(requests)
    device.run()
    for request in requests:
        device.check_answer(request)
    assert set(device.core.take_acceptance().method.tolist()) <= {NGRAM, DRAFT}


def test_text_is_cut_before_the_stop_token_and_the_stop_string() -> None:
    device = PagedDevice(model=Model(vocabulary=5, memory=1), eos=(4,))
    request = Request(0, (1, 2, 3), max_tokens=30)
    device.add([request, replace(request, request_id=1, ignore_eos=True, stop_strings=(b"a",))])
    device.run()
    for answer in device.finished.values():
        device.check_answer(replace(request, request_id=0) if answer.request_id == 0 else replace(
            request, request_id=1, ignore_eos=True, stop_strings=(b"a",)))


# -- helpers without a model ---------------------------------------------------------------------------------------------


def bare(max_num_seqs: int, eos: list[int] | None = None) -> tuple[_core.Scheduler, dict[str, np.ndarray], _core.StepBuffers]:
    """A scheduler whose tokens the test makes up."""
    device = PagedDevice(num_pages=16, max_num_seqs=max_num_seqs, eos=tuple(eos or ()))
    return device.core, device.arrays, device.buffers


def add_bare(
    core: _core.Scheduler,
    max_tokens: int,
    request_id: int = 0,
    shard: int = 0,
    stop_tokens: list[int] | None = None,
) -> int:
    handles = core.add_requests(
        request_id=np.array([request_id], np.int64),
        shard=np.array([shard], np.int32),
        prompt_values=np.array([1, 2, 3], np.int32),
        prompt_offsets=np.array([0, 3], np.int64),
        max_tokens=np.array([max_tokens], np.int32),
        stop_token_values=np.array(stop_tokens or [], np.int32),
        stop_token_offsets=np.array([0, len(stop_tokens or [])], np.int64),
    )
    return int(handles[0])


def result(tokens: list[list[int]], num_draft: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A step's result from the tokens of each row."""
    width = max(len(line) for line in tokens)
    ids = np.array([line + [0] * (width - len(line)) for line in tokens], np.int32)
    return ids, np.array([len(line) for line in tokens], np.int32), np.array(num_draft, np.int32)
