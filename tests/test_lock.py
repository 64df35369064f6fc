"""The output's lock: one holder, freed by release and by death, waited for when asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specbatch.errors import OutputLocked
from specbatch.job.lock import OutputLock
from tests.jobs import ROOT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "out" / "_specbatch").mkdir(parents=True)
    return tmp_path / "out" / "_specbatch" / "lock"


def test_one_holder(path: Path) -> None:
    with OutputLock(path) as first:
        first.acquire()
        with pytest.raises(OutputLocked, match=f"out is locked by process {os.getpid()}"):
            OutputLock(path).acquire()
    second = OutputLock(path)
    second.acquire()
    second.release()
    second.release()  # again does nothing


def test_waiting_ends_when_it_is_free(path: Path) -> None:
    first, second = OutputLock(path), OutputLock(path)
    first.acquire()
    threading.Timer(0.3, first.release).start()
    before = time.monotonic()
    second.acquire(wait=30)
    assert 0.2 < time.monotonic() - before < 10
    second.release()


def test_waiting_ends_when_cancelled(path: Path) -> None:
    first = OutputLock(path)
    first.acquire()
    before = time.monotonic()
    with pytest.raises(OutputLocked):
        OutputLock(path).acquire(wait=30, cancelled=lambda: True)
    assert time.monotonic() - before < 5
    first.release()


def test_a_dead_holder_holds_nothing(path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from specbatch.job.lock import OutputLock\n"
        "lock = OutputLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(OutputLocked, match=f"process {holder.pid}"):
        OutputLock(path).acquire()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    lock = OutputLock(path)
    lock.acquire()
    lock.release()
