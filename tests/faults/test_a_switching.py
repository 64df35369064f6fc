"""Faults A1 to A4: switching between decoding modes while rows run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specbatch import _core
from specbatch.sampling_params import SamplingParams
from tests.driving import acceptance, add, draft, finish, make_engine, tokens


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def params(*max_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=m, ignore_eos=True) for m in max_tokens]


def test_a1_the_draft_catches_up_after_an_ar_phase(tiny_target: Path) -> None:
    """Two rows run AR, then one is left and drafts: what the draft missed is filled first, so all is accepted."""
    engine = make_engine(
        tiny_target,
        lambda step, running, waiting: draft(3 if step > 5 and running == 1 else 0),
        draft_model=str(tiny_target),
    )
    add(engine, [prompt(1, 50), prompt(2, 20)], params(384, 60))
    kinds: list[int] = []
    done = finish(engine, each_step=lambda e: kinds.append(e._info.kind))  # type: ignore[union-attr]
    drafted, rate = acceptance(done)
    assert done[0].completion_tokens == 384
    assert drafted > 200
    assert rate >= 0.98
    assert kinds.count(_core.STEP_DRAFT_PREFILL) == 1
    engine.close()


def test_a1_two_switches_off_and_on_with_forced_preemption(tiny_target: Path) -> None:
    """512 tokens, drafting off and on twice, a row thrown out of its pages now and then."""
    engine = make_engine(
        tiny_target,
        lambda step, *_: draft(0 if 40 <= step < 70 or 100 <= step < 130 else 4),
        draft_model=str(tiny_target),
        max_model_len=700,
    )
    add(engine, [prompt(3, 64), prompt(4, 33)], params(512, 512))

    def preempt(e: object) -> None:
        if engine._progress.steps % 37 == 0:
            for handle in sorted(engine._live)[:1]:
                engine.core.preempt(handle)

    done = finish(engine, each_step=preempt)
    drafted, rate = acceptance(done)
    assert sum(c.completion_tokens for c in done.values()) == 1024
    assert engine.progress.preemptions + sum(1 for _ in done) > 2
    assert drafted > 400
    assert rate >= 0.98
    engine.close()


def test_a2_off_with_a_draft_loaded_is_the_same_path(tiny_target: Path, tiny_draft: Path) -> None:
    """k = 0 with a draft loaded: the same tokens, the same steps, and no page for the draft."""
    work = [prompt(i, 30 + 7 * i) for i in range(6)]
    plain, loaded = make_engine(tiny_target), make_engine(tiny_target, draft_model=str(tiny_draft))
    results = []
    for engine in (plain, loaded):
        add(engine, work)
        shapes: list[tuple[int, int, int]] = []
        done = finish(
            engine, each_step=lambda e, s=shapes: s.append((e._info.kind, e._info.num_tokens, e._info.draft_pages))
        )
        results.append((tokens(done), shapes))
        engine.close()
    assert results[0] == results[1]
    assert all(pages == 0 for _, _, pages in results[1][1])


def test_a2_switching_off_gives_every_draft_page_back(tiny_target: Path, tiny_draft: Path) -> None:
    engine = make_engine(tiny_target, lambda step, *_: draft(3 if step < 10 else 0), draft_model=str(tiny_draft))
    add(engine, [prompt(i, 40) for i in range(4)])
    seen: list[int] = []
    finish(engine, each_step=lambda e: seen.append(e._info.draft_pages))
    assert max(seen) > 0
    assert seen[-1] == 0
    assert all(pages == 0 for pages in seen[12:])
    engine.close()


@pytest.mark.parametrize("period", [2, 3])
def test_a3_ar_right_after_a_long_acceptance(tiny_target: Path, period: int) -> None:
    """Positions and slots come from what is committed, however much was accepted at once."""
    work = [prompt(i, 11 + 5 * i) for i in range(3)]
    plain = make_engine(tiny_target)
    add(plain, work)
    expected = tokens(finish(plain))
    engine = make_engine(
        tiny_target, lambda step, *_: draft(5 if (step // period) % 2 else 0), draft_model=str(tiny_target)
    )
    add(engine, work)
    done = finish(engine)
    assert tokens(done) == expected
    assert acceptance(done)[0] > 0


def test_a4_a_smaller_k_leaves_nothing_over(tiny_target: Path, tiny_draft: Path) -> None:
    """k = 4, then 2, then 1, then 3: only this step's drafts are verified."""
    work = [prompt(i, 25) for i in range(3)]
    plain = make_engine(tiny_target)
    add(plain, work)
    expected = tokens(finish(plain))
    ks = (4, 2, 1, 3)
    for model in (tiny_target, tiny_draft):
        engine = make_engine(tiny_target, lambda step, *_: draft(ks[step % 4]), draft_model=str(model))
        add(engine, work)
        most: list[tuple[int, int]] = []
        done = finish(engine, each_step=lambda e, m=most: m.append((e._info.max_draft_tokens, e._result[0].shape[1])))
        assert tokens(done) == expected
        assert all(width == k + 1 for k, width in most if k)


def test_a7_a_shard_after_a_hopeless_one_gets_speculation_back() -> None:
    """Modes belong to shards: setting one shard's leaves the others' alone, also those that come later."""
    core = _core.Scheduler(num_pages=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    core.set_speculation(_core.METHOD_NGRAM, 3)
    core.set_speculation(_core.METHOD_NONE, 0, 0)
    repeats = np.tile(np.arange(4, dtype=np.int32), 4)
    core.add_requests(
        request_id=np.arange(2, dtype=np.int64),
        shard=np.array([0, 1], np.int32),
        prompt_values=np.concatenate([repeats, repeats + 4]),  # not equal: equal prompts wait for each other
        prompt_offsets=np.array([0, 16, 32], np.int64),
        max_tokens=np.array([20, 20], np.int32),
    )
    from specbatch.engine.step_buffers import StepArrays

    arrays = StepArrays(max_num_seqs=4, max_num_tokens=64, max_num_logits=36, pages_per_row=16)
    none = np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
    info = core.step(0, *none, arrays.core)
    assert info.kind == _core.STEP_PREFILL
    sampled = np.array([[0], [4]], np.int32)  # each goes on with its own repetition
    info = core.step(info.step_id, sampled, np.ones(2, np.int32), np.zeros(2, np.int32), arrays.core)
    assert info.kind == _core.STEP_DECODE
    assert arrays.host["num_draft_tokens"][:2].tolist() == [0, 3]
