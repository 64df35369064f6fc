"""Configs judged by name, shapes by arithmetic, folders loaded without network or foreign code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.models.loading import load_config, load_model
from specbatch.models.support import (
    PROVED,
    check_support,
    count_parameters,
    model_shape,
    model_support,
    shape_from_config,
)
from tests.paged_rows import PagedRows

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | values))
    return folder


def test_the_shape_of_a_known_model() -> None:
    shape = shape_from_config(LLAMA)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.max_model_len) == (32, 8, 128, 8192)
    assert shape.kv_bytes_per_token(2) == 131_072
    assert shape.num_parameters == pytest.approx(8.03e9, rel=0.01)
    assert shape.parameter_bytes(2) == 2 * shape.num_parameters


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {
                "model_type": "gpt2",
                "vocab_size": 50257,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_positions": 1024,
            },
            124e6,
        ),
        (
            {
                "model_type": "mixtral",
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_local_experts": 8,
                "tie_word_embeddings": False,
            },
            46.7e9,
        ),
        (
            {
                "model_type": "gemma2",
                "vocab_size": 256000,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "num_hidden_layers": 26,
                "num_attention_heads": 8,
            },
            2.61e9,
        ),
    ],
)
def test_estimated_parameters(config: dict[str, Any], parameters: float) -> None:
    assert shape_from_config(config).num_parameters == pytest.approx(parameters, rel=0.03)


def test_parameters_are_counted_where_there_are_weights(tiny_target: Path) -> None:
    shape = model_shape(tiny_target)
    assert shape.num_parameters == sum(p.numel() for p in load_model(tiny_target).module.parameters())


@pytest.mark.parametrize(
    ("values", "limit", "note"),
    [
        ({}, 8192, None),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 8192, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}, 32768, None),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}}, 8192, None),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096, "LongRoPE"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192, "dynamic NTK"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}}, 8192, None),
        ({"max_position_embeddings": None}, 2048, "states no context length"),
    ],
)
def test_context_limits(values: dict[str, Any], limit: int, note: str | None) -> None:
    config = LLAMA | values
    assert shape_from_config(config).max_model_len == limit
    support = check_support(config)
    assert support.status == "proved"
    if note is None:
        assert support.notes == ()
    else:
        assert note in support.notes[0]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mamba2"}, "recurrent"),
        ({"model_type": "new", "layer_types": ["full_attention", "linear"]}, "layers of type linear"),
        ({"model_type": "new", "layers_block_type": ["attention", "mamba"]}, "layers of type mamba"),
        ({"model_type": "bloom"}, "bypasses transformers' attention interface"),
        ({"model_type": "falcon", "alibi": True}, "position bias"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "position bias"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross attention"),
        ({"model_type": "llava", "vision_config": {}}, "multimodal"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 10}, "share another layer's keys and values"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "chunked attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "not causal"),
        ({"num_key_value_heads": [4, 2]}, "differ in number or size"),
        ({"model_type": "deepseek_v32"}, "indexer"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised (gptq)"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    support = check_support(LLAMA | values)
    assert support.status == "refused"
    assert reason in "; ".join(support.reasons)
    with pytest.raises(ValueError, match="cannot be run") as error:
        model_shape(write_config(tmp_path / "model", **values))
    assert reason in str(error.value)
    assert str(tmp_path / "model") in str(error.value)


def test_every_reason_is_listed() -> None:
    support = check_support(LLAMA | {"model_type": "mamba", "is_encoder_decoder": True, "vision_config": {}})
    assert len(support.reasons) == 3


def test_an_unknown_type_is_let_through_with_a_note(tmp_path: Path) -> None:
    support = model_support(write_config(tmp_path / "model", model_type="brand_new"))
    assert support.status == "unproved"
    assert "brand_new" in support.notes[0]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "qwen2", "qwen3", "mistral", "phi3"])
def test_windows_of_a_config_that_lists_no_layer_types(kind: str) -> None:
    """What the family's rule says equals what transformers' config class fills in."""
    from transformers import AutoConfig

    values = {"num_hidden_layers": 9, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}
    config = LLAMA | values | {"model_type": kind, "pad_token_id": None, "original_max_position_embeddings": 8192}
    filled = AutoConfig.for_model(**config).to_dict()
    assert shape_from_config(config).sliding_windows == shape_from_config(filled).sliding_windows
    assert any(shape_from_config(config).sliding_windows)


NAMES = ("num_kv_heads", "head_dim", "sliding_windows", "softcap", "tied_embeddings")


@pytest.mark.parametrize("kind", sorted(PROVED - {"deepseek_v2", "deepseek_v3"}))  # those state all of their own sizes
def test_what_a_config_leaves_out_is_what_its_class_fills_in(kind: str) -> None:
    from transformers import AutoConfig

    sizes = {"num_hidden_layers": 31, "hidden_size": 1024, "num_attention_heads": 64, "vocab_size": 200_000}
    for stated in (
        {},
        {"sliding_window": None},
        {"sliding_window": 64},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 64},
        {"sliding_window": 64, "layer_types": ["sliding_attention", *["full_attention"] * 30]},
    ):
        if kind == "exaone4" and stated == {"sliding_window": None}:
            continue  # its class divides by zero
        config = sizes | stated | {"model_type": kind}
        short, filled = (shape_from_config(c, 1) for c in (config, AutoConfig.for_model(**config).to_dict()))
        assert [getattr(short, name) for name in NAMES] == [getattr(filled, name) for name in NAMES], stated


def test_files_beside_the_usual_ones_do_not_count(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def save(name: str, *sizes: int) -> None:
        save_file({f"{name}{i}": torch.zeros(size) for i, size in enumerate(sizes)}, tmp_path / f"{name}.safetensors")

    assert count_parameters(tmp_path) is None
    save("consolidated", 6, 4)
    assert count_parameters(tmp_path) == 10, "all there is"
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=r"model-1.safetensors is missing"):
        count_parameters(tmp_path)
    (save("model-1", 3, 2), save("model-2", 4), save("model-3", 100))
    assert count_parameters(tmp_path) == 9
    save("model", 7)  # which transformers prefers to an index
    assert count_parameters(tmp_path) == 7


def test_missing_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"no usable vocab_size \(found None\)"):
        shape_from_config({k: v for k, v in LLAMA.items() if k != "vocab_size"})
    with pytest.raises(ValueError, match="32 attention heads, no multiple of its 5"):
        shape_from_config(LLAMA | {"num_key_value_heads": 5})


@pytest.mark.parametrize(
    "odd",
    [
        {"architectures": 1},
        {"layer_types": True},
        {"layers_block_type": 1.5},
        {"model_type": ["llama"]},
        {"intermediate_size": [1]},
        {"intermediate_size": float("inf")},
        {"num_experts": {"a": 1}},
        {"rope_scaling": {"rope_type": "yarn", "factor": [2], "original_max_position_embeddings": 16}},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": [1]},
        {"model_type": "smollm3", "sliding_window": 8, "use_sliding_window": True, "no_rope_layers": 3},
        {"model_type": "smollm3", "sliding_window": 8, "use_sliding_window": True, "no_rope_layer_interval": 0.0},
    ],
)
def test_values_of_the_wrong_kind_are_an_error_of_the_folder(tmp_path: Path, odd: dict[str, Any]) -> None:
    folder = write_config(tmp_path / "model", **odd)
    with pytest.raises(ValueError, match=str(folder)):
        model_shape(folder)


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_a_usable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for function in (model_shape, load_config, load_model):
        with pytest.raises(ValueError, match=str(tmp_path)):
            function(tmp_path)


@pytest.mark.parametrize("wrong", [{"num_attention_heads": 48}, {"hidden_size": "4096"}])
def test_a_config_that_its_class_refuses_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"the config of {tmp_path}.* cannot be loaded"):
        load_config(write_config(tmp_path / "model", **wrong))


def test_a_loaded_model_gives_transformers_logits(tiny_target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    ids = [1, 50, 200, 7, 7, 90, 3]
    loaded = load_model(str(tiny_target))
    assert capfd.readouterr().err == "", "no progress bar of transformers' own"
    assert not loaded.module.training
    assert not any(p.requires_grad for p in loaded.module.parameters())
    reference = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([ids])).logits[0]
    assert torch.allclose(PagedRows(loaded, rows=1, max_len=8).step([(0, 0, ids)])[0], expected, atol=1e-4)


def copy_folder(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_missing_weights_are_an_error_not_random_numbers(tiny_target: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_folder(tiny_target, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 weights .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_weights_of_another_shape_are_an_error(tiny_target: Path, tmp_path: Path) -> None:
    folder = copy_folder(tiny_target, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(folder)


def test_pickled_weights_are_not_read(tiny_target: Path, tmp_path: Path) -> None:
    folder = copy_folder(tiny_target, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no .*safetensors files"):
        load_model(folder)


def test_a_damaged_weight_file_is_named(tiny_target: Path, tmp_path: Path) -> None:
    folder = copy_folder(tiny_target, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        model_shape(folder)


def test_code_in_the_folder_is_not_run(tiny_target: Path, tmp_path: Path) -> None:
    folder = copy_folder(tiny_target, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": auto}))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass EvilConfig: pass\nclass Evil: pass\n")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_plans_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "import specbatch.models.support, specbatch.models.tokenizer, specbatch.models.tokenizer_compare\n"
        "import specbatch.engine.kv_layout\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
