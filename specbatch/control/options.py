"""What a controller may choose from, and the sizes it needs. Knows nothing of how it chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specbatch.control.choice import Limits
from specbatch.control.records import METHOD_DRAFT, METHOD_EXTERNAL, METHOD_NGRAM


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """What a controller may choose from, and the sizes it needs. Raises ValueError naming the option."""

    methods: tuple[int, ...]  # METHOD_* besides AR that the engine can run
    max_num_seqs: int
    ks: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    allow_ar: bool = True
    draft_kv_ratio: float = 0.0  # pages of draft KV a page of target KV; 0: the draft keeps none of its own
    block_size: int = 16
    can_probe_draft: bool = True  # the engine answers Decision.probe_draft_rows
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        known = (METHOD_NGRAM, METHOD_DRAFT, METHOD_EXTERNAL)
        if any(m not in known for m in self.methods):
            raise ValueError(f"methods must be among {known}, got {self.methods}")
        if not self.ks or min(self.ks) < 1 or list(self.ks) != sorted(set(self.ks)):
            raise ValueError(f"ks must be ascending and at least 1, got {self.ks}")
        if not self.allow_ar and not self.methods:
            raise ValueError("without AR at least one method is needed")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.draft_kv_ratio < 0:
            raise ValueError(f"draft_kv_ratio must not be negative, got {self.draft_kv_ratio}")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "methods": list(self.methods), "ks": list(self.ks)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ControllerOptions:
        values = dict(data)
        values.update(methods=tuple(data["methods"]), ks=tuple(data["ks"]), limits=Limits(**data["limits"]))
        return cls(**values)
