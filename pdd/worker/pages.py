"""The page pool: which pages are free, cached or pinned, and by whom. Owns the ledger ``free + cached + pinned = total``.

A page has one of three owners at any time: nobody (free), the prefix cache alone (cached), or one or more requests (pinned; the cache may
know it too). A page that the cache does not know has exactly one holder: the request that writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PageCounts:
    """``cached``: held by the prefix cache alone. ``pinned``: reachable by a request or a transfer."""

    total: int
    free: int
    cached: int
    pinned: int


class OutOfPagesError(Exception):
    """Fewer free pages than asked for. The caller may evict from the prefix cache and try again."""


class LedgerError(RuntimeError):
    """The books do not balance. The message says which pages and how."""


class PagePool:
    """Pages ``0 .. num_pages - 1``. Every call is made by the step thread."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: given {num_pages}, at least 1")
        self._total = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders: dict[int, set[str]] = {}
        self._cached: set[int] = set()
        self._num_idle = 0  # cached and without a holder
        self._on_idle: Callable[[int], None] = _ignore

    def on_idle(self, callback: Callable[[int], None]) -> None:
        """``callback(page)`` is called when the last holder of a cached page lets go."""
        self._on_idle = callback

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages held by the cache alone."""
        return self._num_idle

    def is_cached(self, page: int) -> bool:
        """Whether the cache knows ``page``, so that nobody may write it."""
        return page in self._cached

    def counts(self) -> PageCounts:
        return PageCounts(self._total, len(self._free), self._num_idle, len(self._holders))

    def is_idle(self, page: int) -> bool:
        """Whether the cache alone holds ``page``."""
        return page in self._cached and page not in self._holders

    def allocate(self, num_pages: int, holder: str) -> list[int]:
        """Free pages, now pinned by ``holder``. Raises OutOfPagesError and takes none when there are too few."""
        if num_pages > len(self._free):
            raise OutOfPagesError(f"{num_pages} pages asked for, {len(self._free)} free of {self._total}")
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._holders[page] = {holder}
        return pages

    def pin(self, pages: Iterable[int], holder: str) -> None:
        """Share cached pages with ``holder``."""
        for page in pages:
            if page not in self._cached:
                raise LedgerError(f"pin by {holder!r}: page {page} is not in the cache")
            holders = self._holders.setdefault(page, set())
            if holder in holders:
                raise LedgerError(f"pin: {holder!r} holds page {page} already")
            if not holders:
                self._num_idle -= 1
            holders.add(holder)

    def unpin(self, pages: Iterable[int], holder: str) -> None:
        """``holder`` lets go. A page without holders becomes free, or idle when it is cached."""
        for page in pages:
            holders = self._holders.get(page)
            if holders is None or holder not in holders:
                raise LedgerError(f"unpin: {holder!r} does not hold page {page}, held by {sorted(holders or ())}")
            holders.remove(holder)
            if holders:
                continue
            del self._holders[page]
            if page in self._cached:
                self._num_idle += 1
                self._on_idle(page)
            else:
                self._free.append(page)

    def adopt(self, page: int) -> None:
        """The cache takes up a page that one request holds. From now on nobody writes it."""
        if page in self._cached or len(self._holders.get(page, ())) != 1:
            raise LedgerError(f"adopt: page {page} cached={page in self._cached} holders={sorted(self._holders.get(page, ()))}")
        self._cached.add(page)

    def evict(self, page: int) -> None:
        """The cache lets an idle page go; it becomes free."""
        if not self.is_idle(page):
            raise LedgerError(f"evict: page {page} cached={page in self._cached} holders={sorted(self._holders.get(page, ()))}")
        self._cached.remove(page)
        self._num_idle -= 1
        self._free.append(page)

    def check(self, cached: Sequence[int]) -> None:
        """Compare the books with each other and with the pages the cache says it has. Raises LedgerError with what is wrong."""
        problems: list[str] = []
        free, held = set(self._free), set(self._holders)
        if len(free) != len(self._free):
            problems.append(f"free twice: {sorted(p for p in free if self._free.count(p) > 1)}")
        if len(set(cached)) != len(cached) or set(cached) != self._cached:
            problems.append(f"cache holds {sorted(cached)}, pool believes {sorted(self._cached)}")
        for name, both in (("free and pinned", free & held), ("free and cached", free & self._cached)):
            if both:
                problems.append(f"{name}: {sorted(both)}")
        if lost := set(range(self._total)) - free - held - self._cached:
            problems.append(f"lost: {sorted(lost)}")
        if strange := (free | held | self._cached) - set(range(self._total)):
            problems.append(f"not in the pool: {sorted(strange)}")
        if len(self._cached - held) != self._num_idle:
            problems.append(f"idle: counted {self._num_idle}, are {len(self._cached - held)}")
        if shared := sorted(p for p, holders in self._holders.items() if p not in self._cached and len(holders) != 1):
            problems.append(f"writable by several: {[(p, sorted(self._holders[p])) for p in shared]}")
        counts = self.counts()
        if counts.free + counts.cached + counts.pinned != counts.total:
            problems.append(f"free + cached + pinned != total: {counts}")
        if problems:
            raise LedgerError("; ".join(problems))


def _ignore(page: int) -> None:
    """No cache is listening."""
