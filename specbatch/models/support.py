"""Whether specbatch can run a model right, decided from config.json by name: no torch, no transformers.

What cannot be right yet is refused with the reason; model types nobody has proved are let through here and compared
with transformers' own attention when they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbatch.models.shape import (
    Config,
    ModelShape,
    count_parameters,
    length_limit,
    names_odd_values,
    read_config,
    shape_from_config,
    sliding_windows,
)

__all__ = [
    "PROVED",
    "ModelShape",
    "Support",
    "check_support",
    "count_parameters",
    "model_shape",
    "model_support",
    "read_config",
    "shape_from_config",
    "sliding_windows",
]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Model types whose packed, paged decoding is tested token for token against transformers' generate.
PROVED = _words(
    "llama qwen2 qwen3 mistral ministral phi3 gemma gemma2 gemma3_text gpt2 opt mixtral qwen3_moe qwen2_moe "
    "olmo olmo2 olmo3 olmoe granite granitemoe smollm3 starcoder2 gpt_neox cohere cohere2 stablelm phi gpt_oss "
    "exaone4 glm glm4 seed_oss arcee nemotron gpt_bigcode deepseek_v2 deepseek_v3"
)

_RECURRENT = _words(
    "mamba mamba2 falcon_mamba jamba bamba zamba zamba2 recurrent_gemma rwkv xlstm nemotron_h falcon_h1 lfm2 "
    "lfm2_moe lfm3 qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen4_exp kimi_linear minimax olmo_hybrid "
    "bailing_hybrid plamo2 zaya"
)
_OWN_ATTENTION = _words(
    "bloom mpt falcon gpt_neo gpt_neox_japanese xglm cpmant rembert roformer prophetnet big_bird reformer xlnet "
    "ctrl openai-gpt transfo-xl"
)
_ODD_CACHE = {
    "deepseek_v32": "it attends to tokens that an indexer picks",
    "deepseek_v4": "it attends to tokens that an indexer picks",
    "glm_moe_dsa": "it attends to tokens that an indexer picks",
    "doge": "its mask depends on the values it caches",
    "diffllama": "it splits cached values between two attentions",
    "modernbert-decoder": "its attention looks both ways within a window",
    "longcat_flash": "it has two attentions a layer",
    "hrm_text": "it runs its layers several times over",
    "csm": "it generates audio codes",
    "moshi": "it generates audio codes",
    "blt": "it works on bytes in patches",
}
_MULTIMODAL_KEYS = ("vision_config", "audio_config", "vision_tower_config", "speech_config", "image_token_id")
_GENERATORS = ("ForCausalLM", "LMHeadModel")
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")


@dataclass(frozen=True, slots=True)
class Support:
    """`proved`: tested against transformers; `unproved`: compared when loaded; `refused`: `reasons` say why."""

    status: Literal["proved", "unproved", "refused"]
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # limits under which it is right


def model_shape(path: str | Path) -> ModelShape:
    """Shape of the model in a folder; parameters counted from the headers of its safetensors files.

    Raises ValueError naming the folder and why specbatch cannot run it.
    """
    config = read_config(path)
    try:
        support = check_support(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if support.status == "refused":
        kind = config.get("model_type", "of unknown type")
        raise ValueError(f"{path} ({kind}) cannot be run: {'; '.join(support.reasons)}")
    try:
        return shape_from_config(config, num_parameters=count_parameters(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def model_support(path: str | Path) -> Support:
    """The judgement of the model in a folder, with the notes a plan should print."""
    return check_support(read_config(path))


@names_odd_values
def check_support(config: Config) -> Support:
    """Judge a config. Every reason to refuse is listed, not only the first. Raises ValueError for values of odd kinds."""
    kind = str(config.get("model_type", ""))
    reasons = [*_wrong_kind(config), *_wrong_attention(config, kind)]
    if reasons:
        return Support("refused", tuple(reasons))
    _, note = length_limit(config)
    notes = [note] if note else []
    if kind in PROVED:
        return Support("proved", (), tuple(notes))
    notes.append(f"model type {kind or 'unknown'} is not a proved one: it is compared with transformers on loading")
    return Support("unproved", (), tuple(notes))


def _wrong_kind(config: Config) -> list[str]:
    reasons = []
    if config.get("is_encoder_decoder"):
        reasons.append("encoder-decoder models are not supported, only decoders")
    if config.get("add_cross_attention"):
        reasons.append("cross attention is not supported")
    multimodal = [key for key in _MULTIMODAL_KEYS if config.get(key) is not None]
    if multimodal:
        reasons.append(f"it is multimodal (its config has {multimodal[0]}); only text models are supported")
    architectures = [str(a) for a in config.get("architectures") or []]
    if not multimodal and architectures and not any(a.endswith(_GENERATORS) for a in architectures):
        reasons.append(f"{architectures[0]} does not generate text (a ...ForCausalLM would)")
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        method = quantised.get("quant_method", "an unknown method")
        reasons.append(f"its weights are quantised ({method}); use the unquantised checkpoint")
    return reasons


def _wrong_attention(config: Config, kind: str) -> list[str]:
    reasons = []
    odd_layers = _odd_layers(config)
    if kind in _RECURRENT or odd_layers:
        what = f" (layers of type {', '.join(odd_layers)})" if odd_layers else ""
        reasons.append(f"it keeps recurrent or other state besides keys and values{what}, which pages cannot hold yet")
    if kind in _OWN_ATTENTION:
        reasons.append("its attention bypasses transformers' attention interface, so it cannot read paged KV")
    bias = str(config.get("position_embedding_type") or "")
    if config.get("alibi") or bias.startswith(("relative", "alibi")):
        reasons.append("its attention adds a position bias (ALiBi or relative) that paged attention does not know")
    if kind in _ODD_CACHE:
        reasons.append(_ODD_CACHE[kind])
    if config.get("num_kv_shared_layers"):
        reasons.append("some of its layers share another layer's keys and values, which is not supported yet")
    if config.get("attention_chunk_size"):
        reasons.append("chunked attention is not supported yet")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        reasons.append("its attention is not causal")
    uneven = isinstance(config.get("num_key_value_heads"), list)
    if uneven or config.get("global_head_dim") or config.get("num_global_key_value_heads"):
        reasons.append("its layers differ in number or size of key-value heads, which one page layout cannot hold yet")
    return reasons


def _odd_layers(config: Config) -> list[str]:
    """Layer types other than attention, under the names configs list them by."""
    types: list[Any] = [*(config.get("layer_types") or []), *(config.get("layers_block_type") or [])]
    return sorted({str(t) for t in types if t not in _ATTENTION_LAYERS})
