"""Random Parquet files through a whole run: only documented exits, never anything else, rows in = rows out.

Types, nulls, nesting, encodings, row groups and garbage are drawn. The short form runs always, 2,000 files with
-m slow.
"""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from specbatch.errors import ExitCode, SpecbatchError
from specbatch.job.run import run_job
from tests.jobs import Factory, parts, run

SHORT_FILES, ALL_FILES, BATCH = 40, 2000, 250
TEXTS = [
    "",
    " ",
    "a",
    "prompt",
    "größe",
    "日本語 テキスト",
    "\x00",
    "x" * 3000,
    "line\nbreak",
    "{braces}",
    "\ufeff",
    "nan",
    "None",
]


def text(random_: random.Random) -> str | None:
    if random_.random() < 0.2:
        return None
    if random_.random() < 0.4:
        return random_.choice(TEXTS)
    return "".join(random_.choices(string.printable, k=random_.randrange(40)))


def string_like(random_: random.Random, rows: int) -> pa.Array:
    array = pa.array([text(random_) for _ in range(rows)], pa.string())
    kind = random_.choice([
        pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(), "garbage",
        "dictionary", "null",
    ])  # fmt: skip
    if kind == "dictionary":
        return array.dictionary_encode()
    if kind == "null":
        return pa.nulls(rows)
    if kind == "garbage":
        data = [random_.randbytes(random_.randrange(12)) if random_.random() < 0.7 else None for _ in range(rows)]
        raw = pa.array(data, pa.binary())
        return raw if random_.random() < 0.5 else pa.Array.from_buffers(pa.string(), rows, raw.buffers())
    return array.cast(kind)


def messages(random_: random.Random, rows: int) -> pa.Array:
    item = pa.struct([("role", pa.string()), ("content", pa.string()), ("extra", pa.list_(pa.int32()))])
    roles = ["user", "assistant", "system", "robot", None]

    def one() -> Any:
        if random_.random() < 0.2:
            return None
        return [
            None if random_.random() < 0.1 else {"role": random_.choice(roles), "content": text(random_), "extra": None}
            for _ in range(random_.randrange(4))
        ]

    values = [one() for _ in range(rows)]
    if random_.random() < 0.3:
        import json

        return pa.array([None if v is None else json.dumps(v) for v in values], pa.string())
    return pa.array(values, random_.choice([pa.list_(item), pa.large_list(item)]))


def parameters(random_: random.Random, rows: int) -> pa.Array:
    if random_.random() < 0.5:
        cells = [
            None, "", "{}", "[]", "null", "garbage", '{"max_tokens": 3}', '{"max_tokens": 0}', '{"max_tokens": 1e99}',
            '{"temperature": 0.5}', '{"seed": 1}', '{"stop": ["a", ""]}', '{"top_p": 2}', '{"logit_bias": {"5": 1}}',
        ]  # fmt: skip
        return pa.array([random_.choice(cells) for _ in range(rows)], pa.string())
    fields = [("max_tokens", pa.int32()), ("temperature", pa.float64()), ("stop", pa.list_(pa.string()))]
    values = [
        None if random_.random() < 0.2 else {
            "max_tokens": random_.choice([None, 0, 1, 9, -1, 100_000]),
            "temperature": random_.choice([None, 0.0, 1.0, -1.0, float("nan"), float("inf")]),
            "stop": random_.choice([None, [], ["x"], [None], [""]]),
        }
        for _ in range(rows)
    ]  # fmt: skip
    return pa.array(values, pa.struct(fields))


