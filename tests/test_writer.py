"""Parts: schema, samples as lists, the OpenAI batch shape, evidence and figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.errors import ExitCode, InputUnreadable, SchemaError
from specbatch.job.answers import COUNTERS, answer_schema, from_outcomes
from specbatch.job.columns import plan_output
from specbatch.job.options import JobOptions
from specbatch.job.part_answers import PartAnswers
from specbatch.job.part_writer import ParquetPart, read_note
from specbatch.job.prompts import Outcomes
from specbatch.job.reader import Slice
from specbatch.requests import EngineProgress, FinishedRows
from specbatch.sampling_params import SamplingParams
from specbatch.standin import StandInEngine
from tests.jobs import DECODING, Factory, answers, parts, prompts, read, run, write

HOT = SamplingParams(temperature=1.0)


class Drafting(StandInEngine):
    """Says that it drafted, as an engine with speculation does."""

    def take_finished(self) -> FinishedRows | None:
        rows = super().take_finished()
        if rows is None:
            return None
        drafts = (rows.request_id >> 10 & 1 == 0).astype(np.int32)
        return replace(rows, drafted=4 * drafts, accepted=3 * drafts)

    @property
    def progress(self) -> EngineProgress:
        progress = super().progress
        progress.mode = {0: "ngram k=4"}
        return progress


class TestSchema:
    def test_columns_and_types(self, tmp_path: Path) -> None:
        columns = {"id": pa.array([1], pa.int16()), "prompt": ["a"], "when": pa.array([0], pa.timestamp("s"))}
        run(write(tmp_path / "in.parquet", columns), tmp_path / "out")
        schema = pq.read_schema(parts(tmp_path / "out")[0])
        assert schema.names == ["id", "prompt", "when", "completion", "finish_reason", "error", "prompt_tokens",
                                "completion_tokens", "decoding"]  # fmt: skip
        assert schema.field("id").type == pa.int16()
        assert schema.field("completion").type == pa.string()
        assert schema.field("error").type == pa.struct([("code", pa.string()), ("message", pa.string())])
        assert [field.name for field in schema.field("decoding").type] == list(DECODING)

    def test_token_ids_and_logprobs(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a", "", "b"]})
        run(table, tmp_path / "out", output_token_ids=True, logprobs=True)
        first, failed, last = read(tmp_path / "out")
        assert len(first["completion_token_ids"]) == len(first["completion_logprobs"]) == first["completion_tokens"]
        assert bytes(first["completion_token_ids"][:-1]).decode() == first["completion"]
        assert failed["completion_token_ids"] is failed["completion_logprobs"] is None
        assert last["completion_token_ids"]

    def test_kept_columns_in_the_order_asked_for(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"a": [1], "b": [2], "prompt": ["x"]})
        run(table, tmp_path / "out", keep_columns=("b", "a"))
        assert pq.read_schema(parts(tmp_path / "out")[0]).names[:3] == ["b", "a", "completion"]
        with pytest.raises(SchemaError, match="no such column"):
            run(table, tmp_path / "no", keep_columns=("c",))

    @pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
    def test_compression(self, tmp_path: Path, compression: str) -> None:
        run(write(tmp_path / "in.parquet", {"prompt": ["a"]}), tmp_path / "out", compression=compression)
        chunk = pq.ParquetFile(parts(tmp_path / "out")[0]).metadata.row_group(0).column(0)
        assert chunk.compression == {"none": "UNCOMPRESSED"}.get(compression, compression.upper())

    def test_hive_partitions_are_kept(self, tmp_path: Path) -> None:
        write(tmp_path / "in" / "day=1" / "a.parquet", {"prompt": ["a"]})
        write(tmp_path / "in" / "day=2" / "b.parquet", {"prompt": ["b"]})
        run(tmp_path / "in", tmp_path / "out", template="{prompt} on {day}")
        assert [(row["prompt"], row["day"], row["prompt_tokens"]) for row in read(tmp_path / "out")] == [
            ("a", 1, 6), ("b", 2, 6),
        ]  # fmt: skip


class TestSamples:
    def test_lists_of_n(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": [*prompts(5), "", None]})
        run(table, tmp_path / "out", n=4, sampling=HOT, output_token_ids=True)
        rows = read(tmp_path / "out")
        for row in rows[:5]:
            assert len(row["completion"]) == len(row["finish_reason"]) == len(row["completion_tokens"]) == 4
            assert len(set(row["completion"])) > 1
            assert [len(ids) for ids in row["completion_token_ids"]] == row["completion_tokens"]
            assert row["decoding"]["steps"] == sum(row["completion_tokens"])
            assert row["error"] is None
        assert rows[5]["finish_reason"] == ["error"] * 4
        assert rows[5]["completion"] == [None] * 4
        assert rows[5]["error"]["code"] == "empty_prompt"
        assert rows[6]["finish_reason"] == ["skipped"] * 4

    def test_the_first_sample_is_the_answer_without_n(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(5)})
        run(table, tmp_path / "many", n=3, sampling=HOT)
        run(table, tmp_path / "one", sampling=HOT)
        assert [row["completion"][0] for row in read(tmp_path / "many")] == [
            r["completion"] for r in read(tmp_path / "one")
        ]

    def test_greedy_samples_are_computed_once(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(5)})
        factory = Factory()
        run(table, tmp_path / "out", n=3, factory=factory)
        rows = read(tmp_path / "out")
        assert all(len(set(row["completion"])) == 1 and len(row["completion"]) == 3 for row in rows)
        assert factory.made[0].progress.completion_tokens == sum(row["completion_tokens"][0] for row in rows)

    def test_one_failed_sample(self, tmp_path: Path) -> None:
        class Failing(StandInEngine):
            def take_finished(self) -> FinishedRows | None:
                rows = super().take_finished()
                if rows is not None:
                    for i in np.flatnonzero(rows.request_id & 1023 == 1).tolist():
                        rows.finish_reason[i] = 3
                        rows.error[i] = ("too_few_pages", "needs 9 pages of 8")
                return rows

        table = write(tmp_path / "in.parquet", {"prompt": prompts(3)})
        result = run(table, tmp_path / "out", n=2, sampling=HOT, factory=Factory(make=lambda context: Failing()))
        row = read(tmp_path / "out")[0]
        assert row["finish_reason"] in (["stop", "error"], ["length", "error"])
        assert row["completion"][0] is not None
        assert row["completion"][1] is None
        assert row["error"] == {"code": "too_few_pages", "message": "needs 9 pages of 8"}
        assert result.row_errors_by_code == {"too_few_pages": 3}


class TestEvidence:
    def test_modes_and_counters(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(10)})
        result = run(table, tmp_path / "out", factory=Factory(make=lambda context: Drafting()))
        rows = [row["decoding"] for row in read(tmp_path / "out")]
        assert [row["mode"] for row in rows] == ["ngram", "ar"] * 5
        assert sum(row["accepted"] for row in rows) == 15
        manifest = json.loads((tmp_path / "out" / "_specbatch" / "manifest.json").read_text())
        part = manifest["shards"][0]["part"]
        assert (part["drafted"], part["accepted"], part["modes"]) == (20, 15, {"ar": 5, "ngram": 5})
        assert result.total_completion_tokens == sum(row["completion_tokens"] for row in read(tmp_path / "out"))

    def test_footers_say_whose_they_are(self, tmp_path: Path) -> None:
        run(write(tmp_path / "in.parquet", {"prompt": prompts(3)}), tmp_path / "out")
        found = read_note(parts(tmp_path / "out")[0])
        assert found is not None
        assert found[0] == 3
        assert found[1]["shard"] == 0
        assert read_note(tmp_path / "in.parquet") is None


class TestOpenAIBatch:
    def lines(self, tmp_path: Path) -> Path:
        bodies: list[Any] = [
            {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
            {"model": "m", "prompt": "once upon"},
            {"model": "m", "messages": []},
            {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 1, "seed": 4},
            {"model": "m", "prompt": "x", "tools": [1]},
        ]
        path = tmp_path / "in.jsonl"
        texts = [json.dumps({"custom_id": f"id-{i}", "body": body}) for i, body in enumerate(bodies)]
        path.write_text("\n".join([*texts, "garbage"]) + "\n")
        return path

    def test_in_and_out(self, tmp_path: Path) -> None:
        result = run(self.lines(tmp_path), tmp_path / "out", format="openai-batch")
        assert result.exit_code == ExitCode.ROW_ERRORS
        assert [path.name for path in parts(tmp_path / "out")] == ["part-00000.jsonl"]
        rows = [json.loads(line) for line in parts(tmp_path / "out")[0].read_text().splitlines()]
        assert [row["custom_id"] for row in rows] == ["id-0", "id-1", "id-2", "id-3", "id-4", "0-5"]
        body = rows[0]["response"]["body"]
        assert rows[0]["response"]["status_code"] == 200
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["role"] == "assistant"
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
        assert body["usage"]["completion_tokens"] <= 5
        assert rows[1]["response"]["body"]["object"] == "text_completion"
        assert isinstance(rows[1]["response"]["body"]["choices"][0]["text"], str)
        assert [row["error"]["code"] if row["error"] else None for row in rows] == [
            None, None, "empty_prompt", None, "invalid_parameters", "invalid_request",
        ]  # fmt: skip
        assert rows[2]["response"] is None

    def test_lines_nobody_meant(self, tmp_path: Path) -> None:
        """A byte order mark is no error; what has no UTF-8 is one, and keeps its name."""
        lines = [
            b'\xef\xbb\xbf{"custom_id": "first", "body": {"prompt": "a"}}\r',
            b'{"custom_id": "bytes", "body": {"prompt": "\xff\xfe"}}',
            b'{"custom_id": "half", "body": {"prompt": "a \\ud800"}}',
            b'{"custom_id": 7, "body": {"prompt": "a", "tools": [], "response_format": {"type": "text"}}}',
            b'{"custom_id": "deep", "body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"custom_id": "cut", "body": {"pro',
        ]
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"\n".join(lines))
        run(path, tmp_path / "out", format="openai-batch")
        rows = [json.loads(line) for line in parts(tmp_path / "out")[0].read_text().splitlines()]
        assert [row["custom_id"] for row in rows] == ["first", "bytes", "half", "7", "0-4", "0-5"]
        assert [row["error"]["code"] if row["error"] else None for row in rows] == [
            None, "invalid_utf8", "invalid_utf8", None, "invalid_request", "invalid_request",
        ]  # fmt: skip
        run(path, tmp_path / "table")
        assert [row["request"] is None for row in read(tmp_path / "table")] == [False, True, False, False, False, False]

    @pytest.mark.parametrize(
        ("content", "what"),
        [
            (b"\x1f\x8b\x08\x00rest", "compressed"),
            (b'[{"custom_id": "a"},\n{"custom_id": "b"}]', "one JSON array"),
            (b"\xef\xbb\xbf[\n  {}\n]", "one JSON array"),
            (b"PAR1...", "Parquet"),
        ],
    )
    def test_a_file_of_another_kind_is_refused_whole(self, tmp_path: Path, content: bytes, what: str) -> None:
        path = tmp_path / "in.jsonl"
        path.write_bytes(content)
        with pytest.raises(InputUnreadable, match=what):
            run(path, tmp_path / "out", format="openai-batch")

    def test_json_lines_into_parquet(self, tmp_path: Path) -> None:
        run(self.lines(tmp_path), tmp_path / "out")
        rows = read(tmp_path / "out")
        assert [row["custom_id"] for row in rows] == ["id-0", "id-1", "id-2", "id-3", "id-4", None]
        assert rows[0]["completion"] is not None
        assert rows[5]["request"] == "garbage"

    def test_parquet_into_json_lines(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"custom_id": ["a", None], "prompt": ["x", "y"]})
        run(table, tmp_path / "out", format="openai-batch", n=2, sampling=HOT)
        rows = [json.loads(line) for line in parts(tmp_path / "out")[0].read_text().splitlines()]
        assert [row["custom_id"] for row in rows] == ["a", "0-1"]
        assert [choice["index"] for choice in rows[0]["response"]["body"]["choices"]] == [0, 1]

    def test_resume_and_a_missing_part(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": [*prompts(4), *prompts(4)]}, row_group_size=2)
        run(table, tmp_path / "out", format="openai-batch", shard_rows=2)
        before = [path.read_bytes() for path in parts(tmp_path / "out")]
        parts(tmp_path / "out")[2].unlink()
        parts(tmp_path / "out")[1].write_bytes(b"")
        run(table, tmp_path / "out", format="openai-batch", shard_rows=2)
        assert [path.read_bytes() for path in parts(tmp_path / "out")] == before


def output_plan(**values: Any) -> tuple[Any, JobOptions]:
    options = JobOptions(inputs=("in",), output=Path("out"), **values)
    return plan_output(pa.schema([("prompt", pa.string())]), options), options


class TestParquetPart:
    def test_rows_without_answers_are_refused(self, tmp_path: Path) -> None:
        plan, options = output_plan()
        part = ParquetPart(tmp_path / "part-00000.parquet", plan, options)
        outcomes = Outcomes()
        outcomes.error(0, "empty_prompt", "nothing")
        batch = from_outcomes(answer_schema(False, False), outcomes, np.array([0]))
        with pytest.raises(AssertionError, match="2 rows of the input have 1 answers"):
            part.write(Slice(2, {"prompt": pa.array(["a", "b"])}), batch, 0)
        part.abandon()
        assert list(tmp_path.iterdir()) == []

    def test_row_groups_are_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specbatch.job.part_writer.GROUP_ROWS", 3000)
        table = write(tmp_path / "in.parquet", {"prompt": prompts(20_000)})
        run(table, tmp_path / "out")
        metadata = pq.ParquetFile(parts(tmp_path / "out")[0]).metadata
        assert metadata.num_row_groups > 1
        assert [row["prompt"] for row in read(tmp_path / "out")] == prompts(20_000)


@pytest.mark.parametrize("n", [1, 3])
def test_answers_come_back_from_a_part_as_they_went_in(tmp_path: Path, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.job.part_writer.GROUP_ROWS", 5)
    monkeypatch.setattr("specbatch.job.committer._GATHER_SAMPLES", 5 * n)
    texts = [*prompts(12), "", None, *prompts(3, "more")]
    table = write(tmp_path / "in.parquet", {"prompt": texts})
    run(table, tmp_path / "out", n=n, sampling=HOT, output_token_ids=True, logprobs=True)
    rows = read(tmp_path / "out")
    part = PartAnswers(parts(tmp_path / "out")[0], answer_schema(True, True), n, "")
    order = np.array([14, 0, 3, 12, 13, 7, 7])
    got = part.take(order).to_pylist()
    assert part.rows == len(rows)
    for i, row in enumerate(order.tolist()):
        for sample in range(n):
            answer = got[i * n + sample]
            completion = rows[row]["completion"]
            assert answer["text"] == (completion[sample] if n > 1 else completion)
            ids = rows[row]["completion_token_ids"]
            assert answer["token_ids"] == (ids[sample] if n > 1 else ids)
            assert answer["code"] == (rows[row]["error"] or {}).get("code")
            assert answer["prompt_tokens"] == rows[row]["prompt_tokens"]
        steps = sum(answer["steps"] for answer in got[i * n : (i + 1) * n])
        assert steps == (rows[row]["decoding"] or {"steps": 0})["steps"]
    assert np.flatnonzero(part.failed()).tolist() == [12]
    assert set(COUNTERS) < set(got[0])
    assert len(answers(tmp_path / "out")) == 17
