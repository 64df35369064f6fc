"""Packed weights on a CPU: the module's own logits, the same bits for a row in any company, and a way back to torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.attention.cpu_paged import CpuPagedAttention
from specbatch.engine.kv_cache import PagedKVCache
from specbatch.engine.kv_layout import plan_pages
from specbatch.engine.logits import argmax_finite
from specbatch.engine.model_check import compare_logits, paged_logits, sample_rows
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.packing import pack
from specbatch.models.attention_hook import ATTENTION_NAME, register
from specbatch.models.loading import LoadedModel, wrap_module
from specbatch.models.packed import PackedDecoder, module_weights, why_not
from specbatch.sampling_params import SamplingParams
from tests.test_engine import make_prompts, run, tokens

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BASE),
    "llama, odd sizes": ("llama", BASE | {"hidden_size": 44, "head_dim": 24}),
    "llama, biases": ("llama", BASE | {"attention_bias": True}),
    "llama, tied": ("llama", BASE | {"tie_word_embeddings": True}),
    "llama, stretched": ("llama", BASE | {"rope_parameters": LLAMA3}),
    "llama, gelu": ("llama", BASE | {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen2": ("qwen2", BASE),
    "qwen3": ("qwen3", BASE | {"head_dim": 16}),
    "mistral, window": ("mistral", BASE | {"sliding_window": 7, "head_dim": 8}),
}


def make(kind: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **settings)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or "bias" in name:  # made as ones and zeros, which would hide a mistake
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return wrap_module(module)


def logits_of(model: LoadedModel) -> list[torch.Tensor]:
    cache = PagedKVCache(plan_pages(model.kv_shape, None, 16), 8)
    runner = ModelRunner(model, cache.pages("target"), CpuPagedAttention())
    return paged_logits(runner, sample_rows(model.vocab_size, model.device))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_modules_own(shape: str) -> None:
    expected = logits_of(make(*SHAPES[shape]))
    model = make(*SHAPES[shape])
    model.packed = PackedDecoder(module_weights(model), threads=2)
    assert compare_logits(logits_of(model), expected) < 1e-5


@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_bfloat16_is_close(shape: str) -> None:
    kind, settings = SHAPES[shape]
    expected = logits_of(make(kind, settings))  # in float32
    rounded = make(kind, settings, torch.bfloat16)
    torch_difference = compare_logits(logits_of(rounded), expected)
    rounded.packed = PackedDecoder(module_weights(rounded), threads=1)
    assert compare_logits(logits_of(rounded), expected) < 2 * torch_difference + 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_tokens_are_those_of_the_logits(dtype: torch.dtype) -> None:
    model = make("llama", BASE | {"vocab_size": 203}, dtype)
    with torch.no_grad():
        head = model.module.lm_head.weight
        head[100] = head[11] = head[140]  # equal logits: the lowest id wins
        head[7] = 100 * head[7]  # often the best, beyond the limit of some
    packed = model.packed = PackedDecoder(module_weights(model), threads=2)
    hidden = torch.randn(9, 48)
    hidden[3, 5] = torch.nan
    hidden[4] = torch.inf
    indices = torch.tensor([8, 0, 3, 4, 5, 5, 1])
    for limit in (203, 150, 64, 12, 7, 1):
        expected = argmax_finite(packed.logits(hidden, indices)[:, :limit])
        assert packed.greedy(hidden, indices, limit).tolist() == expected.tolist()
    assert packed.greedy(hidden, indices, 203)[2] == -1


def test_packing_proves_itself_and_takes_the_weights_over() -> None:
    model, compute = pack(make(*SHAPES["llama"]), CpuPagedAttention(), 1, lambda: pytest.fail("nothing to load again"))
    assert compute.startswith("packed weights")
    assert model.packed is not None
    linear = [m for m in model.module.base_model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert linear
    assert all(m.weight.numel() == 0 for m in linear)


def test_other_logits_bring_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PackedDecoder.logits

    def wrong(self: PackedDecoder, *args: torch.Tensor) -> torch.Tensor:
        out = original(self, *args)
        out[0, 5] += 0.1 * out.abs().max()
        return out

    monkeypatch.setattr(PackedDecoder, "logits", wrong)
    again = make(*SHAPES["llama"])
    model, compute = pack(make(*SHAPES["llama"]), CpuPagedAttention(), 1, lambda: again)
    assert model is again
    assert model.packed is None
    assert "other logits" in compute


def test_models_of_another_shape_stay_with_torch() -> None:
    other = make("gemma", BASE | {"head_dim": 16})
    assert why_not(other) == "model type gemma"
    model, compute = pack(other, CpuPagedAttention(), 1, lambda: other)
    assert model.packed is None
    assert compute == "torch (model type gemma)"
    assert why_not(make("llama", BASE | {"mlp_bias": True})) == "biases in the MLP"
    assert why_not(make("llama", BASE | {"hidden_act": "relu"})) == "activation relu"


COMPANIES: dict[str, dict[str, Any]] = {
    "one row": {"max_num_seqs": 1},
    "two threads": {"threads": 2},
    "chunked prefill": {"max_num_batched_tokens": 16},
    "ngram": {"speculate": "ngram", "num_speculative_tokens": 4},
    "draft": {"speculate": "draft", "num_speculative_tokens": 4},
    "tiny pool, draft": {
        "kv_memory_bytes": 256 * 400,
        "block_size": 4,
        "max_model_len": 400,
        "speculate": "draft",
        "num_speculative_tokens": 5,
    },
}


def test_bfloat16_rows_are_the_same_in_any_company(tiny_target: Path, tiny_draft: Path) -> None:
    """Not only near: equal, sampled rows too, though bfloat16 has near ties at every turn."""
    prompts = make_prompts()
    params = [SamplingParams(max_tokens=40, temperature=t, seed=5) for t in (0.0, 1.0, 0.0, 0.7, 0.0, 1.3, 0.0)]
    expected = tokens(run(tiny_target, prompts, params, dtype="bfloat16"))
    for name, options in COMPANIES.items():
        if "draft" in name:
            options = options | {"draft_model": str(tiny_draft)}
        assert tokens(run(tiny_target, prompts, params, dtype="bfloat16", **options)) == expected, name
