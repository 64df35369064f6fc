"""Where the memory goes before a run starts: weights, activations, and how many rows the rest holds in each mode.

Owns the arithmetic of bytes. Knows nothing of devices or models beyond the numbers it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT_HEADROOM = 0.08  # share of the device left alone: fragmentation, the driver, other processes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A device's memory and what two models take of it. All in bytes, except tokens a page and the headroom share.

    Raises ValueError naming the number that cannot be.
    """

    device_bytes: int
    target_weights: int
    target_kv_per_token: int
    draft_weights: int = 0
    draft_kv_per_token: int = 0  # 0: the draft keeps no KV of its own
    activation_peak: int = 0
    block_size: int = 16  # target tokens a page
    headroom: float = DEFAULT_HEADROOM

    def __post_init__(self) -> None:
        for name in ("device_bytes", "target_weights", "target_kv_per_token", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("draft_weights", "draft_kv_per_token", "activation_peak"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0.0 <= self.headroom < 1.0:
            raise ValueError(f"headroom must be in [0, 1), got {self.headroom}")

    @property
    def page_bytes(self) -> int:
        """A page: block_size target tokens over all layers."""
        return self.block_size * self.target_kv_per_token

    @property
    def draft_block_size(self) -> int:
        """Draft tokens the bytes of one page hold; 0 without draft KV."""
        return self.page_bytes // self.draft_kv_per_token if self.draft_kv_per_token else 0

    @property
    def draft_kv_ratio(self) -> float:
        """Pages of draft KV for one page of target KV, same tokens."""
        return self.block_size / self.draft_block_size if self.draft_block_size else 0.0

    def kv_bytes(self, *, with_draft: bool) -> int:
        """What is left for KV, with or without the draft's weights on the device. Negative: they do not fit."""
        usable = int(self.device_bytes * (1.0 - self.headroom))
        return usable - self.target_weights - self.activation_peak - (self.draft_weights if with_draft else 0)

    def pages(self, *, with_draft: bool) -> int:
        return max(self.kv_bytes(with_draft=with_draft) // self.page_bytes, 0)

    def rows_without_draft(self, context: int) -> int:
        """AR rows of `context` tokens on a device that never saw the draft."""
        return self.pages(with_draft=False) // self._pages_of(context)

    def rows_ar(self, context: int) -> int:
        """AR rows while the draft's weights stay loaded: with one pool every other byte is the target's."""
        return self.pages(with_draft=True) // self._pages_of(context)

    def rows_speculative(self, context: int) -> int:
        """Rows that each keep target and draft KV: B x M_target / (M_target + M_draft)."""
        each = self._pages_of(context)
        if self.draft_block_size:
            each += -(-context // self.draft_block_size)
        return self.pages(with_draft=True) // each

    def rows_ar_static_split(self, context: int) -> int:
        """AR rows of an engine that sets the draft's share aside for good: no more than it could speculate with."""
        return self.rows_speculative(context)

    def _pages_of(self, context: int) -> int:
        if context < 1:
            raise ValueError(f"context must be at least 1 token, got {context}")
        return -(-context // self.block_size)

    def describe(self, context: int) -> dict[str, Any]:
        """The budget as JSON can hold it; rows are for `context` tokens each."""
        return {
            "device_bytes": self.device_bytes,
            "target_weights": self.target_weights,
            "draft_weights": self.draft_weights,
            "activation_peak": self.activation_peak,
            "kv_bytes": self.kv_bytes(with_draft=True),
            "kv_bytes_without_draft": self.kv_bytes(with_draft=False),
            "target_kv_per_token": self.target_kv_per_token,
            "draft_kv_per_token": self.draft_kv_per_token,
            "page_bytes": self.page_bytes,
            "draft_block_size": self.draft_block_size,
            "context": context,
            "rows_without_draft": self.rows_without_draft(context),
            "rows_ar": self.rows_ar(context),
            "rows_speculative": self.rows_speculative(context),
            "rows_ar_static_split": self.rows_ar_static_split(context),
        }


def speculative_rows(ar_rows: float, target_kv: float, draft_kv: float) -> float:
    """B_spec = B x M_target / (M_target + M_draft): rows left when each also keeps draft KV in the same bytes."""
    if target_kv <= 0 or draft_kv < 0:
        raise ValueError(f"KV bytes a token must be positive (draft: not negative), got {target_kv} and {draft_kv}")
    return ar_rows * target_kv / (target_kv + draft_kv)
