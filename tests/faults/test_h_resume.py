"""FAULTS H: a run that is started again continues, never mixes two runs, and computes nothing twice."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from specbatch.errors import DiskFull, ExitCode, OutputMismatch
from specbatch.job import spool
from specbatch.job.committer import Committer
from specbatch.job.keys import KeyTable
from specbatch.requests import RequestBatch
from specbatch.sampling_params import SamplingParams
from specbatch.standin import StandInEngine, StandInSettings, StandInTokenizer
from tests.jobs import Factory, Recorder, answers, finish, parts, prompts, read, run, start, target, write

SAMPLED = SamplingParams(temperature=1.0)


class Counting(StandInEngine):
    """Counts the rows it is given."""

    def __init__(self, settings: StandInSettings | None = None) -> None:
        super().__init__(settings, max_model_len=4096)
        self.given = 0

    def add(self, batch: RequestBatch) -> None:
        self.given += len(batch)
        super().add(batch)


def counting(settings: StandInSettings | None = None) -> Factory:
    return Factory(make=lambda context: Counting(settings))


def given(factory: Factory) -> int:
    return sum(engine.given for engine in factory.made)


class TestH19KilledHalfWay:
    def test_only_what_was_not_finished_is_done_again(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(400)}, row_group_size=50)
        out = tmp_path / "out"
        process = start(table, "-o", out, "--shard-rows", "50", standin="capacity=10,delay=0.05")
        _wait_for(lambda: _committed(out) >= 2 and bool(list(out.glob("_specbatch/spool/*"))), process)
        process.kill()
        assert finish(process)[0] == -signal.SIGKILL
        assert 2 <= _committed(out) < 8
        run(table, tmp_path / "clean", shard_rows=50)
        # The command line's target has a fingerprint of its own: the second start goes through it too.
        code, _, err = finish(start(table, "-o", out, "--shard-rows", "50"))
        assert code == ExitCode.OK, err
        assert answers(out) == answers(tmp_path / "clean")

    def test_finished_rows_of_an_unfinished_shard_are_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One shard, stopped in its middle: what was spooled is not computed again."""
        monkeypatch.setattr(spool, "FLUSH_SECONDS", 0.0)
        table = write(tmp_path / "in.parquet", {"prompt": prompts(300)})
        first = counting(StandInSettings(capacity=10, raise_on="number 150"))
        monkeypatch.setattr("specbatch.job.driver.EngineDriver._isolate", _give_up)
        with pytest.raises(RuntimeError, match="number 150"):
            run(table, tmp_path / "out", factory=first)
        monkeypatch.undo()
        second = counting()
        run(table, tmp_path / "out", factory=second)
        run(table, tmp_path / "clean")
        assert answers(tmp_path / "out") == answers(tmp_path / "clean")
        assert 0 < given(second) <= 160

    def test_rows_that_never_ran_are_kept_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With several samples a row: an error of a row stands for all of them, also when a killed start found it."""
        monkeypatch.setattr(spool, "FLUSH_SECONDS", 0.0)
        table = write(tmp_path / "in.parquet", {"prompt": [None, "", *prompts(100), None, ""]})
        options: dict[str, Any] = {"n": 3, "sampling": SAMPLED}
        with monkeypatch.context() as patch:
            patch.setattr("specbatch.job.driver.EngineDriver._isolate", _give_up)
            with pytest.raises(RuntimeError, match="number 50"):
                run(table, tmp_path / "out", settings=StandInSettings(capacity=10, raise_on="number 50"), **options)
        result = run(table, tmp_path / "out", **options)
        assert (result.row_errors, result.skipped) == (2, 2)
        run(table, tmp_path / "clean", **options)
        assert answers(tmp_path / "out") == answers(tmp_path / "clean")


def _give_up(self: Any, extra: Any, error: Exception, halve: bool) -> None:
    raise error


class TestH20WriterFailsAfterGeneration:
    def test_rows_are_written_on_resume_without_computing_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(30)}, row_group_size=10)

        def fails(self: Committer, live: Any) -> Any:
            live.spool.sync()
            raise DiskFull("no space")

        with monkeypatch.context() as patch:
            patch.setattr(Committer, "_write", fails)
            with pytest.raises(DiskFull):
                run(table, tmp_path / "out", shard_rows=30)
        assert parts(tmp_path / "out") == []
        again = counting()
        result = run(table, tmp_path / "out", factory=again, shard_rows=30)
        assert (given(again), result.rows_done, result.exit_code) == (0, 30, ExitCode.OK)
        run(table, tmp_path / "clean", shard_rows=30)
        assert answers(tmp_path / "out") == answers(tmp_path / "clean")


class TestH22AnotherRun:
    """Each difference is refused with exit 12, naming the field, before any engine is made."""

    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        path = write(tmp_path / "in.parquet", {"prompt": prompts(4), "title": prompts(4, "title")})
        run(path, tmp_path / "out", template="{prompt}")
        return path

    @pytest.mark.parametrize(
        ("field", "changed"),
        [
            ("model", {"to": target(model="another")}),
            ("dtype", {"to": target(dtype="bfloat16")}),
            ("context_length", {"to": target(max_model_len=2048)}),
            ("temperature", {"sampling": SAMPLED}),
            ("max_tokens", {"sampling": SamplingParams(max_tokens=7)}),
            ("stop", {"sampling": SamplingParams(stop=("x",))}),
            ("seed", {"seed": 1}),
            ("n", {"n": 2}),
            ("prompt", {"template": "{title}"}),
            ("overlong", {"overlong": "skip"}),
            ("limit", {"limit": 2}),
            ("columns", {"keep_columns": ("title",)}),
            ("columns", {"output_token_ids": True}),
            ("format", {"format": "openai-batch"}),
        ],
    )
    def test_settings(self, tmp_path: Path, table: Path, field: str, changed: dict[str, Any]) -> None:
        factory = Factory()
        with pytest.raises(OutputMismatch, match=rf"(another|other) {field}:") as caught:
            run(table, tmp_path / "out", factory=factory, **({"template": "{prompt}"} | changed))
        assert (caught.value.exit_code, caught.value.field) == (ExitCode.OTHER_RUN, field)
        assert factory.made == []

    def test_what_cannot_change_results_may_change(self, tmp_path: Path, table: Path) -> None:
        options: dict[str, Any] = {"shard_rows": 1, "compression": "snappy", "tokenizer_threads": 1, "grace": 1.0}
        assert run(table, tmp_path / "out", template="{prompt}", **options).exit_code == ExitCode.OK

    def test_a_choice_made_at_run_time_is_compared_too(self, tmp_path: Path) -> None:
        class Resolving(StandInEngine):
            dtype = "float32"

            def describe(self) -> dict[str, object]:
                return {"resolved": {"dtype": self.dtype}}

        class Other(Resolving):
            dtype = "bfloat16"

        table = write(tmp_path / "in.parquet", {"prompt": prompts(4)}, row_group_size=2)
        factory = Factory(make=lambda context: Resolving())
        run(table, tmp_path / "out", factory=factory, shard_rows=2)
        parts(tmp_path / "out")[1].unlink()
        second = Factory(make=lambda context: Other())
        with pytest.raises(OutputMismatch, match="float32") as caught:
            run(table, tmp_path / "out", factory=second, shard_rows=2)
        assert caught.value.field == "dtype"
        assert second.contexts[0].resolved == {"dtype": "float32"}

    def test_restart_discards(self, tmp_path: Path, table: Path) -> None:
        (tmp_path / "out" / "notes.txt").write_text("mine")
        result = run(table, tmp_path / "out", template="{title}", restart=True)
        assert (result.exit_code, result.rows_this_start) == (ExitCode.OK, 4)
        assert (tmp_path / "out" / "notes.txt").read_text() == "mine"

    def test_a_directory_of_somebody_else(self, tmp_path: Path, table: Path) -> None:
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "part-00000.parquet").write_bytes(b"theirs")
        for restart in (False, True):
            with pytest.raises(OutputMismatch, match="not empty"):
                run(table, tmp_path / "theirs", restart=restart)
        assert (tmp_path / "theirs" / "part-00000.parquet").read_bytes() == b"theirs"


class TestH23Duplicates:
    def test_greedy_duplicates_are_computed_once(self, tmp_path: Path) -> None:
        texts = ["same"] * 4 + ["other"] + ["same"] * 5
        table = write(tmp_path / "in.parquet", {"prompt": texts}, row_group_size=3)
        factory = counting()
        result = run(table, tmp_path / "out", factory=factory, shard_rows=3)
        assert (given(factory), result.deduplicated, result.rows_computed) == (2, 8, 2)
        rows = read(tmp_path / "out")
        assert [row["decoding"]["source"] for row in rows].count("duplicate") == 8
        run(table, tmp_path / "plain", shard_rows=3, deduplicate=False)
        assert answers(tmp_path / "out") == answers(tmp_path / "plain")
        assert (
            sum(row["decoding"]["steps"] for row in rows) == rows[0]["decoding"]["steps"] + rows[4]["decoding"]["steps"]
        )

    def test_sampled_duplicates_are_independent(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["same"] * 4})
        factory = counting()
        result = run(table, tmp_path / "out", factory=factory, sampling=SAMPLED)
        assert (given(factory), result.deduplicated) == (4, 0)
        assert len({row["completion"] for row in read(tmp_path / "out")}) == 4

    def test_other_parameters_are_another_row(self, tmp_path: Path) -> None:
        cells = ['{"max_tokens": 2}', '{"max_tokens": 3}', '{"max_tokens": 2.0}', None]
        table = write(tmp_path / "in.parquet", {"prompt": ["same"] * 4, "p": cells})
        factory = counting()
        run(table, tmp_path / "out", factory=factory, params_column="p")
        assert given(factory) == 3

    def test_a_row_with_an_error_lends_its_error(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["poison", "fine", "poison"]})
        result = run(table, tmp_path / "out", settings=StandInSettings(raise_on="poison"))
        assert result.row_errors_by_code == {"engine_error": 2}

    def test_the_check_sees_a_wrong_owner(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Negative control: keys that forget the tokens give wrong answers, and the comparison shows it."""
        real = KeyTable.insert
        monkeypatch.setattr(KeyTable, "insert", lambda self, keys, places: real(self, keys * 0 + 1, places))
        table = write(tmp_path / "in.parquet", {"prompt": prompts(4)})
        run(table, tmp_path / "out")
        run(table, tmp_path / "plain", deduplicate=False)
        assert answers(tmp_path / "out") != answers(tmp_path / "plain")


