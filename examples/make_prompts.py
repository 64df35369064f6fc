"""Makes prompts.parquet, the example input: rows the built-in model was not trained on, with the right answers.

    python examples/make_prompts.py [OUT] [--rows N] [--seed S]

Columns: id (string), prompt (the customer's message), expected (the answer: one `key: value` line a field).
The same arguments give the same file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "builtin"))

from messages import make_row  # noqa: E402

SEED = 7  # not the seed that training looks at its held-out rows with
ROW_GROUP = 500


def table(rows: int, seed: int) -> pa.Table:
    made = [make_row("held_out", seed, i) for i in range(rows)]
    return pa.table(
        {
            "id": pa.array([f"m{i:05d}" for i in range(rows)]),
            "prompt": pa.array([row.message for row in made]),
            "expected": pa.array([row.expected for row in made]),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=HERE / "prompts.parquet")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    pq.write_table(table(args.rows, args.seed), args.out, row_group_size=ROW_GROUP, compression="zstd")
    print(f"{args.out}: {args.rows} rows, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
