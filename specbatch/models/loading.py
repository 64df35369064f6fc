"""Local model folders to modules that attend through specbatch. The only place that imports transformers' models.

Imports are made inside the functions: transformers takes as long to import as torch does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specbatch.engine.kv_layout import KVShape
from specbatch.models import attention_hook
from specbatch.models.attention_hook import ATTENTION_NAME, LayerContext, StepContext
from specbatch.models.checkpoint import Checkpoint
from specbatch.models.packed import PackedDecoder
from specbatch.models.shape import count_parameters, rope_type, shape_from_config
from specbatch.models.support import ModelShape, Support, check_support, model_shape, read_config
from specbatch.models.weight_files import has_usual_files


@dataclass(slots=True)
class LoadedModel:
    """A model in eval mode whose attention layers wait for KV pages (a ModelRunner binds them).

    `module` is called with input_ids [1, T], position_ids [1, T], use_cache=False and logits_to_keep [L].
    """

    module: nn.Module | None  # None: read straight into packed weights (lean.py), which then are there
    config: Any  # its transformers config
    shape: ModelShape
    support: Support
    device: torch.device
    dtype: torch.dtype
    layers: list[LayerContext]
    step: StepContext
    packed: PackedDecoder | None = None  # runs in the module's place; the module's layers have no weights then

    @property
    def kv_shape(self) -> KVShape:
        shape = self.shape
        return KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, str(self.dtype).removeprefix("torch."))

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size


def load_config(path: str | Path) -> Any:
    """The transformers config of a local folder. Raises ValueError naming the folder and the reason."""
    read_config(path)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(f"the config of {path} cannot be loaded: {error}") from error


def load_model(path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a local folder: safetensors only, no remote code, no network.

    Raises ValueError naming the folder and the reason, weights missing from the files included.
    """
    model_shape(path)  # refuses what cannot be right before anything heavy is imported
    if not list(Path(path).glob("*.safetensors")):
        raise ValueError(f"{path} has no *.safetensors files (other weight formats can run code and are not read)")
    if has_usual_files(path):
        Checkpoint(path)  # names the file that is missing or damaged
    config = load_config(path)
    attention_hook.register()
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            module, report = AutoModelForCausalLM.from_pretrained(
                str(path),
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"the model in {path} cannot be loaded: {error}") from error
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise ValueError(
            f"the files in {path} lack {len(missing)} weights of {type(module).__name__} (first: {missing[0]}); "
            "transformers would fill them with random numbers"
        )
    return wrap_module(module.to(device), count_parameters(path))


def wrap_module(module: nn.Module, num_parameters: int | None = None) -> LoadedModel:
    """Take a transformers ...ForCausalLM made with attn_implementation="specbatch" into use: eval mode, no gradients.

    Its config, with every default filled in, is judged again here. Raises ValueError with the reason.
    """
    config: Any = module.config
    values = config.to_dict()
    support = check_support(values)
    if support.status == "refused":
        raise ValueError(f"{type(module).__name__} cannot be run: {'; '.join(support.reasons)}")
    if getattr(config, "_attn_implementation", None) != ATTENTION_NAME:
        raise ValueError(f"{type(module).__name__} was made with another attention than {ATTENTION_NAME!r}")
    shape = shape_from_config(values, num_parameters or sum(p.numel() for p in module.parameters()))
    module.eval().requires_grad_(False)
    _freeze_rope(module)
    step = StepContext()
    layers = []
    for attention in attention_hook.attention_modules(module, shape.num_layers):
        index = int(attention.layer_idx)  # type: ignore[arg-type]
        context = LayerContext(index, step, shape.sliding_windows[index])
        attention_hook.attach(attention, context)
        layers.append(context)
    parameter = next(module.parameters())
    return LoadedModel(module, config, shape, support, parameter.device, parameter.dtype, layers, step)


def _freeze_rope(module: nn.Module) -> None:
    """Stop rotary modules from looking at a batch's longest row: contexts stay where their first frequencies hold."""
    rotary: Any
    for rotary in module.modules():
        kind = getattr(rotary, "rope_type", None)
        if isinstance(kind, str) and rope_type({"rope_type": kind}) in ("dynamic", "longrope"):
            rotary.rope_type = "default"


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar of transformers' own over the run's display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
