"""Triton's paged attention against two references in Triton's interpreter (not in bfloat16: its dot is wrong there).

Not collected by itself: the interpreter must be chosen before Triton is imported, so tests/test_triton_paged.py runs
this file in a process of its own. By hand: TRITON_INTERPRET=1 pytest tests/triton_interpreter_checks.py
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from specbatch.attention import triton_kernels, triton_paged
from specbatch.attention.reference import ReferenceBackend
from specbatch.attention.triton_configs import Chip, KernelConfig
from specbatch.engine.kv_cache import KVShape, PagedKVCache, plan_pages
from tests.paged_attention_cases import NAMES, TOLERANCE, Case, build_case, error

SETTINGS = settings(
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # a failing case is small already, and shrinking runs for minutes here
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True, scope="module")
def _patch_language_once() -> Iterator[None]:
    """The interpreter patches triton.language anew for every nested call; once a launch is enough and far quicker."""
    original = getattr(interpreter, "_patch_lang", None)
    patched: set[int] = set()  # modules that the launch in progress has been through

    class Scope:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def restore(self) -> None:
            patched.clear()
            self.inner.restore()

    def once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in patched:
            return None
        scope = original(fn)  # type: ignore[misc]
        if not hasattr(scope, "restore"):
            return scope
        patched.add(module)
        return Scope(scope)

    if original is not None:
        interpreter._patch_lang = once
    yield
    if original is not None:
        interpreter._patch_lang = original


def run(case: Case, config: KernelConfig | None = None, num_sms: int = 4) -> Tensor:
    m, o = case.metadata, case.options
    return triton_paged.launch_attention(
        case.query, case.key_pages, case.value_pages, m.query_start_loc, m.seq_lens, m.block_tables, m.positions,
        m.tree_ancestors, o["sinks"], m.num_rows, m.max_query_len, o["scale"], o["sliding_window"], o["softcap"],
        config=config, chip=Chip((9, 0), num_sms),
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, KernelConfig, int]:
    tree = draw(st.booleans())
    group = draw(st.integers(1, 8))
    longest_query = draw(st.sampled_from([1, 4, 9, 24]))
    rows = draw(st.lists(st.tuples(st.integers(0, longest_query), st.integers(0, 90)), min_size=1, max_size=3))
    rows[draw(st.integers(0, len(rows) - 1))] = (draw(st.integers(1, longest_query)), draw(st.integers(0, 90)))
    block_size = draw(st.sampled_from([1, 3, 8, 16, 32, 64]))
    case = build_case(
        rows,
        kv_heads=draw(st.integers(1, 2)),
        group=group,
        head_dim=draw(st.sampled_from([16, 32, 64, 72, 80, 96, 128])),
        block_size=block_size,
        tenant=draw(st.sampled_from(["target", "draft"])) if block_size >= 8 else "target",
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        tree=tree,
        window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.sampled_from([0.5, 20.0])),
        sinks=draw(st.booleans()),
        spare_rows=draw(st.integers(0, 2)),
        spare_tokens=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 2**16)),
    )
    config = KernelConfig(draw(st.sampled_from([16, 32, 64])), draw(st.sampled_from([16, 32, 64])), 4, 3)
    return case, config, draw(st.sampled_from([1, 8]))


@settings(SETTINGS, max_examples=40)
@given(cases())
def test_equals_both_references(drawn: tuple[Case, KernelConfig, int]) -> None:
    case, config, num_sms = drawn
    actual = run(case, config, num_sms)
    assert error(case, actual) < 1
    assert (actual[case.metadata.num_tokens :] == 0).all()
    if case.metadata.tree_ancestors is None or case.options["sliding_window"] is None:
        reference = ReferenceBackend().forward(
            case.query, case.key_pages, case.value_pages, case.metadata, **case.options
        )
        torch.testing.assert_close(actual, reference, rtol=0, atol=2 * TOLERANCE[case.query.dtype])


@pytest.mark.parametrize(
    ("head_dim", "group", "tokens"),
    [(32, 1, 1), (64, 7, 2), (80, 8, 5), (96, 3, 4), (128, 4, 1), (192, 2, 3), (256, 4, 2)],
)
def test_table_configurations_through_the_operators(head_dim: int, group: int, tokens: int) -> None:
    """The configuration the table gives, by way of torch's dispatcher, in float16."""
    case = build_case(
        [(tokens, 150), (1, 3)], kv_heads=1, group=group, head_dim=head_dim, dtype=torch.float16, spare_tokens=1
    )
    backend = triton_paged.create(torch.device("cpu"), torch.float16, None)
    actual = backend.forward(case.query, case.key_pages, case.value_pages, case.metadata, **case.options)
    assert error(case, actual) < 1


