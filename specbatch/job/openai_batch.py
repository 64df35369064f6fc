"""Answers as lines of an OpenAI batch output file. Pure; knows nothing of files or shards.

Shape: https://platform.openai.com/docs/guides/batch. Failed rows are in place, with `response` null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from specbatch.job.answers import COUNTERS, ERROR, REASON_NAMES, SKIPPED, SOURCE_NAMES
from specbatch.job.reader import Slice


def response_lines(
    piece: Slice, answers: Any, *, n: int, prefix: str, first_row: int, model: str, created: int, chat: bool
) -> Iterator[bytes]:
    """One line a row of `piece`; `answers` has n a row. Rows without a custom_id get `prefix` and their number."""
    ids = piece.columns["custom_id"].to_pylist() if "custom_id" in piece.columns else [None] * piece.rows
    requests = piece.columns["request"].to_pylist() if "request" in piece.columns else None
    samples = answers.to_pylist()
    if len(samples) != piece.rows * n:
        raise AssertionError(f"{piece.rows} rows of the input have {len(samples)} answers")
    for i in range(piece.rows):
        name = f"{prefix}{first_row + i}"
        own = samples[i * n : (i + 1) * n]
        failed = next((item for item in own if item["reason"] in (ERROR, SKIPPED)), None)
        line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": ids[i] if ids[i] is not None else name}
        if failed is not None:
            skipped = failed["reason"] == SKIPPED
            code, message = ("skipped", "the row was skipped") if skipped else (failed["code"], failed["message"])
            line |= {"response": None, "error": {"code": code, "message": message}}
        else:
            as_chat = chat if requests is None else _is_chat(requests[i])
            body = _body(own, as_chat, f"{name}", model, created)
            line |= {"response": {"status_code": 200, "request_id": f"req_{name}", "body": body}, "error": None}
        yield (json.dumps(line, ensure_ascii=False) + "\n").encode()


def _body(samples: list[dict[str, Any]], chat: bool, name: str, model: str, created: int) -> dict[str, Any]:
    choices = []
    for index, sample in enumerate(samples):
        text: dict[str, Any] = {"message": {"role": "assistant", "content": sample["text"]}} if chat else {}
        if not chat:
            text = {"text": sample["text"]}
        choice = {"index": index, **text, "logprobs": None, "finish_reason": REASON_NAMES[sample["reason"]]}
        if sample.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": sample["logprobs"]}
        if sample.get("token_ids") is not None:
            choice["token_ids"] = sample["token_ids"]
        choices.append(choice)
    prompt, completion = samples[0]["prompt_tokens"], sum(sample["completion_tokens"] for sample in samples)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "decoding": {
            "source": SOURCE_NAMES[samples[0]["source"]],
            "mode": samples[0]["mode"],
            **{counter: sum(sample[counter] for sample in samples) for counter in COUNTERS},
        },
    }


def _is_chat(line: str) -> bool:
    try:
        return "messages" in json.loads(line)["body"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return True
