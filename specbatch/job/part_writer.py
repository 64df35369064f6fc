"""Part files: Parquet, or JSON lines in the OpenAI batch shape. Temporary name, fsync, rename; never half a part.

Knows the output's columns; gets input slices and answers from its caller and checks that no row is missing.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.job.columns import OutputPlan
from specbatch.job.durable import promote, temporary, writing
from specbatch.job.openai_batch import response_lines
from specbatch.job.options import JobOptions
from specbatch.job.reader import Slice
from specbatch.job.table import added_columns

GROUP_ROWS: Final = 65_536
GROUP_BYTES: Final = 32 * 2**20
METADATA_KEY: Final = b"specbatch"


class PartWriter(Protocol):
    """Writes one part. `close` makes it durable under its name; `abandon` leaves nothing behind."""

    path: Path

    def write(self, piece: Slice, answers: Any, first_row: int) -> None:
        """Rows in order, with n answers a row."""
        ...

    def close(self, note: dict[str, Any]) -> int:
        """Finish; `note` goes into the footer where the format has one. Returns the size in bytes."""
        ...

    def abandon(self) -> None: ...


class ParquetPart:
    """Row groups of bounded size; every part has exactly the planned schema. Raises DiskFull."""

    def __init__(self, path: Path, plan: OutputPlan, options: JobOptions) -> None:
        self.path = path
        self._plan = plan
        self._n = options.n
        self._temporary = temporary(path)
        self._rows = 0
        self._pending: list[Any] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        with writing(path):
            self._sink = pa.OSFile(str(self._temporary), "wb")
            self._writer = pq.ParquetWriter(
                self._sink, plan.schema, compression=options.compression, version="2.6", write_page_checksum=True
            )

    def write(self, piece: Slice, answers: Any, first_row: int) -> None:
        if answers.num_rows != piece.rows * self._n:
            raise AssertionError(f"{piece.rows} rows of the input have {answers.num_rows} answers")
        columns = [*(piece.columns[name] for name in self._plan.kept), *added_columns(answers, self._n)]
        batch = pa.record_batch(columns, schema=self._plan.schema)
        self._pending.append(batch)
        self._pending_rows += piece.rows
        self._pending_bytes += batch.nbytes
        if self._pending_rows >= GROUP_ROWS or self._pending_bytes >= GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        if not self._pending:
            return
        table = pa.Table.from_batches(self._pending, self._plan.schema)
        with writing(self.path):
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._rows += table.num_rows
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0

    def close(self, note: dict[str, Any]) -> int:
        self._write_group()
        with writing(self.path):
            self._writer.add_key_value_metadata({METADATA_KEY: json.dumps(note).encode()})
            self._writer.close()
            self._sink.close()
            written = pq.read_metadata(str(self._temporary)).num_rows
            if written != self._rows:
                raise AssertionError(f"{self.path}: wrote {self._rows} rows, the file has {written}")
            size = self._temporary.stat().st_size
            promote(self._temporary, self.path)
        return size

    def abandon(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        with contextlib.suppress(OSError, pa.ArrowException):
            self._sink.close()
        self._temporary.unlink(missing_ok=True)


class BatchPart:
    """One JSON object a line, in the order of the input. Raises DiskFull."""

    def __init__(self, path: Path, options: JobOptions, *, model: str, created: int, chat: bool, file: int) -> None:
        self.path = path
        self._options = options
        self._model = model
        self._created = created
        self._chat = chat
        self._file_number = file
        self._temporary = temporary(path)
        with writing(path):
            self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed by close or abandon

    def write(self, piece: Slice, answers: Any, first_row: int) -> None:
        lines = response_lines(
            piece,
            answers,
            n=self._options.n,
            prefix=f"{self._file_number}-",
            first_row=first_row,
            model=self._model,
            created=self._created,
            chat=self._chat,
        )
        with writing(self.path):
            self._file.writelines(lines)

    def close(self, note: dict[str, Any]) -> int:
        with writing(self.path):
            self._file.close()
            size = self._temporary.stat().st_size
            promote(self._temporary, self.path)
        return size

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def read_note(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Rows and note of a Parquet part; None when it has no readable footer or no note of ours."""
    try:
        metadata = pq.read_metadata(str(path))
        note = json.loads((metadata.metadata or {})[METADATA_KEY])
    except (OSError, pa.ArrowException, KeyError, ValueError):
        return None
    return (metadata.num_rows, note) if isinstance(note, dict) else None
