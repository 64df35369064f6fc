"""The step loop end to end on tiny models: the same answer in every mode, batch size and page pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch.api import Completion, Engine
from specbatch.sampling_params import SamplingParams
from tests.tiny import reference_greedy

LENGTHS = (3, 30, 300, 17, 64, 1, 120)


def make_prompts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, n).tolist() for n in lengths]


def run(model: Path, prompts: list[list[int]], params: Any = None, **options: Any) -> list[Completion]:
    settings: dict[str, Any] = {"dtype": "float32", "speculate": "off", "kv_memory_bytes": 4 << 20, "threads": 1}
    with Engine(model=str(model), **(settings | options)) as engine:
        return engine.generate(prompts, params or SamplingParams(max_tokens=40))


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [list(c.token_ids) for c in completions]


MODES: dict[str, dict[str, Any]] = {
    "ar": {},
    "ngram": {"speculate": "ngram", "num_speculative_tokens": 4},
    "draft": {"speculate": "draft", "num_speculative_tokens": 4},
    "one row": {"max_num_seqs": 1},
    "draft, one row": {"speculate": "draft", "num_speculative_tokens": 3, "max_num_seqs": 1},
    "chunked prefill": {"max_num_batched_tokens": 16},
    "tiny pool": {"kv_memory_bytes": 512 * 400, "block_size": 4, "max_model_len": 400},
    "tiny pool, draft": {
        "kv_memory_bytes": 512 * 400,
        "block_size": 4,
        "max_model_len": 400,
        "speculate": "draft",
        "num_speculative_tokens": 5,
    },
    "no prefix cache": {"prefix_cache": False},
}


@pytest.fixture(scope="module")
def expected(tiny_target: Path) -> list[list[int]]:
    return reference_greedy(tiny_target, make_prompts(), 40)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_equals_transformers_in_every_mode(
    mode: str, tiny_target: Path, tiny_draft: Path, expected: list[list[int]]
) -> None:
    options = dict(MODES[mode])
    if options.get("speculate") == "draft":
        options["draft_model"] = str(tiny_draft)
    assert tokens(run(tiny_target, make_prompts(), **options)) == expected


def test_a_tiny_pool_preempts(tiny_target: Path) -> None:
    """The case above is not vacuous: the pool is too small for all rows at once."""
    with Engine(
        model=str(tiny_target),
        dtype="float32",
        speculate="off",
        kv_memory_bytes=512 * 400,
        block_size=4,
        max_model_len=400,
    ) as engine:
        engine.generate(make_prompts(), SamplingParams(max_tokens=40, ignore_eos=True))
        assert engine.core.progress.preemptions > 0


def test_draft_that_is_the_target_is_always_accepted(tiny_target: Path) -> None:
    completions = run(
        tiny_target,
        make_prompts(),
        SamplingParams(max_tokens=100, ignore_eos=True),
        speculate="draft",
        draft_model=str(tiny_target),
        num_speculative_tokens=4,
    )
    drafted, accepted = sum(c.drafted for c in completions), sum(c.accepted for c in completions)
    assert drafted > 300
    assert accepted / drafted >= 0.98


def test_sampling_does_not_depend_on_mode_or_batch(tiny_target: Path, tiny_draft: Path) -> None:
    prompts = make_prompts(3)
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, seed=i if i % 2 else None, top_k=(0, 20)[i % 2], top_p=0.9)
        for i in range(len(prompts))
    ]
    plain = tokens(run(tiny_target, prompts, params))
    draft = {"speculate": "draft", "draft_model": str(tiny_draft), "num_speculative_tokens": 3}
    assert tokens(run(tiny_target, prompts, params, **draft)) == plain
    assert tokens(run(tiny_target, prompts, params, speculate="ngram", num_speculative_tokens=2)) == plain
    assert tokens(run(tiny_target, prompts, params, max_num_seqs=2)) == plain
    assert len({tuple(t) for t in plain}) == len(plain)


def test_rejection_verification_runs_and_greedy_rows_stay_equal(
    tiny_target: Path, tiny_draft: Path, expected: list[list[int]]
) -> None:
    prompts = make_prompts()
    params = [SamplingParams(max_tokens=40, temperature=float(i % 2)) for i in range(len(prompts))]
    got = run(
        tiny_target,
        prompts,
        params,
        speculate="draft",
        draft_model=str(tiny_draft),
        num_speculative_tokens=3,
        verification="rejection",
    )
    assert [list(c.token_ids) for c in got][::2] == expected[::2]
    assert all(c.completion_tokens == 40 or c.finish_reason == "stop" for c in got)


def test_text_and_ids_agree_at_stop_strings(tiny_target: Path, tiny_draft: Path) -> None:
    prompts = make_prompts(5)
    free = run(tiny_target, prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    raw = [bytes(t for t in c.token_ids if t < 256) for c in free]
    params = []
    for text in raw:
        middle = text[10:13].decode("latin-1") if all(b < 0x80 for b in text[10:13]) else "zzz"
        params.append(SamplingParams(max_tokens=40, ignore_eos=True, stop=(middle, "never seen")))
    ar = run(tiny_target, prompts, params)
    spec = run(tiny_target, prompts, params, speculate="draft", draft_model=str(tiny_target), num_speculative_tokens=4)
    assert [(c.text, c.token_ids, c.finish_reason) for c in ar] == [
        (c.text, c.token_ids, c.finish_reason) for c in spec
    ]


def test_logprobs_match_transformers(tiny_target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = make_prompts()[1]
    [completion] = run(tiny_target, [prompt], SamplingParams(max_tokens=12, logprobs=True, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + list(completion.token_ids)])).logits[0]
    wanted = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    wanted = wanted.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize("mode", ["ar", "draft"])
def test_rows_with_and_without_logprobs_share_a_batch(mode: str, tiny_target: Path, tiny_draft: Path) -> None:
    """Each row gets the logprobs it would get alone, or none; rows leave at different steps."""
    prompts = make_prompts(7)
    ask = [i % 3 == 1 for i in range(len(prompts))]
    params = [
        SamplingParams(max_tokens=4 + 5 * i, logprobs=wanted, temperature=float(i % 2), seed=i, ignore_eos=True)
        for i, wanted in enumerate(ask)
    ]
    options: dict[str, Any] = {"max_num_seqs": 3}
    if mode == "draft":
        options |= {"speculate": "draft", "draft_model": str(tiny_draft), "num_speculative_tokens": 3}
    got = run(tiny_target, prompts, params, **options)
    for i, completion in enumerate(got):
        values = completion.logprobs
        if not ask[i]:
            assert values is None or np.isnan(values).all()
            continue
        [alone] = run(tiny_target, [prompts[i]], params[i])
        assert completion.token_ids == alone.token_ids
        assert values == pytest.approx(alone.logprobs, abs=1e-4)


def test_prompt_too_long_is_a_row_error_with_numbers(tiny_target: Path) -> None:
    good, bad = run(tiny_target, [[5] * 10, [5] * 200], max_model_len=100)
    assert good.finish_reason in ("stop", "length")
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert bad.error.startswith("prompt_too_long: ")
    assert "200" in bad.error
    assert "100" in bad.error
