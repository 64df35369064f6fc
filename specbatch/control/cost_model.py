"""What a step costs: measured surfaces of step time, an affine stand-in, and the disk cache between runs.

Owns predictions in seconds. Knows nothing of models or devices: whoever can run a step hands in a callable that times
one. Corrections from what steps really take are in correction.py, the measuring itself in profiler.py.

The step time of a model is taken as a function of rows, tokens a row and KV tokens read. Context enters linearly
(attention reads every KV token once a row and step); rows and tokens a row enter as measured.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from specbatch.cache import write_whole

FORMAT = 2


class StepCost(Protocol):
    """Seconds of one forward pass. tokens: packed tokens of all rows; context: their KV tokens (sum of seq_lens)."""

    @property
    def source(self) -> str: ...

    def target(self, rows: float, tokens: float, context: float) -> float: ...

    def draft(self, rows: float, tokens: float, context: float) -> float:
        """One pass of the draft model; 0 where there is none."""
        ...

    def host(self, rows: float) -> float:
        """What a decode step takes beside its passes, where that is known apart."""
        ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Affine:
    """seconds = base + per_token * tokens + per_kv_token * context."""

    base: float
    per_token: float
    per_kv_token: float

    def __call__(self, rows: float, tokens: float, context: float) -> float:
        return self.base + self.per_token * tokens + self.per_kv_token * context


@dataclass(frozen=True, slots=True)
class AffineCost:
    """Step times by formula: for a simulated device, for planning, and for `--no-profile`."""

    target_model: Affine
    draft_model: Affine | None = None
    source: str = "affine"

    def target(self, rows: float, tokens: float, context: float) -> float:
        return self.target_model(rows, tokens, context)

    def draft(self, rows: float, tokens: float, context: float) -> float:
        return self.draft_model(rows, tokens, context) if self.draft_model is not None else 0.0

    def host(self, rows: float) -> float:
        return 0.0  # it is in the target's base

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "affine",
            "source": self.source,
            "target": asdict(self.target_model),
            "draft": asdict(self.draft_model) if self.draft_model is not None else None,
        }


def roofline(
    *,
    parameter_bytes: float,
    parameters: float,
    kv_bytes_per_token: float,
    bandwidth: float,
    flops: float,
    overhead: float = 0.0,
) -> Affine:
    """Affine step time from sizes: weights read once (bytes / bandwidth), 2 FLOP a parameter and token, KV read once.

    bandwidth in bytes a second, flops in FLOP a second, both as reached, not as printed; overhead in seconds a step.
    """
    return Affine(
        base=overhead + parameter_bytes / bandwidth,
        per_token=2.0 * parameters / flops,
        per_kv_token=kv_bytes_per_token / bandwidth,
    )


class Surface:
    """Step times of one model over rows x tokens a row at a base context, plus a slope in context; monotone in each.

    rows [R], tokens_per_row [Q] ascending; seconds [R][Q]; kv_slope [R] seconds a KV token at each number of rows.
    """

    def __init__(
        self,
        rows: Sequence[float],
        tokens_per_row: Sequence[float],
        seconds: Sequence[Sequence[float]],
        kv_slope: Sequence[float],
        base_context: float,
    ) -> None:
        if not rows or not tokens_per_row or len(seconds) != len(rows) or len(kv_slope) != len(rows):
            raise ValueError(f"a surface of {len(rows)} x {len(tokens_per_row)} got {len(seconds)} lines of seconds")
        if any(len(line) != len(tokens_per_row) for line in seconds):
            raise ValueError("every line of seconds needs one value a number of tokens a row")
        self.rows = [float(r) for r in rows]
        self.tokens_per_row = [float(q) for q in tokens_per_row]
        self.seconds = monotone(seconds)
        self.kv_slope = [max(float(s), 0.0) for s in kv_slope]
        self.base_context = float(base_context)

    def __call__(self, rows: float, tokens: float, context: float) -> float:
        if rows <= 0:
            return 0.0
        i, u = _place(self.rows, rows)
        j, w = _place(self.tokens_per_row, tokens / rows)
        low = _mix(self.seconds[i], j, w)
        base = low + u * (_mix(self.seconds[i + 1], j, w) - low) if u != 0.0 else low
        slope = self.kv_slope[i]
        if u != 0.0:
            slope += min(max(u, 0.0), 1.0) * (self.kv_slope[i + 1] - slope)
        return max(base + slope * (context - rows * self.base_context), 0.2 * base, 1e-9)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "tokens_per_row": self.tokens_per_row,
            "seconds": self.seconds,
            "kv_slope": self.kv_slope,
            "base_context": self.base_context,
        }


def _place(axis: list[float], value: float) -> tuple[int, float]:
    """Segment and fraction on it; fractions above 1 extrapolate beyond the last point, none goes below the first."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    i = min(bisect.bisect_right(axis, value) - 1, len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


