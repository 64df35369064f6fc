"""int8 products in torch, rounded as rust/cpu-kernels/src/int8.rs rounds: what the logits of a quantised model are held
against. Slow and exact; nothing runs on it. Knows no other part of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

TINY = 1e-30  # rows smaller than this count as zero


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of float32 [..., K] rows: whole numbers of -127 to 127 as float64 [..., K], and scales float32 [..., 1]."""
    largest = values.abs().amax(-1, keepdim=True)
    zero = largest < TINY
    rounded = (values * (127.0 / largest.masked_fill(zero, 1.0))).round().masked_fill(zero, 0.0)
    return rounded.double(), (largest / 127.0).masked_fill(zero, 0.0)


class Int8Linear(nn.Module):
    """A linear layer with weights rounded a row each and activations a token each, to the bit what the kernels give."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., K] to [..., columns] in the dtype of the inputs."""
        numbers, scales = quantise(inputs.float())
        weights, columns = quantise(self.linear.weight.float())
        sums = (numbers @ weights.T).float()  # float64 holds these sums exactly
        out = sums * (scales * columns.T)
        if self.linear.bias is not None:
            out = out + self.linear.bias.float()
        return out.to(inputs.dtype)


@contextmanager
def int8_layers(module: Any) -> Iterator[None]:
    """Let the linear layers of a model's blocks (not its head) multiply in int8 for a while."""
    swapped: list[tuple[nn.Module, str, nn.Linear]] = []
    for parent in list(module.base_model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
                swapped.append((parent, name, child))
    try:
        yield
    finally:
        for parent, name, child in swapped:
            setattr(parent, name, child)
