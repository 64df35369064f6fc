"""Checkpoints of the plain shape straight from their files into packed weights, without transformers.

Owns which configs say nothing but what is known here, and how their tensors are named. Any doubt is a reason to load
the model through transformers instead. That the result is right is proved by logits, as always (engine/packing.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbatch.models.attention_hook import StepContext
from specbatch.models.checkpoint import Checkpoint
from specbatch.models.loading import LoadedModel
from specbatch.models.packed import ACTIVATIONS, MODEL_TYPES, DecoderWeights, PackedDecoder, bits, vector
from specbatch.models.rope import Rope, angles, read_rope
from specbatch.models.shape import Config, ModelShape, read_config
from specbatch.models.support import check_support, model_shape
from specbatch.models.weight_files import has_usual_files

_FLOATS = ("F32", "F16", "BF16")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
          "max_position_embeddings")  # fmt: skip
_STRANGERS = ("auto_map", "quantization_config", "text_config", "mlp_bias")
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class NotPlain(Exception):
    """The model is not one that can be read without transformers; says why."""


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """What of a config.json decides the arithmetic."""

    shape: ModelShape
    rope: Rope
    intermediate_size: int
    eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    o_bias: bool
    head_norms: bool  # of queries and keys


def plain_config(path: str | Path) -> PlainConfig:
    """The config of a folder. Raises NotPlain, ValueError as `model_shape` does."""
    config = read_config(path)
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise NotPlain(f"model type {kind}")
    for name in _STRANGERS:
        if config.get(name):
            raise NotPlain(f"{name} {config[name]!r}")
    for name in _SIZES:
        _need(isinstance(config.get(name), int) and not isinstance(config[name], bool), config, name)
    # What a config leaves out is filled in by its class. Where those differ, it must be said.
    _need(kind == "llama" or isinstance(config.get("num_key_value_heads"), int), config, "num_key_value_heads")
    _need("head_dim" not in config or isinstance(config["head_dim"], int) or kind in ("llama", "mistral"),
          config, "head_dim")  # fmt: skip
    eps = config.get("rms_norm_eps", 1e-6)
    _need(isinstance(eps, float), config, "rms_norm_eps")
    activation = config.get("hidden_act", "silu")
    _need(activation in ACTIVATIONS, config, "hidden_act")
    tied, bias = config.get("tie_word_embeddings", False), config.get("attention_bias", False)
    _need(isinstance(tied, bool), config, "tie_word_embeddings")
    _need(isinstance(bias, bool) and (not bias or kind in ("llama", "qwen3")), config, "attention_bias")
    try:
        rope = read_rope(config)
    except ValueError as error:
        raise NotPlain(str(error)) from error
    shape = model_shape(path)
    _refuse_windows(config, shape)
    if not has_usual_files(path):
        raise NotPlain("weights in files of other names")
    if (Path(path) / "adapter_config.json").exists():  # transformers applies it, where it can
        raise NotPlain("an adapter beside the weights")
    if shape.head_dim % 2 or config["intermediate_size"] % 16:
        raise NotPlain(f"head size {shape.head_dim}, intermediate size {config['intermediate_size']}")
    return PlainConfig(
        shape, rope, config["intermediate_size"], eps, activation, tied, bias or kind == "qwen2", bias, kind == "qwen3"
    )


def _need(fine: bool, config: Config, name: str) -> None:
    if not fine:
        raise NotPlain(f"{name} {config.get(name)!r}")


def _refuse_windows(config: Config, shape: ModelShape) -> None:
    windows = {w for w in shape.sliding_windows if w is not None}
    if windows or config.get("use_sliding_window"):
        raise NotPlain(f"a sliding window of {min(windows, default='unknown size')}")
    types = set(map(str, config.get("layer_types") or ()))
    if types - {"full_attention"}:
        raise NotPlain(f"layers of type {', '.join(sorted(types))}")


def load_plain(path: str | Path, dtype: torch.dtype, threads: int, *, int8: bool = False) -> LoadedModel:
    """A model of a local folder on the CPU: packed weights, no module. `int8`: as `PackedDecoder` has it.

    Raises NotPlain with the reason why transformers must load it, ValueError naming a file that is damaged.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise NotPlain(str(dtype))
    plain = plain_config(path)
    files = Checkpoint(path)
    _check_tensors(plain, files)
    embedding = files.tensor(_EMBEDDING, dtype)
    cos, sin = angles(plain.rope, plain.shape.head_dim, plain.shape.max_model_len)
    weights = DecoderWeights(
        shape=plain.shape,
        dtype=dtype,
        intermediate_size=plain.intermediate_size,
        eps=plain.eps,
        activation=plain.activation,
        scale=plain.shape.head_dim**-0.5,
        layers=_layers(plain, files, dtype),
        norm=vector(files.tensor(_NORM, dtype)),
        head=embedding if plain.tied else files.tensor(_HEAD, dtype),
        embedding=embedding,
        cos=vector(cos),
        sin=vector(sin),
    )
    try:
        packed = PackedDecoder(weights, threads, int8=int8)
    except (TypeError, ValueError) as error:  # a shape that the decoder does not know
        raise NotPlain(str(error)) from error
    return LoadedModel(
        module=None,
        config=None,
        shape=plain.shape,
        support=check_support(read_config(path)),
        device=torch.device("cpu"),
        dtype=dtype,
        layers=[],
        step=StepContext(),
        packed=packed,
    )