class TestH24Poison:
    def test_not_computed_again_unless_asked(self, tmp_path: Path) -> None:
        texts = [*prompts(5), "poison", *prompts(4, "more")]
        table = write(tmp_path / "in.parquet", {"prompt": texts}, row_group_size=5)
        settings = StandInSettings(raise_on="poison")
        assert run(table, tmp_path / "out", settings=settings, shard_rows=5).exit_code == ExitCode.ROW_ERRORS
        before = read(tmp_path / "out")
        for _ in range(3):
            factory = counting(settings)
            assert run(table, tmp_path / "out", factory=factory, shard_rows=5).exit_code == ExitCode.ROW_ERRORS
            assert factory.made == []
        healed = counting()
        result = run(table, tmp_path / "out", factory=healed, shard_rows=5, retry_failed=True)
        assert (given(healed), result.exit_code, result.row_errors) == (1, ExitCode.OK, 0)
        after = read(tmp_path / "out")
        assert after[5]["completion"] is not None
        assert after[:5] + after[6:] == before[:5] + before[6:]
        assert (tmp_path / "out" / "_SUCCESS").exists()

    def test_a_retry_that_fails_again_keeps_the_rest(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a", "poison", "b"]})
        settings = StandInSettings(raise_on="poison")
        run(table, tmp_path / "out", settings=settings)
        before = read(tmp_path / "out")
        result = run(table, tmp_path / "out", settings=settings, retry_failed=True)
        assert (result.exit_code, result.row_errors) == (ExitCode.ROW_ERRORS, 1)
        assert [r["completion"] for r in read(tmp_path / "out")] == [r["completion"] for r in before]


class TestH25MissingPart:
    @pytest.mark.parametrize("loss", ["gone", "short"])
    def test_that_part_is_made_again(self, tmp_path: Path, loss: str) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(9)}, row_group_size=3)
        out = tmp_path / "out"
        run(table, out, shard_rows=3)
        before = read(out)
        if loss == "gone":
            parts(out)[1].unlink()
        else:
            import pyarrow.parquet as pq

            file = pq.ParquetFile(parts(out)[1])
            table_part, metadata = file.read().slice(0, 2), file.schema_arrow.metadata
            pq.write_table(table_part.replace_schema_metadata(metadata), parts(out)[1])
        events, factory = Recorder(), counting()
        result = run(table, out, factory=factory, events=events, shard_rows=3)
        assert (result.exit_code, given(factory), events.committed) == (ExitCode.OK, 3, [1])
        assert any("part-00001" in message for _, message in events.warnings)
        assert read(out) == before


