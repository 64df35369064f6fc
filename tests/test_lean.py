"""Checkpoints read without transformers: the same bits as through it, every doubt sent to it, damage named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.models.checkpoint import Checkpoint
from specbatch.models.lean import NotPlain, load_plain, plain_config
from specbatch.models.loading import load_model
from specbatch.models.packed import PackedDecoder, module_weights
from tests.test_packed import BASE, LLAMA3, logits_of

LLAMA = BASE | {"hidden_act": "silu"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama, tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "llama, biases": ("llama", LLAMA | {"attention_bias": True}),
    "llama, stretched, wide heads, gelu": (
        "llama",
        LLAMA | {"rope_parameters": LLAMA3, "head_dim": 24, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3},
    ),
    "mistral": ("mistral", BASE | {"sliding_window": None}),
    "qwen2, tied": ("qwen2", BASE | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", BASE | {"head_dim": 16}),
    "qwen3, biases": ("qwen3", BASE | {"head_dim": 16, "attention_bias": True}),
}


def write(folder: Path, kind: str, settings: dict[str, Any], dtype: torch.dtype, **options: Any) -> Path:
    """A random checkpoint as transformers saves it, without anything that is one or zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    module.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_through_transformers(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Stored in the other dtype for every second kind, and in several files."""
    number = list(KINDS).index(kind)
    stored = dtype if number % 2 else torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    folder = write(tmp_path / "model", *KINDS[kind], stored, max_shard_size="20KB" if number % 3 else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 3) == bool(number % 3)
    through = load_model(folder, dtype=dtype)
    through.packed = PackedDecoder(module_weights(through), threads=1)
    straight = load_plain(folder, dtype, threads=1)
    assert straight.module is None
    assert replace(straight.shape, dtype=None) == replace(through.shape, dtype=None)  # transformers notes its own
    assert (straight.dtype, straight.support) == (through.dtype, through.support)
    for ours, theirs in zip(logits_of(straight), logits_of(through), strict=True):
        assert torch.equal(ours, theirs)


CONFIG: dict[str, Any] = LLAMA | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN = CONFIG | {"model_type": "qwen2"}


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (CONFIG | {"model_type": "phi3"}, "model type phi3"),
        (CONFIG | {"auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map"),
        (CONFIG | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (CONFIG | {"quantization_config": "fp8"}, "quantization_config"),
        (CONFIG | {"rope_parameters": {"rope_type": "longrope"}}, "rotary type 'longrope'"),
        (CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary type 'dynamic'"),
        (CONFIG | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (CONFIG | {"sliding_window": 64}, "sliding window of 64"),
        (CONFIG | {"model_type": "mistral", "sliding_window": 64}, "sliding window of 64"),
        (CONFIG | {"model_type": "mistral"}, "sliding window of 4096"),  # its class's
        (QWEN | {"sliding_window": 64, "use_sliding_window": True}, "sliding window"),
        (QWEN | {"use_sliding_window": True}, "sliding window"),
        (QWEN | {"layer_types": ["full_attention", "sliding_attention"]}, "layers of type .*sliding_attention"),
        (QWEN | {"attention_bias": True}, "attention_bias True"),  # which its class ignores
        (CONFIG | {"mlp_bias": True}, "mlp_bias True"),
        (CONFIG | {"hidden_act": "relu"}, "hidden_act 'relu'"),
        (CONFIG | {"rms_norm_eps": None}, "rms_norm_eps None"),
        (CONFIG | {"tie_word_embeddings": None}, "tie_word_embeddings None"),
        (CONFIG | {"intermediate_size": 88}, "intermediate size 88"),
        (CONFIG | {"hidden_size": "48"}, "hidden_size '48'"),
        (CONFIG | {"head_dim": 15}, "head size 15"),
        ({k: v for k, v in QWEN.items() if k != "num_key_value_heads"}, "num_key_value_heads None"),  # 32 in its class
        (QWEN | {"head_dim": None}, "head_dim None"),
        ({k: v for k, v in CONFIG.items() if k != "max_position_embeddings"}, "max_position_embeddings None"),
    ],
)
def test_doubts_go_to_transformers(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotPlain, match=reason):
        plain_config(write_config(tmp_path, values))


def test_configs_that_are_plain(tmp_path: Path) -> None:
    """The ones above with what was wrong put right, so that none is refused for another reason than it says."""
    for values in (CONFIG, QWEN, CONFIG | {"model_type": "mistral", "sliding_window": None}, QWEN | {"head_dim": 16},
                   QWEN | {"sliding_window": 64, "use_sliding_window": False}):  # fmt: skip
        plain = plain_config(write_config(tmp_path, values))
        assert plain.shape.hidden_size == values["hidden_size"]
        assert plain.head_norms == (values["model_type"] == "qwen3")


def test_an_adapter_goes_to_transformers(tmp_path: Path) -> None:
    folder = write_config(tmp_path, CONFIG)
    plain_config(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(NotPlain, match="adapter"):
        plain_config(folder)


def change(folder: Path, **changes: Any) -> None:
    """Tensors replaced, or left out (None)."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def test_files_that_hold_something_else_go_to_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama", LLAMA, torch.float32)
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6))  # as old files have it: no matter
    load_plain(folder, torch.float32, 1)
    with pytest.raises(NotPlain, match="float16"):
        load_plain(folder, torch.float16, 1)
    for name, tensor, reason in (
        ("model__layers__1__self_attn__q_proj__bias", torch.ones(48), "hold model.layers.1.self_attn.q_proj.bias"),
        ("model__norm__weight", None, "lack model.norm.weight"),
        ("model__norm__weight", torch.ones(1, 48), r"model.norm.weight is F32 \[1, 48\]"),
        ("model__norm__weight", torch.ones(48, dtype=torch.float64), r"model.norm.weight is F64 \[48\]"),
    ):
        before = (folder / "model.safetensors").read_bytes()
        change(folder, **{name: tensor})
        with pytest.raises(NotPlain, match=reason):
            load_plain(folder, torch.float32, 1)
        (folder / "model.safetensors").write_bytes(before)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(NotPlain, match="other names"):
        load_plain(folder, torch.float32, 1)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama", LLAMA, torch.float32, max_shard_size="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()

    def refused(pattern: str) -> None:
        for function in (lambda: load_plain(folder, torch.float32, 1), lambda: load_model(folder)):
            with pytest.raises(ValueError, match=pattern):
                function()

    shard.write_bytes(whole[:-1])
    refused(f"{shard.name} is not a whole safetensors file")
    shard.unlink()
    refused(f"{shard.name} is missing")
    shard.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace(shard.name, f"../{shard.name}"))
    refused("outside its folder")
    index.write_text(text[: len(text) // 2])
    refused(f"{index.name} is no index")
    index.write_text(text)
    load_plain(folder, torch.float32, 1)


def test_a_tensor_is_a_copy(tmp_path: Path) -> None:
    """A file that is replaced while a job runs changes nothing."""
    folder = write(tmp_path / "model", "llama", LLAMA, torch.float32)
    tensor = Checkpoint(folder).tensor("model.norm.weight", torch.float32)
    before = tensor.clone()
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(b"\xff" * (folder / "model.safetensors").stat().st_size)
    assert torch.equal(tensor, before)


def test_a_job_with_the_built_in_pair_imports_no_transformers(tmp_path: Path) -> None:
    """Nor the other large packages that torch itself leaves out at first."""
    code = (
        "import sys; from specbatch.cli import main; code = main(sys.argv[1:])\n"
        "heavy = {'transformers', 'torch._dynamo', 'torch._inductor', 'torch.distributed.tensor', 'sympy', 'rich',"
        " 'matplotlib', 'pandas', 'pyarrow.dataset'}\n"
        "print(sorted(heavy & set(sys.modules)), 'torch' in sys.modules); sys.exit(code)"
    )
    prompts = Path(__file__).parents[1] / "examples" / "prompts.parquet"
    command = ["run", str(prompts), "-o", str(tmp_path / "out"), "--limit", "3", "--device", "cpu", "--max-tokens", "9"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--no-profile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[] True"
