"""Decode steps on a CPU in one call: greedy drafts of a packed model, and their acceptance by the target's best tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbatch import _core
from specbatch.engine.host_cost import host_seconds
from specbatch.engine.rejection import verify_coupled
from specbatch.sampling_params import SamplingParams
from specbatch.speculators.draft_model import DraftModelSpeculator
from tests.driving import add, draft, finish, make_engine, tokens
from tests.paged_device import prompts


@given(st.data())
def test_acceptance_is_that_of_coupled_verification(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    count = int(start[-1])
    token = st.integers(-1, 2)  # few, so that drafts are often right; -1: no token could be sampled
    best = np.array(data.draw(st.lists(token, min_size=count, max_size=count)), np.int32)
    ids = np.array(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), np.int32)
    drafts = np.array([data.draw(st.integers(0, 6)) for _ in lengths], np.int32)
    width = data.draw(st.integers(1, 7))
    if count == 0:
        return
    tokens, num_sampled = _core.accept_drafts(best, ids, start, drafts, width)
    wanted, counts = verify_coupled(*(torch.from_numpy(a) for a in (best, ids, start, drafts)), width)
    assert num_sampled.tolist() == counts.tolist()
    assert tokens.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("start", "drafts", "width"), [([0, 2], [1, 1], 2), ([0, 3, 2], [1, 1], 2), ([0, 9], [1], 2), ([0, 2], [1], 0)]
)
def test_arrays_that_do_not_fit_are_refused(start: list[int], drafts: list[int], width: int) -> None:
    four = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="packed tokens"):
        _core.accept_drafts(four, four, np.array(start, np.int32), np.array(drafts, np.int32), width)


@pytest.mark.parametrize("k", [1, 3, 4])
def test_drafts_in_one_call_are_those_of_pass_by_pass(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """Rows of many lengths, with fewer drafts near their end, some joining late: every draft of every step is compared."""
    compared = 0
    in_one_call = DraftModelSpeculator.propose

    def both(self: DraftModelSpeculator, info: Any, arrays: Any, params: Any) -> Any:
        nonlocal compared
        assert self.runner.model.packed is not None
        self.pass_by_pass(info, arrays, params)
        wanted = arrays.host["input_ids"][: info.num_tokens].copy()
        after_last = arrays.host["query_start_loc"][1 : info.num_rows + 1] - 1
        arrays.host["input_ids"][after_last[arrays.host["num_draft_tokens"][: info.num_rows] > 0]] = 0
        proposal = in_one_call(self, info, arrays, params)
        assert arrays.host["input_ids"][: info.num_tokens].tolist() == wanted.tolist()
        compared += int(arrays.host["num_draft_tokens"][: info.num_rows].sum())
        return proposal

    monkeypatch.setattr(DraftModelSpeculator, "propose", both)
    engine = make_engine(tiny_target, lambda *_: draft(k), draft_model=str(tiny_draft), max_num_seqs=3)
    plain = make_engine(tiny_target, max_num_seqs=3)
    work = [list(p) for p in prompts(7, 5)] + [list(range(40, 71))]
    for each in (engine, plain):
        add(each, work, [SamplingParams(max_tokens=9 + 3 * i, ignore_eos=True) for i in range(len(work))])
    assert tokens(finish(engine)) == tokens(finish(plain))
    assert compared > 50


def test_a_row_without_room_for_its_drafts_is_named(tiny_target: Path, tiny_draft: Path) -> None:
    engine = make_engine(tiny_target, draft_model=str(tiny_draft))
    packed = engine.parts.speculator.runner.model.packed  # type: ignore[union-attr]
    one = np.zeros(1, np.int32)
    host = {
        "draft_input_ids": one,
        "draft_positions": one,
        "draft_slot_mapping": one + 16,
        "draft_query_start_loc": np.array([0, 1], np.int32),
        "draft_seq_lens": one + 1,
        "draft_block_tables": np.ones((1, 2), np.int32),
        "num_draft_tokens": one + 3,
        "query_start_loc": np.array([0, 3], np.int32),
        "input_ids": np.zeros(3, np.int32),
    }

    class Sizes:
        num_rows, num_tokens, draft_num_tokens = 1, 3, 1

    with pytest.raises(ValueError, match="row 0 has no room for 3 drafts"):
        packed.draft(Sizes(), host, 260)
    host["num_draft_tokens"], host["draft_input_ids"] = one + 2, one + 100_000
    with pytest.raises(ValueError, match="token 100000"):
        packed.draft(Sizes(), host, 260)


def test_what_the_host_takes_is_measured_on_an_engine_that_is_as_before(tiny_target: Path, tiny_draft: Path) -> None:
    engine = make_engine(tiny_target, lambda *_: draft(3), draft_model=str(tiny_draft), max_num_seqs=4)
    core = engine.parts.core
    found = host_seconds(engine.parts, lambda rows, tokens, context: 0.0)
    assert [rows for rows, _ in found] == [1.0, 4.0]
    assert all(0.0 < seconds < 1.0 for _, seconds in found)
    assert host_seconds(engine.parts, lambda rows, tokens, context: 1.0) == ()  # long steps: not worth a job
    core.check_integrity()
    assert (core.num_running, core.num_waiting) == (0, 0)
    plain = make_engine(tiny_target, max_num_seqs=4)
    for each in (engine, plain):
        add(each, [list(p) for p in prompts(5)])
    assert tokens(finish(engine)) == tokens(finish(plain))
