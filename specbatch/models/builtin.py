"""The small model pair that ships in the package: where its files are, and what it is.

Knows nothing of torch or of loading a model.

The pair does one narrow job: it turns a short order or support message into `key: value` lines (intent, priority,
order, items, date, city, name). Both are Llama models with tied embeddings and one byte-level BPE tokenizer (1,536
entries), kept in bfloat16. They were trained for specbatch alone, on messages that `examples/builtin/messages.py` makes
up, with `examples/builtin/train.py`; nothing in them comes from another model or from anybody's data. Licence:
Apache-2.0, as specbatch itself. They show and test the engine; they are no general-purpose models and know no
other job.

Sizes, training and measured results: `examples/builtin/README.md`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

TARGET_NAME = "builtin"
DRAFT_NAME = "builtin-draft"


def builtin_paths() -> tuple[Path, Path]:
    """(target, draft): the two Hugging Face folders.

    The package is installed as plain files (a wheel with a compiled module is never run from a zip archive), so these
    are real paths. Raises FileNotFoundError when the installation lacks them.
    """
    root = Path(str(files("specbatch.models"))) / "builtin"
    pair = root / "target", root / "draft"
    for folder in pair:
        if not (folder / "model.safetensors").is_file():
            raise FileNotFoundError(f"the built-in model is missing from this installation: {folder}")
    return pair


def builtin_logits(model: str | Path) -> Path | None:
    """The file with what transformers' layers say of the target or of the draft; None for other models.

    Both are checked against it at every start (engine/proof.py); `examples/builtin/proof.py` writes it.
    """
    folder = Path(model).resolve()
    if folder.parent != (Path(str(files("specbatch.models"))) / "builtin").resolve():
        return None
    return folder.parent / "logits" / f"{folder.name}.safetensors"
