"""Pages and rows of the reference scheduler: reference counts, a prefix cache whose names are whole token lists, least
recently used first out. Slow and obvious; knows no queue and no policy."""

from __future__ import annotations

from dataclasses import dataclass, field


def pages_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size) if block_size else 0


@dataclass(eq=False)
class Page:
    owners: int = 0
    tokens: tuple[int, ...] = ()  # all tokens up to its end, when it is in the prefix cache


@dataclass(eq=False)
class Row:
    request_id: int
    shard: int
    tokens: list[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    may_draft: bool = True
    stop_tokens: tuple[int, ...] = ()
    num_prompt: int = 0
    prefilling: bool = False
    computed: int = 0
    published: int = 0
    pages: list[Page] = field(default_factory=list)
    draft_pages: int = 0
    draft_seen: int = 0
    resume_at: int = 0
    drops: int = 0
    seniority: int = 0
    ticket: tuple[int, int, int] = (0, 0, 0)  # window, group, arrival
    in_flight: int = 0
    finish: tuple[int, int] | None = None  # reason, error
    cached: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    wasted: int = 0
    preempted: int = 0

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def gap(self) -> int:
        return len(self.tokens) - self.draft_seen


class ReferencePool:
    """Pages of one device; rows take and give them."""

    def __init__(self, num_pages: int, block_size: int, prefix_cache: bool) -> None:
        self.num_pages, self.block_size, self.prefix_cache = num_pages, block_size, prefix_cache
        self.free = num_pages - 1
        self.named: dict[tuple[int, ...], Page] = {}
        self.idle: dict[Page, None] = {}  # cached pages nobody owns, least recently used first
        self.running: list[Row] = []

    @property
    def available(self) -> int:
        return self.free + len(self.idle)

    @property
    def target_pages(self) -> int:
        return len({page for row in self.running for page in row.pages})

    @property
    def draft_pages(self) -> int:
        return sum(row.draft_pages for row in self.running)

    def take_page(self) -> Page:
        if self.free:
            self.free -= 1
        else:
            page = next(iter(self.idle))
            del self.idle[page], self.named[page.tokens]
        return Page(owners=1)

    def give_page(self, page: Page) -> None:
        page.owners -= 1
        if page.owners == 0 and page.tokens:
            self.idle[page] = None
        elif page.owners == 0:
            self.free += 1

    def resize(self, row: Row, count: int) -> bool:
        if count - len(row.pages) > self.available:
            return False
        while len(row.pages) > count:
            self.give_page(row.pages.pop())
        while len(row.pages) < count:
            row.pages.append(self.take_page())
        return True

    def resize_draft(self, row: Row, count: int, spare: int = 0) -> bool:
        missing = count - row.draft_pages
        if missing > 0 and missing + spare > self.available:
            return False
        for _ in range(missing):
            self.take_page()
        self.free += max(-missing, 0)
        row.draft_pages = count
        return True

    def publish(self, row: Row) -> None:
        if not self.prefix_cache:
            return
        full = row.computed // self.block_size
        for i in range(row.published, full):
            name = tuple(row.tokens[: (i + 1) * self.block_size])
            if not row.pages[i].tokens and name not in self.named:
                row.pages[i].tokens = name
                self.named[name] = row.pages[i]
        row.published = max(row.published, full)

    def clear_prefix_cache(self) -> None:
        self.free += len(self.idle)
        for page in self.named.values():
            page.tokens = ()
        self.named.clear()
        self.idle.clear()
