"""The prefix cache: a radix tree of pages, compared token by token. Owns which prefixes can be found and who is evicted first.

A node is one full page of tokens below its parent's prefix; children are keyed by the page's tokens themselves, so a match is an
equality of tokens, never of hashes. Each namespace (tenant) has a tree of its own. A hit may end inside a page; its holder then copies
that page before writing.

Invariant: whoever pins a page of the tree pins all its ancestors. So every idle page can be evicted, leaves first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdd.worker.pages import LedgerError, PagePool
from pdd.worker.radix import PageTokens, RadixNode

# (namespace, the prefix page by page, its last page): what is about to leave the device.
OnEvict = Callable[[str, list[PageTokens], int], None]


@dataclass(frozen=True)
class Lease:
    """A hit, pinned by who asked. ``pages`` are full of the first ``len(pages) * page_size`` tokens.

    ``partial_page``: a cached page whose first ``partial_tokens`` slots continue the prefix; pinned too, to be copied and then let go.
    """

    pages: tuple[int, ...]
    num_tokens: int
    partial_page: int | None
    partial_tokens: int


class _Node(RadixNode["_Node"]):
    __slots__ = ("idle_since", "namespace", "page", "parent")

    def __init__(self, namespace: str, parent: _Node | None, key: PageTokens, page: int | None) -> None:
        super().__init__(key)
        self.namespace = namespace
        self.parent = parent
        self.page = page  # None: the root of a namespace
        self.idle_since = 0

    def path(self) -> list[PageTokens]:
        """The pages from the root to this one."""
        keys, node = [], self
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return keys[::-1]


class PrefixCache:
    """See the module docstring. Every call is made by the step thread. ``on_evict`` is called before an evicted page becomes free."""

    def __init__(self, pool: PagePool, page_size: int, on_evict: OnEvict | None = None) -> None:
        self._on_evict = on_evict
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[str, _Node] = {}
        self._by_page: dict[int, _Node] = {}
        self._clock = 0
        self._idle_leaves: list[tuple[int, int]] = []  # heap of (idle_since, page); stale entries are dropped when popped
        pool.on_idle(self._became_idle)

    def lookup(self, namespace: str, tokens: Sequence[int], holder: str) -> Lease:
        """The longest cached prefix of ``tokens``, at most ``len(tokens) - 1`` long, pinned by ``holder``.

        At least one token is always left to compute: somebody needs its logits.
        """
        size, limit = self._page_size, len(tokens) - 1
        node = self._roots.get(namespace)
        if node is None:
            return Lease((), 0, None, 0)
        pages: list[int] = []
        while (len(pages) + 1) * size <= limit:
            start = len(pages) * size
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            pages.append(_page(child))
            node = child
        start = len(pages) * size
        partial, partial_tokens = node.closest(tuple(tokens[start : min(start + size, limit)]))
        self._pool.pin(pages, holder)
        if partial is None:
            return Lease(tuple(pages), start, None, 0)
        self._pool.pin((_page(partial),), holder)
        return Lease(tuple(pages), start + partial_tokens, _page(partial), partial_tokens)

    def insert(self, namespace: str, tokens: Sequence[int], pages: Sequence[int], holder: str) -> list[int]:
        """Make ``pages``, full of ``tokens``, findable. Returns the pages ``holder`` has afterwards, same length and order.

        ``holder`` pins all of ``pages``. Where the tree has the same tokens already, ``holder`` gets the tree's page and its own
        duplicate is released.
        """
        size = self._page_size
        if len(tokens) != len(pages) * size:
            raise ValueError(f"insert: {len(pages)} pages of {size} need {len(pages) * size} tokens, given {len(tokens)}")
        if not pages:
            return []
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = _Node(namespace, None, (), None)
        now_held: list[int] = []
        for i, page in enumerate(pages):
            key = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(key)
            if child is None:
                self._pool.adopt(page)
                child = _Node(namespace, node, key, page)
                node.add(child)
                self._by_page[page] = child
            elif child.page != page:
                self._pool.pin((_page(child),), holder)
                self._pool.unpin((page,), holder)
            now_held.append(_page(child))
            node = child
        return now_held

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` idle pages, longest idle leaf first. Returns how many."""
        evicted = 0
        while evicted < num_pages and self._idle_leaves:
            idle_since, page = heapq.heappop(self._idle_leaves)
            node = self._by_page.get(page)
            if node is None or node.children or node.idle_since != idle_since or not self._pool.is_idle(page):
                continue
            if self._on_evict is not None:
                self._on_evict(node.namespace, node.path(), page)
            self._remove(node)
            evicted += 1
        return evicted

    def pages(self) -> list[int]:
        """Every page in the tree."""
        return list(self._by_page)

    def check(self) -> None:
        """Walk the tree. Raises LedgerError when it disagrees with itself or with the pool."""
        seen = [node.page for root in self._roots.values() for node in _walk(root)]
        if sorted(p for p in seen if p is not None) != sorted(self._by_page):
            raise LedgerError(f"tree holds pages {seen}, index {sorted(self._by_page)}")
        for page, node in self._by_page.items():
            parent = node.parent
            if parent is not None and parent.page is not None and self._pool.is_idle(parent.page) and not self._pool.is_idle(page):
                raise LedgerError(f"page {page} is pinned, its parent {parent.page} is not")
            if node.keys != sorted(node.children):
                raise LedgerError(f"children of page {page}: keys {node.keys}, nodes {sorted(node.children)}")
        self._pool.check(list(self._by_page))

    def _became_idle(self, page: int) -> None:
        self._clock += 1
        node = self._by_page[page]
        node.idle_since = self._clock
        if not node.children:
            self._push(node)

    def _push(self, node: _Node) -> None:
        heapq.heappush(self._idle_leaves, (node.idle_since, _page(node)))
        if len(self._idle_leaves) > 2 * len(self._by_page) + 64:  # mostly stale entries: start over from what is true
            idle = ((n.idle_since, p) for p, n in self._by_page.items() if not n.children and self._pool.is_idle(p))
            self._idle_leaves = sorted(idle)

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None, "a root has no page"
        parent.remove(node)
        del self._by_page[_page(node)]
        self._pool.evict(_page(node))
        if parent.children:
            return
        if parent.page is None:
            del self._roots[parent.namespace]
        elif self._pool.is_idle(parent.page):
            self._push(parent)


def _page(node: _Node) -> int:
    assert node.page is not None, "a root has no page"
    return node.page


def _walk(root: _Node) -> Iterator[_Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