def test_long_prompts_take_several_query_tiles() -> None:
    case = build_case([(37, 20), (0, 5), (3, 0), (70, 0)], kv_heads=1, group=4, spare_rows=3, spare_tokens=40)
    assert error(case, run(case, KernelConfig(64, 32, 4, 3), num_sms=1)) < 1


def test_splitting_the_context_does_not_change_the_answer() -> None:
    case = build_case([(2, 700), (1, 0), (1, 300)], kv_heads=1, group=2)
    whole = run(case, KernelConfig(16, 64, 4, 3), num_sms=0)
    split = run(case, KernelConfig(16, 64, 4, 3), num_sms=64)
    assert error(case, whole) < 1
    assert error(case, split) < 1
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)
    assert not torch.equal(split, whole)  # the plan did split


@st.composite
def writes(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "slots": draw(st.lists(st.integers(-1, 63), max_size=12, unique_by=lambda s: s if s >= 0 else object())),
        "kv_heads": draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([16, 40, 80, 256])),
        "block_size": draw(st.sampled_from([1, 5, 16])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16])),
    }


def check_write(slots: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether exactly the slots asked for change, and to the right values, in every byte of the storage."""
    target = KVShape(2, kv_heads, head_dim, NAMES[dtype])
    draft = KVShape(1, kv_heads, head_dim, NAMES[dtype])
    for tenant in ("target", "draft"):
        cache = PagedKVCache(plan_pages(target, draft, block_size), 64 // block_size + 2)
        cache.storage.random_(generator=torch.Generator().manual_seed(1))
        wanted = PagedKVCache(cache.layout, cache.num_pages)
        wanted.storage.copy_(cache.storage)
        fused = torch.randn(len(slots), 3 * kv_heads, head_dim).to(dtype)  # keys and values, slices of one projection
        key, value = fused[:, kv_heads : 2 * kv_heads], fused[:, 2 * kv_heads :]
        arguments = (key, value), torch.tensor(slots, dtype=torch.int32)
        layer = cache.pages(tenant).shape[1] - 1  # type: ignore[arg-type]
        triton_paged.launch_write_kv(*arguments[0], *cache.layer_pages(tenant, layer), arguments[1])  # type: ignore[arg-type]
        ReferenceBackend().write_kv(*arguments[0], *wanted.layer_pages(tenant, layer), arguments[1])  # type: ignore[arg-type]
        if not torch.equal(cache.storage, wanted.storage):
            return False
    return True


@settings(SETTINGS, max_examples=25)
@given(writes())
def test_write_kv_changes_its_slots_and_nothing_else(drawn: dict[str, Any]) -> None:
    assert check_write(**drawn)


def test_write_kv_through_the_operator() -> None:
    pages = torch.zeros(4, 2, 4, 2, 16)
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    triton_paged.TritonPagedAttention().write_kv(
        key, value, pages[:, 0], pages[:, 1], torch.tensor([5, -1, 14], dtype=torch.int32)
    )
    assert torch.equal(pages[1, 0, 1], key[0])
    assert torch.equal(pages[3, 1, 2], value[2])
    assert pages.count_nonzero() == 4 * 32


def test_operators_keep_torchs_contract() -> None:
    """Schema (what is mutated and aliased) and fake implementation agree with what the operators do."""
    case = build_case([(2, 10), (1, 0)], kv_heads=1)
    m, o = case.metadata, case.options
    arguments = (
        case.query, case.key_pages.nan_to_num(), case.value_pages.nan_to_num(), m.query_start_loc, m.seq_lens,
        m.block_tables, m.positions, None, None, m.num_rows, m.max_query_len, o["scale"], None, None,
    )  # fmt: skip
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.specbatch.paged_attention.default, arguments, test_utils=checks)
    pages = torch.zeros(3, 4, 1, 32), torch.zeros(3, 4, 1, 32)
    write = (torch.ones(2, 1, 32), torch.ones(2, 1, 32), *pages, torch.tensor([5, -1], dtype=torch.int32))
    torch.library.opcheck(torch.ops.specbatch.write_kv.default, write, test_utils=checks)


CHAIN = {"rows": [(5, 40), (1, 20)], "spare_tokens": 3}
MUTANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a token does not see itself": ("index[None, :] <= own", "index[None, :] < own", CHAIN),
    "a token sees the next one": ("index[None, :] <= own", "index[None, :] <= 1 + own", CHAIN),
    "the unmasked tiles reach too far": ("else before + first + 1", "else before + first + 16", CHAIN),
    "the window is one too wide": (
        "own_position[:, None] - window",
        "own_position[:, None] - window - 1",
        {**CHAIN, "window": 7},
    ),
    "the window skips a tile too many": (
        "before + first - window + 1",
        "before + first - window + 17",
        {**CHAIN, "window": 30},
    ),
    "tree bits are shifted": ("tl.maximum(twig, 0)", "tl.maximum(twig - 1, 0)", {**CHAIN, "tree": True}),
    "a tree's window counts indices": (
        "if TREE:  # tokens of a tree stand",
        "if False:  #",
        {"rows": [(24, 20)], "tree": True, "window": 2},
    ),
    "the sink counts in every split": (
        "if split == 0:  # a sink",
        "if split >= 0:  # a sink",
        {"rows": [(1, 300)], "sinks": True},
    ),
    "the combine pass forgets a split": ("split * per_split <", "(split + 1) * per_split <", {"rows": [(1, 300)]}),
    "spare tokens keep what was there": (
        "range(tl.load(query_start_loc_ptr + num_rows) +",
        "range(num_tokens +",
        CHAIN,
    ),
    "pages past the context are read": ("in_use = index < seq_len", "in_use = index < seq_len + 1", CHAIN),
    "the page stride of values is the block": (
        "page * value_stride_page + offset",
        "page * BLOCK_SIZE * TOKEN_STRIDE + offset",
        CHAIN,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_catches_a_broken_kernel(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one small fault in the kernel's source, and the case that must show it."""
    old, new, arguments = MUTANTS[mutant]
    case = build_case(**arguments)
    config = KernelConfig(32, 16, 4, 3)
    assert error(case, run(case, config, 8)) < 1
    _break_kernels(old, new, tmp_path, monkeypatch)
    # New memory may hold anything.
    monkeypatch.setattr(torch, "empty", lambda shape, **kw: torch.full(shape, float("nan"), **kw))
    assert error(case, run(case, config, 8)) > 1


def test_the_comparison_catches_a_write_to_slot_minus_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = {"slots": [17, -1, 20], "kv_heads": 1, "head_dim": 16, "block_size": 5, "dtype": torch.float32}
    assert check_write(**write)  # type: ignore[arg-type]
    _break_kernels("if slot < 0:", "if slot < -1:", tmp_path, monkeypatch)
    assert not check_write(**write)  # type: ignore[arg-type]


def _break_kernels(old: str, new: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(triton_kernels.__file__).read_text()
    assert source.count(old) == 1, f"the kernel no longer reads {old!r}"
    broken = folder / "broken_kernels.py"
    broken.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("broken_kernels", broken)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(triton_paged, "kernels", module)
