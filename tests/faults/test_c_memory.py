"""Faults C1 to C8: too little memory, the ends of the context, drafts that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specbatch.engine.plan import plan_engine
from specbatch.engine_options import EngineOptions
from specbatch.sampling_params import SamplingParams
from tests.driving import acceptance, add, draft, finish, make_engine, tokens
from tests.tiny import write_llama

PAGE = 256 * 4  # bytes of four float32 tokens of the tiny target: 2 layers x 2 x 2 heads x 8


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def test_c1_a_tiny_pool_that_preempts_all_the_time(tiny_target: Path) -> None:
    work = [prompt(s, 10 + 13 * s) for s in range(6)]
    plain = make_engine(tiny_target)
    add(plain, work)
    expected = tokens(finish(plain))
    engine = make_engine(
        tiny_target,
        lambda step, *_: draft(step % 5),
        draft_model=str(tiny_target),
        kv_memory_bytes=PAGE * 36,
        block_size=4,
        max_model_len=128,
    )
    add(engine, work)
    between = 0

    def throw_out(e: object) -> None:
        nonlocal between
        if engine._progress.steps % 11 == 0 and engine._live:
            between += engine.core.preempt(max(engine._live))

    done = finish(engine, each_step=throw_out)
    assert tokens(done) == expected
    assert engine.progress.preemptions + between > 5
    engine.close()


def test_c2_a_row_larger_than_the_pool_fails_alone(tiny_target: Path, tiny_draft: Path) -> None:
    engine = make_engine(
        tiny_target,
        lambda *_: draft(4),
        draft_model=str(tiny_draft),
        kv_memory_bytes=PAGE * 17,
        block_size=4,
        max_model_len=512,
    )
    add(
        engine,
        [prompt(1, 20), prompt(2, 40), prompt(3, 100)],
        [SamplingParams(max_tokens=m, ignore_eos=True) for m in (20, 300, 5)],
    )
    done = finish(engine)
    assert done[0].finish_reason == "length"
    for i in (1, 2):
        assert done[i].finish_reason == "error"
        assert done[i].error is not None
        assert done[i].error.startswith("too_few_pages")
        assert "16 pages" in done[i].error
    engine.close()


def test_c4_the_pool_exactly_full_shrinks_k_and_never_waits(tiny_target: Path) -> None:
    """Two rows whose pages fill the pool to the last slot: they finish, every step makes progress."""
    work = [prompt(s, 31) for s in range(2)]
    plain = make_engine(tiny_target)
    add(plain, work, SamplingParams(max_tokens=33, ignore_eos=True))
    expected = tokens(finish(plain))
    engine = make_engine(
        tiny_target,
        lambda *_: draft(4),
        draft_model=str(tiny_target),
        kv_memory_bytes=PAGE * (2 * 16 + 1),
        block_size=4,
        max_model_len=64,
    )
    add(engine, work, SamplingParams(max_tokens=33, ignore_eos=True))
    steps = 0

    def count(e: object) -> None:
        nonlocal steps
        steps += 1
        assert steps < 400

    assert tokens(finish(engine, each_step=count)) == expected
    engine.close()


def test_c6_both_models_are_budgeted_before_the_run(tiny_target: Path) -> None:
    """A draft as heavy as the target halves the rows that can draft, not those of AR."""
    options = EngineOptions(
        model=str(tiny_target),
        draft_model=str(tiny_target),
        dtype="float32",
        kv_memory_bytes=PAGE * 4 * 100,
        block_size=16,
        max_model_len=64,
        threads=1,
    )
    plan = plan_engine(options)
    assert plan.max_rows_ar == 24
    assert plan.max_rows_speculative == 12
    described = plan.describe()
    assert described["max_rows_ar"] == 24
    assert described["draft_kv_bytes_per_token"] == described["kv_bytes_per_token"] == 256


@pytest.mark.parametrize("room", [1, 2, 3, 6])
def test_c7_the_end_of_the_context_clamps_k(tiny_target: Path, room: int) -> None:
    engine = make_engine(tiny_target, lambda *_: draft(4), draft_model=str(tiny_target), max_model_len=64)
    add(engine, [prompt(1, 64 - room)], SamplingParams(max_tokens=50, ignore_eos=True))
    done = finish(engine)
    plain = make_engine(tiny_target, max_model_len=64)
    add(plain, [prompt(1, 64 - room)], SamplingParams(max_tokens=50, ignore_eos=True))
    assert tokens(done) == tokens(finish(plain))
    assert done[0].completion_tokens == room
    assert done[0].finish_reason == "length"
    engine.close()


def test_c7_beyond_the_drafts_context_the_row_runs_ar(tiny_target: Path, tmp_path: Path) -> None:
    short = write_llama(tmp_path / "short", seed=1, max_position_embeddings=48)
    engine = make_engine(tiny_target, lambda *_: draft(4), draft_model=str(short), max_model_len=128)
    add(engine, [prompt(1, 20)], SamplingParams(max_tokens=100, ignore_eos=True))
    widest: list[int] = []
    done = finish(
        engine, each_step=lambda e: widest.append(e._info.draft_max_seq_len if e._info.num_draft_tokens else 0)
    )
    plain = make_engine(tiny_target, max_model_len=128)
    add(plain, [prompt(1, 20)], SamplingParams(max_tokens=100, ignore_eos=True))
    assert tokens(done) == tokens(finish(plain))
    assert max(widest) <= 48
    assert acceptance(done)[0] > 10
    assert done[0].completion_tokens == 100
    engine.close()


def test_c8_another_mapping_of_the_same_size_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    import json

    other = write_llama(tmp_path / "other", seed=3)
    file = other / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="id 65"):
        plan_engine(EngineOptions(model=str(tiny_target), draft_model=str(other), dtype="float32"))


def test_c8_a_padded_draft_vocabulary_is_fine(tiny_target: Path, tmp_path: Path) -> None:
    padded = write_llama(tmp_path / "padded", seed=4, vocab_size=320)
    work = [prompt(s, 15) for s in range(3)]
    plain = make_engine(tiny_target)
    add(plain, work)
    expected = tokens(finish(plain))
    engine = make_engine(tiny_target, lambda *_: draft(3), draft_model=str(padded))
    add(engine, work)
    assert tokens(finish(engine)) == expected
    engine.close()
