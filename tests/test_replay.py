"""A log of decisions, decided again: the same answers, without torch, in well under a second."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specbatch.control.controller import Controller, ControllerOptions, FixedPolicy
from specbatch.control.records import METHOD_DRAFT, METHOD_NGRAM
from specbatch.control.replay import read_log, replay
from specbatch.control.row_model import PlainRows
from specbatch.control.simulate import SimDevice, simulate
from specbatch.control.workloads import drifting, workload


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two shards with every kind of decision in it, as JSON Lines."""
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    work = workload(160, accept=drifting(0.9, 0.1), prompt=64, output=120, shards=2, ngram_accept=0.2)
    rows = PlainRows(work, pages=2_000, max_num_seqs=48, draft_kv_ratio=0.1)
    device = SimDevice(jitter=0.03)
    with path.open("w") as file:
        options = ControllerOptions(methods=(METHOD_NGRAM, METHOD_DRAFT), max_num_seqs=48, draft_kv_ratio=0.1)
        policy = Controller(options, device.cost, log=lambda event: print(json.dumps(event), file=file))
        simulate(rows, policy, device, work.tokens)
    return path


def test_a_replay_decides_the_same(log: Path) -> None:
    start = time.process_time()
    again = replay(read_log(log))
    seconds = time.process_time() - start
    assert again.decisions > 40
    assert again.same, str(again.differences[0])
    assert seconds < 1.0
    methods = {s["method"] for e in read_log(log) if e["event"] == "decision" for s in e["decision"]["shards"]}
    assert len(methods) > 1  # or there was nothing to decide


def events(log: Path) -> list[dict[str, Any]]:
    return list(read_log(log))


def test_a_tampered_log_is_found_out(log: Path) -> None:
    tampered = events(log)
    for event in tampered[10:20]:
        for sample in event["observation"]["acceptance"]:
            sample["accepted"] = [0] * len(sample["accepted"])
    again = replay(tampered)
    assert not again.same
    assert "decision" in str(again.differences[0])


def test_a_log_over_a_restart_replays_each_part(log: Path) -> None:
    """A resumed run appends to the log and starts with what is configured, not with what was learned."""
    part = events(log)[:20]
    again = replay(part + part)
    assert again.same
    assert again.decisions == 2 * sum(e["event"] == "decision" for e in part)


def test_a_line_cut_short_by_a_crash_is_left_out(log: Path, tmp_path: Path) -> None:
    text = log.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(text[:6]) + text[6][:50])
    assert len(list(read_log(cut))) == 6
    cut.write_text("".join(text[:3]) + text[3][:50] + "\n" + text[4])
    with pytest.raises(ValueError, match="line 4"):
        list(read_log(cut))
    cut.write_text('["no event"]\n')
    with pytest.raises(ValueError, match="line 1"):
        list(read_log(cut))


def test_a_forced_run_has_nothing_to_replay(tmp_path: Path) -> None:
    work = workload(8, accept=drifting(0.5), prompt=16, output=16)
    lines: list[dict[str, Any]] = []
    simulate(PlainRows(work, pages=500, max_num_seqs=8), FixedPolicy(1, 2, log=lines.append), SimDevice(), work.tokens)
    assert len(lines) == 1
    assert replay(lines).decisions == 0


def test_no_torch_and_no_core_is_needed(log: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'specbatch._core'): sys.modules[name] = None\n"
        "from specbatch.control.replay import read_log, replay\n"
        f"again = replay(read_log({str(log)!r}))\n"
        "print(again.decisions, again.same)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    count, same = done.stdout.split()
    assert int(count) > 40
    assert same == "True"
