"""The prefix cache's second tier: pages that had to leave the device, kept in host memory. Owns which of them are kept.

A radix tree of its own, so the first tier knows nothing of it: a page is found by the tokens of the whole prefix that it ends. Pages leave
in the order in which they were last stored or found, the ends of prefixes before their beginnings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdd.worker.pages import LedgerError
from pdd.worker.radix import PageTokens, RadixNode
from pddbridge.engine import KVBlock
from pddbridge.kv_spec import TokenRange

Blocks = tuple[KVBlock, ...]


@dataclass(frozen=True)
class TierCounts:
    """``stored``, ``evicted``: pages that came and went, ever. ``hit_tokens``: tokens that requests got from here instead of computing."""

    pages: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    stored: int = 0
    evicted: int = 0
    hit_tokens: int = 0


class _Node(RadixNode["_Node"]):
    __slots__ = ("blocks", "parent")

    def __init__(self, parent: _Node | None, key: PageTokens) -> None:
        super().__init__(key)
        self.parent = parent
        self.blocks: Blocks | None = None  # None: on the device, or gone, while a longer prefix is here


class HostTier:
    """At most ``capacity_bytes`` of KV. Every call is made by the step thread."""

    def __init__(self, capacity_bytes: int, page_size: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes: given {capacity_bytes}, allowed 1 or more")
        self._page_size = page_size
        self._roots: dict[str, _Node] = {}
        self._by_age: OrderedDict[int, _Node] = OrderedDict()  # id(node): nodes with blocks, longest unused first
        self._counts = TierCounts(capacity_bytes=capacity_bytes)

    def touch(self, namespace: str, path: Sequence[PageTokens]) -> bool:
        """Whether the page at the end of ``path`` is here already; it is then as good as new."""
        node = self._roots.get(namespace)
        for key in path:
            node = node.children.get(key) if node is not None else None
        if node is None or node.blocks is None:
            return False
        self._by_age.move_to_end(id(node))
        return True

    def put(self, namespace: str, path: Sequence[PageTokens], blocks: Blocks) -> None:
        """Keep the page at the end of ``path``, all planes of its tokens; older ones make room. One that is too large is not kept."""
        size = _size(blocks)
        if size > self._counts.capacity_bytes:
            return
        while self._counts.num_bytes + size > self._counts.capacity_bytes:
            self._evict(next(iter(self._by_age.values())))
        node = self._roots.setdefault(namespace, _Node(None, ()))
        for key in path:
            child = node.children.get(key)
            if child is None:
                child = _Node(node, key)
                node.add(child)
            node = child
        assert node.blocks is None, "touch says whether a page is here"
        node.blocks = blocks
        self._by_age[id(node)] = node
        self._count(pages=1, num_bytes=size, stored=1)

    def find(self, namespace: str, tokens: Sequence[int], num_pages: int) -> tuple[Blocks, ...]:
        """What is here of the prefix of ``tokens`` beyond its first ``num_pages`` pages, in order and without a gap.

        At most ``len(tokens) - 1`` tokens are covered; the last entry may be the first tokens of a page that goes on differently.
        """
        size, limit = self._page_size, len(tokens) - 1
        node = self._roots.get(namespace)
        for i in range(num_pages):
            node = node.children.get(tuple(tokens[i * size : (i + 1) * size])) if node is not None else None
        found: list[Blocks] = []
        touched: list[_Node] = []
        start = num_pages * size
        while node is not None and start + size <= limit:
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None or child.blocks is None:
                break
            found.append(child.blocks)
            touched.append(child)
            node, start = child, start + size
        if node is not None and start < limit:
            partial, length = node.closest(tuple(tokens[start : min(start + size, limit)]), _is_here)
            if partial is not None and partial.blocks is not None:
                found.append(tuple(_first(block, length) for block in partial.blocks))
                touched.append(partial)
        for node in reversed(touched):
            self._by_age.move_to_end(id(node))
        return tuple(found)

    def count_hit(self, num_tokens: int) -> None:
        """A request took ``num_tokens`` from here."""
        self._count(hit_tokens=num_tokens)

    def counts(self) -> TierCounts:
        return self._counts

    def check(self) -> None:
        """Walk the tree. Raises LedgerError when it disagrees with the counts or keeps what leads nowhere."""
        nodes = [node for root in self._roots.values() for node in _walk(root)]
        kept = [node for node in nodes if node.blocks is not None]
        if {id(node) for node in kept} != set(self._by_age):
            raise LedgerError(f"host tier: {len(kept)} pages in the tree, {len(self._by_age)} by age")
        if (len(kept), sum(_size(node.blocks or ()) for node in kept)) != (self._counts.pages, self._counts.num_bytes):
            raise LedgerError(f"host tier: {len(kept)} pages do not add up to {self._counts}")
        if any(not node.children and node.blocks is None for node in nodes):
            raise LedgerError("host tier: a branch without pages")

    def _evict(self, node: _Node) -> None:
        assert node.blocks is not None, "only pages have an age"
        self._count(pages=-1, num_bytes=-_size(node.blocks), evicted=1)
        del self._by_age[id(node)]
        node.blocks = None
        while node.blocks is None and not node.children and node.parent is not None:
            parent = node.parent
            parent.remove(node)
            node = parent
        if node.parent is None and not node.children:
            self._roots = {name: root for name, root in self._roots.items() if root is not node}

    def _count(self, *, pages: int = 0, num_bytes: int = 0, stored: int = 0, evicted: int = 0, hit_tokens: int = 0) -> None:
        old = self._counts
        self._counts = replace(
            old,
            pages=old.pages + pages,
            num_bytes=old.num_bytes + num_bytes,
            stored=old.stored + stored,
            evicted=old.evicted + evicted,
            hit_tokens=old.hit_tokens + hit_tokens,
        )


def _is_here(node: _Node) -> bool:
    return node.blocks is not None


def _first(block: KVBlock, num_tokens: int) -> KVBlock:
    """The first tokens of ``block``, which stay where they are in memory when that is contiguous."""
    tokens = TokenRange(block.tokens.start, block.tokens.start + num_tokens)
    return replace(block, tokens=tokens, values=block.values[:, :num_tokens].copy())


def _size(blocks: Blocks) -> int:
    return sum(block.values.nbytes for block in blocks)


def _walk(root: _Node) -> list[_Node]:
    nodes, stack = [], [root]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(node.children.values())
    return nodes
