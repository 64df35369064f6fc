"""The Rust scheduler through its arrays: random lives against a device in miniature and the reference scheduler."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specbatch import _core
from tests.paged_device import PagedDevice, prompts
from tests.reference_books import Step
from tests.reference_pool import Row
from tests.reference_scheduler import ReferenceScheduler
from tests.row_model import Model, Request

NONE, NGRAM, DRAFT, EXTERNAL = _core.METHOD_NONE, _core.METHOD_NGRAM, _core.METHOD_DRAFT, _core.METHOD_EXTERNAL


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
        prompt = [i % 3 for i in range(shared)]
        prompt += [rng.randrange(device.model.vocabulary) for _ in range(length - shared)]
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
