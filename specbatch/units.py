"""Durations, sizes, rates and counts: how people write them, and how specbatch writes them back.

Knows nothing of options or of the terminal; every parser raises ValueError that says what would be accepted.
"""

from __future__ import annotations

import math
import re

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Seconds of "90", "90s", "10m", "1h30m", "2d" or "500ms"; a bare number is seconds."""
    compact = text.strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", compact):
        return float(compact)
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise ValueError("a duration such as 90s, 10m, 1h30m or 2d")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "512M", "10GB" or "1048576": B alone is decimal (10GB), all else binary (4GiB = 4G)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size such as 512MiB, 4GiB or 10GB")
    number, prefix, binary, byte = match.groups()
    base = 1000 if byte and not binary else 1024
    return int(float(number) * base ** _POWERS[prefix.upper()])


def parse_fraction(text: str) -> float:
    """A share between 0 and 1 of "5%" or "0.05"."""
    stripped = text.strip()
    try:
        value = float(stripped[:-1]) / 100 if stripped.endswith("%") else float(stripped)
    except ValueError:
        raise ValueError("a share such as 5% or 0.05") from None
    if not 0 <= value <= 1:
        raise ValueError("a share between 0 and 1, such as 5% or 0.05")
    return value


def format_duration(seconds: float | None) -> str:
    """0.4 -> "0.4 s", 75 -> "1m 15s", 3700 -> "1h 01m", 90000 -> "1d 01h"; unknown -> "?"."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def format_bytes(count: float) -> str:
    """Binary units, three digits: 1536 -> "1.5 KiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 99.95 else f"{value:.1f} {units[0]}"


def format_count(count: float) -> str:
    """1234567 -> "1,234,567"."""
    return f"{count:,.0f}"


def format_rate(per_second: float | None) -> str:
    """Tokens (or rows) a second: one digit after the point under ten, none above; unknown -> "-"."""
    if per_second is None or not math.isfinite(per_second):
        return "-"
    return f"{per_second:.1f}" if per_second < 9.95 else f"{per_second:,.0f}"


def format_percent(share: float | None) -> str:
    """0.734 -> "73 %", unknown -> "-"; never rounds a miss up to 100 % or a hit down to 0 %."""
    if share is None or not math.isfinite(share):
        return "-"
    if 0 < share < 0.005:
        return "<1 %"
    if 0.995 <= share < 1:
        return "99 %"
    return f"{share * 100:.0f} %"
