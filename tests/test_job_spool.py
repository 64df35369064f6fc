"""Spools: answers in any order, kept through a crash, and cut where they are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.job import spool as spools
from specbatch.job.answers import answer_schema, from_outcomes
from specbatch.job.prompts import Outcomes
from specbatch.job.spool import Spool
from tests.jobs import run, write

SCHEMA = answer_schema(False, False)


def batch(slots: list[int], mark: str = "m") -> Any:
    outcomes = Outcomes()
    for slot in slots:
        outcomes.error(slot, "engine_error", f"{mark}{slot}")
    return from_outcomes(SCHEMA, outcomes, np.array(slots, np.int64))


def open_spool(path: Path, slots: int = 20, identity: str = "run shard") -> Spool:
    return Spool(path, identity, slots, SCHEMA)


def texts(spool: Spool, slots: list[int]) -> list[str]:
    return spool.gather(np.array(slots, np.int64)).column("message").to_pylist()  # type: ignore[no-any-return]


def test_any_order_over_frames(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s")
    assert spool.append(batch([3, 1])) == 2
    spool.flush()
    assert spool.append(batch([0, 2, 7])) == 3
    assert spool.append(batch([1], "again")) == 0
    spool.flush()
    assert texts(spool, [0, 1, 2, 3, 7]) == ["m0", "again1", "m2", "m3", "m7"]
    assert texts(spool, [7, 7, 3]) == ["m7", "m7", "m3"]
    assert np.flatnonzero(spool.answered).tolist() == [0, 1, 2, 3, 7]
    assert spool.has(np.array([4, 7])).tolist() == [False, True]
    spool.discard()
    assert list(tmp_path.iterdir()) == []


@given(
    order=st.permutations(range(30)),
    cuts=st.lists(st.integers(1, 29), max_size=6),
    wanted=st.lists(st.integers(0, 29), max_size=40),
)
@settings(max_examples=15, deadline=None)
def test_gather_is_a_look_up(tmp_path_factory: pytest.TempPathFactory, order: Any, cuts: Any, wanted: Any) -> None:
    spool = open_spool(tmp_path_factory.mktemp("spool") / "s", 30)
    for piece in np.split(np.array(order), sorted(set(cuts))):
        spool.append(batch(piece.tolist()))
        spool.flush()
    assert texts(spool, wanted) == [f"m{slot}" for slot in wanted]


class TestRecovery:
    def filled(self, path: Path) -> None:
        spool = open_spool(path)
        for slots in ([0, 1], [2], [3, 4, 5]):
            spool.append(batch(slots))
            spool.flush()

    def test_everything_intact_is_taken_over(self, tmp_path: Path) -> None:
        self.filled(tmp_path / "s")
        spool = open_spool(tmp_path / "s")
        assert sum(answers.num_rows for answers in spool.recover()) == 6
        spool.append(batch([6]))
        spool.flush()
        assert texts(spool, [6, 0, 5]) == ["m6", "m0", "m5"]

    def test_every_cut_leaves_whole_frames(self, tmp_path: Path) -> None:
        self.filled(tmp_path / "s")
        data = (tmp_path / "s").read_bytes()
        seen = set()
        for size in range(0, len(data) + 1, 41):
            (tmp_path / "cut").write_bytes(data[:size])
            spool = open_spool(tmp_path / "cut")
            spool.recover()
            found = np.flatnonzero(spool.answered).tolist()
            seen.add(len(found))
            assert found == list(range(len(found)))
            spool.append(batch([9]))  # and it can be written on
            spool.flush()
            again = open_spool(tmp_path / "cut")
            again.recover()
            assert np.flatnonzero(again.answered).tolist() == [*found, 9]
        assert seen <= {0, 2, 3, 6}
        assert {0, 2, 3} <= seen

    def test_flipped_bits_are_found(self, tmp_path: Path) -> None:
        self.filled(tmp_path / "s")
        data = (tmp_path / "s").read_bytes()
        for place in range(0, len(data), 67):
            broken = bytearray(data)
            broken[place] ^= 0x40
            (tmp_path / "bad").write_bytes(broken)
            spool = open_spool(tmp_path / "bad")
            spool.recover()
            found = np.flatnonzero(spool.answered)
            assert len(found) in (0, 2, 3)
            assert texts(spool, found.tolist()) == [f"m{slot}" for slot in found]

    def test_a_spool_of_another_run_is_thrown_away(self, tmp_path: Path) -> None:
        self.filled(tmp_path / "s")
        spool = open_spool(tmp_path / "s", identity="another run")
        assert spool.recover() == []
        spool.append(batch([1], "new"))
        spool.flush()
        again = open_spool(tmp_path / "s", identity="another run")
        again.recover()
        assert np.flatnonzero(again.answered).tolist() == [1]

    def test_some_answers_may_be_left_behind(self, tmp_path: Path) -> None:
        self.filled(tmp_path / "s")
        spool = open_spool(tmp_path / "s")
        spool.recover(keep=lambda answers: np.asarray(answers.column("slot")) != 2)
        assert np.flatnonzero(spool.answered).tolist() == [0, 1, 3, 4, 5]


def test_an_answer_that_is_not_there_is_named(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s")
    spool.append(batch([1]))
    spool.flush()
    with pytest.raises(AssertionError, match="no answer for 2 slots, the first 0"):
        texts(spool, [1, 0, 2])


def test_old_answers_are_flushed(tmp_path: Path) -> None:
    spool = open_spool(tmp_path / "s")
    spool.append(batch([1]))
    spool.flush_if_old(0.0)
    assert not (tmp_path / "s").exists()
    spool.flush_if_old(float("inf"))
    assert (tmp_path / "s").exists()


def test_many_answers_are_flushed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "FLUSH_ROWS", 3)
    spool = open_spool(tmp_path / "s")
    spool.append(batch([1, 2]))
    assert not (tmp_path / "s").exists()
    spool.append(batch([3]))
    assert (tmp_path / "s").exists()


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "_CACHE_BYTES", 1)
    spool = open_spool(tmp_path / "s")
    for slot in range(5):
        spool.append(batch([slot]))
        spool.flush()
    assert texts(spool, [4, 0, 3, 1, 2]) == ["m4", "m0", "m3", "m1", "m2"]
    assert len(spool._cache) == 1


def test_a_spool_that_outlived_its_part_goes_with_the_next_start(tmp_path: Path) -> None:
    """The last start died between the manifest's last entry and the removal: nothing is left to do but this."""
    table = write(tmp_path / "in.parquet", {"prompt": ["a", "b"]})
    run(table, tmp_path / "out")
    left = tmp_path / "out" / "_specbatch" / "spool" / "part-00000.spool"
    left.write_bytes(b"answers that are in the part")
    assert run(table, tmp_path / "out").rows_this_start == 0
    assert not left.exists()
