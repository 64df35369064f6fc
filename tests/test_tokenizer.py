"""Tokenizers of a folder: ids, bytes, templates and the comparison of two."""

from __future__ import annotations

import json
import random
import threading
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.models.chat_template import ChatTemplate
from specbatch.models.token_bytes import TokenBytes, find_mismatch
from specbatch.models.tokenizer import HFTokenizer
from specbatch.models.tokenizer_compare import compare
from tests.small_tokenizers import KINDS, TEXT, byte_level, sentencepiece_bpe, write

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def rows(encoded: tuple[Any, Any]) -> list[list[int]]:
    values, offsets = encoded
    assert values.dtype == np.int32
    assert offsets.dtype == np.int64
    return [values[a:b].tolist() for a, b in pairwise(offsets.tolist())]


# ---- ids


def test_golden_ids(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), TOKENS))
    assert rows(tokenizer.encode(["the the</s>", "", "té<tool>"])) == [[257, 258, 260], [], [116, 0xC3, 0xA9, 261]]
    assert rows(tokenizer.encode([])) == []
    assert tokenizer.vocab_size == 262
    assert tokenizer.vocabulary[258] == "Ġthe"


def test_long_texts_are_not_truncated_by_what_the_file_says(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    tokenizer = HFTokenizer(write(tmp_path, inner, TOKENS))
    assert rows(tokenizer.encode(["abcdefgh", "a"])) == [[97, 98, 99, 100, 101, 102, 103, 104], [97]]


def test_the_interpreter_is_released_while_encoding(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), TOKENS))
    texts = [TEXT * 20] * 400
    done = threading.Event()
    thread = threading.Thread(target=lambda: (tokenizer.encode(texts), done.set()))
    turns = 0
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 5


# ---- bytes


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_equal_decode(kind: str, tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, KINDS[kind](), {}))
    table = tokenizer.byte_table
    expected = {"byte_level": "byte-level", "sentencepiece_bpe": "metaspace", "unigram": "metaspace"}
    assert table.method == expected.get(kind, "decode")
    assert table.mismatch is None
    text = TEXT if kind != "word_piece" else "the quick fox dogs end"
    ids = rows(tokenizer.encode([text], add_special_tokens=False))[0]
    joined = table.join(ids).decode()
    assert joined.strip() == tokenizer.decode(ids).strip()
    if kind in ("byte_level", "sentencepiece_bpe"):
        assert joined.strip() == text
    special = next(iter(tokenizer.special_ids))
    assert table[special] == b""


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_bytes_of_any_text_join_to_it(text: str) -> None:
    tokenizer = _byte_level_tokenizer()
    ids = rows(tokenizer.encode([text], add_special_tokens=False))[0]
    if not any(i in tokenizer.special_ids for i in ids):
        assert tokenizer.byte_table.join(ids) == text.encode()


_cached: list[HFTokenizer] = []


def _byte_level_tokenizer() -> HFTokenizer:
    if not _cached:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            _cached.append(HFTokenizer(write(Path(folder), byte_level(), TOKENS)))
    return _cached[0]


def test_byte_tokens_are_bytes_and_lookalikes_are_text(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, sentencepiece_bpe(), TOKENS))
    table = tokenizer.byte_table
    byte = {i: t for i, t in tokenizer.vocabulary.items() if t.startswith("<0x")}
    assert sorted(table[i] for i in byte) == [bytes([b]) for b in range(256)]
    emoji = rows(tokenizer.encode(["🙂"], add_special_tokens=False))[0]
    assert table.join(emoji).decode().strip() == "🙂"
    assert len(emoji) == 5, "a space and four bytes"


def test_the_self_check_catches_a_wrong_table(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), TOKENS))
    table = tokenizer.byte_table
    broken = table.values.copy()
    broken[table.offsets[ord("q")]] = ord("Q")
    wrong = TokenBytes(broken, table.offsets, table.method, None)
    assert find_mismatch(table, tokenizer._tokenizer, set(tokenizer.special_ids), byte_tokens=False) is None
    message = find_mismatch(wrong, tokenizer._tokenizer, set(tokenizer.special_ids), byte_tokens=False)
    assert message is not None
    assert "quick" in message or "Q" in message


