"""Every proved model type, with tiny random weights in float32: packed, paged, multi-token greedy decoding equals
transformers' generate token for token, and its logits those of one plain pass.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.attention.reference import ReferenceBackend
from specbatch.models.attention_hook import ATTENTION_NAME, register
from specbatch.models.loading import LoadedModel, load_model, wrap_module
from specbatch.models.support import PROVED
from specbatch.models.tokenizer import HFTokenizer
from tests.paged_rows import PagedRows, greedy

VOCAB = 97
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
NO_GQA = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 48}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPED_MOE = MOE | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
WINDOW = {"sliding_window": 7}  # shorter than every context here
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16}
SCALES: dict[str, Any] = {
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
}

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": BASE | {"head_dim": 16},
    "mistral": BASE | WINDOW | {"head_dim": 8},
    "ministral": BASE | WINDOW | {"head_dim": 8},
    "phi3": BASE | {"original_max_position_embeddings": 128, "pad_token_id": 0},
    "gemma": BASE | {"head_dim": 16},
    "gemma2": BASE | GEMMA | WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": BASE | GEMMA | WINDOW | {"sliding_window_pattern": 2},
    "gpt2": GPT,
    "opt": NO_GQA | {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "mixtral": BASE | LOCAL_MOE | WINDOW | {"head_dim": 8},
    "qwen3_moe": BASE | MOE | {"head_dim": 8},
    "qwen2_moe": BASE | MOE | {"shared_expert_intermediate_size": 16},
    "olmo": BASE,
    "olmo2": BASE,
    "olmo3": BASE | WINDOW,
    "olmoe": BASE | {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": BASE | SCALES,
    "granitemoe": BASE | LOCAL_MOE | SCALES,
    "smollm3": BASE | {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "starcoder2": BASE | WINDOW,
    "gpt_neox": NO_GQA,
    "cohere": BASE | {"logit_scale": 0.5},
    "cohere2": BASE | WINDOW | {"logit_scale": 0.5},
    "stablelm": BASE,
    "phi": BASE,
    "gpt_oss": BASE | LOCAL_MOE | WINDOW | {"head_dim": 8, "rope_parameters": PLAIN_ROPE},
    "exaone4": BASE | WINDOW,
    "glm": BASE | {"head_dim": 8, "pad_token_id": 0},
    "glm4": BASE | {"head_dim": 8, "pad_token_id": 0},
    "seed_oss": BASE | {"head_dim": 8},
    "arcee": BASE,
    "nemotron": BASE,
    "gpt_bigcode": GPT | {"multi_query": True},
    "deepseek_v2": BASE | GROUPED_MOE | LATENT,
    "deepseek_v3": BASE | GROUPED_MOE | LATENT,
}
ROPE: dict[str, Any] = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, windows in later layers": ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_moe, windows": ("qwen3_moe", WINDOW | {"use_sliding_window": True}),
    "qwen2_moe, windows in some layers": ("qwen2_moe", WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    "phi3, windows": ("phi3", WINDOW),
    "phi3, longrope": (
        "phi3",
        {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.5] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama, yarn": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    "llama, llama3 rope": (
        "llama",
        {"rope_parameters": ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}
SEEDS = {"gemma": 1, "starcoder2": 2}  # where seed 0 makes a model that repeats itself or comes to near ties
PROMPT_LENGTHS = (21, 3, 10)
NEW_TOKENS = 12


def make_model(kind: str, **overrides: Any) -> Any:
    """A transformers model whose greedy outputs vary (wide weights) and that no end token stops."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | FAMILIES[kind] | overrides
    torch.manual_seed(SEEDS.get(kind, 0))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # narrow embeddings: else a model with tied ones says its own input again and again
            parameter.data.normal_(0, 0.05 if "embed" in name or "wte" in name else 0.2)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_prompts(seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@torch.inference_mode()
def transformers_greedy(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[Tensor]]:
    """generate() of each prompt alone, and the logits of its new tokens in one plain pass."""
    outputs, logits = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        outputs.append(out[0, len(prompt) :].tolist())
        logits.append(model(input_ids=out, use_cache=False).logits[0, len(prompt) - 1 : -1].float())
    return outputs, logits


def adopt(model: Any) -> LoadedModel:
    register()
    model.config._attn_implementation = ATTENTION_NAME
    return wrap_module(model)


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    scale = max(float(e.abs().max()) for e in expected)
    return max(float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True)) / scale


