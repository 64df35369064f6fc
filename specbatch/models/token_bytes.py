"""The bytes every vocabulary entry stands for, so that text can be built and stop strings found without a tokenizer.

Reads tokenizer.json's decoder to know how; checks itself against the tokenizer's own decode.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

METASPACE = "\u2581"
CHECK_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.",
    "def f(x):\n    return x ** 2  # a comment\n",
    "Grüße aus Köln, naïve café — “quoted” … 漢字かな交じり文",
    "한국어, Привет, 🙂👩‍🚀.",
    "  two  spaces,\ttabs\r\nand lines\n\n",
)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of every id: values[offsets[i]:offsets[i + 1]]; special tokens and unused ids have none."""

    values: NDArray[np.uint8]
    offsets: NDArray[np.int64]  # [vocabulary + 1]
    method: str  # "byte-level" | "metaspace" | "decode"
    mismatch: str | None  # what the tokenizer's decode says otherwise, None: nothing

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token: int) -> bytes:
        return self.values[self.offsets[token] : self.offsets[token + 1]].tobytes()

    def join(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self[t] for t in tokens)


def token_bytes(tokenizer: Tokenizer, tokenizer_json: dict[str, Any], special_ids: set[int]) -> TokenBytes:
    """Bytes of the whole vocabulary: exact rules where the decoder has them, else by differences of decode."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    steps = _decoder_steps(tokenizer_json.get("decoder"))
    kinds = [str(step.get("type")) for step in steps]
    added = {int(t["id"]) for t in tokenizer_json.get("added_tokens", [])}
    by_difference = _difference_rule(tokenizer, size, special_ids | added)
    attempts: list[tuple[str, Callable[[int, str], bytes]]] = []
    if "ByteLevel" in kinds:
        attempts.append(("byte-level", lambda _, token: _byte_level_bytes(token)))
    elif {"Metaspace", "ByteFallback"} & set(kinds):
        attempts.append(("metaspace", _metaspace_rule(steps)))
    attempts.append(("decode", lambda token_id, _: by_difference(token_id)))
    result: TokenBytes | None = None
    for method, rule in attempts:
        pieces = []
        for token_id in range(size):
            token = None if token_id in special_ids else tokenizer.id_to_token(token_id)
            if token is None:
                pieces.append(b"")
            elif token_id in added:
                pieces.append(by_difference(token_id))
            else:
                pieces.append(rule(token_id, token))
        offsets = np.zeros(size + 1, np.int64)
        np.cumsum([len(p) for p in pieces], out=offsets[1:])
        table = TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), offsets, method, None)
        mismatch = find_mismatch(table, tokenizer, special_ids, byte_tokens="ByteFallback" in kinds)
        if mismatch is None:
            return table
        if result is None:
            result = TokenBytes(table.values, table.offsets, method, mismatch)
    assert result is not None
    return result


def find_mismatch(table: TokenBytes, tokenizer: Tokenizer, special_ids: set[int], *, byte_tokens: bool) -> str | None:
    """Compare joined bytes with the tokenizer's decode on encoded text and on random ids; says the first difference.

    Decoders drop one space at the start of a text, and treat a continuation there differently, so random ids follow a
    word; random runs of byte tokens are not valid text and are left out.
    """
    rng = random.Random(0)
    plain = [i for i in range(len(table)) if i not in special_ids and len(table[i]) > 0]
    if byte_tokens:
        plain = [i for i in plain if not _is_byte_token(tokenizer.id_to_token(i) or "")]
    samples = [tokenizer.encode(text, add_special_tokens=False).ids for text in CHECK_TEXTS]
    words = (i for i in plain if _is_word(table[i]) and tokenizer.decode([i]).encode().strip() == table[i].strip())
    start = list(islice(words, 1))
    if plain:
        samples += [start + rng.choices(plain, k=8) for _ in range(64)]
    for ids in samples:
        ours = table.join(ids).decode("utf-8", "replace")
        theirs = tokenizer.decode(ids, skip_special_tokens=True)
        if ours != theirs and ours.removeprefix(" ") != theirs.removeprefix(" ") and ours.strip() != theirs.strip():
            return f"tokens {ids[:12]} decode to {theirs[:60]!r}, their bytes to {ours[:60]!r}"
    return None


def _is_word(text: bytes) -> bool:
    return text.strip().isalpha() and text.isascii()


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _decoder_steps(inner)]
    return [decoder]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (Radford et al., 2019): visible Latin-1 is itself, the rest from U+0100."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in visible}
    hidden = [b for b in range(256) if b not in visible]
    table.update({chr(256 + n): b for n, b in enumerate(hidden)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[c] for c in token)
    except KeyError:
        return token.encode()


def _is_byte_token(token: str) -> bool:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return False
    try:
        int(token[3:5], 16)
    except ValueError:
        return False
    return True


def _metaspace_rule(steps: Sequence[dict[str, Any]]) -> Callable[[int, str], bytes]:
    byte_fallback = any(step.get("type") == "ByteFallback" for step in steps)
    replacements = [(METASPACE, " ")]
    for step in steps:
        if step.get("type") == "Metaspace":
            replacements[0] = (str(step.get("replacement", METASPACE)), " ")
        if step.get("type") == "Replace" and isinstance(step.get("pattern"), dict) and "String" in step["pattern"]:
            replacements.append((str(step["pattern"]["String"]), str(step.get("content", ""))))

    def rule(_: int, token: str) -> bytes:
        if byte_fallback and _is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return rule


def _difference_rule(tokenizer: Tokenizer, size: int, avoid: set[int]) -> Callable[[int], bytes]:
    """What decode says more when the id follows a token that is plain text by itself."""
    anchor: int | None = None
    for token_id in range(size):
        token = tokenizer.id_to_token(token_id) if token_id not in avoid else None
        if token and token.isascii() and token.isalpha() and tokenizer.decode([token_id]).strip() == token:
            anchor = token_id
            break
    before = tokenizer.decode([anchor]) if anchor is not None else ""

    def rule(token_id: int) -> bytes:
        if anchor is not None:
            both = tokenizer.decode([anchor, token_id], skip_special_tokens=False)
            if both.startswith(before):
                return both[len(before) :].encode()
        return tokenizer.decode([token_id], skip_special_tokens=False).encode()

    return rule