def _mix(line: list[float], j: int, w: float) -> float:
    return line[j] + w * (line[j + 1] - line[j]) if w != 0.0 else line[j]


@dataclass(frozen=True, slots=True)
class GridCost:
    """Measured step times."""

    target_surface: Surface
    draft_surface: Surface | None = None
    source: str = "profile"
    host_seconds: tuple[
        tuple[float, float], ...
    ] = ()  # (rows, seconds beside the passes) at the fewest and the most rows known

    def target(self, rows: float, tokens: float, context: float) -> float:
        return self.target_surface(rows, tokens, context)

    def draft(self, rows: float, tokens: float, context: float) -> float:
        return self.draft_surface(rows, tokens, context) if self.draft_surface is not None else 0.0

    def host(self, rows: float) -> float:
        if not self.host_seconds:
            return 0.0
        (low, first), (high, last) = self.host_seconds[0], self.host_seconds[-1]
        share = min(max((rows - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        return first + share * (last - first)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "grid",
            "source": self.source,
            "target": self.target_surface.to_json(),
            "draft": self.draft_surface.to_json() if self.draft_surface is not None else None,
            "host": [list(point) for point in self.host_seconds],
        }


def cost_from_json(data: Mapping[str, Any]) -> AffineCost | GridCost:
    """The inverse of to_json. Raises ValueError for an unknown kind, KeyError or TypeError for missing parts."""
    draft = data["draft"]
    if data["kind"] == "affine":
        return AffineCost(Affine(**data["target"]), Affine(**draft) if draft is not None else None, data["source"])
    if data["kind"] == "grid":
        host = tuple((float(rows), float(seconds)) for rows, seconds in data.get("host", ()))
        return GridCost(
            Surface(**data["target"]), Surface(**draft) if draft is not None else None, data["source"], host
        )
    raise ValueError(f"unknown kind of cost model: {data['kind']!r}")


def isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators)."""
    blocks: list[list[float]] = []  # [mean, count]
    for value in values:
        blocks.append([float(value), 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            total = blocks[-1][1] + count
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / total, total]
    return [mean for mean, count in blocks for _ in range(int(count))]


def monotone(table: Sequence[Sequence[float]]) -> list[list[float]]:
    """`table` made non-decreasing along lines and columns: isotonic along each in turn until nothing moves."""
    lines = [[float(v) for v in line] for line in table]
    for _ in range(50):
        before = lines
        lines = [isotonic(line) for line in lines]
        lines = [list(line) for line in zip(*(isotonic(column) for column in zip(*lines, strict=True)), strict=True)]
        if lines == before:
            break
    for i, line in enumerate(lines):  # the limit is reached to rounding only: make it exact
        for j in range(len(line)):
            line[j] = max(line[j], line[j - 1] if j else line[j], lines[i - 1][j] if i else line[j])
    return lines


class CostCache:
    """Measured costs on disk, one JSON file a key. A file that cannot be read, or of another key, counts as absent."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, key: Mapping[str, str]) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self.folder / f"cost-{digest[:24]}.json"

    def load(self, key: Mapping[str, str]) -> AffineCost | GridCost | None:
        """The costs stored under exactly this key (device, model, dtype, versions ...), or None."""
        try:
            data = json.loads(self.path(key).read_text("utf-8"))
            if data["format"] != FORMAT or data["key"] != dict(key):
                return None
            return cost_from_json(data["cost"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, key: Mapping[str, str], cost: AffineCost | GridCost) -> Path:
        """Write whole or not at all. Raises OSError."""
        text = json.dumps({"format": FORMAT, "key": dict(key), "cost": cost.to_json()})
        write_whole(self.path(key), text.encode())
        return self.path(key)
