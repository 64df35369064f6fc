"""Validation of sampling parameters: every option names itself, its value and what is allowed."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from specbatch.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0.7"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 1.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [(1, 2.0)]),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop", None),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("2",)),
        ("stop_token_ids", 2),
        ("ignore_eos", "yes"),
        ("logprobs", 1),
        ("min_tokens", -1),
        ("min_tokens", 129),  # more than max_tokens
    ],
)
def test_a_bad_value_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be .*, got ") as error:
        SamplingParams(**{option: value})  # type: ignore[arg-type]
    assert repr(value) in str(error.value)


def test_edges_are_allowed() -> None:
    SamplingParams(
        max_tokens=2**31 - 1,
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=1,
        repetition_penalty=0.01,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=2**63 - 1,
        min_tokens=2**31 - 1,
    )


def test_values_come_out_in_their_declared_types() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=1,
        top_p=np.float32(0.5),  # type: ignore[arg-type]
        stop="END",  # type: ignore[arg-type]
        stop_token_ids=[np.int32(3)],  # type: ignore[arg-type]
        logit_bias={np.int64(4): 1},  # type: ignore[dict-item]
    )
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    assert type(params.top_p) is float
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {4: 1.0}
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_params_compare_hash_copy_and_travel() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop=("x",))
    same = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop=("x",))
    assert params == same
    assert hash(params) == hash(same)
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, seed=3).seed == 3
    given = {1: 2.0}
    kept = SamplingParams(logit_bias=given)
    given[2] = 1.0
    assert kept.logit_bias == {1: 2.0}


def test_what_kind_of_sampling_it_is() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(presence_penalty=0.1).has_penalties
    assert SamplingParams(frequency_penalty=-0.1).has_penalties
