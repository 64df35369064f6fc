"""How inputs are cut into shards: ranges of whole row groups of one file. Pure arithmetic; reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FILE_BITS, ROW_BITS, SAMPLE_BITS = 16, 37, 10  # of a request id: 63 bits, so that it is never negative


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows [first_row, first_row + rows) of file number `file`, the first ones of `num_groups` whole row groups."""

    index: int
    file: int
    first_group: int
    num_groups: int
    first_row: int
    rows: int

    @property
    def first_key(self) -> int:
        """Row identity (file, row number) of the first row as one integer, in input order."""
        return self.file << ROW_BITS | self.first_row

    @property
    def part_stem(self) -> str:
        return f"part-{self.index:05d}"


def plan_shards(row_groups: Sequence[Sequence[int]], target_rows: int, limit: int | None = None) -> list[Shard]:
    """Cut files, given the rows of each row group of each file, into shards of up to `target_rows` rows.

    A row group is never cut except by `limit` (rows over all files). Inputs without any row make one empty shard,
    so that an output with a schema exists.
    """
    shards: list[Shard] = []
    left = limit if limit is not None else sum(map(sum, row_groups))
    for file, groups in enumerate(row_groups):
        first_group = first_row = rows = 0
        for group, group_rows in enumerate([*groups, None]):
            if group_rows is None or (rows and rows + group_rows > target_rows):
                rows = min(rows, left)
                if rows:
                    shards.append(Shard(len(shards), file, first_group, group - first_group, first_row, rows))
                    left -= rows
                first_row += rows
                first_group, rows = group, 0
            rows += group_rows or 0
    return shards or [Shard(0, 0, 0, 0, 0, 0)]
