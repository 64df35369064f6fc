"""Whole engines on a real device: graphs against eager steps, memory measured, several kinds of rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specbatch.api import Completion, Engine
from specbatch.models.builtin import builtin_paths
from specbatch.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MODES: dict[str, dict[str, Any]] = {
    "off": {"speculate": "off"},
    "ngram": {"speculate": "ngram", "num_speculative_tokens": 4},
    "draft": {"speculate": "draft", "num_speculative_tokens": 4},
}
KINDS = (
    SamplingParams(max_tokens=48, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, seed=1),
    SamplingParams(max_tokens=30, min_tokens=5, frequency_penalty=0.4, repetition_penalty=1.1),
    SamplingParams(max_tokens=20, logprobs=True),
)


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """float32 products in full: another tile order must not turn a choice."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def run(mode: str, **options: Any) -> tuple[list[Completion], dict[str, Any], int]:
    """Completions of 60 prompts, the plan, and how often a graph was replayed."""
    target, draft = (str(path) for path in builtin_paths())
    settings = {"model": target, "device": "cuda", "dtype": "float32", "profile": False, "max_num_seqs": 24}
    if mode == "draft":
        settings["draft_model"] = draft
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 200, n).tolist() for n in rng.integers(1, 90, 60)]
    with Engine(**(settings | MODES[mode] | options)) as engine:
        completions = engine.generate(prompts, [KINDS[i % len(KINDS)] for i in range(len(prompts))])
        graphs = engine.core.parts.graphs
        return completions, engine.core.describe(), graphs.runner.replays if graphs is not None else 0


@pytest.fixture(scope="module")
def eager() -> list[Completion]:
    completions, described, replays = run("off", cuda_graphs="off")
    assert not described["cuda_graphs"]["enabled"]
    assert replays == 0
    return completions


@pytest.mark.parametrize("mode", MODES)
def test_graphs_give_what_eager_steps_give(mode: str, eager: list[Completion]) -> None:
    completions, described, replays = run(mode)
    graphs = described["cuda_graphs"]
    assert graphs["enabled"], graphs["reason"]
    assert graphs["graphs"] >= 4
    assert replays > 50
    assert [c.token_ids for c in completions] == [c.token_ids for c in eager]
    for got, wanted in zip(completions[3::4], eager[3::4], strict=True):
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)


def test_memory_is_measured_and_leaves_room() -> None:
    _, described, _ = run("draft", kv_memory_fraction=0.5, max_num_seqs=8)
    assert described["activation_bytes"] > 0
    assert described["graph_bytes"] > 0
    free, total = torch.cuda.mem_get_info()
    assert described["kv_bytes"] + described["graph_bytes"] + described["activation_bytes"] < total
    assert free > 0


def test_small_pools_preempt_and_change_nothing(eager: list[Completion]) -> None:
    completions, _, _ = run("draft", kv_memory_bytes=8 << 20, max_model_len=256)
    assert [c.token_ids for c in completions] == [c.token_ids for c in eager]
