"""Muon for the weight matrices: momentum whose step is made orthogonal. Knows nothing of the model.

Method: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). On two slow cores it needs
about half of the rows that AdamW needs here, for a sixth more time a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, r, c] -> the nearest matrices with singular values near 1, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are stepped together. `lr` is the root mean square change of a matrix's singular values."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                shapes[p.shape].append(p)
            for shape, same in shapes.items():
                directions = torch.stack([self._momentum(p, group) for p in same])
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(same, orthogonal(directions), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _momentum(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Nesterov momentum of a gradient, so far."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(state["momentum"], group["momentum"])
