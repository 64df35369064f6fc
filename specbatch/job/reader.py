"""Input files as slices of columns, in bounded memory: only the columns asked for, a few thousand rows at a time.

Owns opening, unifying schemas over files and hive partitions. Knows nothing of prompts; JSON lines are in jsonl.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.errors import InputMissing, InputUnreadable, OutputMismatch, ResourceError, SchemaError, UsageError
from specbatch.job.inputs import FileState, InputSpec
from specbatch.job.jsonl import JsonlFile
from specbatch.job.shards import Shard

SLICE_ROWS = 8192
SLICE_BYTES = 8 * 2**20  # decoded size aimed at; a single row may be larger
_READ_BUFFER = 2**20  # a column chunk is streamed through this, not loaded whole
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive rows. `columns` has exactly the columns asked for, of the unified schema's types, `rows` long."""

    rows: int
    columns: dict[str, Any]  # pa.Array


class InputFile(Protocol):
    """What both kinds of file offer."""

    schema: Any  # pa.Schema of the file itself
    row_groups: list[int]  # rows of each

    def read(self, names: Sequence[str], first_group: int, num_groups: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows and columns of whole row groups, in order; columns the file does not have are left out."""
        ...


class ParquetFile:
    """One Parquet file. Raises InputUnreadable, InputMissing."""

    def __init__(self, spec: InputSpec) -> None:
        self.path = spec.path
        with _reading(spec):
            file = self._open()
            self.schema = file.schema_arrow
            self.row_groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
            file.close()

    def _open(self) -> Any:
        return pq.ParquetFile(
            str(self.path), buffer_size=_READ_BUFFER, pre_buffer=False, page_checksum_verification=True
        )

    def read(self, names: Sequence[str], first_group: int, num_groups: int) -> Iterator[tuple[int, dict[str, Any]]]:
        groups = list(range(first_group, first_group + num_groups))
        own = set(self.schema.names)
        present = [name for name in names if name in own]
        if not present:
            for group in groups:
                for start in range(0, self.row_groups[group], SLICE_ROWS):
                    yield min(SLICE_ROWS, self.row_groups[group] - start), {}
            return
        file = self._open()
        try:
            rows = _slice_rows(file.metadata, groups, set(present))
            for batch in file.iter_batches(rows, row_groups=groups, columns=present):
                yield batch.num_rows, {name: batch.column(batch.schema.get_field_index(name)) for name in present}
        finally:
            file.close()


def _slice_rows(metadata: Any, groups: Sequence[int], names: set[str]) -> int:
    """Rows a slice so that the columns of the widest row group decode to about SLICE_BYTES."""
    widest = 1.0
    for index in groups:
        group = metadata.row_group(index)
        chunks = (group.column(i) for i in range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in chunks if _belongs(c.path_in_schema, names))
        widest = max(widest, size / max(1, group.num_rows))
    return max(1, min(SLICE_ROWS, int(SLICE_BYTES / widest)))


def _belongs(path: str, names: set[str]) -> bool:
    return path in names or any(path[:i] in names for i, character in enumerate(path) if character == ".")


class _reading:
    """Turns what Arrow raises while it reads `spec` into InputMissing, InputUnreadable or ResourceError."""

    def __init__(self, spec: InputSpec) -> None:
        self.path = spec.path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MemoryError):
            raise ResourceError(f"not enough memory to read {self.path}: {error}") from error
        if isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and not self.path.exists()):
            raise InputMissing(f"{self.path} is gone") from error
        if isinstance(error, PermissionError):
            raise InputMissing(f"cannot read {self.path}: permission denied") from error
        if isinstance(error, _UNREADABLE):
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputUnreadable(f"cannot read {self.path}: {first_line}") from error


class InputSet:
    """All input files as one table: one schema, rows addressed by shard. Safe to read from several threads."""

    def __init__(self, specs: Sequence[InputSpec], states: Sequence[FileState]) -> None:
        """Opens every file once. Raises SchemaError, UsageError, InputUnreadable, InputMissing."""
        self.specs = list(specs)
        self.states = list(states)
        self.is_jsonl = specs[0].is_jsonl
        other = next((spec for spec in specs if spec.is_jsonl != self.is_jsonl), None)
        if other is not None:
            raise UsageError(
                f"{specs[0].path} and {other.path} are of two kinds", hint="run Parquet and JSON lines apart"
            )
        self.files: list[InputFile] = []
        for spec in specs:
            with _reading(spec):
                self.files.append(JsonlFile(spec.path) if self.is_jsonl else ParquetFile(spec))
        self._hive = _hive_fields(specs, self.files)
        self.schema = _unify(specs, self.files, self._hive)

    @property
    def row_groups(self) -> list[list[int]]:
        return [file.row_groups for file in self.files]

    @property
    def rows(self) -> list[int]:
        return [sum(groups) for groups in self.row_groups]

    def read(self, shard: Shard, names: Sequence[str]) -> Iterator[Slice]:
        """The shard's rows, `names` only. Raises InputUnreadable, InputMissing; OutputMismatch for a changed file."""
        spec, file = self.specs[shard.file], self.files[shard.file]
        left = shard.rows
        self._require_unchanged(shard.file)
        with _reading(spec):
            for rows, columns in file.read(names, shard.first_group, shard.num_groups):
                if left == 0:
                    break
                rows = min(rows, left)
                left -= rows
                if rows:
                    yield Slice(rows, {name: self._column(name, columns, rows, spec) for name in names})
        self._require_unchanged(shard.file)
        if left:
            raise InputUnreadable(f"cannot read {spec.path}: {left} rows fewer than its footer says")

    def _column(self, name: str, columns: dict[str, Any], rows: int, spec: InputSpec) -> Any:
        kind = self.schema.field(name).type
        if name in columns:
            column = columns[name].slice(0, rows)
            return column if column.type == kind else column.cast(kind)
        if name in self._hive:
            value = spec.hive.get(name)
            return pa.repeat(pa.scalar(int(value) if value and pa.types.is_integer(kind) else value, kind), rows)
        return pa.nulls(rows, kind)

    def _require_unchanged(self, index: int) -> None:
        path = self.specs[index].path
        if FileState.of(path) != self.states[index]:
            raise OutputMismatch(
                f"{path} was changed while the job was reading it", field="inputs", hint="run again with --restart"
            )


def _hive_fields(specs: Sequence[InputSpec], files: Sequence[InputFile]) -> dict[str, Any]:
    """Partition columns and their types: integers when every value is one as Python would print it, else strings."""
    fields: dict[str, Any] = {}
    for name in dict.fromkeys(name for spec in specs for name in spec.hive):
        if any(name in file.schema.names for file in files):
            continue  # the file's own column is what was written
        values = [value for spec in specs if (value := spec.hive.get(name)) is not None]
        integers = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", value) for value in values)
        fields[name] = pa.int64() if values and integers else pa.string()
    return fields


def _unify(specs: Sequence[InputSpec], files: Sequence[InputFile], hive: dict[str, Any]) -> Any:
    """One schema for all files: missing columns become null, numbers widen. Raises SchemaError naming the column."""
    for spec, file in zip(specs, files, strict=True):
        repeated, times = Counter(file.schema.names).most_common(1)[0] if file.schema.names else ("", 0)
        if times > 1:
            raise SchemaError(f"{spec.path} has two columns named {repeated!r}", hint="rename one of them")
    fields = {field.name: field for field in files[0].schema}
    for spec, file in zip(specs[1:], files[1:], strict=True):
        for field in file.schema:
            known = fields.setdefault(field.name, field)
            kind = _common_type(known.type, field.type)
            if kind is None:
                raise SchemaError(
                    f"column {field.name!r} is {field.type} in {spec.path} but {known.type} in {specs[0].path}"
                )
            fields[field.name] = known.with_type(kind)
    schema = pa.schema(fields.values())
    for name, kind in hive.items():
        schema = schema.append(pa.field(name, kind))
    return schema


def _common_type(one: Any, other: Any) -> Any:
    """A type that holds the values of both; None when there is none."""
    if one == other:
        return one
    for first, second in ((one, other), (_plain(one), _plain(other))):
        try:
            pair = [pa.schema([("x", kind)]) for kind in (first, second)]
            common = pa.unify_schemas(pair, promote_options="permissive").field(0).type
            if pa.types.is_decimal(common) and pa.types.is_integer(first if pa.types.is_decimal(second) else second):
                common = pa.decimal128(38, common.scale)  # Arrow's own choice has a digit too few for every integer
            for kind in (one, other):
                pa.array([], kind).cast(common)
            return common
        except (pa.ArrowException, ValueError, TypeError):
            continue
    return None


def _plain(kind: Any) -> Any:
    """Without dictionaries and views: one file may have them where another has not, with the same values."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind
