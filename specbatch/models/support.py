"""What a model is and whether specbatch can run it right, from config.json alone: no torch, no transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only language model."""

    model_type: str
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int  # tokens of context the positions allow
    sliding_windows: tuple[int | None, ...]  # one a layer
    num_parameters: int  # exact where the weights' headers can be read, else an estimate
    dtype: str | None  # of the checkpoint, where it says
    softcap: bool = False
    sinks: bool = False
    num_experts: int = 0

    def parameter_bytes(self, itemsize: int) -> int:
        return self.num_parameters * itemsize

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ValueError that names the folder when it is not one."""
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
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


def model_shape(path: str | Path) -> ModelShape:
    """Shape of the model in a folder; parameters counted from the headers of its safetensors files."""
    config = read_config(path)
    return shape_from_config(config, num_parameters=count_parameters(path))


def shape_from_config(config: Config, num_parameters: int | None = None) -> ModelShape:
    """Shape from a config's values. Raises ValueError naming the value that is missing."""

    def need(*names: str) -> int:
        value = _first(config, *names)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config.json has no usable {names[0]} (found {value!r})")
        return value

    layers = need("num_hidden_layers", "n_layer", "num_layers")
    hidden = need("hidden_size", "n_embd", "d_model")
    heads = need("num_attention_heads", "n_head", "num_heads")
    kv_heads = int(_first(config, "num_key_value_heads", default=heads))
    head_dim = int(_first(config, "head_dim", default=hidden // heads))
    vocab = need("vocab_size")
    architectures = config.get("architectures") or [""]
    shape = ModelShape(
        model_type=str(config.get("model_type", "")),
        architecture=str(architectures[0]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=vocab,
        max_model_len=int(_first(config, "max_position_embeddings", "n_positions", default=2048)),
        sliding_windows=sliding_windows(config, layers),
        num_parameters=num_parameters or 0,
        dtype=_first(config, "dtype", "torch_dtype"),
        softcap=config.get("attn_logit_softcapping") is not None,
        num_experts=int(_first(config, "num_local_experts", "num_experts", default=0)),
    )
    return shape


def sliding_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None: full attention."""
    window = config.get("sliding_window")
    types = config.get("layer_types")
    if window is None:
        return (None,) * layers
    if types:
        return tuple(int(window) if t == "sliding_attention" else None for t in types)
    if config.get("use_sliding_window") is False:
        return (None,) * layers
    return (int(window),) * layers


def count_parameters(path: str | Path) -> int | None:
    """Parameters in a folder's safetensors files, read from their headers; None without such files."""
    total = 0
    files = sorted(Path(path).glob("*.safetensors"))
    for file in files:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for size in entry["shape"]:
                    count *= size
                total += count
    return total if files else None
