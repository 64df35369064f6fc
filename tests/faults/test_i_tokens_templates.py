"""FAULTS I: tokens and templates."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.models.loading import load_model
from specbatch.models.tokenizer import HFTokenizer
from tests.paged_rows import PagedRows, greedy
from tests.small_tokenizers import byte_level, sentencepiece_bpe, write
from tests.tiny import reference_greedy

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)


def ids_of(tokenizer: HFTokenizer, text: str, **options: Any) -> list[int]:
    values, offsets = tokenizer.encode([text], **options)
    assert [*pairwise(offsets.tolist())] == [(0, len(values))]
    return [int(v) for v in values]


def test_i27_one_bos_however_it_comes(tmp_path: Path) -> None:
    """The tokenizer adds BOS, the template writes it: one BOS either way, and none is invented."""
    tokenizer = HFTokenizer(write(tmp_path, sentencepiece_bpe(), TOKENS | {"chat_template": WITH_BOS}))
    rendered = tokenizer.render([{"role": "user", "content": "the"}])
    assert rendered == "<s>the"
    the = tokenizer._tokenizer.token_to_id("\u2581the")
    assert ids_of(tokenizer, rendered, add_special_tokens=False) == [1, the]
    assert ids_of(tokenizer, rendered, add_special_tokens=True) == [1, the]
    assert ids_of(tokenizer, "the") == [1, the]
    assert ids_of(tokenizer, "the", add_special_tokens=False) == [the]


def test_i27_a_config_that_asks_for_bos_is_heard(tmp_path: Path) -> None:
    asked = HFTokenizer(write(tmp_path / "a", byte_level(), TOKENS | {"add_bos_token": True}))
    silent = HFTokenizer(write(tmp_path / "b", byte_level(), TOKENS))
    assert ids_of(asked, "a") == [259, 97]
    assert ids_of(asked, "<s>a") == [259, 97]
    assert ids_of(silent, "a") == [97]


def test_i27_a_config_that_forbids_bos_is_heard(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, sentencepiece_bpe(), TOKENS | {"add_bos_token": False}))
    assert ids_of(tokenizer, "the") == ids_of(tokenizer, "the", add_special_tokens=False)


def test_i29_a_template_that_refuses_the_roles_gives_its_reason(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), TOKENS | {"chat_template": ALTERNATING}))
    message = {"role": "user", "content": "x"}
    assert tokenizer.render([message]) == "x"
    with pytest.raises(ValueError, match="roles must alternate user/assistant"):
        tokenizer.render([message, message])
    assert tokenizer.render([message]) == "x", "one bad row leaves the next alone"


def test_i29_a_model_without_template_names_the_option(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(write(tmp_path, byte_level(), TOKENS))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template: give one with --chat-template"):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_i31_lengths_3_30_300_alone_and_together(tiny_target: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (3, 30, 300)]
    expected = reference_greedy(tiny_target, prompts, 10)
    model = load_model(tiny_target)
    wanted = [len(out) for out in expected]
    together, _ = greedy(PagedRows(model, rows=3, max_len=320, block_size=16), prompts, 10, guesses=expected)
    assert [out[:n] for out, n in zip(together, wanted, strict=True)] == expected
    for prompt, out in zip(prompts, expected, strict=True):
        alone, _ = greedy(PagedRows(model, rows=1, max_len=320, block_size=16), [prompt], 10, guesses=[out])
        assert alone[0][: len(out)] == out
