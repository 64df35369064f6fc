"""Random JSON lines in and around the OpenAI batch shape: every line is a row, and no line ends the job."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from specbatch.errors import ROW_ERROR_CODES, ExitCode, InputUnreadable
from tests.jobs import parts, run

SHORT_FILES, ALL_FILES = 25, 500
NAMES = [
    "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed", "n", "logit_bias",
    "logprobs", "tools", "response_format", "stream", "model", "frequency_penalty", "presence_penalty", "user", "nonsense",
]  # fmt: skip


def value(random_: random.Random, depth: int = 0) -> Any:
    """Any JSON value, and some that only Python's reader takes."""
    simple = [
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        2**64,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "text",
        "\ud800",
        "größe",
        "\x00",
    ]
    kind = random_.random()
    if depth > 2 or kind < 0.7:
        return random_.choice(simple)
    items = [value(random_, depth + 1) for _ in range(random_.randrange(4))]
    return items if kind < 0.85 else {random_.choice(["role", "content", "a", ""]): item for item in items}


def body(random_: random.Random) -> Any:
    if random_.random() < 0.1:
        return value(random_)
    content: dict[str, Any] = {}
    if random_.random() < 0.5:
        content["messages"] = [{"role": "user", "content": f"question {random_.randrange(50)}"}]
    elif random_.random() < 0.8:
        content["prompt"] = f"prompt {random_.randrange(50)}"
    for _ in range(random_.choice([0, 0, 1, 3])):
        content[random_.choice(NAMES)] = value(random_)
    return content


def line(random_: random.Random) -> bytes:
    """One line; some are damaged, none holds a line break of its own."""
    request: dict[str, Any] = {"custom_id": random_.choice([f"id-{random_.randrange(9)}", value(random_)])}
    if random_.random() < 0.95:
        request["body"] = body(random_)
    data = bytearray(json.dumps(request, ensure_ascii=random_.random() < 0.5).encode("utf-8", "surrogatepass"))
    kind = random_.random()
    if kind < 0.1:
        data = data[: random_.randrange(len(data))]
    elif kind < 0.25:
        for _ in range(random_.randrange(1, 5)):
            data[random_.randrange(len(data))] = random_.choice([0, 0x22, 0x5B, 0x7B, 0xFF, 0xC3, 0x20])
    return bytes(data).replace(b"\n", b" ")


def one_file(directory: Path, seed: int) -> None:
    random_ = random.Random(seed)
    directory.mkdir()
    lines = [line(random_) for _ in range(random_.randrange(40))]
    ending = random_.choice([b"\n", b"\r\n", b"\n\n"])
    path, out = directory / "in.jsonl", directory / "out"
    path.write_bytes(ending.join(lines))
    as_lines = random_.random() < 0.7
    options: dict[str, Any] = {"n": 2} if random_.random() < 0.2 else {}
    try:
        result = run(path, out, format="openai-batch" if as_lines else "parquet", **options)
    except InputUnreadable:
        assert lines[0].lstrip().startswith((b"[", b"\x1f", b"PAR1", b"PK")), f"seed {seed}"
        return
    wanted = sum(1 for text in lines if text.strip())
    assert result.exit_code in (ExitCode.OK, ExitCode.ROW_ERRORS), f"seed {seed}"
    assert result.rows == result.rows_done == wanted, f"seed {seed}"
    assert set(result.row_errors_by_code) <= set(ROW_ERROR_CODES), f"seed {seed}"
    if as_lines:
        rows = [json.loads(text) for part in parts(out) for text in part.read_bytes().splitlines()]
        assert len(rows) == wanted, f"seed {seed}"
        assert all((row["response"] is None) != (row["error"] is None) for row in rows), f"seed {seed}"
        assert all(isinstance(row["custom_id"], str) for row in rows), f"seed {seed}"


def test_some_files(tmp_path: Path) -> None:
    for seed in range(SHORT_FILES):
        one_file(tmp_path / str(seed), seed)


@pytest.mark.slow
def test_many_files(tmp_path: Path) -> None:
    for seed in range(ALL_FILES):
        one_file(tmp_path / str(seed), 1000 + seed)