def other(random_: random.Random, rows: int) -> pa.Array:
    def some(make: Any) -> list[Any]:
        return [None if random_.random() < 0.3 else make() for _ in range(rows)]

    kinds = [
        lambda: pa.array(some(lambda: random_.randrange(-5, 5)), random_.choice([pa.int8(), pa.int64(), pa.float32()])),
        lambda: pa.array(
            some(lambda: random_.choice([1.5, float("nan"), -0.0])), random_.choice([pa.float64(), pa.float32()])
        ),
        lambda: pa.array(
            some(lambda: random_.randrange(10**9)), random_.choice([pa.timestamp("us"), pa.timestamp("ns", "UTC")])
        ),
        lambda: pa.array(some(lambda: random_.randrange(10**4)), pa.date32()),
        lambda: pa.array(some(lambda: [random_.randrange(3)] * random_.randrange(3)), pa.list_(pa.int16())),
        lambda: pa.array(some(lambda: [("k", random_.randrange(3))]), pa.map_(pa.string(), pa.int32())),
        lambda: pa.array(some(lambda: {"a": 1, "b": {"c": [text(random_)]}})),
        lambda: pa.array(some(lambda: random_.random() < 0.5), pa.bool_()),
        lambda: pa.array(some(lambda: random_.randbytes(4)), pa.binary(4)),
        lambda: pc.cast(pa.array(some(lambda: random_.randrange(100)), pa.int64()), pa.decimal128(30, 2)),
        lambda: string_like(random_, rows),
        lambda: pa.nulls(rows),
        lambda: pa.array(some(lambda: random_.randrange(3)), pa.int32()).dictionary_encode(),
    ]
    return random_.choice(kinds)()


def table(random_: random.Random) -> tuple[pa.Table, dict[str, Any]]:
    """A table and options that may fit it."""
    rows = random_.choice([0, 1, 2, 7, 40, 150])
    columns: dict[str, pa.Array] = {}
    options: dict[str, Any] = {}
    shape = random_.random()
    if shape < 0.6:
        columns["prompt"] = string_like(random_, rows)
    elif shape < 0.8:
        columns["messages"] = messages(random_, rows)
        if random_.random() < 0.5:
            options["messages_column"] = "messages"
    else:
        columns["title"] = other(random_, rows)
        columns["body"] = string_like(random_, rows)
        options["template"] = random_.choice(["{title}: {body}", "{body}", "{title}", "{{}}{body}"])
    if random_.random() < 0.3:
        columns["p"] = parameters(random_, rows)
        options["params_column"] = "p"
    for i in range(random_.randrange(4)):
        columns[random_.choice([f"c{i}", f"a.b{i}", "completion", f"ü {i}", ""])] = other(random_, rows)
    if random_.random() < 0.2:
        options["n"] = 3
    if random_.random() < 0.2:
        options["chat"] = random_.choice(["on", "off"])
    if random_.random() < 0.2:
        options["overlong"] = random_.choice(["truncate-left", "truncate-right", "skip"])
    if random_.random() < 0.2:
        options["limit"] = random_.randrange(1, 50)
    if random_.random() < 0.2:
        options["keep_columns"] = ()
    if random_.random() < 0.3:
        options["output_token_ids"] = options["logprobs"] = True
    if random_.random() < 0.2:
        options["format"] = "openai-batch"
    options["max_row_bytes"] = random_.choice([10, 1000, 1 << 24])
    options["shard_rows"] = random_.choice([1, 10, 1000])
    return pa.table(columns), options


def write_somehow(path: Path, content: pa.Table, random_: random.Random) -> None:
    options: dict[str, Any] = {
        "row_group_size": random_.choice([None, 1, 3, 50]) if content.num_rows else None,
        "compression": random_.choice(["zstd", "snappy", "none", "gzip"]),
        "use_dictionary": random_.random() < 0.5,
        "data_page_version": random_.choice(["1.0", "2.0"]),
        "version": random_.choice(["1.0", "2.4", "2.6"]),
        "write_page_checksum": random_.random() < 0.5,
        "store_schema": random_.random() < 0.7,
        "data_page_size": random_.choice([None, 64]),
    }
    try:
        pq.write_table(content, path, **options)
    except (pa.ArrowException, ValueError, OSError):  # old format versions cannot hold every type
        pq.write_table(content, path)


