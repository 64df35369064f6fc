"""A program: run a small job and die at its N-th system call that changes a file, for every N; then start it again.

Each run is a fork of this process, which never runs a job itself. Prints one JSON object a death: scenario, N, what died
and what was wrong after the next start (null: nothing).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.job import loop, part_writer, spool
from specbatch.standin import StandInSettings
from tests.jobs import answers, parts, run, write

CALLS = ("replace", "fsync", "unlink", "mkdir", "ftruncate", "pwrite", "rmdir")
DIED = 77
TEXTS = [None, "", "poison", *(f"prompt {i}" for i in range(30)), "prompt 1", "poison too"]
SICK = StandInSettings(raise_on="poison")


def table(place: Path) -> Path:
    cells = ['{"temperature": 1}' if i % 3 else "bad" if i % 7 == 0 else None for i in range(len(TEXTS))]
    return write(place / "in.parquet", {"prompt": TEXTS, "p": cells}, row_group_size=6)


def fresh(place: Path, out: Path) -> None:
    run(place / "in.parquet", out, shard_rows=12)


def retry(place: Path, out: Path) -> None:
    """The parts are there, with errors that a second try mends."""
    run(place / "in.parquet", out, shard_rows=12, retry_failed=True)


def restart(place: Path, out: Path) -> None:
    """What is there was made with other settings."""
    run(place / "in.parquet", out, shard_rows=12, restart=True)


def sick(place: Path, out: Path) -> None:
    run(place / "in.parquet", out, shard_rows=12, settings=SICK)


def other(place: Path, out: Path) -> None:
    run(place / "in.parquet", out, shard_rows=6, seed=5)


def samples(place: Path, out: Path) -> None:
    """Several samples a row, greedy and sampled rows mixed; every step of the engine goes to the spool at once."""
    loop._FLUSH_SECONDS = spool.FLUSH_SECONDS = 0.0  # type: ignore[misc]
    slow = StandInSettings(capacity=4)
    run(place / "in.parquet", out, shard_rows=24, n=3, params_column="p", settings=slow)


def batch(place: Path, out: Path) -> None:
    """JSON lines, whose parts have no footer to check."""
    run(place / "in.parquet", out, shard_rows=12, format="openai-batch")


# What was there before, the start that dies, and the start after that.
SCENARIOS: dict[str, tuple[Callable[..., None] | None, Callable[..., None], Callable[..., None]]] = {
    "fresh": (None, fresh, fresh),
    "retry": (sick, retry, retry),
    "restart": (other, restart, restart),
    "samples": (None, samples, samples),
    "batch": (None, batch, batch),
}


def forked(work: Callable[..., None], place: Path, out: Path, die_at: int = 0) -> tuple[int, str]:
    """Run it in a child. Returns its exit code and the call it died in."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            if die_at:
                _plan_death(die_at, writer)
            work(place, out)
            code = 0
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def _plan_death(number: int, writer: int) -> None:
    """The `number`-th call does not happen (of a write, half of it does), and nothing after it."""
    count = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count < number:
                return real(*arguments, **keywords)
            if name == "pwrite":
                descriptor, data, offset = arguments
                real(descriptor, memoryview(data)[: len(memoryview(data)) // 2], offset)
            os.write(writer, f"{name} {arguments[0]}".encode())
            os._exit(DIED)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))


def table_of(out: Path) -> list[Any]:
    """Rows without the evidence of how and when they were made."""
    if parts(out)[0].suffix == ".parquet":
        return answers(out)
    rows = [json.loads(line) for part in parts(out) for line in part.read_text().splitlines()]
    for row in rows:
        if row["response"] is not None:
            del row["response"]["body"]["decoding"], row["response"]["body"]["created"]
    return rows


def is_whole(part: Path) -> bool:
    """Whatever has the name of a part can be read to its end."""
    if part.suffix == ".jsonl":
        lines = part.read_text().splitlines()
        return len(lines) in (12, len(TEXTS) % 12) and all(json.loads(line) for line in lines)
    try:
        return bool(pq.ParquetFile(part).read().num_rows == pq.ParquetFile(part).metadata.num_rows)
    except (pa.ArrowException, OSError):
        return False


def wrong(out: Path, expected: list[Any]) -> str | None:
    """What is not as it should be after the start that followed a death."""
    if table_of(out) != expected:
        return "other answers"
    if not (out / "_SUCCESS").exists():
        return "no _SUCCESS"
    left = [str(path.relative_to(out)) for path in out.rglob("*") if ".tmp-" in path.name or path.suffix == ".spool"]
    return f"left behind: {left}" if left else None


def main(place: Path, scenario: str, stride: int) -> None:
    before, dying, after = SCENARIOS[scenario]
    table(place)
    code, said = forked(after if before is None else fresh, place, place / f"{scenario}-clean")
    assert code == 0, said
    expected = table_of(place / f"{scenario}-clean")
    number = 1
    while True:
        out = place / f"{scenario}-{number}"
        if before is not None:
            assert forked(before, place, out)[0] == 0
        code, said = forked(dying, place, out, number)
        if code == 0:
            return
        assert code == DIED, said
        problem = next((f"{part.name} is not whole" for part in parts(out) if not is_whole(part)), None)
        again, error = forked(after, place, out)
        problem = problem or (error if again else wrong(out, expected))
        print(json.dumps({"scenario": scenario, "step": number, "in": said, "wrong": problem}), flush=True)
        number += stride


if __name__ == "__main__":
    if sys.argv[4:] == ["broken"]:  # parts are written under their own names
        part_writer.temporary = lambda path: path
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
