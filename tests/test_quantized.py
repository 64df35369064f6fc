"""int8 layers on a CPU: what torch says they should give, the same bits for a row in any company, refusals, bookkeeping."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.api import Engine
from specbatch.compose import cost_key, make_engine
from specbatch.engine.model_check import sample_rows
from specbatch.engine.plan import plan_engine
from specbatch.engine.quantized import why_not_int8
from specbatch.engine_options import EngineOptions
from specbatch.models.packed import PackedDecoder, module_weights
from specbatch.models.support import model_shape
from specbatch.sampling_params import SamplingParams
from specbatch.target import make_target
from tests.int8_reference import int8_layers
from tests.test_engine import make_prompts, run, tokens
from tests.test_packed import BASE, COMPANIES, SHAPES, logits_of, make

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_int8_layers_in_torch(shape: str) -> None:
    """Two orders of float sums before a number is rounded move it to its neighbour now and then, and all that follow it a
    little; every token that is spared agrees to the last digits."""
    model = make(*SHAPES[shape])
    plain = torch.cat(logits_of(model))
    with int8_layers(model.module):
        expected = torch.cat(logits_of(model))
    model.packed = PackedDecoder(module_weights(model), threads=2, int8=True)
    actual = torch.cat(logits_of(model))
    by_token = (actual - expected).abs().amax(1) / expected.abs().max()
    assert by_token.min() < 1e-5
    assert by_token.max() < 0.05
    assert (actual - plain).abs().max() / expected.abs().max() > 1e-3  # it was rounded at all


def test_a_number_that_is_not_finite_reaches_its_own_rows_logits_only() -> None:
    model = make("llama", BASE)
    with torch.no_grad():
        model.module.model.embed_tokens.weight[5, 3] = torch.nan
    model.packed = PackedDecoder(module_weights(model), threads=1, int8=True)
    logits = logits_of(model)
    has = [bool((row == 5).any()) for row in sample_rows(model.vocab_size, CPU)]
    assert [bool(x.isnan().all(1).any()) for x in logits] == has
    assert [bool(x.isfinite().all()) for x in logits] == [not h for h in has]


def test_weights_that_int8_cannot_hold_are_refused() -> None:
    model = make("llama", BASE)
    with torch.no_grad():
        model.module.model.layers[1].mlp.up_proj.weight[3, 3] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        PackedDecoder(module_weights(model), threads=1, int8=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_the_same_in_any_company(dtype: str, tiny_target: Path, tiny_draft: Path) -> None:
    prompts = make_prompts()
    params = [SamplingParams(max_tokens=40, temperature=t, seed=5) for t in (0.0, 1.0, 0.0, 0.7, 0.0, 1.3, 0.0)]
    expected = tokens(run(tiny_target, prompts, params, dtype=dtype, quantize="int8"))
    assert expected != tokens(run(tiny_target, prompts, params, dtype=dtype))
    names = COMPANIES if dtype == "bfloat16" else ["chunked prefill", "draft"]
    for name in names:
        options = COMPANIES[name]
        if "draft" in name:
            options = options | {"draft_model": str(tiny_draft)}
        assert tokens(run(tiny_target, prompts, params, dtype=dtype, quantize="int8", **options)) == expected, name


def test_the_draft_is_rounded_too_and_stays_as_it_is_where_it_cannot(tiny_target: Path, tiny_draft: Path) -> None:
    options = EngineOptions(
        model=str(tiny_target), draft_model=str(tiny_draft), speculate="draft", dtype="float32", quantize="int8",
        kv_memory_bytes=4 << 20, threads=1, profile=False,
    )  # fmt: skip
    engine = make_engine(options)
    parts = engine.parts
    assert "int8" in parts.compute
    assert "int8" in parts.speculator.runner.model.packed.kernel  # type: ignore[union-attr]
    assert parts.describe()["quantize"] == "int8"
    keys = [cost_key(parts), cost_key(replace(parts, plan=replace(parts.plan, quantize="none")))]
    assert keys[0] != keys[1]
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "--quantize int8: beside float32 or bfloat16, not float16: --dtype auto"),
        ({"attention": "reference"}, "--quantize int8: it brings its own attention: not with --attention reference"),
    ],
)
def test_what_excludes_it_is_refused_before_anything_loads(options: Any, message: str, tiny_target: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan_engine(EngineOptions(model=str(tiny_target), device="cpu", quantize="int8", **options))


def test_devices_and_models_without_packed_weights_are_refused_by_name(tiny_target: Path, tmp_path: Path) -> None:
    shape = model_shape(tiny_target)
    assert "leave it out, or --device cpu" in str(why_not_int8(torch.device("cuda:0"), "auto", torch.bfloat16, shape))
    assert "not gemma2" in str(why_not_int8(CPU, "auto", torch.float32, replace(shape, model_type="gemma2")))
    assert why_not_int8(CPU, "auto", torch.bfloat16, shape) is None
    # A model of a right type that packed weights cannot take all the same: found on loading.
    make("llama", BASE | {"mlp_bias": True, "vocab_size": shape.vocab_size}).module.save_pretrained(tmp_path)
    for file in tiny_target.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"--quantize int8: .* cannot run from packed weights here \(.*MLP"):
        Engine(model=str(tmp_path), quantize="int8", dtype="float32", kv_memory_bytes=4 << 20)


def test_memory_counts_a_byte_a_weight_but_for_embedding_and_head(tiny_target: Path) -> None:
    plans = [
        plan_engine(EngineOptions(model=str(tiny_target), device="cpu", dtype="bfloat16", quantize=q))  # type: ignore[arg-type]
        for q in ("none", "int8")
    ]
    shape = plans[0].target
    kept = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    assert plans[0].weight_bytes == 2 * shape.num_parameters
    assert plans[1].weight_bytes == shape.num_parameters + kept
    assert json.loads(json.dumps(plans[1].describe()))["quantize"] == "int8"


def test_a_resume_does_not_mix(tiny_target: Path) -> None:
    prints = [
        make_target(EngineOptions(model=str(tiny_target), quantize=q))[0].fingerprint  # type: ignore[arg-type]
        for q in ("none", "int8")
    ]
    assert {k for k in prints[0] if prints[0][k] != prints[1][k]} == {"quantize"}
