"""Checks a run over prompts.parquet: how many completions state every field exactly as expected.

    python examples/check_answers.py OUT_DIR [--min-exact SHARE]

OUT_DIR holds specbatch's part-*.parquet files: the input's columns, `expected` among them, and `completion`. Prints the
exact-match figure, the share of right values by field, and the first wrong rows. Exit status 1 below --min-exact.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def fields(text: str | None) -> dict[str, list[str]]:
    """Values by key, in order (items repeat)."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (text or "").strip().splitlines():
        key, _, value = line.partition(":")
        found[key.strip()].append(value.strip())
    return dict(found)


def read(folder: Path) -> pa.Table:
    parts = sorted(folder.glob("part-*.parquet"))
    if not parts:
        sys.exit(f"{folder}: no part-*.parquet here")
    return pa.concat_tables([pq.read_table(part, columns=["id", "prompt", "expected", "completion"]) for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--min-exact", type=float, default=0.0, help="fail below this share of exact rows")
    parser.add_argument("--show", type=int, default=3, help="wrong rows to print")
    args = parser.parse_args()

    rows = read(args.out_dir).to_pylist()
    stated, right, wrong = Counter[str](), Counter[str](), []
    for row in rows:
        expected, got = fields(row["expected"]), fields(row["completion"])
        for key in expected.keys() | got.keys():
            stated[key] += 1
            right[key] += expected.get(key) == got.get(key)
        if expected != got:
            wrong.append(row)
    exact = (len(rows) - len(wrong)) / max(1, len(rows))
    print(f"exact match of all fields: {len(rows) - len(wrong)} of {len(rows)} rows ({exact:.1%})")
    for key in sorted(stated, key=lambda key: -stated[key]):
        print(f"  {key:<9} {right[key] / stated[key]:7.2%} of {stated[key]}")
    for row in wrong[: args.show]:
        print(
            f"\n{row['id']}: {row['prompt']}\n  expected: {fields(row['expected'])}\n"
            f"  got:      {fields(row['completion'])}"
        )
    sys.exit(1 if exact < args.min_exact else 0)


if __name__ == "__main__":
    main()
