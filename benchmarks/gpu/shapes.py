"""Models of known shapes with random weights, made on the device: nothing to download, nothing to copy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbatch.engine.parts import EngineParts, Models, backend_for, build_parts
from specbatch.engine.plan import plan_engine
from specbatch.engine_options import EngineOptions
from specbatch.models import attention_hook
from specbatch.models.loading import LoadedModel, wrap_module
from tests.tiny import write_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip
DRAFTS = {"tiny": "tiny", "135M": "135M", "1B": "135M", "8B": "1B"}  # their shapes; which tokens they draft is made up
CONTEXT = 4096


@dataclass(frozen=True)
class Weights:
    """Bytes that one pass reads whatever its rows, and KV bytes that a token of context adds."""

    pass_bytes: int
    kv_bytes_per_token: int


def write_config(folder: Path, name: str, vocab: int) -> Path:
    """A folder as plan_engine wants it: config and tokenizer, no weights."""
    from transformers import LlamaConfig

    write_tokenizer(folder, vocab=260)
    values = SHAPES[name] | {"vocab_size": vocab, "max_position_embeddings": CONTEXT, "eos_token_id": 256}
    (folder / "config.json").write_text(
        json.dumps(LlamaConfig(**values, architectures=["LlamaForCausalLM"]).to_dict() | {"model_type": "llama"})
    )
    return folder


def random_model(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The folder's model with random weights, made where it will run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention_hook.register()
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = attention_hook.ATTENTION_NAME
    with device, default_dtype(dtype):
        module = AutoModelForCausalLM.from_config(config, attn_implementation=attention_hook.ATTENTION_NAME)
    return wrap_module(module)


def random_parts(folder: Path, name: str, options: dict[str, Any]) -> tuple[EngineParts, Weights, Weights]:
    """Parts of an engine over a shape and its draft's; what their passes read. Raises OutOfMemoryError of torch."""
    vocab = SHAPES[name]["vocab_size"]
    target = write_config(folder / "target", name, vocab)
    draft = write_config(folder / "draft", DRAFTS[name], vocab)
    chosen = EngineOptions(model=str(target), draft_model=str(draft), speculate="draft", **options)
    plan = plan_engine(chosen)
    assert plan.draft is not None
    models = Models(
        random_model(target, plan.device, plan.dtype),
        random_model(draft, plan.device, plan.dtype),
        backend_for(plan, chosen, plan.target),
        backend_for(plan, chosen, plan.draft),
    )
    parts = build_parts(plan, chosen, models=models)
    assert models.draft is not None
    return parts, weights_of(models.target), weights_of(models.draft)


def weights_of(model: LoadedModel) -> Weights:
    embedding = model.module.get_input_embeddings().weight  # type: ignore[operator]
    head = model.module.get_output_embeddings().weight  # type: ignore[operator]
    total = sum(p.numel() * p.element_size() for p in model.module.parameters())
    looked_up = 0 if head is embedding else embedding.numel() * embedding.element_size()
    return Weights(total - looked_up, model.kv_shape.bytes_per_token)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
