"""The whole decode, verify and draft step under fake CUDA tensors: what a graph would refuse, these refuse too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="torch for this machine came without Triton")

from specbatch.attention.triton_paged import TritonPagedAttention
from specbatch.engine.model_runner import ModelRunner
from specbatch.engine.row_params import BIASED, LOGPROBS, NUM_COLUMNS, PENALISED, SAMPLED, TRUNCATED, Tables, rows_over
from specbatch.engine.static_step import StaticStep
from specbatch.engine.step_buffers import Bucket, StepArrays
from specbatch.models import attention_hook
from specbatch.models.loading import wrap_module

pytestmark = pytest.mark.slow

ROWS, K, VOCAB, PAGES = 6, 3, 64, 20
SHAPES = StepArrays(
    max_num_seqs=ROWS,
    max_num_tokens=ROWS * (K + 1),
    max_num_logits=ROWS * (K + 1),
    pages_per_row=8,
    draft_pages_per_row=8,
).shapes
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mixture of experts": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
}


class HostCopies(TorchDispatchMode):
    """Notes every operation that moves a tensor between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = ({t.device.type for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.dim() > 0}
                           for tree in ((args, kwargs), out))  # fmt: skip
        if len(inputs | outputs) > 1:
            self.found.append(f"{func}: {inputs} to {outputs}")
        return out


def make_runner(family: str) -> ModelRunner:
    import transformers

    attention_hook.register()
    config_name, model_name, more = FAMILIES[family]
    config = getattr(transformers, config_name)(**COMMON, **more)
    config._attn_implementation = attention_hook.ATTENTION_NAME
    with torch.device("cuda"):
        module = getattr(transformers, model_name)(config).to(torch.bfloat16)
        pages = torch.empty(PAGES, 2, 2, 16, 2, 16, dtype=torch.bfloat16)
    return ModelRunner(wrap_module(module), pages, TritonPagedAttention())


def make_step(family: str, kind: int, step_class: type[StaticStep] = StaticStep) -> StaticStep:
    device = {name: torch.zeros(shape, dtype=torch.int32, device="cuda") for name, shape in SHAPES.items()}
    arrays: Any = SimpleNamespace(shapes=SHAPES, device=device, device_type=torch.device("cuda"))
    packed = torch.zeros(ROWS, NUM_COLUMNS, dtype=torch.int32, device="cuda")
    rows = rows_over(packed, np.zeros((ROWS, NUM_COLUMNS), np.int32), Tables.empty(VOCAB, torch.device("cuda")))
    rows.kind, rows.num_rows = kind, ROWS
    return step_class(
        arrays, rows, make_runner(family), make_runner(family), max_speculative_tokens=K, max_model_len=128,
        draft_block_size=16,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [0, SAMPLED, SAMPLED | TRUNCATED | LOGPROBS, SAMPLED | TRUNCATED | PENALISED | BIASED])
@pytest.mark.parametrize("family", FAMILIES)
def test_step_asks_nothing_of_the_host(family: str, kind: int) -> None:
    with FakeTensorMode():
        step = make_step(family, kind)
        buffers = {name: value for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
        copies = HostCopies()
        with copies:
            for width in (1, K + 1):
                step.target(Bucket(ROWS, width))
            step.draft(Bucket(4, K + 1))
        assert not copies.found
        assert all(getattr(step, name) is value for name, value in buffers.items())  # results stay where they were
        assert step.tokens(Bucket(ROWS, 2)).shape == (ROWS, 2)


def test_a_step_that_looks_at_data_is_seen() -> None:
    class Looks(StaticStep):
        def target(self, bucket: Bucket) -> None:
            super().target(bucket)
            if int(self.num_sampled(bucket).max()) > 1:
                self.result.zero_()

    class Copies(StaticStep):
        def target(self, bucket: Bucket) -> None:
            super().target(bucket)
            self.num_sampled(bucket).cpu()

    class Selects(StaticStep):
        def target(self, bucket: Bucket) -> None:
            super().target(bucket)
            self.result[self.result[:, 0] > 0].sum()

    with FakeTensorMode():
        for broken in (Looks, Selects):
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                make_step("llama", 0, broken).target(Bucket(2, 2))
        copies = HostCopies()
        step = make_step("llama", 0, Copies)
        with copies:
            step.target(Bucket(2, 2))
        assert copies.found
