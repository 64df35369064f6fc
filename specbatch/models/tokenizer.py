"""A model folder's tokenizer: text to ids in batches, messages to text, ids to bytes. No torch, no transformers.

Knows the files of a Hugging Face folder; knows nothing of models, prompts' columns or scheduling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer

from specbatch.models.chat_template import ChatTemplate, choose_template
from specbatch.models.token_bytes import TokenBytes, token_bytes

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_VOCABULARIES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "vocab.json")
ABSURD_LENGTH = 10**9  # "no limit" is written as 10**30 in many tokenizer_config.json


class HFTokenizer:
    """Tokenizer of a local folder. Implements specbatch.requests.Tokenizer."""

    def __init__(self, path: str | Path, *, chat_template: str | None = None, now: datetime | None = None) -> None:
        """Read tokenizer.json and its companions; `chat_template` (a template's text) overrides the folder's own.

        Raises ValueError that names the folder and the fix.
        """
        self.path = Path(path)
        self._config = _read_json(self.path / "tokenizer_config.json")
        self._json_text = _read_tokenizer_json(self.path)
        self._json: dict[str, Any] = json.loads(self._json_text)
        try:
            self._tokenizer = RustTokenizer.from_str(self._json_text)
        except Exception as error:  # the binding raises bare Exception
            raise ValueError(f"{self.path / 'tokenizer.json'} cannot be loaded: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens = self._read_special_tokens()
        source = chat_template if chat_template is not None else self._read_template()
        self._template = ChatTemplate(source, self.special_tokens, now) if source else None
        bos = self.special_tokens.get("bos_token")
        self.bos_token_id: int | None = self._tokenizer.token_to_id(bos) if bos else None
        self._add_bos = self._config.get("add_bos_token")

    # ---- text to ids

    def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of every text as values and offsets [n + 1]. The interpreter is released while encoding.

        NOTE: a text that begins with the BOS token gets no second one (templates write their own). Rendered
        conversations want add_special_tokens=False, as their template has written every special token they need.
        """
        special = add_special_tokens and self._add_bos is not False  # an explicit false counts, as in transformers
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
        ids = [encoding.ids for encoding in encodings]
        if special and self.bos_token_id is not None:
            ids = [self._one_bos(row) for row in ids]
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(row) for row in ids], out=offsets[1:])
        values = np.fromiter(chain.from_iterable(ids), np.int32, count=int(offsets[-1]))
        return values, offsets

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        assert bos is not None
        if self._add_bos is True and ids[:1] != [bos]:
            return [bos, *ids]
        start = 0
        while ids[start : start + 2] == [bos, bos]:
            start += 1
        return ids[start:]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids as the tokenizer itself has it, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    # ---- messages to text

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def prefers_chat(self) -> bool:
        """A model that comes with a chat template was tuned for it."""
        return self.has_chat_template

    @property
    def chat_template(self) -> str | None:
        return self._template.source if self._template else None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """One conversation through the chat template, generation prompt included. Raises ValueError."""
        if self._template is None:
            raise ValueError(f"{self.path} has no chat template: give one with --chat-template, or give plain prompts")
        return self._template.render(messages, variables=variables)

    # ---- ids to bytes

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that print nothing."""
        marked = {int(t["id"]) for t in self._json.get("added_tokens", []) if t.get("special")}
        named = (self._tokenizer.token_to_id(token) for token in self.special_tokens.values())
        return frozenset(marked | {i for i in named if i is not None})

    @cached_property
    def byte_table(self) -> TokenBytes:
        return token_bytes(self._tokenizer, self._json, set(self.special_ids))

    def token_bytes(self, vocab_size: int | None = None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Bytes of every id as values and offsets; with `vocab_size`, padded with empty entries to that many ids."""
        table = self.byte_table
        offsets = table.offsets
        if vocab_size is not None and vocab_size > len(table):
            offsets = np.concatenate([offsets, np.full(vocab_size - len(table), offsets[-1], np.int64)])
        return table.values, offsets

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        """Every id in use and its token."""
        return {i: token for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def vocab_size(self) -> int:
        """Highest id in use + 1. A model's embedding may have more rows."""
        return max(self.vocabulary, default=-1) + 1

    @property
    def decoder(self) -> object:
        """How tokens become text, as tokenizer.json has it; equal decoders turn equal tokens into equal bytes."""
        return self._json.get("decoder")

    # ---- what the folder says

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: of generation_config.json (else config.json), and the tokenizer's own EOS."""
        found: list[int] = []
        model = _read_json(self.path / "config.json")
        text = model.get("text_config")
        for value in (
            _read_json(self.path / "generation_config.json").get("eos_token_id"),
            model.get("eos_token_id"),
            text.get("eos_token_id") if isinstance(text, dict) else None,
        ):
            if value is not None:
                found = [int(v) for v in (value if isinstance(value, list) else [value])]
                break
        eos = self.special_tokens.get("eos_token")
        own = self._tokenizer.token_to_id(eos) if eos else None
        if own is not None:
            found.append(own)
        return tuple(sorted(set(found)))

    @property
    def model_max_length(self) -> int | None:
        """tokenizer_config.json's limit, None where it says none or an absurd one."""
        value = self._config.get("model_max_length")
        if isinstance(value, (int, float)) and 0 < value < ABSURD_LENGTH:
            return int(value)
        return None

    def _read_special_tokens(self) -> dict[str, str]:
        sources = (_read_json(self.path / "special_tokens_map.json"), self._config)
        tokens: dict[str, str] = {}
        for source in sources:
            for name in SPECIAL_NAMES:
                value = source.get(name)
                content = value.get("content") if isinstance(value, dict) else value
                if isinstance(content, str):
                    tokens[name] = content
        return tokens

    def _read_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        return choose_template(self._config.get("chat_template"), str(self.path / "tokenizer_config.json"))


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no such file. Raises ValueError naming the file."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return value


def _read_tokenizer_json(path: Path) -> str:
    """tokenizer.json, or what transformers converts the folder's other vocabulary files to."""
    file = path / "tokenizer.json"
    if file.is_file():
        return file.read_text("utf-8")
    others = [name for name in OTHER_VOCABULARIES if (path / name).is_file()]
    fix = (
        f'python -c "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained({str(path)!r})'
        f'.save_pretrained({str(path)!r})"'
    )
    if not others:
        raise ValueError(f"{path} has no tokenizer.json and no other vocabulary file")
    try:
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        return str(converted.backend_tokenizer.to_str())
    except Exception as error:
        raise ValueError(
            f"{path} has no tokenizer.json, only {', '.join(others)}, and converting it failed ({error}). "
            f"Make one where that works: {fix}"
        ) from error
