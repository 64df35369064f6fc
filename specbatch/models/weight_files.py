"""Which safetensors files of a folder a model is read from. Opens none of them: no torch, no transformers."""

from __future__ import annotations

import json
from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def has_usual_files(folder: str | Path) -> bool:
    """There is something to open: one file or an index, by their usual names."""
    return any((Path(folder) / name).is_file() for name in (SINGLE, INDEX))


def weight_files(folder: str | Path) -> list[Path]:
    """One file, or those that an index names (in transformers' order of preference).

    Raises ValueError naming the file that is missing or damaged.
    """
    folder = Path(folder)
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    try:
        content = json.loads(index.read_text("utf-8"))
        places = content["weight_map"]
        names = sorted({Path(name) for name in places.values()})
    except FileNotFoundError:
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error}") from error
    for name in names:
        if name.name != str(name):
            raise ValueError(f"{index} names a file outside its folder: {name}")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing, which {INDEX} names")
    return [folder / name for name in names]
