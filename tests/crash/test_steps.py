"""A job that dies at any of its system calls: the next start makes the table that an uninterrupted run makes.

test_kill.py kills at random moments; here no moment is left out. The short form takes a few of the calls.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crash.steps import SCENARIOS
from tests.jobs import ROOT, environment

STRIDE = {"fresh": 11, "retry": 13, "samples": 23}  # of the short form
LEAST = {"fresh": 40, "retry": 30, "restart": 50, "samples": 60, "batch": 40}  # calls that such a job makes


def deaths(place: Path, scenario: str, stride: int, *more: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.steps", str(place), scenario, str(stride), *more],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("scenario", STRIDE)
def test_some_calls(tmp_path: Path, scenario: str) -> None:
    found = deaths(tmp_path, scenario, STRIDE[scenario])
    assert len(found) >= LEAST[scenario] // STRIDE[scenario]
    assert [death for death in found if death["wrong"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_call(tmp_path: Path, scenario: str) -> None:
    found = deaths(tmp_path, scenario, 1)
    assert len(found) >= LEAST[scenario]
    assert {"replace", "fsync", "unlink"} <= {death["in"].split()[0] for death in found}
    assert [death for death in found if death["wrong"]] == []


@pytest.mark.slow
def test_the_check_sees_parts_written_in_place(tmp_path: Path) -> None:
    """Negative control: without temporary names a death leaves a part that is not whole."""
    found = deaths(tmp_path, "fresh", 3, "broken")
    assert any("is not whole" in (death["wrong"] or "") for death in found)
