"""The collector while starting: off, then on again, and what was made meanwhile left out of it."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys

import pytest

from specbatch.garbage import lasting_objects


def test_objects_made_meanwhile_are_not_looked_through_again() -> None:
    before = gc.get_freeze_count()
    try:
        with contextlib.suppress(ZeroDivisionError), lasting_objects():
            assert not gc.isenabled()
            with lasting_objects():
                pass
            assert not gc.isenabled(), "the outer one is still in force"
            kept = [[i] for i in range(1000)]
            _ = 1 // 0
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with lasting_objects():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_end_of_a_process_with_triton_is_silent() -> None:
    pytest.importorskip("triton")
    code = "from specbatch.garbage import lasting_objects\nwith lasting_objects():\n    import triton.language"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
