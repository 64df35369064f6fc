"""How bytes become pages: one page size for two tenants (target and draft), each with its own shape and dtype.

Pure arithmetic, no torch, so that a plan can be made before anything loads.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_ALIGNMENT = 256  # bytes; wide enough for any vector load or bulk copy

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token of one model keeps in the cache: keys and values of every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # "float32" | "float16" | "bfloat16"

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ValueError(
                f"a KV cache needs layers, kv_heads and head_dim of at least 1, got {self.layers}, {self.kv_heads}, "
                f"{self.head_dim}"
            )
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"KV dtype must be one of {', '.join(ITEMSIZE)}, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The one page size and what it holds for each tenant."""

    target: KVShape
    draft: KVShape | None
    block_size: int  # target tokens a page
    draft_block_size: int  # draft tokens the same bytes hold; 0: no draft
    page_bytes: int

    def pages_for(self, budget_bytes: int) -> int:
        """Pages that fit the budget, the null page included."""
        return max(budget_bytes, 0) // self.page_bytes

    def bytes_for(self, num_pages: int) -> int:
        return num_pages * self.page_bytes


def plan_pages(target: KVShape, draft: KVShape | None, block_size: int) -> PageLayout:
    """Lay out pages of `block_size` target tokens. Raises ValueError when not even one draft token fits into a page."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    page_bytes = -(-block_size * target.bytes_per_token // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
    draft_block_size = 0
    if draft is not None:
        draft_block_size = page_bytes // draft.bytes_per_token
        if draft_block_size < 1:
            needed = -(-draft.bytes_per_token // target.bytes_per_token)
            raise ValueError(
                f"one draft token takes {draft.bytes_per_token} bytes of KV, more than a whole page of {block_size} "
                f"target tokens ({page_bytes} bytes): use a block size of at least {needed}, or a smaller draft model"
            )
    return PageLayout(target, draft, block_size, draft_block_size, page_bytes)
