"""The last line, the JSON object, the metrics file, and the report of an output directory."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbatch.control.records import AcceptanceSample, Candidate, Decision, Observation, ShardDecision, ShardRows
from specbatch.errors import ROW_ERROR_CODES, DiskFull, ExitCode, InputMissing, OutputLocked, OutputMismatch
from specbatch.job.evidence import read_evidence
from specbatch.job.manifest import DIRECTORY, SUCCESS, InputEntry, Manifest, PartEntry
from specbatch.job.options import JobResult
from specbatch.job.report import report
from specbatch.job.shards import Shard
from specbatch.job.summary import error_line, error_object, final_line, metrics_text, result_object, write_metrics
from specbatch.options import RUN_OPTIONS


def a_result(**changes: Any) -> JobResult:
    values: dict[str, Any] = {
        "exit_code": 0, "reason": "done", "output": "prompts.out", "rows": 2290, "rows_done": 2290, "row_errors": 0,
        "row_errors_by_code": {}, "skipped": 0, "reused": 0, "deduplicated": 0, "shards": 4, "shards_done": 4,
        "rows_this_start": 2290, "rows_computed": 2290, "prompt_tokens": 600_000, "completion_tokens": 412_331,
        "generation_seconds": 724.0, "completion_tokens_per_second": 569.5, "engine_busy_seconds": 700.0,
        "wall_seconds": 750.0, "steps": 9000, "drafted": 1000, "accepted": 714, "acceptance_rate": 0.714,
        "preemptions": 0, "total_prompt_tokens": 600_000, "total_completion_tokens": 412_331,
        "prompt_source": "column prompt", "engine": {"device": "cpu"},
    }  # fmt: skip
    return JobResult(**(values | changes))


def test_the_final_line_says_what_happened_and_fits_a_mail() -> None:
    line = final_line(a_result())
    assert line == (
        "done: 2,290 of 2,290 rows in prompts.out, 412,331 tokens at 570 tokens/s, acceptance 71 %, 12m 30s [exit 0]"
    )
    codes = {"prompt_too_long": 2, "empty_prompt": 5, "a": 1, "b": 1}
    changed = a_result(exit_code=3, reason="done with row errors", row_errors=9, row_errors_by_code=codes, skipped=4)
    assert "9 row errors (5 empty_prompt, 2 prompt_too_long, 1 a, ...), 4 skipped" in final_line(changed)
    stopped = final_line(a_result(exit_code=143, reason="SIGTERM", rows_done=600, acceptance_rate=None))
    assert stopped.endswith("run it again to continue [exit 143]")
    assert "acceptance" not in stopped
    unreadable = a_result(exit_code=2, reason="unreadable input", rows_done=600, failed_shards={3: "corrupt"})
    assert final_line(unreadable).endswith("1 shard left out, see the warnings [exit 2]")
    both = final_line(a_result(exit_code=143, reason="SIGTERM", failed_shards={3: "corrupt", 4: "corrupt"}))
    assert both.endswith("2 shards left out, see the warnings, run it again to continue [exit 143]")
    for text in (line, stopped, final_line(changed)):
        assert text.isascii()
        assert "\n" not in text
    assert error_line(OutputLocked("x.out is in use")) == "error: x.out is in use [exit 11]"


def test_the_json_object_has_a_version_and_every_field() -> None:
    content = json.loads(json.dumps(result_object(a_result(), version="1.2", settings={"seed": 3})))
    assert content["schema_version"] == 1
    needed = {"rows", "prompt_tokens", "completion_tokens", "generation_seconds", "completion_tokens_per_second",
              "wall_seconds", "acceptance_rate", "preemptions", "exit_code", "reason", "settings"}  # fmt: skip
    assert needed <= content.keys()
    error = error_object(OutputMismatch("another seed", field="seed", hint="use --restart"), version="1.2")
    assert error["exit_code"] == 12
    assert error["error"] == {"code": "other_run", "message": "another seed", "hint": "use --restart"}


def samples(text: str) -> dict[str, float]:
    """Prometheus samples by name, and the syntax checked on the way."""
    values = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP \w+ .+|TYPE \w+ gauge)", line)
            continue
        match = re.fullmatch(r'(\w+)\{output="((?:[^"\\]|\\.)*)"(?:,code="(\w+)")?\} (\S+)', line)
        assert match, line
        values[match[1] + (f"/{match[3]}" if match[3] else "")] = float(match[4])
    return values


def test_metrics_keep_last_success_across_failures() -> None:
    first = metrics_text(a_result(), exit_code=0, output='a"b\\c', now=1000.0)
    assert samples(first)["specbatch_last_success_timestamp_seconds"] == 1000
    assert samples(first)["specbatch_completion_tokens"] == 412_331
    second = metrics_text(None, exit_code=11, output='a"b\\c', earlier=first, now=2000.0)
    assert samples(second) == {
        "specbatch_last_success_timestamp_seconds": 1000,
        "specbatch_last_run_timestamp_seconds": 2000,
        "specbatch_last_exit_code": 11,
    }
    third = metrics_text(a_result(exit_code=143), exit_code=143, output="x", earlier=second, now=3000.0)
    assert samples(third)["specbatch_last_success_timestamp_seconds"] == 1000
    errors = a_result(exit_code=3, row_errors=3, row_errors_by_code={"empty_prompt": 2, "prompt_too_long": 1})
    fourth = samples(metrics_text(errors, exit_code=3, output="x", earlier=third, now=4000.0))
    assert fourth["specbatch_last_success_timestamp_seconds"] == 4000
    assert fourth["specbatch_row_errors_by_code/empty_prompt"] == 2
    assert fourth["specbatch_row_errors"] == 3
    never = metrics_text(None, exit_code=2, output="x", earlier="garbage {", now=1.0)
    assert "specbatch_last_success_timestamp_seconds" not in samples(never)


def test_the_metrics_file_is_replaced_whole_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "specbatch.prom"
    write_metrics(path, a_result(), exit_code=0, output="o")
    before = path.stat().st_ino
    write_metrics(path, None, exit_code=13, output="o")
    assert path.stat().st_ino != before
    assert "specbatch_last_success" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IROTH
    assert [p.name for p in tmp_path.iterdir()] == ["specbatch.prom"]
    link = tmp_path / "link.prom"
    link.symlink_to(path)
    write_metrics(link, None, exit_code=5, output="o")
    assert link.is_symlink()
    assert 'exit_code{output="o"} 5' in path.read_text()


def a_part(name: str, **changes: Any) -> PartEntry:
    values: dict[str, Any] = {"rows": 10, "bytes": 100, "completion_tokens": 50, "drafted": 20, "accepted": 15}
    return PartEntry(name, **(values | {"modes": {"ngram": 9, "ar": 1}} | changes))


def a_manifest(output: Path, parts: list[PartEntry | None]) -> Manifest:
    shards = [Shard(i, 0, i, 1, 10 * i, 10) for i in range(len(parts))]
    manifest = Manifest(
        version="0.1.0", created="2026-03-01T02:00:00Z", target="m", format="parquet", n=1, fingerprint={"seed": 0},
        columns={"prompt": "column prompt"}, inputs=[InputEntry("a.parquet", 1000, 0, "d", 20)], shards=shards,
        parts=parts, starts=[{"exit_code": 0}],
    )  # fmt: skip
    (output / DIRECTORY).mkdir(parents=True)
    manifest.save(output)
    return manifest


def an_observation(step: int, acceptance: tuple[AcceptanceSample, ...]) -> Observation:
    return Observation(
        step=step, time=step / 10, running=4, waiting=0, shards=(ShardRows(0, 4), ShardRows(1, 0)), mean_context=1,
        mean_prompt=1, mean_limit=1, free_pages=1, total_pages=2, target_pages=1, draft_pages=0, max_num_seqs=8,
        acceptance=acceptance,
    )  # fmt: skip


def a_decision(step: int, method: int, k: int, *, switched: bool, probe: bool = False) -> Decision:
    candidates = (
        Candidate(0, 0, 4, 1.0, 0.1, 40.0),
        Candidate(1, 2, 4, 1.4, 0.1, 55.0),
        Candidate(1, 4, 4, 1.5, 0.1, 50.0),
    )
    chosen = ShardDecision(0, method, k, f"because of step {step}", switched, probe, candidates)
    fields = {"shadow_ngram": 0, "probe_draft_rows": 0, "max_rows": 0, "changed": switched, "reason": ""}
    known = {name: fields.get(name, 0) for name in Decision.__dataclass_fields__}
    return Decision(**(known | {"step": step, "method": method, "k": k, "shards": (chosen,)}))


def write_log(output: Path, entries: list[tuple[Observation, Decision]], tail: str = "") -> None:
    lines = [json.dumps({"event": "decision", "observation": o.to_json(), "decision": d.to_json()}) for o, d in entries]
    (output / DIRECTORY / "decisions.jsonl").write_text('{"event": "start"}\n' + "\n".join(lines) + "\n" + tail)


def test_the_report_puts_manifest_and_decisions_together(tmp_path: Path) -> None:
    a_manifest(tmp_path, [a_part("part-00000.parquet", row_errors={"empty_prompt": 2}), None])
    counts = AcceptanceSample(0, 1, 10, 8, (8, 6), (6, 3), 17)
    shadow = AcceptanceSample(0, 4, 10, 8, (100, 100), (0, 0), 17)
    fewer = AcceptanceSample(0, 1, 10, 8, (100, 0), (0, 0), 17, k=1)  # scored within real rounds
    log = [
        (an_observation(10, ()), a_decision(10, 0, 0, switched=True)),
        (an_observation(20, (counts, shadow, fewer)), a_decision(20, 1, 2, switched=True, probe=True)),
        (an_observation(30, (counts,)), a_decision(30, 1, 2, switched=True)),
        (an_observation(40, ()), a_decision(40, 1, 2, switched=False)),
    ]
    write_log(tmp_path, log, tail='{"event": "decision", "observ')
    found = report(tmp_path)
    assert (found.rows, found.rows_done, found.row_errors, found.complete) == (20, 10, 2, False)
    assert found.acceptance_rate == 0.75
    first, second = found.shards
    assert first.acceptance_by_position == {"ngram": [0.75, 0.5]}
    assert (first.mode, first.reason, first.changes) == ("ngram k=2", "because of step 40", 1)
    assert first.predicted_tokens_per_second == {"ar": 40.0, "ngram k=2": 55.0}
    assert second.part is None
    evidence = found.evidence
    assert [(c.step, c.mode, c.probe) for c in evidence.changes] == [
        (10, "ar", False), (20, "ngram k=2", True), (30, "ngram k=2", False)]  # fmt: skip
    assert (evidence.decisions, evidence.unreadable_lines) == (4, 1)
    content = json.loads(json.dumps(found.to_dict(decisions=True)))
    assert content["schema_version"] == 1
    assert len(content["decisions"]) == 3
    assert "decisions" not in found.to_dict()


def test_complete_needs_every_part_and_the_marker(tmp_path: Path) -> None:
    a_manifest(tmp_path, [a_part("part-00000.parquet")])
    assert not report(tmp_path).complete
    (tmp_path / SUCCESS).touch()
    assert report(tmp_path).complete
    assert report(tmp_path).shards[0].mode == "ngram"


def test_a_report_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no such directory"):
        report(tmp_path / "nowhere")
    with pytest.raises(InputMissing, match="no run has written here"):
        report(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputMissing, match="no such directory"):
        report(tmp_path / "file")


def test_a_log_of_another_shape_is_counted_not_trusted(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).mkdir()
    lines = ['{"event": "decision"}', '{"event": "decision", "observation": {}, "decision": 3}', "[]", "not json"]
    (tmp_path / DIRECTORY / "decisions.jsonl").write_text("\n".join(lines))
    assert read_evidence(tmp_path).unreadable_lines == 3
    assert read_evidence(tmp_path / "nowhere").decisions == 0


def test_an_unwritable_metrics_file_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises((DiskFull, OSError)):
        write_metrics(tmp_path / "no" / "such" / "x.prom", a_result(), exit_code=0, output="o")
    assert replace(a_result(), rows=1).rows == 1


def test_the_page_about_the_output_names_everything_there_is() -> None:
    page = (Path(__file__).parent.parent / "docs" / "output.md").read_text()
    wanted = [f"| `{code}` |" for code in ROW_ERROR_CODES]
    wanted += [f"| `{name}` |" for name in result_object(a_result(), version="1", settings={})]
    wanted += [f"| {code} |" if code < 130 else str(int(code)) for code in map(int, ExitCode)]
    assert [text for text in wanted if text not in page] == []


def test_the_pages_name_only_options_and_metrics_that_exist() -> None:
    known = {option.flag for option in RUN_OPTIONS} | {"--decisions", "--help", "--version"}
    metrics = metrics_text(a_result(row_errors_by_code={"a": 1}), exit_code=0, output="x")
    for name in ("output.md", "cron.md"):
        page = (Path(__file__).parent.parent / "docs" / name).read_text()
        inside = "\n".join(line for line in page.splitlines() if not line.startswith(("#SBATCH", "systemctl")))
        for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", inside)) - {"--now"}:
            assert flag in known, (name, flag)
        for metric in set(re.findall(r"specbatch_[a-z_]+", page)):
            assert metric in metrics, (name, metric)
