"""Small tokenizers of every kind that models come with, written as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.tiny import bytes_to_unicode

SPACE = "\u2581"
TEXT = "the quick brown fox jumps over the lazy dog. Grüße, naïve café, 漢字 and 🙂 the end"


def byte_level(extra: tuple[str, ...] = ()) -> Tokenizer:
    """GPT-2's kind: bytes under printable names, two merges, one special and one ordinary added token."""
    names = bytes_to_unicode()
    vocab = {names[b]: b for b in range(256)}
    vocab |= {"th": 256, "the": 257, "Ġthe": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *extra])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """Llama 2's kind: spaces as a visible character, unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    letters = sorted({*TEXT.replace(" ", SPACE)} - {*"漢字🙂"})
    vocab = {piece: i for i, piece in enumerate([*pieces, *letters, f"{SPACE}t", "he", f"{SPACE}the"])}
    merges = [(SPACE, "t"), ("h", "e"), (f"{SPACE}t", "he")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def unigram() -> Tokenizer:
    """T5's kind: a unigram model with metaspace."""
    letters = sorted({*TEXT.replace(" ", SPACE)})
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in letters), (f"{SPACE}the", -2.0), ("ick", -2.5)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE)
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: words and ##continuations."""
    words = ["[UNK]", "the", "qui", "##ck", "fox", "dog", "##s", ".", "end", *"abcdefghijklmnopqrstuvwxyz"]
    vocab = {w: i for i, w in enumerate([*words, *(f"##{c}" for c in "abcdefghijklmnopqrtuvwxyz")])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece_bpe": sentencepiece_bpe,
    "unigram": unigram,
    "word_piece": word_piece,
}


def write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and `files` (underscore for the dot) as JSON or text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    for name, content in files.items():
        path = folder / ".".join(name.rsplit("_", 1))
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder
