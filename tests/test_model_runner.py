"""Models on packed rows: padding, several models at once, wiring, and the check of unproved types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specbatch.attention.reference import ReferenceBackend
from specbatch.engine.kv_cache import PagedKVCache, plan_pages
from specbatch.engine.model_check import check_against_transformers
from specbatch.engine.model_runner import ModelRunner
from specbatch.models import support
from specbatch.models.loading import LoadedModel, load_model
from tests.paged_rows import PagedRows, int32
from tests.test_model_families import adopt, largest_error, make_model

IDS = [17, 40, 5, 88, 23, 61, 9, 9, 70, 31, 12]


@pytest.fixture(scope="module")
def llama(tiny_target: Path) -> LoadedModel:
    return load_model(tiny_target)


def plain_logits(kind: str, ids: list[int], **overrides: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = make_model(kind, **overrides)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def test_only_the_wanted_logits_are_computed(llama: LoadedModel) -> None:
    rows = PagedRows(llama, rows=1, max_len=16)
    seen: list[tuple[int, ...]] = []
    hook = llama.module.lm_head.register_forward_hook(lambda _m, args, _o: seen.append(tuple(args[0].shape)))  # type: ignore[union-attr,operator]
    wanted = rows.runner.forward(int32(IDS), rows.metadata([(0, 0, len(IDS))]), int32([10, 2]))
    every = rows.step([(0, 0, IDS)])[0]
    rows.fill([(0, 0, IDS)])
    hook.remove()
    assert wanted.shape == (2, llama.vocab_size)
    assert wanted.dtype is torch.float32
    assert torch.allclose(wanted, every[[10, 2]], atol=1e-5)
    assert [s[1] for s in seen] == [2, len(IDS)]


def test_padding_changes_nothing_and_touches_no_page(llama: LoadedModel) -> None:
    rows = PagedRows(llama, rows=2, max_len=16)
    plain = rows.step([(0, 0, IDS)])[0]
    before = rows.cache.storage.clone()
    padded = rows.step([(0, 0, IDS)], padding=6)[0]
    assert torch.allclose(plain, padded, atol=1e-5)
    changed = (before != rows.cache.storage).view(rows.cache.num_pages, -1).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) <= set(rows.tables[0])
    assert bool(rows.cache.pages("target")[0].isnan().all()), "the null page is never written"


def test_one_metadata_over_static_tensors_serves_step_after_step(llama: LoadedModel) -> None:
    rows = PagedRows(llama, rows=2, max_len=16)
    every = rows.step([(0, 0, IDS)])[0]
    metadata = rows.metadata([(1, 0, 1)])
    one_by_one = []
    for position, token in enumerate(IDS):
        fresh = rows.metadata([(1, position, 1)])
        metadata.positions.copy_(fresh.positions)
        metadata.slot_mapping.copy_(fresh.slot_mapping)
        metadata.seq_lens.copy_(fresh.seq_lens)
        one_by_one.append(rows.runner.forward(int32([token]), metadata, int32([0])))
    assert torch.allclose(torch.cat(one_by_one), every, atol=1e-4)


def test_forward_hidden_leaves_the_same_kv(llama: LoadedModel) -> None:
    one, other = PagedRows(llama, rows=1, max_len=16), PagedRows(llama, rows=1, max_len=16)
    one.runner = ModelRunner(llama, one.cache.pages("target"), ReferenceBackend())
    one.step([(0, 0, IDS)])
    other.runner = ModelRunner(llama, other.cache.pages("target"), ReferenceBackend())
    other.fill([(0, 0, IDS)])
    assert torch.equal(one.cache.storage, other.cache.storage)


def test_target_and_draft_live_side_by_side(tiny_target: Path, tiny_draft: Path) -> None:
    """Two models over one pool, interleaved, each give what they give alone."""
    target, draft = load_model(tiny_target), load_model(tiny_draft)
    alone = [PagedRows(model, rows=1, max_len=24).step([(0, 0, IDS)])[0] for model in (target, draft)]
    cache = PagedKVCache(plan_pages(target.kv_shape, draft.kv_shape, 4), 40)
    assert cache.block_size("draft") > 4
    runners = [
        ModelRunner(target, cache.pages("target"), ReferenceBackend()),
        ModelRunner(draft, cache.pages("draft"), ReferenceBackend()),
    ]
    helper = PagedRows.__new__(PagedRows)
    outputs: list[list[Tensor]] = [[], []]
    for first, last in ((0, 4), (4, 5), (5, len(IDS))):
        for i, (runner, tenant) in enumerate(zip(runners, ("target", "draft"), strict=True)):
            helper.block_size = cache.block_size(tenant)  # type: ignore[arg-type]
            helper.tables = [[7, 3, 21, 30]] if tenant == "target" else [[5, 11, 2, 33]]
            metadata = helper.metadata([(0, first, last - first)])
            outputs[i].append(runner.forward(int32(IDS[first:last]), metadata, torch.arange(last - first)))
    for got, expected in zip(outputs, alone, strict=True):
        assert largest_error([torch.cat(got)], [expected]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gives_float32_logits_near_the_exact_ones(tiny_target: Path, dtype: torch.dtype) -> None:
    exact = PagedRows(load_model(tiny_target), rows=1, max_len=16).step([(0, 0, IDS)])
    low = PagedRows(load_model(tiny_target, dtype=dtype), rows=1, max_len=16).step([(0, 0, IDS)])
    assert low[0].dtype is torch.float32
    assert 0 < largest_error(low, exact) < 0.1


def test_pages_of_another_model_are_refused(llama: LoadedModel) -> None:
    shape = llama.kv_shape
    other = type(shape)(shape.layers + 1, shape.kv_heads, shape.head_dim, shape.dtype)
    cache = PagedKVCache(plan_pages(other, None, 4), 4)
    with pytest.raises(ValueError, match=r"KV pages hold .*\(3, 2, 2, 8\), the model needs \(2, 2, 2, 8\)"):
        ModelRunner(llama, cache.pages("target"), ReferenceBackend())


def test_a_layer_that_does_not_attend_through_us_is_noticed() -> None:
    class Elsewhere(nn.Module):
        def forward(self, hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, None]:
            return torch.zeros_like(hidden_states), None

    model = adopt(make_model("llama"))
    model.module.model.layers[1].self_attn = Elsewhere()  # type: ignore[union-attr,index,operator]
    with pytest.raises(RuntimeError, match=r"in layers \[0, 2\], not in \[0, 1, 2\]"):
        PagedRows(model, rows=1, max_len=16).step([(0, 0, IDS)])


def test_a_window_other_than_the_configs_is_noticed() -> None:
    model = adopt(make_model("mistral"))
    model.layers[1].sliding_window = None
    model.layers[2].sliding_window = 5
    with pytest.raises(RuntimeError, match=r"layer 1 .* window of 7 tokens, its config says None"):
        PagedRows(model, rows=1, max_len=16).step([(0, 0, IDS)])


def test_attention_outside_a_runner_says_so() -> None:
    model = adopt(make_model("llama"))
    with pytest.raises(RuntimeError, match="LlamaAttention has no KV pages"):
        model.module(input_ids=torch.tensor([[1, 2]]), use_cache=False)


class _HalfScale(ReferenceBackend):
    def forward(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, metadata: Any, **options: Any) -> Tensor:
        options["scale"] *= 0.5
        return super().forward(query, key_pages, value_pages, metadata, **options)


def test_an_unproved_type_is_compared_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "PROVED", frozenset())
    model = adopt(make_model("gemma2"))
    assert model.support.status == "unproved"
    assert "compared with transformers" in model.support.notes[0]
    rows = PagedRows(model, rows=1, max_len=16)
    got = rows.step([(0, 0, IDS)])
    assert largest_error(got, [plain_logits("gemma2", IDS)]) < 1e-5
    assert check_against_transformers(rows.runner) < 1e-5
    with pytest.raises(RuntimeError, match="model type gemma2 gives other logits"):
        PagedRows(model, rows=1, max_len=16, backend=_HalfScale())


def test_a_proved_type_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adopt(make_model("gemma2"))
    PagedRows(model, rows=1, max_len=16, backend=_HalfScale())  # wrong, but nobody looks
