"""Logits by which a model in packed weights proves itself at every start, kept so that transformers is needed once.

Owns where they are and what they are kept under; whether a model equals them is packing.py's question. What cannot be
read counts as absent, and wrong numbers can only make a right model go through transformers again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specbatch import __version__
from specbatch.cache import cache_folder, write_whole
from specbatch.engine.model_check import ROWS
from specbatch.models.builtin import builtin_logits
from specbatch.models.checkpoint import Checkpoint, layout
from specbatch.models.support import read_config

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Proof:
    """What transformers' own layers say after some rows of tokens."""

    rows: list[Tensor]  # int64 ids, of ROWS' lengths
    logits: list[Tensor]  # float32 [tokens of the second chunk, vocab], one a row


def load_proof(file: Path, vocab_size: int) -> Proof | None:
    """What a file holds; None where it is absent, damaged or of another shape."""
    lengths, seconds = [n for n, _ in ROWS], [n - cut for n, cut in ROWS]
    try:
        with safe_open(str(file), framework="pt") as handle:
            ids, logits = handle.get_tensor("ids"), handle.get_tensor("logits")
    except (OSError, SafetensorError):
        return None
    fits = (
        ids.shape == (sum(lengths),)
        and ids.dtype == torch.int32
        and logits.shape == (sum(seconds), vocab_size)
        and logits.dtype == torch.float32
        and int(ids.min()) >= 0
        and int(ids.max()) < vocab_size
    )
    return Proof(list(ids.long().split(lengths)), list(logits.split(seconds))) if fits else None


def store_proof(file: Path, proof: Proof) -> None:
    """Whole or not at all; a disk that takes no more is no error: the next start proves again."""
    content = save({"ids": torch.cat(proof.rows).int(), "logits": torch.cat(proof.logits).float()})
    with contextlib.suppress(OSError):
        write_whole(file, content)


def known_proof(model: str | Path, dtype: torch.dtype, vocab_size: int) -> Proof | None:
    """What is known of a model: of the built-in pair from the package, of others from an earlier start.

    Raises ValueError as reading config and headers does.
    """
    shipped = builtin_logits(model)
    proof = load_proof(shipped, vocab_size) if shipped is not None else None
    return proof or load_proof(kept_file(model, dtype), vocab_size)


def kept_file(model: str | Path, dtype: torch.dtype) -> Path:
    """Where the logits of a model are kept. Raises ValueError as reading config and headers does.

    The key says how the files are read (config, names and sizes of tensors, versions); what is in them, the logits
    themselves say.
    """
    versions = [FORMAT, __version__, torch.__version__, version("transformers")]
    key = [versions, str(dtype), read_config(model), layout(Checkpoint(model).tensors)]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"logits-{digest[:24]}.safetensors"
