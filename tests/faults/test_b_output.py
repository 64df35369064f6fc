"""Faults B1 to B13 that need the whole step loop: where a run ends, what is shared, what an exception leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch.engine.engine import Engine
from specbatch.sampling_params import SamplingParams
from tests.driving import acceptance, add, draft, finish, make_engine, tokens


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def both(target: Path, prompts: list[list[int]], params: list[SamplingParams], k: int = 4) -> tuple[dict, dict]:
    """The same requests AR and with a draft that is always right."""
    results = []
    for script, options in ((None, {}), (lambda *_: draft(k), {"draft_model": str(target)})):
        engine = make_engine(target, script, **options)
        add(engine, prompts, params)
        results.append(finish(engine))
        engine.close()
    return results[0], results[1]


def test_b1_a_stop_token_in_the_middle_of_an_accepted_run(tiny_target: Path) -> None:
    work = [prompt(s, 20) for s in range(8)]
    free, _ = both(tiny_target, work, [SamplingParams(max_tokens=24, ignore_eos=True)] * 8)
    stops = [free[i].token_ids[5 + i] for i in range(8)]  # falls on every place of a round of five
    params = [SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(s,)) for s in stops]
    plain, spec = both(tiny_target, work, params)
    assert plain == {i: _same(plain[i], spec[i]) for i in plain}
    for i in range(8):
        assert spec[i].finish_reason == "stop"
        assert spec[i].token_ids == free[i].token_ids[: free[i].token_ids.index(stops[i]) + 1]
        assert spec[i].completion_tokens == len(spec[i].token_ids)
        assert spec[i].accepted <= spec[i].completion_tokens - 1


def _same(plain: Any, spec: Any) -> Any:
    """`spec` with the counters that may differ between modes taken from `plain`."""
    from dataclasses import replace

    return replace(spec, steps=plain.steps, drafted=plain.drafted, accepted=plain.accepted)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7])
def test_b1_the_length_cap_in_the_middle_of_a_run(tiny_target: Path, limit: int) -> None:
    plain, spec = both(tiny_target, [prompt(1, 9)], [SamplingParams(max_tokens=limit, ignore_eos=True)])
    assert spec[0].token_ids == plain[0].token_ids
    assert spec[0].completion_tokens == limit
    assert spec[0].finish_reason == "length"
    assert (spec[0].drafted == 0) == (limit <= 2)  # the last token is never drafted for


def test_b9_ragged_acceptance_equals_batched_ar(tiny_target: Path, tmp_path: Path) -> None:
    """A draft that is right about half of the time: rows of one step accept different numbers."""
    half = near_copy(tiny_target, tmp_path / "half")
    work = [prompt(s, 5 + 9 * s) for s in range(7)]
    plain = make_engine(tiny_target)
    add(plain, work)
    expected = tokens(finish(plain))
    engine = make_engine(tiny_target, lambda *_: draft(4), draft_model=str(half))
    add(engine, work)
    ragged = 0

    def watch(e: Engine) -> None:
        nonlocal ragged
        sampled = e._result[1]
        ragged += len(set(sampled.tolist())) > 1

    done = finish(engine, each_step=watch)
    assert tokens(done) == expected
    assert 0.1 < acceptance(done)[1] < 0.95
    assert ragged > 5


def near_copy(source: Path, path: Path, noise: float = 0.02) -> Path:
    """The same model with its weights shaken a little."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, path)
    torch.manual_seed(0)
    weights = load_file(path / "model.safetensors")
    shaken = {name: w + noise * torch.randn_like(w) * w.std() if w.dim() > 1 else w for name, w in weights.items()}
    save_file(shaken, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_b11_a_shared_prefix_does_not_cost_acceptance(tiny_target: Path) -> None:
    """The second row skips a 512-token prefix in the target; its draft has to read it all the same."""
    shared = prompt(7, 512)
    engine = make_engine(tiny_target, lambda *_: draft(4), draft_model=str(tiny_target), max_model_len=700)
    params = [SamplingParams(max_tokens=60, ignore_eos=True)]
    add(engine, [[*shared, *prompt(1, 9)]], params)
    done = finish(engine)
    add(engine, [[*shared, *prompt(2, 9)]], params, first_id=1)
    cached: list[int] = []
    while engine.num_unfinished:
        engine.step()
        rows = engine.take_finished()
        if rows is not None:
            cached += rows.cached_tokens.tolist()
            drafted, accepted = int(rows.drafted.sum()), int(rows.accepted.sum())
    assert cached[0] >= 496
    assert drafted >= 40
    assert accepted / drafted >= 0.98
    assert acceptance(done)[1] >= 0.98
    engine.close()


@pytest.mark.parametrize("where", ["propose", "target", "verify"])
def test_b13_an_exception_leaves_the_step_undone(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    work = [prompt(s, 12 + s) for s in range(3)]
    plain = make_engine(tiny_target)
    add(plain, work)
    expected = tokens(finish(plain))
    engine = make_engine(tiny_target, lambda *_: draft(3), draft_model=str(tiny_draft))
    add(engine, work)
    for _ in range(9):
        engine.step()
    owner, name = {
        "propose": (engine.parts.speculator, "propose"),
        "target": (engine.parts.runner, "forward"),
        "verify": (engine._eager, "_verify"),
    }[where]
    # Rows that a fast path chooses without logits would not come by here.
    monkeypatch.setattr(type(engine.parts.runner), "can_choose", False)
    with monkeypatch.context() as patch:

        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("injected")

        patch.setattr(type(owner), name, broken)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="injected"):
                engine.step()
            engine.core.check_integrity()
    assert tokens(finish(engine)) == expected
    engine.close()


def test_a_row_without_finite_logits_fails_alone(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN logits in one row: that row is an error, the others go on as if nothing had happened."""
    work = [prompt(s, 12 + s) for s in range(3)]
    plain = make_engine(tiny_target)
    add(plain, work)
    expected = tokens(finish(plain))
    engine = make_engine(tiny_target)
    add(engine, work)
    engine.step()
    forward = type(engine.parts.runner).forward

    def poisoned(self: object, *args: object, **kwargs: object) -> object:
        logits = forward(self, *args, **kwargs).clone()  # type: ignore[arg-type]
        logits[1] = float("nan")
        return logits

    monkeypatch.setattr(type(engine.parts.runner), "can_choose", False)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.parts.runner), "forward", poisoned)
        engine.step()
    done = finish(engine)
    assert done[1].finish_reason == "error"
    assert done[1].error is not None
    assert done[1].error.startswith("engine_error")
    assert [done[i].token_ids for i in (0, 2)] == [expected[0], expected[2]]
    engine.close()
