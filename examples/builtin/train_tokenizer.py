"""Trains the built-in pair's tokenizer: byte-level BPE over generated rows, with a chat template.

Run `python examples/builtin/train_tokenizer.py OUT_DIR` (seconds). Digits and the capitals of an order id are tokens
of their own, and a value after `key: ` has the same tokens as in running text, so that an answer is a plain copy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from messages import make_row
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE: Final = 1536
CONTEXT: Final = 1024
PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
# A capitalised or lower-case word with the space before it; a lone capital; a digit; punctuation; white space.
PIECES: Final = r" ?\p{Lu}?\p{Ll}+| ?\p{Lu}|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + ('' if message['role'] == 'assistant' else ' ') + message['content'] | trim"
    " + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def texts(rows: int, seed: int) -> Iterator[str]:
    for i in range(rows):
        row = make_row("train", seed, i)
        yield " " + row.message
        yield row.expected


def train(rows: int = 20_000, seed: int = 0) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, USER, ASSISTANT, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(rows, seed), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    save(train(), parser.parse_args().out)


if __name__ == "__main__":
    main()
