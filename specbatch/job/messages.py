"""Conversations as the chat template wants them: lists of objects without null padding. Pure Python."""

from __future__ import annotations

import json
from typing import Any


def drop_nulls(value: Any) -> Any:
    """Leave out fields that are null, at every depth: Arrow gives every struct all fields of its type."""
    if isinstance(value, dict):
        return {name: drop_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """A cell (list of structs, or JSON text of one) as messages. Raises ValueError saying what is wrong and where."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"messages are not JSON: {error}") from None
    if not isinstance(value, list):
        raise ValueError(f"messages must be a list, got {type(value).__name__}")
    messages = drop_nulls(value)
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} of {len(messages)} has no role")
    return messages  # type: ignore[no-any-return]


def with_system(messages: list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """Messages with the run's system prompt first, unless they bring their own."""
    if system_prompt is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def text_size(value: Any) -> int:
    """Characters of all strings inside: what a conversation weighs."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(text_size(item) for item in value.values())
    if isinstance(value, list):
        return sum(text_size(item) for item in value)
    return 0