@pytest.mark.parametrize("kind", FAMILIES)
def test_decoding_equals_transformers(kind: str) -> None:
    check_decoding(make_model(kind))


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_of_variants_equals_transformers(name: str) -> None:
    kind, overrides = VARIANTS[name]
    check_decoding(make_model(kind, **overrides))


def check_decoding(model: Any) -> None:
    prompts = make_prompts()
    expected, expected_logits = transformers_greedy(model, prompts)
    assert len({t for out in expected for t in out}) > 6, "the test's model repeats itself too much to show anything"
    loaded = adopt(model)
    assert loaded.support.status == "proved"
    rows = PagedRows(loaded, rows=len(prompts), max_len=max(PROMPT_LENGTHS) + NEW_TOKENS + 5)
    actual, logits = greedy(rows, prompts, NEW_TOKENS, guesses=expected)
    assert actual == expected
    assert largest_error(logits, expected_logits) < 1e-4


def test_what_is_called_proved_is_tested() -> None:
    assert set(FAMILIES) == PROVED


class _Broken(ReferenceBackend):
    """A backend that forgets one thing."""

    def __init__(self, forgets: str) -> None:
        self.forgets = forgets

    def forward(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: Any, **options: Any) -> Tensor:
        if self.forgets == "off_by_one" and options["sliding_window"] is not None:
            options["sliding_window"] += 1
        elif self.forgets in options:
            options[self.forgets] = None
        return super().forward(query, key_pages, value_pages, metadata, **options)


@pytest.mark.parametrize(
    ("kind", "forgets"),
    [
        ("mistral", "sliding_window"),
        ("mistral", "off_by_one"),
        ("gemma2", "softcap"),
        ("gemma3_text", "sliding_window"),
        ("gpt_oss", "sinks"),
    ],
)
def test_the_comparison_catches_a_backend_that_forgets(kind: str, forgets: str) -> None:
    model = make_model(kind)
    prompts = make_prompts()
    expected, expected_logits = transformers_greedy(model, prompts)
    rows = PagedRows(adopt(model), rows=3, max_len=40, backend=_Broken(forgets))
    actual, logits = greedy(rows, prompts, NEW_TOKENS, guesses=expected)
    assert actual != expected or largest_error(logits, expected_logits) > 1e-3


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_tokens_do_not_feel_their_neighbours(kind: str) -> None:
    """Experts are chosen a token at a time: a row alone and a row in company get the same logits."""
    loaded = adopt(make_model(kind))
    prompts = make_prompts()
    together = PagedRows(loaded, rows=3, max_len=40)
    in_company = together.step([(r, 0, prompt) for r, prompt in enumerate(prompts)], padding=5)
    alone = [PagedRows(loaded, rows=1, max_len=40).step([(0, 0, prompt)])[0] for prompt in prompts]
    assert largest_error(in_company, alone) < 1e-5


@pytest.mark.real_model
def test_a_real_checkpoint_equals_transformers() -> None:
    path = os.environ.get("SPECBATCH_TEST_MODEL")
    if not path:
        pytest.skip("SPECBATCH_TEST_MODEL names no checkpoint")
    from transformers import AutoModelForCausalLM

    tokenizer = HFTokenizer(path)
    texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea, there"]
    values, offsets = tokenizer.encode(texts)
    prompts = [values[a:b].tolist() for a, b in pairwise(offsets.tolist())]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    reference.generation_config.eos_token_id = None
    expected, _ = transformers_greedy(reference, prompts)
    del reference
    longest = max(map(len, prompts)) + NEW_TOKENS + 5
    rows = PagedRows(load_model(path), rows=len(prompts), max_len=longest, block_size=16)
    actual, _ = greedy(rows, prompts, NEW_TOKENS, guesses=expected)
    assert actual == expected
