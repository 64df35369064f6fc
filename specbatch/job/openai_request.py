"""One line of an OpenAI batch file as a prompt and parameters. Pure; knows no columns and no sampling rules.

Shape: https://platform.openai.com/docs/guides/batch (chat completions and completions).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from specbatch.job.params import KEYS

_RENAMED: Final = {"max_completion_tokens": "max_tokens"}
_HARMLESS: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "n",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
    }
)
# Accepted with the value that asks for nothing, refused with any other.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Exactly one of messages and prompt is set. `params` holds only what the request gives."""

    messages: list[Any] | None
    prompt: str | None
    params: dict[str, Any]


class RequestProblem(ValueError):
    """`code` is a row error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_request(line: str, n: int, logprobs: bool) -> BatchRequest:
    """Raises RequestProblem. `n` and `logprobs` are the run's: a request may not ask for others."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestProblem("invalid_request", f"not JSON: {error}") from None
    body = request.get("body") if isinstance(request, dict) else None
    if not isinstance(body, dict):
        raise RequestProblem("invalid_request", "the line has no object named body")
    messages, prompt = body.get("messages"), body.get("prompt")
    if (messages is None) == (prompt is None):
        raise RequestProblem("invalid_request", "body must have either messages or prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise RequestProblem("invalid_request", "body.prompt must be one string")
    if messages is not None and not isinstance(messages, list):
        raise RequestProblem("invalid_messages", "body.messages must be a list")
    params = {}
    for name, value in body.items():
        if value is None or name in _HARMLESS or value in _NEUTRAL.get(name, ()):
            continue
        name = _RENAMED.get(name, name)
        if name == "logprobs":
            if value and not logprobs:
                raise RequestProblem("invalid_parameters", "logprobs needs a run with --logprobs")
        elif name in KEYS:
            params[name] = value
        else:
            raise RequestProblem("invalid_parameters", f"body.{name} is not supported")
    if body.get("n") not in (None, n):
        raise RequestProblem("invalid_parameters", f"n is {body['n']!r}, this run makes {n} (see -n)")
    return BatchRequest(messages, prompt, params)
