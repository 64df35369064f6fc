"""Fixtures shared by all tests: tiny checkpoints made once a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that was measured or proved before, and nothing left behind in the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama with a byte-level tokenizer."""
    from tests.tiny import write_llama

    return write_llama(tmp_path_factory.mktemp("tiny") / "target", seed=1)


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random-weight Llama, smaller: hardly any of its drafts is right."""
    from tests.tiny import write_llama

    return write_llama(tmp_path_factory.mktemp("tiny") / "draft", seed=2, layers=1, hidden=16)
