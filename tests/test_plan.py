"""The arithmetic of `specbatch plan` against numbers worked out by hand, and the worked examples of docs/plan.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from specbatch.control.simulate import EAGLE_LIKE, H100_8B
from specbatch.plan import PlanRequest, estimate_parameters, load_shape, make_plan, round_tokens, shape_of
from specbatch.plan_gpus import GPUS, find_gpu
from specbatch.plan_show import chart, tables, to_text, write_html

LLAMA_2_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_2_7B = LLAMA_2_70B | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LLAMA_32_1B = LLAMA_2_70B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LLAMA_31_8B = LLAMA_2_70B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 128256,
}
QWEN3_06B = LLAMA_32_1B | {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_8B = LLAMA_31_8B | {"num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(LLAMA_2_70B, 68.98), (LLAMA_2_7B, 6.74), (LLAMA_32_1B, 1.24), (LLAMA_31_8B, 8.03), (QWEN3_06B, 0.596)],
)
def test_parameters_from_the_config(config: dict[str, Any], billions: float) -> None:
    assert estimate_parameters(config) / 1e9 == pytest.approx(billions, rel=0.01)


def test_kv_from_key_value_heads() -> None:
    """Not from attention heads: Llama-2-70B holds 320 KiB a token in float16, 0.67 GB at 2,048 tokens, not 8 GB."""
    large, small = shape_of(LLAMA_2_70B), shape_of(LLAMA_2_7B)
    assert large.kv_bytes_per_token(2) == 320 * 1024
    assert 2048 * large.kv_bytes_per_token(2) / 1e9 == pytest.approx(0.67, abs=0.005)
    assert small.kv_bytes_per_token(2) == 512 * 1024  # more than the ten times larger model


def test_round_tokens() -> None:
    assert round_tokens(0.88, 4) == pytest.approx(3.94, abs=0.005)
    assert round_tokens(0.55, 4) == pytest.approx(2.11, abs=0.005)
    assert round_tokens(1.0, 4) == 5.0
    assert round_tokens(0.3, 0) == 1.0
    with pytest.raises(ValueError, match="acceptance"):
        round_tokens(1.2, 4)


def seventy(draft: dict[str, Any] | None) -> PlanRequest:
    return PlanRequest(
        shape_of(LLAMA_2_70B), find_gpu("a100-80"), shape_of(draft) if draft else None, gpus=4, context=2048
    )


def test_70b_with_a_7b_draft_on_four_80_gb_devices() -> None:
    plan = make_plan(seventy(LLAMA_2_7B))
    # the draft's KV alone: 320 / (320 + 512); its weights take a little more
    assert plan.rows_speculative / plan.rows_ar == pytest.approx(0.38, abs=0.005)
    assert (plan.rows_without_draft, plan.rows_ar, plan.rows_speculative) == (265, 245, 94)
    assert plan.rows_static_split == plan.rows_speculative
    # memory full, it loses at every acceptance; at one row it wins
    assert all(ratio < 1 for ratio, _ in plan.full.values())
    assert plan.speedup[0.7, 1][0] > 1.5


def test_70b_with_a_1b_draft_on_four_80_gb_devices() -> None:
    plan = make_plan(seventy(LLAMA_32_1B))
    assert (plan.rows_ar, plan.rows_speculative) == (261, 237)
    assert plan.full[0.8][0] > 1.0 > plan.full[0.3][0]


def test_ngram_takes_no_memory() -> None:
    plan = make_plan(seventy(None))
    assert plan.rows_without_draft == plan.rows_ar == plan.rows_speculative
    assert plan.rules[2].found == "n-gram needs none"


def test_data_sheet_costs_agree_with_published_step_times() -> None:
    """8B on one H100: fixed cost, cost a token and a KV token within 10 % of what was measured."""
    plan = make_plan(PlanRequest(shape_of(LLAMA_31_8B), find_gpu("h100")))
    model = plan.cost.target_model
    assert model.base == pytest.approx(H100_8B.base, rel=0.1)
    assert model.per_token == pytest.approx(H100_8B.per_token, rel=0.1)
    assert model.per_kv_token == pytest.approx(H100_8B.per_kv_token, rel=0.1)
    assert EAGLE_LIKE.base < model.base


def test_the_crossover_is_where_the_ratio_is_one() -> None:
    plan = make_plan(PlanRequest(shape_of(QWEN3_8B), find_gpu("h200"), shape_of(QWEN3_06B), context=1024))
    for acceptance, rows in plan.crossover.items():
        if rows is None:
            assert plan.best(acceptance, 1)[0] <= 1.0
        elif rows < plan.rows_speculative:
            assert plan.best(acceptance, rows)[0] > 1.0 >= plan.best(acceptance, rows + 1)[0]
    for rows, acceptance in plan.break_even.items():
        if acceptance is not None and acceptance > 0.01:
            assert plan.best(acceptance, rows)[0] == pytest.approx(1.0, abs=0.01)
    ordered = [r or 0 for _, r in sorted(plan.crossover.items())]
    assert ordered == sorted(ordered)


def test_rules_of_thumb_are_tested_not_assumed() -> None:
    rules = {bool(rule.holds) for name in GPUS for rule in _rules_on(name)}
    assert rules == {True, False}  # on some devices one holds, on none are they laws
    assert "KV" in make_plan(seventy(LLAMA_2_7B)).rules[2].found


def _rules_on(name: str) -> tuple[Any, ...]:
    try:
        return make_plan(PlanRequest(shape_of(LLAMA_31_8B), find_gpu(name), shape_of(LLAMA_32_1B))).rules
    except ValueError:
        return ()


def test_what_does_not_fit_is_said_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"weights take 138\.0 GB.*1 x h100"):
        make_plan(PlanRequest(shape_of(LLAMA_2_70B), find_gpu("h100")))
    with pytest.raises(ValueError, match="gpu must be one of"):
        find_gpu("h1000")
    with pytest.raises(ValueError, match="context"):
        PlanRequest(shape_of(LLAMA_2_7B), find_gpu("h100"), context=0)


def test_a_lone_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    assert load_shape(tmp_path) == load_shape(tmp_path / "config.json") == shape_of(LLAMA_31_8B)
    with pytest.raises(ValueError, match="no config"):
        load_shape(tmp_path / "missing")


def test_shown_as_text_json_svg_and_html(tmp_path: Path) -> None:
    plan = make_plan(seventy(LLAMA_32_1B))
    text = to_text(plan)
    assert [table.title for table in tables(plan)] == [p.splitlines()[0] for p in text.strip().split("\n\n")]
    assert json.loads(json.dumps(plan.to_json()))["memory"]["rows_speculative"] == 237
    assert ElementTree.fromstring(chart(plan).to_svg()).tag.endswith("svg")
    write_html(plan, tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert not re.search(r"(src|href)=|url\(", page)  # self-contained
    chart(plan).write(tmp_path / "plan.svg")
    ElementTree.parse(tmp_path / "plan.svg")
    with pytest.raises(ValueError, match=r"\.svg, \.png"):
        chart(plan).write(tmp_path / "plan.gif")


def test_png_needs_matplotlib_and_says_so(tmp_path: Path) -> None:
    plan = make_plan(seventy(None))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="matplotlib"):
            chart(plan).write(tmp_path / "plan.png")
    else:
        chart(plan).write(tmp_path / "plan.png")
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_what_the_command_says() -> None:
    """docs/plan.md: every table in it is one of the worked examples, and the numbers of its prose are theirs."""
    page = (Path(__file__).parent.parent / "docs" / "plan.md").read_text()
    shown = 0
    for draft in (LLAMA_2_7B, LLAMA_32_1B):
        plan = make_plan(seventy(draft))
        shown += sum(table.to_text() in page for table in tables(plan))
        if draft is LLAMA_2_7B:
            least, most = min(r for r, _ in plan.full.values()), max(r for r, _ in plan.full.values())
            assert f"{least:.2f}x to {most:.2f}x" in page
            assert f"of {plan.rows_ar} rows that fit in AR {plan.rows_speculative} can draft" in page
        else:
            assert min(a for a, (ratio, _) in plan.full.items() if ratio > 1.0) == 0.6
            assert f"at 64 rows from {plan.break_even[64]:.2f}" in page
    assert shown == page.count("\n----") == 8
