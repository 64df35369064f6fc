"""int8 weights and activations on a CPU: what allows them, and a model loaded so.

The proof has two halves. That the layers are wired as transformers wires them, the same weights show before, unrounded, by
logits (packing.py). That the rounded ones are multiplied right, each packed matrix shows bit for bit (int8_check.rs): integer
sums leave no room for a tolerance, which logits of rounded layers would need, since one number rounded the other way moves
all that follow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbatch.models.lean import NotPlain, load_plain
from specbatch.models.loading import LoadedModel
from specbatch.models.packed import MODEL_TYPES, PackedDecoder, module_weights
from specbatch.models.shape import ModelShape


def why_not_int8(device: torch.device, attention: str, dtype: torch.dtype, shape: ModelShape) -> str | None:
    """Why layers of this shape cannot be int8 there, with the fix; None: so far they can."""
    if device.type != "cpu":
        return f"only on a CPU, not on {device}: leave it out, or --device cpu"
    if dtype == torch.float16:
        return "beside float32 or bfloat16, not float16: --dtype auto"
    if attention not in ("auto", "cpu"):
        return f"it brings its own attention: not with --attention {attention}"
    if shape.model_type not in MODEL_TYPES:
        return f"for model types {', '.join(MODEL_TYPES)}, not {shape.model_type}: leave it out"
    return None


def load_int8(path: str, dtype: torch.dtype, threads: int, load: Callable[[], LoadedModel]) -> tuple[LoadedModel, str]:
    """A model that runs from packed weights, with int8 layers, and what it runs on, for people.

    `load` loads through transformers. Raises ValueError naming the weights that int8 cannot hold.
    """
    try:
        model = load_plain(path, dtype, threads, int8=True)
    except NotPlain:
        model = load()
        model.packed = PackedDecoder(module_weights(model), threads, int8=True)
    assert model.packed is not None
    return model, model.packed.kernel
