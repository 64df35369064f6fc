"""Sizes of a model, from config.json and the headers of its weight files alone: no torch, no transformers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from specbatch.models.weight_files import has_usual_files, weight_files

Config = Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_MAX_LEN = 2048  # for a config that states no limit at all

# What a config class fills in where config.json says nothing (an explicit null stays one).
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 4096},
    "exaone4": {"num_key_value_heads": 32, "sliding_window": 4096},
    "gemma": {"head_dim": 256, "num_key_value_heads": 16},
    "gemma2": {
        "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    "glm": {"head_dim": 128, "num_key_value_heads": 2},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2},
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "olmo3": {"sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen2_moe": {"num_key_value_heads": 16, "sliding_window": 4096},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "smollm3": {"num_key_value_heads": 4},
    "stablelm": {"num_key_value_heads": 32},
    "starcoder2": {"num_key_value_heads": 2},
}  # fmt: skip
# Whose head is a matrix of its own unless config.json says otherwise.
_UNTIED = frozenset({
    "arcee", "deepseek_v2", "deepseek_v3", "exaone4", "glm", "glm4", "gpt_neox", "gpt_oss", "granite",
    "granitemoe", "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe",
    "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "stablelm",
})  # fmt: skip

# Families in which every n-th layer sees all of the context, where a config lists no layer types.
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4}

_UNGATED = ("gpt2", "opt", "gpt_neox", "gptj", "gpt_bigcode", "codegen", "phi", "starcoder2", "nemotron", "biogpt")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only language model."""

    model_type: str
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of keys as cached (values are padded to it where theirs is smaller)
    hidden_size: int
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's
    max_model_len: int  # tokens of context that are right (see length_limit)
    sliding_windows: tuple[int | None, ...]  # one a layer
    num_parameters: int  # exact where the weights' headers can be read, else an estimate
    dtype: str | None  # of the checkpoint, where it says
    softcap: bool = False
    sinks: bool = False
    intermediate_size: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    tied_embeddings: bool = False

    def parameter_bytes(self, itemsize: int, *, int8_layers: bool = False) -> int:
        """Of all weights; with `int8_layers` those of the layers take a byte each, embedding and head stay as they are."""
        if not int8_layers:
            return self.num_parameters * itemsize
        kept = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return kept * itemsize + max(self.num_parameters - kept, 0)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ValueError that names the folder when it is not one."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return config


