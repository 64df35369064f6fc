"""What crosses between Python and the Rust core: every wrong array is refused by name and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specbatch import _core
from tests.paged_device import PagedDevice, make_arrays, prompts
from tests.row_model import Request

SHAPE = {"rows": 3, "tokens": 40, "logits": 18, "width": 16, "draft_width": 16}


def requests(**changes: Any) -> dict[str, Any]:
    """Arguments of add_requests for two rows, some of them replaced."""
    arguments: dict[str, Any] = {
        "request_id": np.array([7, 8], np.int64),
        "shard": np.zeros(2, np.int32),
        "prompt_values": np.array([1, 2, 3, 4, 5], np.int32),
        "prompt_offsets": np.array([0, 2, 5], np.int64),
        "max_tokens": np.array([4, 4], np.int32),
    }
    return arguments | changes


@pytest.fixture
def device() -> PagedDevice:
    """Two rows in the middle of a decode step with drafts; a result is due."""
    device = PagedDevice(max_num_seqs=3, draft_block_size=4)
    device.core.set_speculation(_core.METHOD_EXTERNAL, 3)
    device.add([Request(i, p, max_tokens=20) for i, p in enumerate(prompts(2))])
    while device.step().kind != _core.STEP_DECODE:
        pass
    return device


def call(device: PagedDevice, **changes: Any) -> _core.StepInfo:
    assert device.info is not None
    names = ("token_ids", "num_sampled", "num_draft")
    arguments: dict[str, Any] = dict(zip(names, device.result, strict=True)) | {"step_id": device.info.step_id}
    return device.core.step(**(arguments | changes), buffers=device.buffers)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


Change = Callable[[np.ndarray, np.ndarray, np.ndarray], dict[str, Any]]  # of token_ids, num_sampled, num_draft
WRONG_RESULTS: dict[str, tuple[Change, str]] = {
    "dtype": (lambda t, s, d: {"token_ids": t.astype(np.int64)}, r"token_ids: expected .*int32\[B, w\], got int64\["),
    "dimensions": (lambda t, s, d: {"token_ids": t[0]}, r"token_ids: expected .*\[B, w\], got int32\[6\]"),
    "order": (
        lambda t, s, d: {"token_ids": np.asfortranarray(t)},
        r"token_ids: expected C-contig.*\(not C-contiguous\)",
    ),
    "stride": (lambda t, s, d: {"num_sampled": np.repeat(s, 2)[::2]}, r"num_sampled: expected C-contiguous"),
    "rows": (lambda t, s, d: {"token_ids": t[:1]}, r"token_ids: expected .* with 2 rows, got int32\[1, 6\]"),
    "missing rows": (
        lambda t, s, d: {"token_ids": t[:1], "num_sampled": s[:1], "num_draft": d[:1]},
        r"num_sampled: expected shape \[2\] .*got \[1\]",
    ),
    "no rows": (
        lambda t, s, d: {"token_ids": t[:0], "num_sampled": s[:0], "num_draft": d[:0]},
        r"num_sampled: expected shape \[2\] .*got \[0\]",
    ),
    "columns": (
        lambda t, s, d: {"token_ids": t[:, :1].copy(), "num_sampled": ints(1, 2)},
        r"token_ids: expected at least 2 columns .*got 1",
    ),
    "other length": (lambda t, s, d: {"num_draft": ints(0, 0, 0)}, r"num_draft: expected .* 2 rows, got int32\[3\]"),
    "too many": (lambda t, s, d: {"num_sampled": ints(1, 5)}, r"num_sampled\[1\]: expected 1\.\.=4 .*got 5"),
    "none": (lambda t, s, d: {"num_sampled": ints(0, 1)}, r"num_sampled\[0\]: expected 1\.\.=4 .*got 0"),
    "more than drafted": (
        lambda t, s, d: {"num_sampled": ints(1, 3), "num_draft": ints(3, 1)},
        r"num_sampled\[1\]: expected 1\.\.=2 .*got 3",
    ),
    "drafted too many": (lambda t, s, d: {"num_draft": ints(3, 4)}, r"num_draft\[1\]: expected 0\.\.=3 .*got 4"),
    "negative drafts": (lambda t, s, d: {"num_draft": ints(-1, 3)}, r"num_draft\[0\]: expected 0\.\.=3 .*got -1"),
    "negative id": (lambda t, s, d: {"token_ids": t * 0 - 1}, r"token_ids\[0, 0\]: expected .* at least 0, got -1"),
    "unknown step": (lambda t, s, d: {"step_id": 99}, r"step_id: expected \d+ \(the outstanding step\), got 99"),
    "old step": (lambda t, s, d: {"step_id": 1}, r"step_id: expected \d+ \(the outstanding step\), got 1"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_RESULTS.values(), ids=WRONG_RESULTS.keys())
def test_a_wrong_result_is_refused_and_changes_nothing(device: PagedDevice, change: Change, message: str) -> None:
    before = {name: array.copy() for name, array in device.arrays.items()}
    with pytest.raises(ValueError, match=message):
        call(device, **change(*device.result))
    for name, array in device.arrays.items():
        assert (array == before[name]).all(), name
    device.run()  # the right result still fits, and the answers are right
    for i, prompt in enumerate(prompts(2)):
        device.check_answer(Request(i, prompt, max_tokens=20))


def test_lists_are_not_arrays(device: PagedDevice) -> None:
    with pytest.raises(TypeError, match=r"num_sampled: expected a numpy array int32\[B\], got .*list"):
        call(device, num_sampled=[1, 1])


def test_views_of_the_buffers_may_be_handed_back(device: PagedDevice) -> None:
    """num_draft is often a slice of the very array that the call fills."""
    assert call(device, num_draft=device.arrays["num_draft_tokens"][:2]).kind == _core.STEP_DECODE


def test_a_step_id_without_a_step_is_refused() -> None:
    device = PagedDevice()
    with pytest.raises(ValueError, match="no step is outstanding"):
        device.core.step(5, *device.nothing(), device.buffers)
    with pytest.raises(ValueError, match="no step is outstanding"):
        device.core.step(0, np.ones((1, 1), np.int32), np.ones(1, np.int32), np.zeros(1, np.int32), device.buffers)
    with pytest.raises(ValueError, match="step_id"):
        device.core.abort_step(1)
    info = device.core.step(0, *device.nothing(), device.buffers)
    assert info.kind == _core.STEP_IDLE
    device.core.abort_step(info.step_id)  # nothing to forget
    assert device.core.step(info.step_id, *device.nothing(), device.buffers).kind == _core.STEP_IDLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_index": np.zeros(0, np.int32)}, r"seq_index: expected int32\[R\] with R >= 1"),
        ({"seq_lens": np.zeros(4, np.int32)}, r"seq_lens: expected int32\[R\] = int32\[3\], got int32\[4\]"),
        ({"query_start_loc": np.zeros(3, np.int32)}, r"query_start_loc: expected int32\[R \+ 1\] = int32\[4\]"),
        ({"positions": np.zeros(39, np.int32)}, r"positions: expected int32\[T\] = int32\[40\], got int32\[39\]"),
        ({"slot_mapping": np.zeros(40, np.int64)}, r"slot_mapping: expected C-contiguous int32\[T\], got int64\[40\]"),
        ({"block_tables": np.zeros((2, 16), np.int32)}, r"block_tables: expected int32\[R, P\] with R = 3"),
        ({"block_tables": np.zeros((3, 32), np.int32)[:, ::2]}, r"block_tables: expected C-contiguous"),
        ({"draft_block_tables": np.zeros(48, np.int32)}, r"draft_block_tables: expected .*\[R, Pd\], got int32\[48\]"),
    ],
)
def test_wrong_buffers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.StepBuffers(**(make_arrays(**SHAPE) | changes))


def test_an_array_cannot_serve_twice_or_be_read_only() -> None:
    arrays: dict[str, Any] = make_arrays(**SHAPE)
    with pytest.raises(ValueError, match=r"\w+: expected an array of its own"):
        _core.StepBuffers(**(arrays | {"draft_positions": arrays["positions"]}))
    frozen = arrays["seq_lens"].copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="seq_lens: expected an array of its own, writeable"):
        _core.StepBuffers(**(arrays | {"seq_lens": frozen}))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"rows": 2}, r"seq_index: expected R >= 3 \(max_num_seqs\), got 2"),
        ({"tokens": 31}, r"input_ids: expected T >= 32 \(max_num_batched_tokens\), got 31"),
        ({"logits": 2}, r"logits_indices: expected L >= 3 \(max_num_seqs\), got 2"),
        ({"width": 15}, r"block_tables: expected P >= 16 \(pages of max_model_len\), got 15"),
        ({"draft_width": 12}, r"draft_block_tables: expected Pd >= 13 \(pages of draft_max_model_len\), got 12"),
    ],
)
def test_buffers_too_small_for_the_scheduler_are_refused(shape: dict[str, int], message: str) -> None:
    device = PagedDevice(max_num_seqs=3, draft_block_size=5)
    device.add([Request(0, (1, 2))])
    with pytest.raises(ValueError, match=message):
        device.core.step(0, *device.nothing(), _core.StepBuffers(**make_arrays(**(SHAPE | shape))))
    assert device.step().kind == _core.STEP_PREFILL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": np.zeros(2, np.int32)}, r"request_id: expected C-contiguous int64\[n\], got int32\[2\]"),
        ({"shard": np.zeros(3, np.int32)}, r"shard: expected int32\[n\] with 2 rows, got int32\[3\]"),
        ({"prompt_offsets": np.array([0, 2], np.int64)}, r"prompt_offsets: expected int64\[n \+ 1\] with 3 rows"),
        ({"prompt_offsets": np.array([0, 2, 6], np.int64)}, r"prompt_offsets: expected .* end at 5"),
        ({"prompt_offsets": np.array([0, 6, 5], np.int64)}, r"prompt_offsets: expected offsets that .*never fall"),
        ({"prompt_offsets": np.array([1, 2, 5], np.int64)}, r"prompt_offsets: expected offsets that start at 0"),
        ({"prompt_values": np.array([1, 2, 3, -4, 5], np.int32)}, r"prompt_values: expected ids .*-4.*request 8"),
        ({"max_tokens": np.array([4, 0], np.int32)}, r"max_tokens\[1\]: expected at least 1, got 0"),
        ({"min_tokens": np.array([-1, 0], np.int32)}, r"min_tokens\[0\]: expected at least 0, got -1"),
        ({"ignore_eos": np.zeros(2, np.int32)}, r"ignore_eos: expected C-contiguous bool\[n\], got int32\[2\]"),
        (
            {"stop_token_values": np.zeros(2, np.int32)},
            r"stop_token_offsets: expected an array beside stop_token_values",
        ),
        ({"stop_string_rows": np.zeros(3, np.int64)}, r"stop_string_values: expected an array beside"),
        (
            {
                "stop_string_values": np.zeros(0, np.uint8),
                "stop_string_offsets": np.array([0, 0], np.int64),
                "stop_string_rows": np.array([0, 1, 1], np.int64),
            },
            r"stop_string_values: expected non-empty stop strings \(request 7\)",
        ),
    ],
)
def test_wrong_requests_are_refused_and_none_is_queued(changes: dict[str, Any], message: str) -> None:
    device = PagedDevice()
    with pytest.raises(ValueError, match=message):
        device.core.add_requests(**requests(**changes))
    assert device.core.num_unfinished == 0
    assert device.core.add_requests(**requests()).tolist() == [0, 1]


def test_stop_strings_need_token_bytes() -> None:
    core = _core.Scheduler(num_pages=8, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=16)
    strings = {
        "stop_string_values": np.frombuffer(b"ab", np.uint8),
        "stop_string_offsets": np.array([0, 2], np.int64),
        "stop_string_rows": np.array([0, 1, 1], np.int64),
    }
    with pytest.raises(ValueError, match="set_token_bytes"):
        core.add_requests(**requests(**strings))
    with pytest.raises(ValueError, match="offsets: expected"):
        core.set_token_bytes(np.zeros(3, np.uint8), np.array([0, 2], np.int64))
    core.set_token_bytes(np.zeros(3, np.uint8), np.array([0, 3], np.int64))
    core.add_requests(**requests(**strings))


def test_rows_that_can_never_run_come_back_at_once() -> None:
    device = PagedDevice(num_pages=4, block_size=4, max_model_len=20)
    device.add([Request(0, ()), Request(1, (1,) * 20), Request(2, (1,) * 13), Request(3, (1,) * 12)])
    device.take()
    assert {i: (a.reason, a.error) for i, a in device.finished.items()} == {
        0: (_core.FINISH_ERROR, _core.ERROR_EMPTY_PROMPT),
        1: (_core.FINISH_ERROR, _core.ERROR_PROMPT_TOO_LONG),
        2: (_core.FINISH_ERROR, _core.ERROR_TOO_FEW_PAGES),
    }
    assert device.core.num_unfinished == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 1}, r"num_pages: expected 2\.\."),
        ({"num_pages": -3}, r"num_pages: expected at least 0, got -3"),
        ({"block_size": 0}, r"block_size: expected 1\.\."),
        ({"num_pages": 2**30, "block_size": 16}, r"num_pages: .*exceed .* slots an int32 can name"),
        ({"max_num_seqs": 0}, r"max_num_seqs: expected 1"),
        ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens: expected 1"),
        ({"ngram_min": 3, "ngram_max": 2}, r"ngram_max: expected 3"),
        ({"eos_token_ids": np.array([-1], np.int32)}, r"eos_token_ids: expected ids of at least 0, got -1"),
        ({"eos_token_ids": np.array([1], np.int64)}, r"eos_token_ids: expected C-contiguous int32"),
    ],
)
def test_wrong_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"num_pages": 8, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    with pytest.raises(ValueError, match=message):
        _core.Scheduler(**(sizes | {"max_model_len": 16} | changes))


def test_wrong_modes_are_refused() -> None:
    core = PagedDevice().core
    for arguments, message in [
        ((7, 2), "method: expected"),
        ((_core.METHOD_NGRAM_SHADOW, 2), "method: expected"),
        ((_core.METHOD_NGRAM, 6), r"k: expected 0\.\.=5 \(max_speculative_tokens\), got 6"),
        ((_core.METHOD_NGRAM, -1), r"k: expected 0\.\.=5"),
        ((_core.METHOD_DRAFT, 2), "METHOD_DRAFT needs a scheduler with draft_block_size"),
    ]:
        with pytest.raises(ValueError, match=message):
            core.set_speculation(*arguments)
    with pytest.raises(ValueError, match="k: expected"):
        core.set_shadow_ngram(6)
    with pytest.raises(ValueError, match="n: expected"):
        core.set_max_num_seqs(0)


def test_unknown_handles_are_harmless() -> None:
    core = PagedDevice().core
    for handle in (-1, 0, 5, 2**40):
        assert core.preempt(handle) is False
        assert core.abort(handle) is False
        assert core.drop_draft(handle) == 0
    core.check_integrity()


def test_info_is_plain_and_frozen() -> None:
    info = PagedDevice().step()
    assert repr(info).startswith("StepInfo(step_id=1, kind=0, method=0,")
    with pytest.raises(AttributeError):
        info.kind = 2
    with pytest.raises(TypeError):
        _core.StepInfo()  # type: ignore[call-arg]


def test_the_interpreter_is_released_and_threads_do_not_block_each_other() -> None:
    """Eight threads, each with a scheduler of its own, and one scheduler that all of them ask."""
    shared = PagedDevice().core
    failures: list[BaseException] = []

    def work() -> None:
        try:
            device = PagedDevice()
            rows = [Request(i, p, max_tokens=12) for i, p in enumerate(prompts(3))]
            device.add(rows)
            while device.step().kind != _core.STEP_IDLE:
                shared.check_integrity()
                shared.preempt(0)
            for request in rows:
                device.check_answer(request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