def expected_tensors(plain: PlainConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes [out, in] of all weights."""
    shape = plain.shape
    hidden, inner = shape.hidden_size, plain.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {_EMBEDDING: (shape.vocab_size, hidden), _NORM: (hidden,)}
    if not plain.tied:
        tensors[_HEAD] = (shape.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if plain.qkv_bias:
        layer |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", queries), ("k", keys), ("v", keys))}
    if plain.o_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if plain.head_norms:
        layer |= {f"self_attn.{n}_norm.weight": (shape.head_dim,) for n in ("q", "k")}
    for i in range(shape.num_layers):
        tensors |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    return tensors


def _check_tensors(plain: PlainConfig, files: Checkpoint) -> None:
    """The files hold exactly the tensors that the config asks for. Raises NotPlain with the first difference."""
    expected = expected_tensors(plain)
    if files.repeated:
        raise NotPlain(f"several files hold {min(files.repeated)}")
    there = {n: t for n, t in files.tensors.items() if not n.endswith("self_attn.rotary_emb.inv_freq")}  # of old files
    for name in sorted(expected.keys() ^ there.keys()):
        raise NotPlain(f"the files {'lack' if name in expected else 'hold'} {name}")
    for name, tensor in there.items():
        if tensor.shape != expected[name] or tensor.dtype not in _FLOATS:
            raise NotPlain(f"{name} is {tensor.dtype} {list(tensor.shape)}")


def _layers(plain: PlainConfig, files: Checkpoint, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Layer after layer; the next one is read while this one is packed."""
    last = plain.shape.num_layers - 1
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        coming = reader.submit(_layer, plain, files, dtype, 0)
        for i in range(last + 1):
            arrays = coming.result()
            if i < last:
                coming = reader.submit(_layer, plain, files, dtype, i + 1)
            yield arrays


def _layer(plain: PlainConfig, files: Checkpoint, dtype: torch.dtype, number: int) -> dict[str, Any]:
    """Arguments of CpuDecoder.add_layer."""

    def get(name: str) -> torch.Tensor:
        return files.tensor(f"model.layers.{number}.{name}", dtype)

    arrays: dict[str, Any] = {
        "attention_norm": vector(get("input_layernorm.weight")),
        "mlp_norm": vector(get("post_attention_layernorm.weight")),
    }
    arrays |= {n: bits(get(f"self_attn.{n}_proj.weight")) for n in ("q", "k", "v", "o")}
    arrays |= {n: bits(get(f"mlp.{n}_proj.weight")) for n in ("gate", "up", "down")}
    if plain.qkv_bias:
        arrays["qkv_bias"] = vector(torch.cat([get(f"self_attn.{n}_proj.bias") for n in ("q", "k", "v")]))
    if plain.o_bias:
        arrays["o_bias"] = vector(get("self_attn.o_proj.bias"))
    if plain.head_norms:
        arrays["query_norm"] = vector(get("self_attn.q_norm.weight"))
        arrays["key_norm"] = vector(get("self_attn.k_norm.weight"))
    return arrays
