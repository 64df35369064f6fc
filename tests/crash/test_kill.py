"""kill -9 at random moments, start again until done: the table is the one that an uninterrupted run makes.

Jobs are short and small, so that a kill falls into every phase: hashing, spooling, writing a part, renaming, saving the
manifest. The short form runs always; `-m slow` runs 200 kills.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specbatch.errors import ExitCode
from tests.jobs import answers, finish, parts, run, start, write

ROWS = 400
SHORT_KILLS, ALL_KILLS = 4, 200


def make_table(path: Path, random_: random.Random) -> Path:
    texts: list[str | None] = [f"prompt {i} " + "x" * random_.randrange(200) for i in range(ROWS)]
    for i in random_.sample(range(ROWS), 40):
        texts[i] = random_.choice(["", None, texts[0]])
    return write(path, {"id": list(range(ROWS)), "prompt": texts}, row_group_size=random_.choice([30, 57, 400]))


def arguments(table: Path, out: Path, options: list[str]) -> list[Any]:
    return [table, "-o", out, "--progress", "none", *options]


VARIANTS: list[list[str]] = [
    ["--shard-rows", "60"],
    ["--shard-rows", "400", "--temperature", "1", "--seed", "3"],
    ["--shard-rows", "30", "-n", "3", "--temperature", "0.7"],
    ["--shard-rows", "57", "--output-token-ids"],
]


def kill_until(directory: Path, seed: int, kills: int) -> None:
    random_ = random.Random(seed)
    done = variant = 0
    while done < kills:
        directory.joinpath(str(variant)).mkdir(parents=True)
        place = directory / str(variant)
        table = make_table(place / "in.parquet", random_)
        options = VARIANTS[(seed + variant) % len(VARIANTS)]
        code, _, err = finish(start(*arguments(table, place / "clean", options)))
        assert code == ExitCode.ROW_ERRORS, err
        expected = answers(place / "clean")
        out = place / "out"
        left = min(kills - done, 12)
        while True:
            slow = random_.choice(["capacity=40,delay=0.02", "capacity=7,delay=0.005", "delay=0.01"])
            process = start(*arguments(table, out, options), standin=slow if left else "")
            if left == 0:
                code, _, err = finish(process)
                assert code == ExitCode.ROW_ERRORS, err
                break
            moment = time.monotonic() + random_.uniform(0.0, 1.0)
            if random_.random() < 0.8:  # most kills once the job is really at work
                while process.poll() is None and not (out / "_specbatch" / "manifest.json").exists():
                    time.sleep(0.002)
                moment = time.monotonic() + random_.uniform(0.0, 0.7)
            while process.poll() is None and time.monotonic() < moment:
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            code, _, err = finish(process)
            assert code in (-signal.SIGKILL, ExitCode.ROW_ERRORS), err
            done += code == -signal.SIGKILL
            left -= 1
            for part in parts(out):  # whatever has the name of a part is a whole part
                assert pq.ParquetFile(part).read().num_rows == pq.ParquetFile(part).metadata.num_rows
        assert answers(out) == expected
        assert (out / "_SUCCESS").exists()
        assert not list(out.glob(".*.tmp-*"))
        assert not list(out.glob("_specbatch/spool/*"))
        variant += 1


def test_a_few_kills(tmp_path: Path) -> None:
    kill_until(tmp_path, seed=1, kills=SHORT_KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_kills(tmp_path: Path, seed: int) -> None:
    kill_until(tmp_path, seed=seed + 10, kills=ALL_KILLS // 4)


def test_the_comparison_sees_a_lost_row(tmp_path: Path) -> None:
    """Negative control: a part with two rows exchanged is not what an uninterrupted run makes."""
    table = make_table(tmp_path / "in.parquet", random.Random(0))
    assert run(table, tmp_path / "out", shard_rows=60).exit_code == ExitCode.ROW_ERRORS
    expected = answers(tmp_path / "out")
    path = parts(tmp_path / "out")[0]
    broken = pq.ParquetFile(path).read()
    order = [1, 0, *range(2, broken.num_rows)]
    pq.write_table(broken.take(order), path)
    assert answers(tmp_path / "out") != expected
