"""`specbatch bench`: what is measured in which order, the figures made of it, and a made-up acceptance that says so."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.bench import BenchResult, Run, Setting, measure, part_of, run_bench, settings_of
from specbatch.bench_show import chart, tables, to_markdown, to_text
from specbatch.cli import main
from specbatch.control.fixed import FixedPolicy
from specbatch.control.records import METHOD_DRAFT, METHOD_NONE
from specbatch.engine.parts import build_parts
from specbatch.engine.plan import plan_engine
from specbatch.engine.synthetic import SyntheticEngine
from specbatch.engine_options import EngineOptions
from specbatch.requests import EngineProgress, FinishedRows, RequestBatch
from specbatch.sampling_params import SamplingParams
from tests.driving import make_engine

OFF, AUTO = Setting("off"), Setting("auto")


def test_settings_and_their_order() -> None:
    names = [s.name for s in settings_of(("auto", "off", "ngram", "draft"), None)]
    assert names == ["off", *(f"ngram k={k}" for k in (1, 2, 4, 8)), *(f"draft k={k}" for k in (1, 2, 4)), "auto"]
    assert [s.name for s in settings_of(("draft", "off"), (3, 3, 5))] == ["draft k=3", "draft k=5", "off"]


def requests(count: int, length: int = 12, **params: Any) -> RequestBatch:
    settings = {"max_tokens": 20, "ignore_eos": True} | params
    values = np.random.default_rng(0).integers(0, 256, count * length).astype(np.int32)
    offsets = np.arange(count + 1, dtype=np.int64) * length
    return RequestBatch(np.arange(count, dtype=np.int64), 0, values, offsets, SamplingParams(**settings))


@dataclass
class Recorder:
    """An engine that notes what it was asked to do and answers at once."""

    calls: list[tuple[str, int, int]] = field(default_factory=list)  # policy, limit, rows
    progress: EngineProgress = field(default_factory=EngineProgress)
    on_step: Any = None
    max_model_len: int = 64
    waiting: RequestBatch | None = None

    def use_policy(self, policy: Any, max_num_seqs: int | None = None) -> None:
        assert self.waiting is None
        self.policy, self.limit = policy, max_num_seqs

    def add(self, batch: RequestBatch) -> None:
        self.waiting = batch
        assert isinstance(batch.params, list) == (max(p.max_tokens for p in params_of(batch)) == 4)
        if not isinstance(batch.params, list):  # a warm-up is not a measurement
            self.calls.append((self.policy, self.limit or 0, len(batch)))

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) if self.waiting else 0

    def step(self) -> bool:
        return True

    def take_finished(self) -> FinishedRows:
        batch, self.waiting = self.waiting, None
        assert batch is not None
        n = len(batch)
        zeros, offsets = np.zeros(n, np.int32), np.arange(n + 1, dtype=np.int64)
        token = np.full(n, 5 if self.policy != "draft k=2" else 6, np.int32)
        none = np.zeros(0, np.uint8)
        return FinishedRows(
            batch.request_id, np.ones(n, np.uint8), [None] * n, zeros + 3, zeros + 7, token, offsets, none, offsets * 0,
            zeros, zeros, zeros, zeros, zeros, zeros,
        )  # fmt: skip


def params_of(batch: RequestBatch) -> list[SamplingParams]:
    return [batch.params] if isinstance(batch.params, SamplingParams) else list(batch.params)


def test_every_setting_has_its_turn_in_every_round_and_none_is_always_first() -> None:
    settings = settings_of(("off", "draft", "auto"), (1, 2))
    engine, saved = Recorder(), []
    result = BenchResult((2, 5), settings, None, {})
    run_bench(
        engine,  # type: ignore[arg-type]
        requests(9),
        result,
        rounds=3,
        make_policy=lambda setting, rows: setting.name,  # type: ignore[arg-type, return-value]
        say=lambda line: None,
        save=lambda r: saved.append(r.rounds),
    )
    assert saved == [1, 2, 3]
    cells = [engine.calls[i : i + 4] for i in range(0, len(engine.calls), 4)]
    assert len(cells) == 6
    assert all({c[0] for c in cell} == {s.name for s in settings} for cell in cells)
    assert all(len({c[1:] for c in cell}) == 1 for cell in cells)
    assert [cell[0][1:] for cell in cells] == [(2, 2), (5, 5)] * 3
    assert len({cell[0][0] for cell in cells}) > 1
    runs = result.runs[5, Setting("draft", 2)]
    assert [r.completion_tokens for r in runs] == [35] * 3
    assert all(r.prompt_tokens == 15 and r.different_rows == 5 for r in runs)
    assert all(r.different_rows == 0 for r in result.runs[5, AUTO])
    assert "other tokens" in to_text(result)


def result_of(rates: dict[Setting, list[float]], synthetic: tuple[float, ...] | None = None) -> BenchResult:
    """A result at 4 rows at once with given tokens a second."""
    result = BenchResult((4,), tuple(rates), synthetic, {"model": "m<1>"})
    for setting, many in rates.items():
        drafted = 100 if setting.k else 0
        result.runs[4, setting] = [
            Run(10.0 / r, 1.0, 0.1, 8, 10, drafted, drafted * 3 // 4, {"ar": 3, "draft k=2": 1}, 0) for r in many
        ]
    return result


def test_medians_best_and_ratio() -> None:
    result = result_of({OFF: [10, 30, 11], Setting("draft", 2): [12, 13, 1], AUTO: [12.6, 99, 12]})
    assert result.rate(4, OFF) == pytest.approx(11)
    assert result.best_forced(4) == Setting("draft", 2)
    assert result.auto_ratio(4) == pytest.approx(12.6 / 12)
    assert result.acceptance(4, OFF) is None
    assert result.acceptance(4, Setting("draft", 2)) == 0.75
    assert result.modes(4, AUTO) == {"ar": 0.75, "draft k=2": 0.25}
    told = json.loads(json.dumps(result.to_json()))
    assert told["auto_over_best_forced"] == [{"rows_at_once": 4, "ratio": 1.05, "best": "draft k=2"}]
    assert told["synthetic_acceptance"] is None
    assert [c["tokens_per_second"] for c in told["cells"]] == [11, 12, 12.6]
    text = to_text(result)
    assert re.search(r"auto over best forced +1\.050", text)
    assert "SYNTHETIC" not in text
    only = result_of({OFF: [10.0]})
    assert only.auto_ratio(4) is None
    assert only.to_json()["auto_over_best_forced"] == [{"rows_at_once": 4, "ratio": None, "best": "off"}]


def test_a_made_up_acceptance_is_named_wherever_it_shows() -> None:
    result = result_of({OFF: [10.0], Setting("draft", 2): [12.0]}, synthetic=(0.75, 0.5))
    assert all("SYNTHETIC acceptance 0.75, 0.5" in table.title for table in tables(result))
    assert "SYNTHETIC acceptance 0.75, 0.5" in chart(result).to_svg()
    assert ElementTree.fromstring(chart(result).to_svg()).tag.endswith("svg")
    assert to_markdown(result).count("SYNTHETIC") == 2
    assert result.to_json()["synthetic_acceptance"] == [0.75, 0.5]


def test_a_policy_can_follow_another_on_one_engine(tiny_target: Path, tiny_draft: Path) -> None:
    """Each measurement starts from nothing: the same steps and the same tokens, whatever ran before."""
    engine = make_engine(tiny_target, draft_model=str(tiny_draft), max_num_seqs=8)
    work = requests(6)
    seen = []
    for method, k, rows in ((METHOD_NONE, 0, 6), (METHOD_DRAFT, 3, 3), (METHOD_NONE, 0, 6), (METHOD_DRAFT, 3, 3)):
        run, tokens = measure(engine, work, FixedPolicy(method, k), rows)
        seen.append((run.decode_steps, run.drafted, run.accepted, run.completion_tokens))
        assert run.completion_tokens == 120
        assert 0 < run.prefill_seconds < run.seconds
        assert [len(t) // 4 for t in tokens] == [20] * 6
        assert engine.core.take_acceptance().rounds.size == (1 if k else 0)
        engine.core.check_integrity()
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]
    assert seen[0][0] == {"ar": 19}
    assert set(seen[1][0]) >= {"draft k=3"}
    engine.add(part_of(work, 1))
    with pytest.raises(ValueError, match="1 rows are unfinished"):
        engine.use_policy(FixedPolicy(METHOD_NONE, 0))


@pytest.mark.parametrize("accept", [(0.75,), (0.9, 0.2), (0.0,), (1.0,)])
def test_drafts_are_accepted_as_often_as_was_asked_for(
    tiny_target: Path, tiny_draft: Path, accept: tuple[float, ...]
) -> None:
    options = EngineOptions(
        model=str(tiny_target), draft_model=str(tiny_draft), dtype="float32", kv_memory_bytes=4 << 20, device="cpu",
        threads=1, max_num_seqs=16,
    )  # fmt: skip
    engine = SyntheticEngine(build_parts(plan_engine(options), options), FixedPolicy(METHOD_NONE, 0), accept)
    assert engine.describe()["synthetic_acceptance"][:2] == [accept[0], accept[-1]]
    run, _ = measure(engine, requests(16, max_tokens=120), FixedPolicy(METHOD_DRAFT, 2), 16)
    assert run.completion_tokens == 16 * 120
    counts = engine.core.take_acceptance()
    offered, accepted = counts.offered.sum(axis=0), counts.accepted.sum(axis=0)
    assert accepted[0] / offered[0] == pytest.approx(accept[0], abs=0.06)
    if offered[1]:
        assert accepted[1] / offered[1] == pytest.approx(accept[-1], abs=0.08)
    engine.close()


def test_an_impossible_acceptance_is_refused(tiny_target: Path) -> None:
    engine = make_engine(tiny_target)
    with pytest.raises(ValueError, match="between 0 and 1"):
        SyntheticEngine(engine.parts, FixedPolicy(METHOD_NONE, 0), (1.5,))


def prompts_file(folder: Path, count: int = 6) -> Path:
    path = folder / "prompts.parquet"
    pq.write_table(pa.table({"prompt": [f"row {i} " * (i + 1) for i in range(count)]}), path)
    return path


def test_the_command(tiny_target: Path, tiny_draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = prompts_file(tmp_path)
    models = ["--model", str(tiny_target), "--draft-model", str(tiny_draft), "--dtype", "float32", "--threads", "1"]
    models += ["--no-profile", "--kv-memory", "4MiB", "--max-tokens", "8"]
    code = main(["bench", str(path), *models, "--rows-at-once", "1,3", "--rounds", "2", "--k", "2"])
    out, err = capsys.readouterr()
    assert code == 0, err
    told = json.loads((tmp_path / "prompts.bench.json").read_text())
    assert {(c["rows_at_once"], c["setting"]) for c in told["cells"]} == {
        (r, s) for r in (1, 3) for s in ("off", "ngram k=2", "draft k=2", "auto")
    }
    assert all(len(c["rounds"]) == 2 and min(c["rounds"]) > 0 for c in told["cells"])
    assert all(r["ratio"] > 0 for r in told["auto_over_best_forced"])
    assert all(c["different_rows"] == 0 for c in told["cells"])
    assert "auto over best forced" in out
    assert "round 2/2, 3 at once, draft k=2" in err
    assert (tmp_path / "prompts.bench.md").read_text().startswith("**Completion tokens a second")
    ElementTree.parse(tmp_path / "prompts.bench.svg")
    again = ["bench", str(path), *models, "--rows-at-once", "2", "--rounds", "1", "--k", "2", "--json"]
    code = main([*again, "--synthetic-acceptance", "0.9,0.5", "--save", str(tmp_path / "made-up")])
    out, err = capsys.readouterr()
    assert code == 0, err
    told = json.loads(out)
    assert told["synthetic_acceptance"] == [0.9, 0.5]
    assert {c["setting"] for c in told["cells"]} == {"off", "draft k=2", "auto"}
    assert all(c["completion_tokens"] == [16] for c in told["cells"])  # no row ends early on a made-up token
    assert "SYNTHETIC" in (tmp_path / "made-up.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows-at-once", "9"], "9 prompts are needed, the input has 6"),
        (["--rows-at-once", "0"], "--rows-at-once must be numbers from 1"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--speculators", "off,medusa"], "--speculators must be among off, ngram, draft, auto"),
        (["--rows-at-once", "2", "--speculators", "draft"], "no draft model"),
        (["--rows-at-once", "2", "--synthetic-acceptance", "0.5"], "needs a draft model"),
        (["--plot", "x.gif"], "plot must end in"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    path = prompts_file(tmp_path)
    assert (
        main(["bench", str(path), "--model", str(tiny_target), "--dtype", "float32", "--no-profile", *arguments]) == 2
    )
    assert words in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.parquet"]
