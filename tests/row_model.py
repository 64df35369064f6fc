"""Rows and a stand-in for a language model: the next token is a function of the tokens before it, so one wrong token
changes everything after it, and `Model.complete` says what a row must answer, one token at a time."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from specbatch import _core


@dataclass(frozen=True)
class Request:
    request_id: int
    prompt: tuple[int, ...]
    max_tokens: int = 16
    shard: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    may_draft: bool = True
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Model:
    vocabulary: int = 5
    draft_skill: int = 60  # per cent of drafts that are right
    memory: int | None = None  # tokens that matter to the next one; None: all. Few make text that repeats itself

    def next(self, tokens: tuple[int, ...]) -> int:
        seen = tokens[-self.memory :] if self.memory else tokens
        return zlib.crc32(repr(seen).encode()) % self.vocabulary

    def draft(self, tokens: tuple[int, ...]) -> int:
        right = self.next(tokens)
        skilled = zlib.crc32(repr(("draft", tokens)).encode()) % 100 < self.draft_skill
        return right if skilled else (right + 1) % self.vocabulary

    def bytes_of(self, token: int) -> bytes:
        return [b"a", b"b", b"ab", b"", b"ca"][token % 5]

    def complete(self, request: Request, eos: tuple[int, ...], max_model_len: int) -> tuple[list[int], bytes, int]:
        """Tokens, text and finish reason of the row alone."""
        tokens: list[int] = []
        text = b""
        while True:
            token = self.next(request.prompt + tuple(tokens))
            tokens.append(token)
            before, text = len(text), text + self.bytes_of(token)
            if len(tokens) >= request.min_tokens:
                if (token in eos and not request.ignore_eos) or token in request.stop_tokens:
                    return tokens, text[:before], _core.FINISH_STOP
                found = [
                    at
                    for stop in request.stop_strings
                    for at in range(len(text))
                    if text.startswith(stop, at) and at + len(stop) > before
                ]
                if found:
                    return tokens, text[: min(found)], _core.FINISH_STOP
            if len(tokens) == request.max_tokens or len(request.prompt) + len(tokens) == max_model_len:
                return tokens, text, _core.FINISH_LENGTH
