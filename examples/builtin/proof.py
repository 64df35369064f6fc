"""Writes the logits by which the built-in pair proves itself at every start: what transformers' own layers say, float32.

    python examples/builtin/proof.py

To be run again when the weights change, or the rows that specbatch/engine/model_check.py compares.
"""

from __future__ import annotations

import torch

from specbatch.attention.reference import ReferenceBackend
from specbatch.engine.kv_cache import PagedKVCache
from specbatch.engine.kv_layout import plan_pages
from specbatch.engine.model_check import check_against_transformers, paged_logits, sample_rows
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.proof import Proof, store_proof
from specbatch.models.builtin import builtin_logits, builtin_paths
from specbatch.models.loading import load_model


def main() -> None:
    for folder in builtin_paths():
        model = load_model(folder, dtype=torch.float32)
        pages = PagedKVCache(plan_pages(model.kv_shape, None, 16), 8, model.device).pages("target")
        runner = ModelRunner(model, pages, ReferenceBackend())
        check_against_transformers(runner)  # with its own attention, too
        rows = sample_rows(model.vocab_size, model.device)
        file = builtin_logits(folder)
        assert file is not None
        store_proof(file, Proof(rows, paged_logits(runner, rows)))
        print(file, file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
