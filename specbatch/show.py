"""`--show N`: the first finished rows of an output, as plain text for a person.

Knows the output's columns; nothing of how they came about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbatch.job.options import JobOptions
from specbatch.streams import SafeStream, printable

WIDTH = 600  # characters of a cell that are shown


def show_rows(stream: SafeStream, options: JobOptions, count: int) -> None:
    """Print the first `count` rows: the input columns short, the completion in full up to WIDTH characters."""
    added = ("completion", "finish_reason", "error", "prompt_tokens", "completion_tokens", "decoding")
    for row in first_rows(options.output, count):
        stream.line("")
        for name, value in row.items():
            bare = name.removeprefix(options.output_prefix)
            if bare in added and bare != "completion" and not (bare == "error" and value is not None):
                continue
            lines = _shown(value).splitlines() or [""]
            stream.line(f"  {printable(name)}: {printable(lines[0])}")
            for line in lines[1:]:
                stream.line(f"      {printable(line)}")
    stream.line("")


def first_rows(output: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of the finished parts, in order. Fewer where fewer are done; [] for a folder without parts."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for part in sorted(Path(output).glob("part-*")):
        if part.suffix == ".parquet":
            for batch in pq.ParquetFile(part).iter_batches(batch_size=count - len(rows)):
                rows += batch.to_pylist()
                if len(rows) >= count:
                    return rows[:count]
        else:
            with part.open(encoding="utf-8") as file:
                for line in file:
                    rows.append(json.loads(line))
                    if len(rows) >= count:
                        return rows
    return rows


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