def _first(config: Config, *names: str, default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def names_odd_values(function: Callable[P, T]) -> Callable[P, T]:
    """A list where a number belongs, and the like, is a ValueError that speaks of config.json."""

    @wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise ValueError(f"config.json holds a value of the wrong kind: {error}") from error

    return named


def _filled(config: Config) -> Config:
    """With what the family's config class adds."""
    return {**_CLASS_DEFAULTS.get(str(config.get("model_type")), {}), **config}


@names_odd_values
def shape_from_config(config: Config, num_parameters: int | None = None) -> ModelShape:
    """Shape from a config's values. Raises ValueError naming the value that is missing or makes no sense."""
    config = _filled(config)

    def need(*names: str, default: int | None = None) -> int:
        value = _first(config, *names, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json has no usable {names[0]} (found {value!r})")
        return value

    layers = need("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    hidden = need("hidden_size", "n_embd", "d_model", "dim")
    heads = need("num_attention_heads", "n_head", "num_heads", "n_heads")
    kv_heads = need("num_key_value_heads", "num_kv_heads", default=heads)
    head_dim = need("head_dim", default=max(hidden // heads, 1))
    if config.get("multi_query") is True:
        kv_heads = 1
    if config.get("kv_lora_rank") and config.get("qk_rope_head_dim"):  # latent attention, cached expanded
        kv_heads = heads
        head_dim = need("qk_nope_head_dim") + need("qk_rope_head_dim")
    if heads % kv_heads:
        raise ValueError(f"config.json has {heads} attention heads, no multiple of its {kv_heads} key-value heads")
    length, _ = length_limit(config)
    architectures = config.get("architectures") or [""]
    dtype = _first(config, "dtype", "torch_dtype")
    shape = ModelShape(
        model_type=str(config.get("model_type", "")),
        architecture=str(architectures[0]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=need("vocab_size", "padded_vocab_size"),
        max_model_len=length,
        sliding_windows=sliding_windows(config, layers),
        num_parameters=num_parameters or 0,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        softcap=config.get("attn_logit_softcapping") is not None,
        sinks=config.get("model_type") == "gpt_oss",
        intermediate_size=int(_first(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)),
        num_experts=int(_first(config, "num_local_experts", "num_experts", "n_routed_experts", default=0)),
        experts_per_token=int(_first(config, "num_experts_per_tok", default=0)),
        tied_embeddings=bool(config.get("tie_word_embeddings", config.get("model_type") not in _UNTIED)),
    )
    return shape if num_parameters else replace(shape, num_parameters=estimate_parameters(shape, config))


def estimate_parameters(shape: ModelShape, config: Config) -> int:
    """Parameters by the usual decoder's arithmetic; within some percent for the families proved."""
    projections = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    matrices = 2 if shape.model_type in _UNGATED else 3
    if shape.num_experts > 1:
        width = int(_first(config, "moe_intermediate_size", "intermediate_size", default=shape.intermediate_size))
        mlp = shape.num_experts * (3 * shape.hidden_size * width + shape.hidden_size)
    else:
        mlp = matrices * shape.hidden_size * shape.intermediate_size
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return embeddings + shape.num_layers * (projections + mlp + 2 * shape.hidden_size)


def rope_settings(config: Config) -> list[Config]:
    """Rotary settings in force: one for the model, or one a layer type."""
    found = _first(config, "rope_parameters", "rope_scaling")
    if not isinstance(found, Mapping):
        return []
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested if nested and "rope_type" not in found and "type" not in found else [found]


def rope_type(settings: Config) -> str:
    return str(_first(settings, "rope_type", "type", default="default"))


def length_limit(config: Config) -> tuple[int, str | None]:
    """Tokens of context up to which every row is right, and a note where that is less than the config states.

    Linear and "llama3" scaling are part of max_position_embeddings in published configs; YaRN (Peng et al., 2023,
    arXiv:2309.00071) multiplies the original length where the config still states that one. Dynamic NTK and LongRoPE
    change every row's rotation once one row of the batch is long: such models stay within the original length.
    """
    stated = _first(
        config, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"
    )
    if not isinstance(stated, int) or stated < 1:
        return DEFAULT_MAX_LEN, f"config.json states no context length: {DEFAULT_MAX_LEN} is taken"
    limit, note = stated, None
    for settings in rope_settings(config):
        kind = rope_type(settings)
        original = _first({**config, **settings}, "original_max_position_embeddings")
        if kind == "yarn" and isinstance(original, int):
            limit = max(limit, int(original * float(settings.get("factor") or 1.0)))
        if kind == "longrope" and isinstance(original, int) and original < limit:
            limit = original
            note = (
                f"LongRoPE rotates every row of a batch differently once one is over {original} tokens: contexts are "
                f"kept to {original} of the model's {stated}"
            )
        if kind == "dynamic" and isinstance(original, int):
            limit = min(limit, original)
        if kind == "dynamic":
            note = f"dynamic NTK scaling depends on a batch's longest row: contexts are kept to {limit} tokens"
    return limit, note


def sliding_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None: full attention. Where a config lists no layer types, its family's rule counts."""
    config = _filled(config)
    window = config.get("sliding_window")
    kind = str(config.get("model_type"))
    if window is None or not isinstance(window, int) or window < 1:
        return (None,) * layers
    asked = config.get("use_sliding_window")
    if kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe") and not asked:  # whatever their layers' types say
        return (None,) * layers
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) >= layers:
        return tuple(window if t == "sliding_attention" else None for t in types[:layers])
    if asked is False or (kind == "smollm3" and not asked):
        return (None,) * layers
    first = int(_first(config, "max_window_layers", default=28))
    if kind in ("qwen2", "qwen3"):
        return tuple(window if i >= first else None for i in range(layers))
    if kind == "qwen2_moe":
        return tuple(window if i % 2 == 0 and i < first else None for i in range(layers))
    if kind == "smollm3":  # where there are no rotations
        every = int(_first(config, "no_rope_layer_interval", default=4))
        rotated = _first(config, "no_rope_layers", default=[(i + 1) % every for i in range(layers)])
        return tuple(None if i < len(rotated) and rotated[i] else window for i in range(layers))
    period = _PERIODS.get(kind)
    if period is not None:
        stated = _first(config, "sliding_window_pattern", "_sliding_window_pattern")
        period = stated if isinstance(stated, int) and stated > 0 else period
        return tuple(window if (i + 1) % period else None for i in range(layers))
    return (window,) * layers


def count_parameters(path: str | Path) -> int | None:
    """Parameters in the safetensors files that a model is read from, from their headers; None without such files.

    Files of other names beside the usual ones (`consolidated.safetensors`) hold the same weights again. Raises ValueError.
    """
    total = 0
    folder = Path(path)
    files = sorted(folder.glob("*.safetensors"))
    if files and has_usual_files(folder):
        files = weight_files(folder)
    for file in files:
        try:
            with file.open("rb") as handle:
                (length,) = struct.unpack("<Q", handle.read(8))
                if length > 100_000_000:
                    raise ValueError(f"its header would be {length} bytes")
                header = json.loads(handle.read(length))
            total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
    return total if files else None
