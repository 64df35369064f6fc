"""Rotary angles by our own arithmetic: the bits of transformers' own; what is not known is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbatch.models.rope import angles, read_rope

SIZES = {
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
KNOWN: dict[str, dict[str, Any]] = {
    "none said": {},
    "old theta": {"rope_theta": 500000},
    "old theta, scaling null": {"rope_theta": 5e5, "rope_scaling": None},
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "odd head size": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 90},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    "linear, old words": {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 2e4},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "llama3, old place": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "yarn": {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "yarn, old words": {"rope_scaling": {"type": "yarn"} | {k: v for k, v in YARN.items() if k != "rope_type"}},
    "yarn, betas": {"rope_parameters": YARN | {"rope_theta": 1e4, "beta_fast": 16, "beta_slow": 2}},
    "yarn, scaling": {"rope_parameters": YARN | {"rope_theta": 1e4, "attention_factor": 1.3}},
    "yarn, mscale": {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.1}},
    "yarn, exact range": {"rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False}},
    "yarn, one step": {"rope_parameters": YARN | {"rope_theta": 1e4, "beta_fast": 900.0, "beta_slow": 800.0}},
    "yarn, not longer": {"rope_parameters": YARN | {"rope_theta": 1e4, "factor": 1.0}},
}


@pytest.mark.parametrize("name", KNOWN)
def test_angles_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = SIZES | KNOWN[name]
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(**{k: (dict(v) if isinstance(v, dict) else v) for k, v in values.items()})
    )
    expected = rotary(torch.zeros(1, 1, 1), torch.arange(3000)[None])
    found = angles(read_rope(values), values.get("head_dim", 64), 3000)
    assert torch.equal(found[0], expected[0][0])
    assert torch.equal(found[1], expected[1][0])


def test_the_kinds_differ() -> None:
    """Else equality above would say little."""
    different = {n: v for n, v in KNOWN.items() if "rope_parameters" in v and n != "yarn, not longer"}
    tables = [angles(read_rope(SIZES | v), v.get("head_dim", 64), 50)[0] for v in different.values()]
    assert len({tuple(t.flatten().tolist()) for t in tables}) == len(tables)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rotary type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rotary type default full_attention"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rotary type"),
        ({"rope_parameters": "yarn"}, "no object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear without factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor '4'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "default factor"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": None}}, "llama3 without low_freq_factor"),
        ({"rope_parameters": YARN | {"surprise": 1}}, "yarn surprise"),
        ({"rope_parameters": YARN | {"truncate": 1}}, "truncate 1"),
        ({"rope_parameters": YARN, "rope_scaling": LLAMA3}, "rope_scaling beside rope_parameters"),
        ({"rope_parameters": YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings beside"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor beside"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "default partial_rotary_factor"),
        ({"rope_theta": None}, "rope_theta None"),
        ({"rope_theta": True}, "rope_theta True"),
        ({"rope_theta": -1.0}, "rope_theta -1.0"),
    ],
)
def test_what_is_not_known_is_named(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_rope(SIZES | values)
