"""Answers taken from earlier outputs: the table is the one a full run makes, and nothing that differs is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specbatch.errors import ExitCode, InputMissing, UsageError
from specbatch.job.keys import MISSING, KeyTable, key_path, place, read_keys, row_keys, unplace, write_keys
from specbatch.job.reuse import PartOpener
from specbatch.sampling_params import SamplingParams
from specbatch.standin import StandInEngine, StandInSettings
from tests.faults.test_h_resume import counting
from tests.faults.test_h_resume import given as rows_given
from tests.jobs import Factory, Recorder, answers, parts, prompts, read, run, target, write

HOT = SamplingParams(temperature=1.0)


class TestKeyTable:
    @given(st.lists(st.lists(st.integers(1, 12), max_size=20), max_size=6), st.sampled_from([3, 1000]))
    @example([[1, 1, 1, 2], [2, 2]], 3)
    @settings(max_examples=50, deadline=None)
    def test_against_a_dictionary(self, batches: list[list[int]], limit: int) -> None:
        """The slow obvious twin: a dict in which the first of equal keys stays.

        A full table may know fewer keys: then a later row of the key is the owner, one that keeps its own place.
        """
        table, number = KeyTable(limit), 0
        twin: dict[int, int] = {}
        owners: set[tuple[int, int]] = set()  # (value, place) of rows that are computed themselves
        for batch in batches:
            keys = np.array([[value % 4, value] for value in batch], np.uint64).reshape(-1, 2)
            own = place(0, 1, np.arange(number, number + len(batch)))
            number += len(batch)
            got = table.insert(keys, own)
            for value, mine, found in zip(batch, own.tolist(), got.tolist(), strict=True):
                twin.setdefault(value, mine)
                if found == mine:
                    owners.add((value, mine))
                assert found == twin[value] or (limit == 3 and (value, found) in owners)
        every = np.array([[value % 4, value] for value in range(1, 13)], np.uint64)
        wanted = [twin.get(value, MISSING) for value in range(1, 13)]
        if limit == 3:
            assert table.size <= limit
        else:
            assert table.find(every).tolist() == wanted
            assert table.size == len(twin)

    def test_growing_keeps_everything(self) -> None:
        keys = np.random.default_rng(0).integers(1, 2**63, (30_000, 2)).astype(np.uint64)
        table = KeyTable(1 << 20)
        for start in range(0, len(keys), 700):
            piece = keys[start : start + 700]
            table.insert(piece, place(3, 2, np.arange(start, start + len(piece))))
        source, part, row = unplace(table.find(keys))
        assert (source == 3).all()
        assert (part == 2).all()
        assert np.array_equal(row, np.arange(len(keys)))
        assert (table.find(keys + np.uint64(1)) == MISSING).all()

    def test_places_hold_their_parts(self) -> None:
        for values in ((0, 0, 0), (127, 2**24 - 1, 2**32 - 1), (1, 5, 7)):
            assert [int(v) for v in unplace(place(*values))] == list(values)


class TestKeys:
    def test_tokens_parameters_and_seed_count(self) -> None:
        values, offsets = np.array([1, 2, 1, 2, 12], np.int32), np.array([0, 2, 4, 5])
        keys = row_keys(values, offsets, [b"p"], None)
        assert (keys[0] == keys[1]).all()
        assert (keys[0] != keys[2]).any()
        seeded = row_keys(values, offsets, [b"p"], np.array([1, 2, -1]))
        assert (seeded[0] != seeded[1]).any()
        assert (seeded[2] == keys[2]).all()
        assert (row_keys(values, offsets, [b"p", b"q", b"p"], None)[1] != keys[1]).any()

    def test_files_that_do_not_check_are_not_used(self, tmp_path: Path) -> None:
        keys = np.arange(1, 9, dtype=np.uint64).reshape(4, 2)
        path = tmp_path / "keys" / "part-00000.keys"
        write_keys(path, keys)
        assert np.array_equal(read_keys(path, 4), keys)  # type: ignore[arg-type]
        assert read_keys(path, 5) is None
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert read_keys(path, 4) is None
        assert read_keys(tmp_path / "none", 4) is None


class TestReuse:
    def nights(self, tmp_path: Path) -> tuple[Path, Path]:
        """Two nights: rows moved, two changed, one new, one gone; an error and a null in each."""
        old = [*prompts(60), "", None, "poison"]
        new = [*reversed(prompts(58)), "changed", "new one", "", None, "poison", prompts(1)[0]]
        return (
            write(tmp_path / "old.parquet", {"prompt": old}, row_group_size=20),
            write(tmp_path / "new.parquet", {"prompt": new}, row_group_size=17),
        )

    def test_the_table_is_that_of_a_full_run(self, tmp_path: Path) -> None:
        old, new = self.nights(tmp_path)
        failing = StandInSettings(raise_on="poison")
        run(old, tmp_path / "last", shard_rows=20, settings=failing)
        factory = counting(failing)
        result = run(new, tmp_path / "tonight", shard_rows=17, factory=factory, reuse=(tmp_path / "last",))
        run(new, tmp_path / "full", shard_rows=17, settings=failing)
        assert answers(tmp_path / "tonight") == answers(tmp_path / "full")
        assert result.reused == 59  # 58 in reverse, and the first one again
        assert result.rows_computed == 2  # "changed", "new one"; "poison" is an error again
        sources = [row["decoding"]["source"] for row in read(tmp_path / "tonight") if row["decoding"]]
        assert sources.count("reused") == 59
        assert all(row["decoding"]["steps"] == 0 for row in read(tmp_path / "tonight")
                   if row["decoding"] and row["decoding"]["source"] == "reused")  # fmt: skip

    def test_all_the_same_needs_no_engine(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(30)})
        run(table, tmp_path / "one")
        factory = Factory()
        result = run(table, tmp_path / "two", factory=factory, reuse=(tmp_path / "one",))
        assert (factory.made, result.reused, result.exit_code) == ([], 30, ExitCode.OK)
        third = run(table, tmp_path / "three", factory=factory, reuse=(tmp_path / "two",))  # taken once more
        assert (factory.made, third.reused) == ([], 30)
        assert answers(tmp_path / "three") == answers(tmp_path / "one")

    def test_several_outputs(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            run(write(tmp_path / f"{name}.parquet", {"prompt": prompts(20, name)}), tmp_path / name)
        both = write(tmp_path / "both.parquet", {"prompt": [*prompts(20, "b"), *prompts(20, "a"), "c"]})
        factory = counting()
        result = run(both, tmp_path / "out", factory=factory, reuse=(tmp_path / "a", tmp_path / "b"))
        assert (result.reused, rows_given(factory)) == (40, 1)
        run(both, tmp_path / "full")
        assert answers(tmp_path / "out") == answers(tmp_path / "full")

    @pytest.mark.parametrize(
        ("changed", "word"),
        [
            ({"to": target(model="another")}, "model"),
            ({"to": target(dtype="bfloat16")}, "dtype"),
            ({"to": target(max_model_len=2000)}, "context_length"),
            ({"n": 2}, "n"),
            ({"output_token_ids": True}, "completion_token_ids"),
        ],
    )
    def test_another_model_or_setting_is_computed_and_said(
        self, tmp_path: Path, changed: dict[str, Any], word: str
    ) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(10)})
        run(table, tmp_path / "one")
        events, factory = Recorder(), counting()
        result = run(table, tmp_path / "two", factory=factory, events=events, reuse=(tmp_path / "one",), **changed)
        assert (result.reused, rows_given(factory)) == (0, 10)
        assert any(word in message for _, message in events.warnings)

    @pytest.mark.parametrize("changed", [SamplingParams(max_tokens=7), SamplingParams(stop=("x",)), HOT])
    def test_other_parameters_are_computed(self, tmp_path: Path, changed: SamplingParams) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(10)})
        run(table, tmp_path / "one")
        events = Recorder()
        assert run(table, tmp_path / "two", sampling=changed, reuse=(tmp_path / "one",), events=events).reused == 0
        ((_, message),) = events.warnings  # said at the start, where it is of use
        assert re.search("its (max_tokens|stop|temperature) was .*, here it is", message)
        events = Recorder()
        run(table, tmp_path / "three", seed=5, reuse=(tmp_path / "one",), events=events)
        assert events.warnings == []  # a seed changes no greedy answer

    def test_sampled_rows_by_seed_and_place(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(20)}, row_group_size=10)
        moved = write(tmp_path / "moved.parquet", {"prompt": ["first", *prompts(20)]}, row_group_size=10)
        run(table, tmp_path / "one", sampling=HOT, n=3)
        for name, source, reused in (("same", table, 20), ("moved", moved, 0)):
            result = run(source, tmp_path / name, sampling=HOT, n=3, reuse=(tmp_path / "one",))
            run(source, tmp_path / f"{name} full", sampling=HOT, n=3)
            assert result.reused == reused
            assert answers(tmp_path / name) == answers(tmp_path / f"{name} full")
        assert run(table, tmp_path / "other seed", sampling=HOT, n=3, seed=1, reuse=(tmp_path / "one",)).reused == 0

    def test_everything_a_row_has_comes_along(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(20)})
        wanted: dict[str, Any] = {"output_token_ids": True, "logprobs": True, "output_prefix": "x_"}
        run(table, tmp_path / "one", **wanted)
        assert run(table, tmp_path / "two", reuse=(tmp_path / "one",), **wanted).reused == 20
        first, second = read(tmp_path / "one"), read(tmp_path / "two")
        for row in (*first, *second):
            del row["x_decoding"]
        assert first == second
        assert first[0]["x_completion_token_ids"]

    def test_what_cannot_serve_is_said_and_costs_nothing_else(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(10)}, row_group_size=5)
        run(table, tmp_path / "one", shard_rows=5)
        key_path(tmp_path / "one", "part-00000").write_bytes(b"garbage")
        events = Recorder()
        result = run(table, tmp_path / "two", shard_rows=5, events=events, reuse=(tmp_path / "one", tmp_path / "none"))
        assert result.reused == 5
        assert sorted(code for code, _ in events.warnings) == ["reuse", "reuse"]
        parts(tmp_path / "one")[1].unlink()
        assert run(table, tmp_path / "three", shard_rows=5, reuse=(tmp_path / "one",)).reused == 0
        with pytest.raises(UsageError, match="is the output itself"):
            run(table, tmp_path / "two", shard_rows=5, restart=True, reuse=(tmp_path / "two",))

    def test_a_part_that_was_replaced_is_not_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between loading keys and reading answers somebody makes another table of the same length there."""
        table = write(tmp_path / "in.parquet", {"prompt": prompts(10)})
        other = write(tmp_path / "other.parquet", {"prompt": prompts(10, "other")})
        run(table, tmp_path / "one")
        real = PartOpener.__call__

        def swap(self: PartOpener, source: int, part: int) -> Any:
            run(other, tmp_path / "one", restart=True)
            return real(self, source, part)

        monkeypatch.setattr(PartOpener, "__call__", swap)
        with pytest.raises(InputMissing, match="was replaced"):
            run(table, tmp_path / "two", reuse=(tmp_path / "one",))
        monkeypatch.undo()
        assert run(table, tmp_path / "two", reuse=(tmp_path / "one",)).exit_code == ExitCode.OK

    def test_run_time_choices_are_taken_over(self, tmp_path: Path) -> None:
        class Resolving(StandInEngine):
            def describe(self) -> dict[str, object]:
                return {"resolved": {"dtype": "float32"}}

        table = write(tmp_path / "in.parquet", {"prompt": prompts(10)})
        more = write(tmp_path / "more.parquet", {"prompt": prompts(11)})
        run(table, tmp_path / "one", factory=Factory(make=lambda context: Resolving()))
        factory = Factory(make=lambda context: Resolving())
        result = run(more, tmp_path / "two", factory=factory, reuse=(tmp_path / "one",))
        assert (result.reused, factory.contexts[0].resolved) == (10, {"dtype": "float32"})

    def test_two_percent_changed_cost_two_percent(self, tmp_path: Path) -> None:
        texts = prompts(5000)
        old = write(tmp_path / "old.parquet", {"prompt": texts}, row_group_size=1000)
        run(old, tmp_path / "last", shard_rows=1000)
        new = write(
            tmp_path / "new.parquet",
            {"prompt": [f"changed {t}" if i % 50 == 7 else t for i, t in enumerate(texts)]},
            row_group_size=1000,
        )
        factory = counting()
        result = run(new, tmp_path / "tonight", shard_rows=1000, factory=factory, reuse=(tmp_path / "last",))
        assert (rows_given(factory), result.reused, len(parts(tmp_path / "tonight"))) == (100, 4900, 5)
        run(new, tmp_path / "full", shard_rows=1000)
        assert answers(tmp_path / "tonight") == answers(tmp_path / "full")

    def test_the_check_sees_a_wrong_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Negative control: taking the row beside the right one must show."""
        table = write(tmp_path / "in.parquet", {"prompt": prompts(10)})
        run(table, tmp_path / "one")
        real = KeyTable.find

        def beside(self: KeyTable, keys: Any) -> Any:
            found = real(self, keys)
            return np.where(found == MISSING, found, found ^ 1)

        monkeypatch.setattr(KeyTable, "find", beside)
        run(table, tmp_path / "two", reuse=(tmp_path / "one",))
        assert answers(tmp_path / "two") != answers(tmp_path / "one")
