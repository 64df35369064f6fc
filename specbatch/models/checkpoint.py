"""The safetensors files of a folder: which tensors there are, and each as a torch tensor. Knows no model, no names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specbatch.models.weight_files import weight_files


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # in the words of safetensors: F32, BF16, ...


class Checkpoint:
    """Opened for reading; the files are mapped into memory, not read."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError naming the file that is missing, truncated or damaged."""
        self._files = {file: _open(file) for file in weight_files(folder)}
        self.tensors: dict[str, Stored] = {}
        self.repeated: set[str] = set()  # in more than one file
        for file, handle in self._files.items():
            for name in handle.keys():  # noqa: SIM118
                if name in self.tensors:
                    self.repeated.add(name)
                entry = handle.get_slice(name)
                self.tensors[name] = Stored(file, tuple(entry.get_shape()), str(entry.get_dtype()))

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy in memory of its own. Raises ValueError naming the file."""
        stored = self.tensors[name]
        try:
            mapped: Tensor = self._files[stored.file].get_tensor(name)
            return mapped.to(dtype, copy=True)
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{stored.file}: {name} cannot be read: {error}") from error


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def layout(tensors: Mapping[str, Stored]) -> list[list[object]]:
    """Names, shapes and dtypes, in order, as JSON holds them: how the files are to be read."""
    return [[name, list(t.shape), t.dtype] for name, t in sorted(tensors.items())]
