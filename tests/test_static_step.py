"""The whole decode, verify and draft step under fake CUDA tensors: what a graph would refuse, these refuse too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # NOTE: fake tensors have no data, so no address


class Watch(TorchDispatchMode):
    """Notes what a graph would not survive: copies between devices, and tensors read that nobody keeps at their place."""

    def __init__(self, fixed: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {storage_of(tensor) for tensor in fixed}
        self.kept: list[torch.Tensor] = []  # made meanwhile; alive, so that no storage is used twice
        self.copies: list[str] = []
        self.strangers: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        out = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in ((args, kwargs), out)
        )
        devices = {t.device.type for t in (*inputs, *outputs) if t.dim() > 0}
        if len(devices) > 1:
            self.copies.append(f"{func} between {' and '.join(sorted(devices))}")
        if any(storage_of(t) not in self.known for t in inputs):
            self.strangers.append(str(func))
        for tensor in outputs:
            self.known.add(storage_of(tensor))
            self.kept.append(tensor)
        return out


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks the driver what the device is before it multiplies by experts."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def make_runner(family: str) -> ModelRunner:
    import transformers

    attention_hook.register()
    config_name, model_name, more = FAMILIES[family]
    config = getattr(transformers, config_name)(**COMMON, **more)
    config._attn_implementation = attention_hook.ATTENTION_NAME
    # NOTE: made in bfloat16, not converted: a conversion swaps parameters, which fails while anything refers to them weakly.
    with torch.device("cuda"), default_dtype(torch.bfloat16):
        module = getattr(transformers, model_name)(config)
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


def fixed_tensors(step: StaticStep) -> list[torch.Tensor]:
    """What stays where it is from step to step: weights, pages, step arrays, sampling rows and tables, own buffers."""
    tables = step.rows.tables
    runners = [step.target_runner, step.draft_runner]
    modules = [runner.model.module for runner in runners if runner is not None]
    return [
        *(t for module in modules for t in (*module.parameters(), *module.buffers())),
        *(runner.pages for runner in runners if runner is not None),
        *step.arrays.device.values(),
        step.rows.packed,
        *(getattr(tables, name) for name in tables.__slots__),
        *(t for t in vars(step).values() if isinstance(t, torch.Tensor)),
    ]


GREEDY, HOT, CUT = 0, SAMPLED, SAMPLED | TRUNCATED | LOGPROBS
ALL = SAMPLED | TRUNCATED | PENALISED | BIASED
CASES = [(family, kind) for family in FAMILIES for kind in (GREEDY, ALL)] + [("llama", HOT), ("llama", CUT)]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_step_asks_nothing_of_the_host(family: str, kind: int) -> None:
    """Fake tensors raise at whatever depends on data; the rest is watched."""
    with FakeTensorMode():
        step = make_step(family, kind)
        buffers = {name: value for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
        watch = Watch(fixed_tensors(step))
        with watch:
            for width in (1, K + 1):
                step.target(Bucket(ROWS, width))
            step.draft(Bucket(4, K + 1))
        assert watch.operations > 300
        assert not watch.copies
        assert not watch.strangers
        assert all(getattr(step, name) is value for name, value in buffers.items())  # results stay where they were
        assert step.tokens(Bucket(ROWS, 2)).shape == (ROWS, 2)


class Looks(StaticStep):
    """Broken: the host reads a count."""

    def target(self, bucket: Bucket) -> None:
        super().target(bucket)
        if int(self.num_sampled(bucket).max()) > 1:
            self.result.zero_()


class Selects(StaticStep):
    """Broken: a size depends on data."""

    def target(self, bucket: Bucket) -> None:
        super().target(bucket)
        self.result[self.result[:, 0] > 0].sum()


class Copies(StaticStep):
    """Broken: a result goes to the host."""

    def target(self, bucket: Bucket) -> None:
        super().target(bucket)
        self.num_sampled(bucket).cpu()


class Moves(StaticStep):
    """Broken: reads a tensor that is another one at every step."""

    def target(self, bucket: Bucket) -> None:
        super().target(bucket)
        self.result.add_(self.outside())

    def outside(self) -> torch.Tensor:
        return vars(self).setdefault("made", [torch.ones(1, dtype=torch.int32, device="cuda")])[0]


@pytest.mark.parametrize("broken", [Looks, Selects])
def test_a_step_that_depends_on_data_is_refused(broken: type[StaticStep]) -> None:
    with FakeTensorMode():
        step = make_step("llama", GREEDY, broken)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            step.target(Bucket(2, 2))


def test_copies_and_strangers_are_seen() -> None:
    with FakeTensorMode():
        step: Any = make_step("llama", GREEDY, Copies)
        with Watch(fixed_tensors(step)) as watch:
            step.target(Bucket(2, 2))
        assert watch.copies
        step = make_step("llama", GREEDY, Moves)
        step.outside()
        with Watch(fixed_tensors(step)) as watch:
            step.target(Bucket(2, 2))
        assert watch.strangers
