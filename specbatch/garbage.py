"""Python's cycle collector while a program starts: what is imported then stays, so looking through it is in vain."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_objects() -> Iterator[None]:
    """For imports and loading: no collection meanwhile, and what there is afterwards is never looked through again.

    Importing torch makes half a million objects. Passing over them takes a tenth off the import and most of the time
    that the interpreter takes to end. A program that has switched the collector off itself is left alone.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.unregister(_thaw)
        atexit.register(_thaw)


def _thaw() -> None:
    """Triton's binding counts what the last collection leaves over, and writes about it on stderr."""
    if "triton" in sys.modules:
        gc.unfreeze()
