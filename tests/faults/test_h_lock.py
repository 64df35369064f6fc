"""FAULTS H26: two runs at once on one output."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from specbatch.errors import ExitCode, OutputLocked
from specbatch.job.lock import OutputLock
from tests.faults.test_h_resume import _wait_for
from tests.jobs import finish, prompts, run, start, write


class TestH26TwoAtOnce:
    def test_the_second_is_told_and_a_crash_frees_the_lock(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": prompts(200)})
        out = tmp_path / "out"
        first = start(table, "-o", out, standin="capacity=1,delay=0.1")
        _wait_for(lambda: (out / "_specbatch" / "manifest.json").exists(), first)
        with pytest.raises(OutputLocked, match=f"process {first.pid}") as caught:
            run(table, out)
        assert caught.value.exit_code == ExitCode.LOCKED
        first.kill()
        finish(first)
        code, _, err = finish(start(table, "-o", out))
        assert code == ExitCode.OK, err

    def test_waiting(self, tmp_path: Path) -> None:
        table = write(tmp_path / "in.parquet", {"prompt": ["a"]})
        (tmp_path / "out" / "_specbatch").mkdir(parents=True)
        lock = OutputLock(tmp_path / "out" / "_specbatch" / "lock")
        lock.acquire()
        before = time.monotonic()
        with pytest.raises(OutputLocked, match=r"after waiting 0\.3 s"):
            run(table, tmp_path / "out", wait_lock=0.3)
        assert time.monotonic() - before >= 0.3
        threading.Timer(0.2, lock.release).start()
        assert run(table, tmp_path / "out", wait_lock=30.0).exit_code == ExitCode.OK