def test_padded_vocabulary_has_empty_entries(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), TOKENS))
    values, offsets = tokenizer.token_bytes(300)
    assert len(offsets) == 301
    assert offsets[-1] == offsets[262] == len(values)
    assert values.dtype == np.uint8
    assert offsets.dtype == np.int64
    assert len(tokenizer.token_bytes(10)[1]) == 263, "never fewer than the tokenizer uses"


# ---- what ends a completion


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {260}),
        ({"generation_config_json": {"eos_token_id": [257, 258]}, "config_json": {"eos_token_id": 3}}, {257, 258, 260}),
        ({"generation_config_json": {}, "config_json": {"eos_token_id": 3}}, {3, 260}),
        ({"config_json": {"text_config": {"eos_token_id": 4}}}, {4, 260}),
    ],
)
def test_eos_ids(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), TOKENS, **files))
    assert set(tokenizer.eos_token_ids) == expected


def test_absurd_lengths_are_no_lengths(tmp_path: Path) -> None:
    for value, expected in ((10**30, None), (512, 512), (None, None), (1e30, None)):
        folder = write(tmp_path / str(value), byte_level(), {"model_max_length": value})
        assert HFTokenizer(folder).model_max_length == expected


# ---- messages to text

USER = {"role": "user", "content": "Hi <b> & 'you'\n"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes?"}, USER],
    [USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"é": 1, "b": [True]}}]}],
    [{"role": "user", "content": [{"type": "text", "text": "part"}]}],
]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | string }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "blocks": "{{ bos_token }}\n    {% for m in messages %}\n  {% if m.content is defined %}\n[{{ m.role }}] "
    "{{ m.content }}\n  {% endif %}\n    {%- endfor %}\n{{ eos_token }}{{ missing }}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}",
    "loop": "{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}{% if m.role == 'system' %}"
    "{% continue %}{% endif %}{{ loop.index }}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}<{{ m.role }}>{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | string "
    "| length %}{% endfor %}{{ ns.n }}{{ dict(a=1)['a'] }}{{ range(3) | list }}",
    "date": "{{ strftime_now('%Y') | length }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    inner = byte_level()
    config = TOKENS | {"chat_template": TEMPLATES[name]}
    ours = HFTokenizer(write(tmp_path, inner, config))
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATES[name], **TOKENS)
    for conversation in CONVERSATIONS:
        expected = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert ours.render(conversation) == expected


def test_null_fields_are_left_out_at_every_depth(tmp_path: Path) -> None:
    """A column of structs pads every message with the fields of all others."""
    padded = {"role": "user", "content": "x", "tool_calls": None, "extra": [{"a": None, "b": 1}]}
    template = "{{ messages | tojson }}"
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), {"chat_template": template}))
    assert json.loads(tokenizer.render([padded])) == [{"role": "user", "content": "x", "extra": [{"b": 1}]}]


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_offered_under_the_names_templates_use(field: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}", {})
    assert template.render([USER, {"role": "assistant", "content": "ok", field: "hmm"}]) == "|;hmm|hmm;"


def test_a_fixed_date(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), {"chat_template": "{{ strftime_now('%d %b %Y') }}"})
    assert HFTokenizer(folder, now=datetime(2024, 2, 29)).render([USER]) == "29 Feb 2024"


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ({"chat_template": "one"}, None, "one"),
        ({"chat_template": NAMED}, None, "D"),
        ({"chat_template": {"default": "D", "rag": "R"}}, None, "D"),
        ({"chat_template": [{"name": "only", "template": "O"}]}, None, "O"),
        ({"chat_template": "config"}, "file", "file"),
        ({}, "file", "file"),
    ],
)
def test_where_templates_are_found(tmp_path: Path, config: Any, file: str | None, expected: str) -> None:
    folder = write(tmp_path, byte_level(), config, **({"chat_template_jinja": file} if file else {}))
    assert HFTokenizer(folder).render([USER]) == expected
    assert HFTokenizer(folder, chat_template="given").render([USER]) == "given"