def _committed(output: Path) -> int:
    manifest = output / "_specbatch" / "manifest.json"
    shards = json.loads(manifest.read_text())["shards"] if manifest.exists() else []
    return sum(shard["part"] is not None for shard in shards)


def _wait_for(ready: Callable[[], bool], process: Any) -> None:
    while not ready():
        assert process.poll() is None, finish(process)
        time.sleep(0.01)


def test_seeds_do_not_depend_on_the_schedule(tmp_path: Path) -> None:
    """Sampled rows: the same answers whatever the shards, the batch and the order of finishing."""
    table = write(tmp_path / "in.parquet", {"prompt": ["same"] * 60}, row_group_size=10)
    run(table, tmp_path / "a", sampling=SAMPLED, shard_rows=10, settings=StandInSettings(capacity=7))
    run(table, tmp_path / "b", sampling=SAMPLED, shard_rows=60, tokenizer_threads=1)
    run(table, tmp_path / "c", sampling=SAMPLED, shard_rows=60, seed=1)
    assert answers(tmp_path / "a") == answers(tmp_path / "b")
    assert answers(tmp_path / "a") != answers(tmp_path / "c")


def test_an_explicit_seed_of_a_row_is_taken_as_it_is(tmp_path: Path) -> None:
    cells = pa.array([{"seed": 5}, {"seed": 5}, {"seed": 6}, {"seed": None}], pa.struct([("seed", pa.int64())]))
    table = write(tmp_path / "in.parquet", {"prompt": ["same"] * 4, "p": cells})
    run(table, tmp_path / "out", sampling=SAMPLED, params_column="p")
    texts = [row["completion"] for row in read(tmp_path / "out")]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_tokenizers_are_made_once(tmp_path: Path) -> None:
    made = []

    def make() -> StandInTokenizer:
        made.append(1)
        return StandInTokenizer()

    run(write(tmp_path / "in.parquet", {"prompt": ["a"]}), tmp_path / "out", to=target(tokenizer=make))
    assert len(made) == 1