def damage(path: Path, random_: random.Random) -> None:
    data = bytearray(path.read_bytes())
    kind = random_.randrange(4)
    if kind == 0:
        data = data[: random_.randrange(len(data))]
    elif kind == 1:
        for _ in range(random_.randrange(1, 20)):
            data[random_.randrange(len(data))] = random_.randrange(256)
    elif kind == 2:
        data = bytearray(random_.randbytes(random_.randrange(200)))
    else:
        data += b"trailing"
    path.write_bytes(data)


def one_file(directory: Path, seed: int) -> str:
    """Returns how it ended, for the statistics."""
    random_ = random.Random(seed)
    directory.mkdir()
    path, out = directory / "in.parquet", directory / "out"
    content, options = table(random_)
    write_somehow(path, content, random_)
    damaged = random_.random() < 0.15
    if damaged:
        damage(path, random_)
    try:
        result = run(path, out, factory=Factory(), **options)
    except SpecbatchError as error:
        if error.exit_code not in (ExitCode.USAGE, ExitCode.INPUT_MISSING) or not error.message:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        return type(error).__name__
    if damaged and result.exit_code == ExitCode.USAGE:
        assert result.failed_shards
        return "unreadable shards"
    assert result.exit_code in (ExitCode.OK, ExitCode.ROW_ERRORS), f"seed {seed}: {result}"
    if not damaged:
        wanted = min(content.num_rows, options.get("limit", content.num_rows))
        assert result.rows == result.rows_done == wanted, f"seed {seed}"
        if options.get("format") == "openai-batch":
            assert sum(len(part.read_bytes().splitlines()) for part in parts(out)) == wanted
        else:
            check_rows(out, content, options, wanted, seed)
    return str(int(result.exit_code))


def check_rows(out: Path, content: pa.Table, options: dict[str, Any], wanted: int, seed: int) -> None:
    """The output has the input's rows in order, and every row says how it ended."""
    back = pa.concat_tables([pq.ParquetFile(part).read() for part in parts(out)])
    assert back.num_rows == wanted, f"seed {seed}"
    for name in content.column_names if "keep_columns" not in options else ():
        assert values(content[name].slice(0, wanted)) == values(back[name]), f"seed {seed}: column {name}"
    reasons = back["finish_reason"].combine_chunks()
    flat = reasons.flatten() if "n" in options else reasons
    assert flat.null_count == 0, f"seed {seed}"
    assert len(flat) == wanted * options.get("n", 1)
    assert set(flat.to_pylist()) <= {"stop", "length", "error", "skipped"}, f"seed {seed}"


def values(column: pa.ChunkedArray) -> list[str]:
    """Cells in a form in which NaN equals NaN and invalid UTF-8 can be compared."""
    try:
        return [repr(value) for value in column.to_pylist()]
    except ValueError:  # invalid UTF-8, or nanoseconds that Python has no type for
        kind = pa.int64() if pa.types.is_timestamp(column.type) else pa.binary()
        return [repr(value) for value in column.cast(kind).to_pylist()]


def test_some_files(tmp_path: Path) -> None:
    endings = [one_file(tmp_path / str(seed), seed) for seed in range(SHORT_FILES)]
    assert {"0", "3"} <= set(endings), "the drawn files must not all be refused"


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(ALL_FILES // BATCH))
def test_many_files(tmp_path: Path, batch: int) -> None:
    endings = [one_file(tmp_path / str(seed), 1000 + batch * BATCH + seed) for seed in range(BATCH)]
    assert sum(ending in ("0", "3") for ending in endings) > BATCH // 2, endings


def test_the_check_sees_a_lost_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a job that leaves a row out must fail."""
    real = run_job

    def losing(*arguments: Any, **keywords: Any) -> Any:
        result = real(*arguments, **keywords)
        for part in parts(arguments[0].output)[:1]:
            content = pq.ParquetFile(part).read()
            pq.write_table(content.slice(1), part)
        return result

    monkeypatch.setattr("tests.jobs.run_job", losing)
    with pytest.raises(AssertionError):
        [one_file(tmp_path / str(seed), seed) for seed in range(20)]