def test_no_default_among_several_templates_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), {"chat_template": {"rag": "R", "tool_use": "T"}})
    with pytest.raises(ValueError, match="none called default: rag, tool_use"):
        HFTokenizer(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[9].content.x }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages"),
        ("{% set _ = messages.append(1) %}", "refused the messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_templates_that_fail_raise_value_errors(template: str, message: str) -> None:
    with pytest.raises(ValueError, match="the chat template") as error:
        ChatTemplate(template, {}).render([USER])
    assert message in str(error.value)


def test_a_template_that_does_not_parse_and_messages_that_are_none() -> None:
    with pytest.raises(ValueError, match="does not parse"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(ValueError, match="conversation is empty"):
        ChatTemplate("x", {}).render([])
    with pytest.raises(ValueError, match="message 0 is not an object with fields but str"):
        ChatTemplate("x", {}).render(["hello"])  # type: ignore[list-item]


# ---- folders


def test_folders_without_a_tokenizer_are_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json and no other vocabulary file"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"only tokenizer\.model, and converting it failed.*save_pretrained"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be loaded"):
        HFTokenizer(tmp_path)


# ---- comparison


def test_padded_and_extended_vocabularies_are_compatible(tmp_path: Path) -> None:
    target = HFTokenizer(write(tmp_path / "a", byte_level(), TOKENS))
    longer = HFTokenizer(write(tmp_path / "b", byte_level(), TOKENS, config_json={"vocab_size": 9999}))
    extended = byte_level()
    extended.add_special_tokens(["<|new|>"])
    more = HFTokenizer(write(tmp_path / "c", extended, TOKENS))
    assert compare(target, longer, 9999).compatible
    verdict = compare(target, more)
    assert verdict.compatible
    assert (verdict.shared, verdict.target_only, verdict.draft_only) == (262, 0, 1)
    reverse = compare(more, target, draft_vocab_size=262)
    assert not reverse.compatible
    assert reverse.first_difference == 262
    assert "no embedding" in reverse.reason
    assert compare(more, target, draft_vocab_size=320).compatible


def test_same_size_other_mapping_is_refused_naming_the_first_difference(tmp_path: Path) -> None:
    target = HFTokenizer(write(tmp_path / "a", byte_level(), TOKENS))
    shuffled = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    vocab = shuffled["model"]["vocab"]
    names = {i: t for t, i in vocab.items()}
    vocab[names[70]], vocab[names[200]] = 200, 70
    other = write(tmp_path / "b", byte_level(), TOKENS)
    (other / "tokenizer.json").write_text(json.dumps(shuffled))
    verdict = compare(target, HFTokenizer(other))
    assert not verdict.compatible
    assert verdict.first_difference == 70
    assert "id 70 is 'F' to the target" in verdict.reason


def test_another_special_token_of_the_same_id_is_refused(tmp_path: Path) -> None:
    a = HFTokenizer(write(tmp_path / "a", byte_level(("<|x|>",)), TOKENS))
    b = HFTokenizer(write(tmp_path / "b", byte_level(("<|y|>",)), TOKENS))
    assert compare(a, a).compatible
    assert compare(a, b).first_difference == 261


def test_names_that_differ_may_mean_the_same_bytes(tmp_path: Path) -> None:
    """A byte-level and a metaspace tokenizer of the same ids: compared by bytes, not by how they are written."""
    from tokenizers import Tokenizer, decoders, models

    letters = {c: i for i, c in enumerate("abcdefgh")}
    first = Tokenizer(models.BPE(vocab=letters | {"Ġ": 8}, merges=[]))
    first.decoder = decoders.ByteLevel()
    second = Tokenizer(models.BPE(vocab=letters | {"\u2581": 8}, merges=[]))
    second.decoder = decoders.Metaspace(replacement="\u2581")
    verdict = compare(HFTokenizer(write(tmp_path / "a", first)), HFTokenizer(write(tmp_path / "b", second)))
    assert verdict.compatible, verdict.reason


def test_random_byte_sequences_decode_as_joined_bytes(tmp_path: Path) -> None:
    """Tokens that split characters: replacement characters stand where the tokenizer puts them."""
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), TOKENS))
    rng = random.Random(3)
    for _ in range(200):
        ids = rng.choices(range(259), k=6)
        assert tokenizer.byte_table.join(ids).decode("utf-8", "replace") == tokenizer.decode(ids)
