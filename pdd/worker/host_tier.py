"""The prefix cache's second tier: pages that had to leave the device, kept in host memory. Owns which of them are kept, and their memory.

A radix tree of its own, so the first tier knows nothing of it: a page is found by the tokens of the whole prefix that it ends. Pages leave
in the order in which they were last stored or found, the ends of prefixes before their beginnings.

All memory is taken and touched when the tier is made: a worker is then as large as it will ever be, and a machine that is too small says so
at once and not after an hour of traffic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdd.worker.pages import LedgerError
from pdd.worker.radix import PageTokens, RadixNode
from pddbridge.engine import KVBlock
from pddbridge.kv_block import arrays_in, room_for
from pddbridge.kv_spec import KVSpec, TokenRange

Blocks = tuple[KVBlock, ...]
# Reads a page, into these arrays where the device can; see :meth:`pddbridge.engine.Engine.read_kv`.
ReadPage = Callable[[tuple[np.ndarray, ...]], Blocks]


@dataclass(frozen=True)
class TierCounts:
    """``num_bytes``: of the memory, taken by pages. ``stored``, ``evicted``: pages that came and went, ever. ``hit_tokens``: tokens that
    requests got from here instead of computing.
    """

    pages: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    stored: int = 0
    evicted: int = 0
    hit_tokens: int = 0


class _Node(RadixNode["_Node"]):
    __slots__ = ("blocks", "parent", "slot")

    def __init__(self, parent: _Node | None, key: PageTokens) -> None:
        super().__init__(key)
        self.parent = parent
        self.blocks: Blocks | None = None  # None: on the device, or gone, while a longer prefix is here
        self.slot = 0  # of the memory; means something with ``blocks``


class HostTier:
    """At most ``capacity_bytes`` of KV of ``spec``, in whole pages. Every call is made by the step thread."""

    def __init__(self, capacity_bytes: int, page_size: int, spec: KVSpec) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes: given {capacity_bytes}, allowed 1 or more")
        self._page_size, self._spec = page_size, spec
        self._page_bytes = room_for(spec, page_size)
        num_slots = capacity_bytes // self._page_bytes
        self._memory = np.empty((num_slots, self._page_bytes), np.uint8)
        self._memory.fill(0)  # np.zeros would leave it untouched
        self._free = list(range(num_slots))
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

    def put(self, namespace: str, path: Sequence[PageTokens], read: ReadPage) -> None:
        """Keep the page at the end of ``path``, all planes of its tokens, as ``read`` gives it; the oldest one makes room. A tier without
        room for one page keeps none. Raises what ``read`` does; an older page may then be gone.
        """
        if not self._memory.size:
            return
        if not self._free:
            self._evict(next(iter(self._by_age.values())))
        slot = self._free.pop()
        try:
            blocks = self._filled(slot, read)
        except BaseException:
            self._free.append(slot)
            raise
        node = self._roots.setdefault(namespace, _Node(None, ()))
        for key in path:
            child = node.children.get(key)
            if child is None:
                child = _Node(node, key)
                node.add(child)
            node = child
        assert node.blocks is None, "touch says whether a page is here"
        node.blocks, node.slot = blocks, slot
        self._by_age[id(node)] = node
        self._count(pages=1, num_bytes=self._page_bytes, stored=1)

    def find(self, namespace: str, tokens: Sequence[int], num_pages: int) -> tuple[Blocks, ...]:
        """What is here of the prefix of ``tokens`` beyond its first ``num_pages`` pages, in order and without a gap.

        At most ``len(tokens) - 1`` tokens are covered; the last entry may be the first tokens of a page that goes on differently. What is
        found is good until the next ``put``: its memory may then be another page's.
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
        if (len(kept), len(kept) * self._page_bytes) != (self._counts.pages, self._counts.num_bytes):
            raise LedgerError(f"host tier: {len(kept)} pages do not add up to {self._counts}")
        if sorted([*self._free, *(node.slot for node in kept)]) != list(range(len(self._memory))):
            raise LedgerError(f"host tier: {len(self._free)} free slots and {len(kept)} pages are not {len(self._memory)} slots")
        if any(not node.children and node.blocks is None for node in nodes):
            raise LedgerError("host tier: a branch without pages")

    def _filled(self, slot: int, read: ReadPage) -> Blocks:
        """The page, in the memory of ``slot``."""
        arrays = arrays_in(self._memory[slot], self._spec, self._page_size)
        kept = []
        for block, array in zip(read(arrays), arrays, strict=True):
            if not np.may_share_memory(block.values, array):
                array[...] = block.values
            kept.append(replace(block, values=array))
        return tuple(kept)

    def _evict(self, node: _Node) -> None:
        assert node.blocks is not None, "only pages have an age"
        self._count(pages=-1, num_bytes=-self._page_bytes, evicted=1)
        del self._by_age[id(node)]
        self._free.append(node.slot)
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
    """The first tokens of ``block``, contiguous."""
    tokens = TokenRange(block.tokens.start, block.tokens.start + num_tokens)
    return replace(block, tokens=tokens, values=block.values[:, :num_tokens].copy())


def _walk(root: _Node) -> list[_Node]:
    nodes, stack = [], [root]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(node.children.values())
    return nodes
