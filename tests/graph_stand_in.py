"""A stand-in for CUDA graphs on the CPU: a tape of torch operations, replayed over the tensors it was recorded with.

As with a real graph, host values are baked in, an operation that depends on data cannot be captured, tensors from
outside the fixed buffers cannot be read, and what was computed on the way is worthless between replays: it is filled
with garbage before each one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GARBAGE = {torch.bool: True, torch.int32: 0x5A5A5A5A, torch.int64: 0x5A5A5A5A5A5A5A5A}


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def depends_on_data(func: Any, args: Any) -> bool:
    """Whether the host must wait for the device to know the operation's result or its shape."""
    if func is torch.ops.aten.index.Tensor:  # only a boolean mask makes its shape unknown
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """Records the operations below it."""

    def __init__(self, fixed: set[int]) -> None:
        super().__init__()
        self.fixed = fixed
        self.made: dict[int, Tensor] = {}  # by storage; kept alive, so that no address is used twice
        self._work: list[tuple[Any, Any, Any, list[Tensor]]] = []  # operation, arguments, results to fill
        self._views: list[Any] = []
        self._garbage: list[tuple[Tensor, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if depends_on_data(func, args):
            raise RuntimeError(f"{func} depends on data and cannot be captured")
        inputs = {storage_of(tensor) for tensor in tensors_in((args, kwargs)) if tensor.numel()}
        if not inputs <= self.fixed | self.made.keys():
            raise RuntimeError(f"{func} reads a tensor from outside the captured buffers")
        out = func(*args, **kwargs)
        results = tensors_in(out)
        for tensor in results:
            storage = storage_of(tensor)
            if tensor.numel() and storage not in self.fixed and storage not in self.made:
                self.made[storage] = tensor
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self._garbage.append((whole, GARBAGE.get(tensor.dtype, float("nan"))))
        if func._schema.is_mutable:
            self._work.append((func, args, kwargs, []))
        elif all(storage_of(tensor) in inputs for tensor in results):
            self._views.append(out)  # still the same memory when its base is filled
        else:
            self._work.append((func, args, kwargs, results))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for tensor, value in self._garbage:
            tensor.fill_(value)
        for func, args, kwargs, results in self._work:
            new = func(*args, **kwargs)
            if len(results) == 1:
                results[0].copy_(new)
            elif results:
                for old, fresh in zip(results, tensors_in(new), strict=True):
                    old.copy_(fresh)

    @property
    def nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.made.values())


class TapeCapturer:
    """Implements specbatch.engine.graphs.Capturer over fixed tensors: weights, pages, the step's buffers."""

    def __init__(self, fixed: Iterable[Tensor]) -> None:
        self.fixed = {storage_of(tensor) for tensor in fixed}
        self.nbytes = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        tape = Tape(self.fixed)
        with tape:
            function()
        self.nbytes += tape.nbytes
        tape.replay()
        return tape.replay

    def memory(self) -> int:
        return self.nbytes
