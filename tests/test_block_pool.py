"""Pages as callers see them: the prefix cache, its eviction, the two tenants, and that all pages come back."""

from __future__ import annotations

from specbatch import _core
from tests.paged_device import PagedDevice, prompts, run
from tests.row_model import Request


def test_finished_prompts_stay_cached_until_their_room_is_needed() -> None:
    device = PagedDevice(num_pages=9, block_size=4, max_model_len=32)
    run(device, [Request(0, tuple(range(12)), max_tokens=2)])
    assert device.info is not None
    assert (device.info.cached_pages, device.info.free_pages, device.info.target_pages) == (3, 5, 0)
    run(device, [Request(1, (*range(12), 50), max_tokens=2)])
    assert device.finished[1].cached == 12
    run(device, [Request(2, tuple(range(20, 48)), max_tokens=2)])  # 7 pages: evicts
    run(device, [Request(3, (*range(12), 50), max_tokens=2)])
    assert device.finished[3].cached < 12


def test_the_least_recently_used_prefix_goes_first() -> None:
    device = PagedDevice(num_pages=10, block_size=4, max_model_len=32)
    for request_id, start in enumerate((0, 100, 0)):  # the first prefix is used again after the second
        run(device, [Request(request_id, tuple(range(start, start + 9)), max_tokens=1)])
    run(device, [Request(3, tuple(range(200, 224)), max_tokens=1)])  # needs 6 of 5 free pages and 4 cached
    run(device, [Request(4, tuple(range(9)), max_tokens=1)])
    run(device, [Request(5, tuple(range(100, 109)), max_tokens=1)])
    assert [device.finished[i].cached for i in (0, 1, 2, 4)] == [0, 0, 8, 8]
    assert device.finished[5].cached < 8


def test_a_shared_page_is_counted_once() -> None:
    device = PagedDevice(max_num_seqs=3)
    device.add([Request(i, (*range(8), i), max_tokens=6) for i in range(3)])
    while device.step().kind != _core.STEP_DECODE:
        pass
    assert device.info is not None
    assert device.info.target_pages == 2 + 3


def test_clearing_the_cache_frees_idle_pages_and_forgets_the_others() -> None:
    device = PagedDevice()
    run(device, [Request(0, tuple(range(12)), max_tokens=2)])
    assert device.core.clear_prefix_cache() == 3
    device.add([Request(1, tuple(range(12)), max_tokens=8)])
    device.step()
    device.step()
    assert device.core.clear_prefix_cache() == 0
    device.add([Request(2, tuple(range(12)), max_tokens=2)])
    device.run()
    assert [device.finished[i].cached for i in (1, 2)] == [0, 0]


def test_without_prefix_cache_nothing_is_shared_or_kept() -> None:
    device = PagedDevice(prefix_cache=False)
    run(device, [Request(i, tuple(range(12)), max_tokens=2) for i in range(3)])
    assert device.info is not None
    assert (device.info.cached_pages, device.info.free_pages) == (0, device.num_pages - 1)
    assert all(answer.cached == 0 for answer in device.finished.values())


def test_draft_pages_come_from_the_same_pool_and_go_back() -> None:
    device = PagedDevice(draft_block_size=8, num_pages=40)
    device.core.set_speculation(_core.METHOD_DRAFT, 3)
    device.add([Request(i, p, max_tokens=30) for i, p in enumerate(prompts(3, 10))])
    while device.step().kind != _core.STEP_DECODE:
        pass
    info = device.info
    assert info is not None
    assert info.draft_pages >= 3
    assert info.free_pages + info.cached_pages + info.target_pages + info.draft_pages == 39
    held = info.draft_pages
    assert device.core.drop_draft() == held
    assert device.core.drop_draft() == 0
    device.run()
    for i, prompt in enumerate(prompts(3, 10)):
        device.check_answer(Request(i, prompt, max_tokens=30))


def test_a_preempted_row_finds_its_pages_again() -> None:
    """Output pages included: recomputing costs the tokens of the last page only."""
    device = PagedDevice(num_pages=40)
    device.add([Request(0, tuple(range(10)), max_tokens=30)])
    for _ in range(16):
        device.step()
    known = len(device.tokens[0])
    assert known > 20
    assert device.preempt(0)
    info = device.step()
    assert info.kind == _core.STEP_PREFILL
    assert info.num_tokens <= 4 + 1
    device.run()
    device.check_answer(Request(0, tuple(range(10)), max_tokens=30))
