"""Local model folders to modules that attend through specbatch. The only place that imports transformers' models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbatch.engine.kv_layout import KVShape
from specbatch.models import attention_hook
from specbatch.models.attention_hook import ATTENTION_NAME, LayerContext, StepContext
from specbatch.models.support import ModelShape, model_shape


@dataclass(slots=True)
class LoadedModel:
    """A model in eval mode whose attention layers wait for KV pages (a ModelRunner binds them)."""

    module: nn.Module  # transformers' ...ForCausalLM
    config: Any  # its transformers config
    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    layers: list[LayerContext]
    step: StepContext

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(
            self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_dim, attention_hook.dtype_name(self.dtype)
        )

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size


def load_config(path: str | Path) -> Any:
    """The transformers config of a local folder. Raises ValueError naming the folder and the reason."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the config of {path} cannot be loaded: {error}") from error


def load_model(path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a local folder's weights (safetensors only, no remote code). Raises ValueError naming the folder and the reason."""
    shape = model_shape(path)
    config = load_config(path)
    attention_hook.register()
    from transformers import AutoModelForCausalLM

    try:
        module = AutoModelForCausalLM.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the model in {path} cannot be loaded: {error}") from error
    module = module.to(device)
    return wrap_module(module, shape)


def wrap_module(module: nn.Module, shape: ModelShape) -> LoadedModel:
    """Take a transformers ...ForCausalLM that was made with attn_implementation="specbatch" into use."""
    module.eval().requires_grad_(False)
    step = StepContext()
    layers = []
    for attention in attention_hook.attention_modules(module, shape.num_layers):
        index = int(attention.layer_idx)  # type: ignore[arg-type]
        context = LayerContext(index, step, shape.sliding_windows[index])
        attention_hook.attach(attention, context)
        layers.append(context)
    parameter = next(module.parameters())
    return LoadedModel(module, module.config, shape, parameter.device, parameter.dtype, layers, step)
