"""Speculation in the Rust scheduler, one situation a test: switching, catch-up, stops in an accepted run, counts."""

from __future__ import annotations

import numpy as np
import pytest

from specbatch import _core
from tests.paged_device import PagedDevice, add_bare, bare, prompts, result, run
from tests.row_model import Model, Request

NONE, NGRAM, DRAFT, EXTERNAL = _core.METHOD_NONE, _core.METHOD_NGRAM, _core.METHOD_DRAFT, _core.METHOD_EXTERNAL


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
    assert device.info is not None
    assert device.info.draft_pages > 0
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
    assert rows.finish_reason.tolist() == [_core.FINISH_STOP]
    assert rows.stop_token.tolist() == [3]
    assert (rows.num_drafted[0], rows.num_accepted[0], rows.num_steps[0]) == (4, 3, 1)
    counts = core.take_acceptance()
    assert counts.offered[0, :5].tolist() == counts.accepted[0, :5].tolist() == [1, 1, 1, 0, 0]
    assert counts.committed.tolist() == [3]
    assert info.kind == _core.STEP_IDLE
    assert info.free_pages + info.cached_pages == 15
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
    assert drafted[3][-1] == 0
    assert max(drafted[3]) == 4
    assert device.finished[1].reason == _core.FINISH_LENGTH
    assert len(device.finished[1].tokens) == 2


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
    assert counts.shard.tolist() == [5]
    assert counts.method.tolist() == [EXTERNAL]
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


@pytest.mark.parametrize("mode", [(_core.METHOD_NONE, 0), (NGRAM, 1), (EXTERNAL, 4)])
def test_the_shadow_counts_what_ngram_speculation_would_have_got(mode: tuple[int, int]) -> None:
    """Rounds scored on tokens that any mode commits equal the rounds of n-gram speculation itself, whatever its k."""
    requests = [Request(i, p, max_tokens=40) for i, p in enumerate(prompts(3, 9))]
    shadowed = PagedDevice(model=Model(memory=2), num_pages=100)
    shadowed.core.set_shadow_ngram(4)
    run(shadowed, requests, *mode)
    shadow = shadowed.core.take_acceptance()
    lines = {k: line for line, k in enumerate(shadow.k.tolist()) if shadow.method[line] == _core.METHOD_NGRAM_SHADOW}
    assert list(lines) == [1, 2, 3, 4]
    assert {k for k, m in zip(shadow.k.tolist(), shadow.method.tolist(), strict=True) if m == mode[0]} <= {0}
    for k, line in lines.items():
        real = PagedDevice(model=Model(memory=2), num_pages=100)
        run(real, requests, NGRAM, k)
        counts = real.core.take_acceptance()
        assert counts.method.tolist() == [NGRAM]
        assert counts.accepted[0].sum() > 20
        assert shadow.accepted[line, k:].sum() == 0
        # The shadow scores the first token of a row too, and does not shorten its last proposals.
        assert np.abs(shadow.accepted[line] - counts.accepted[0]).max() <= 2 * len(requests)
        assert abs(int(shadow.rounds[line]) - int(counts.rounds[0])) <= 2 * len(requests)
        assert abs(int(shadow.committed[line]) - int(counts.committed[0])) <= 2 * len(requests)


def test_rounds_of_fewer_drafts_are_scored_within_real_ones() -> None:
    """Three drafts a round tell what one and two would have brought."""
    requests = [Request(i, p, max_tokens=200) for i, p in enumerate(prompts(6, 9))]
    scored = PagedDevice(model=Model(draft_skill=70), num_pages=400, max_num_seqs=6)
    scored.core.set_score_fewer(True)
    run(scored, requests, EXTERNAL, 3)
    counts = scored.core.take_acceptance()
    lines = {k: line for line, k in enumerate(counts.k.tolist())}
    assert counts.method.tolist() == [EXTERNAL] * 3
    assert sorted(lines) == [0, 1, 2]
    for k in (1, 2):
        real = PagedDevice(model=Model(draft_skill=70), num_pages=400, max_num_seqs=6)
        run(real, requests, EXTERNAL, k)
        wanted, found = real.core.take_acceptance(), lines[k]
        assert counts.offered[found, k:].sum() == 0
        rate = counts.committed[found] / counts.rounds[found]
        assert rate == pytest.approx(wanted.committed[0] / wanted.rounds[0], rel=0.06)
        assert counts.rounds[found] == pytest.approx(counts.rounds[lines[0]], rel=0.05)
    scored.core.set_score_fewer(False)
    run(scored, [Request(9, prompts(1)[0], max_tokens=20)], EXTERNAL, 3)
    assert scored.core.take_acceptance().k.tolist() == [0]


def test_rows_that_accept_little_draft_less_and_give_their_pages_back() -> None:
    requests = [Request(i, p, max_tokens=120) for i, p in enumerate(prompts(4, 9))]
    drafted: dict[float, int] = {}
    for least in (0.0, 0.5):
        device = PagedDevice(model=Model(draft_skill=15), draft_block_size=4, num_pages=400)
        device.core.set_least_acceptance(least, 0.6, 4.0)
        run(device, requests, DRAFT, 4)
        for request in requests:
            device.check_answer(request)
        device.core.check_integrity()
        drafted[least] = sum(answer.drafted for answer in device.finished.values())
    assert drafted[0.5] < 0.4 * drafted[0.0]
    good = PagedDevice(model=Model(draft_skill=100), draft_block_size=4, num_pages=400)
    good.core.set_least_acceptance(0.5, 0.6, 4.0)
    run(good, requests, DRAFT, 4)
    counts = good.core.take_acceptance()
    assert counts.accepted[0, 3] > 0.7 * counts.rounds[0]  # rows that accept all come to have all


@pytest.mark.parametrize(
    ("arguments", "named"), [((1.0,), "least"), ((-0.1,), "least"), ((0.5, 1.1), "usual"), ((0.5, 0.5, -1.0), "weight")]
)
def test_what_is_asked_of_rows_must_be_a_chance(arguments: tuple[float, ...], named: str) -> None:
    core, _, _ = bare(max_num_seqs=2)
    with pytest.raises(ValueError, match=named):
        core.set_least_acceptance(*arguments)


def test_a_shard_that_leaves_draft_mode_between_two_calls_keeps_its_pages() -> None:
    """Modes are set for all and then one by one; what counts is what they are when the next step begins."""
    device = PagedDevice(model=Model(draft_skill=100), draft_block_size=4, num_pages=400)
    device.core.set_speculation(NONE, 0)
    device.core.set_speculation(DRAFT, 4, shard=0)
    device.add([Request(i, p, max_tokens=100) for i, p in enumerate(prompts(3))])
    for _ in range(12):
        info = device.step()
    held = info.draft_pages
    device.core.set_speculation(NONE, 0)
    device.core.set_speculation(DRAFT, 4, shard=0)
    info = device.step()
    assert info.kind == _core.STEP_DECODE
    assert info.draft_pages >= held > 0
    device.core.set_speculation(NONE, 0)
    assert device.step().draft_pages == 0


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
    device = PagedDevice(model=Model(vocabulary=5, memory=1), eos=(3,))
    requests = [
        Request(0, (1, 2, 3), max_tokens=30),
        Request(1, (1, 2, 3), max_tokens=30, ignore_eos=True, stop_strings=(b"a",)),
    ]
    device.add(requests)
    device.run()
    for request in requests:
        device.check_answer(request)
        assert device.finished[request.request_id].reason == _core.FINISH_STOP
