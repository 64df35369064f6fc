"""Tiny random-weight checkpoints for tests: a real Hugging Face folder in milliseconds, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

EOS = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(path: Path, *, vocab: int = 260) -> None:
    """Byte-level: ids 0-255 are the bytes, 256 is EOS, then fillers up to `vocab`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = bytes_to_unicode()
    table = {names[b]: b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|end|>", *(f"<|extra{i}|>" for i in range(vocab - 257))]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def bytes_to_unicode() -> dict[int, str]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in printable}
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + len(table) - len(printable))
    return table


def write_llama(
    path: Path, *, seed: int = 0, layers: int = 2, hidden: int = 32, eos: int | None = EOS, **overrides: Any
) -> Path:
    """A Llama with random weights, spread widely enough that greedy choices are not near ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": eos,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides)))
    model.save_pretrained(path)
    write_tokenizer(path, vocab=260)
    return path


def reference_greedy(path: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """transformers' own greedy continuation, one prompt at a time, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    results = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
            results.append(out[0, len(prompt) :].tolist())
    return results
