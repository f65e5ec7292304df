"""A node of a radix tree whose edges are full pages of tokens, compared token by token: never by hashes. Owns the search among children."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Generic, TypeVar

PageTokens = tuple[int, ...]
Child = TypeVar("Child", bound="RadixNode")


class RadixNode(Generic[Child]):
    """``key``: the page's tokens, () for a root."""

    __slots__ = ("children", "key", "keys")

    def __init__(self, key: PageTokens) -> None:
        self.key = key
        self.children: dict[PageTokens, Child] = {}
        self.keys: list[PageTokens] = []  # the children's, sorted: the longest common prefix is next to where a tail would stand

    def add(self, child: Child) -> None:
        self.children[child.key] = child
        insort(self.keys, child.key)

    def remove(self, child: Child) -> None:
        del self.children[child.key]
        del self.keys[bisect_left(self.keys, child.key)]

    def closest(self, tail: PageTokens, usable: Callable[[Child], bool] = lambda child: True) -> tuple[Child | None, int]:
        """The ``usable`` child with the longest common prefix with ``tail``, and its length; None when that is 0.

        The common prefix shrinks with the distance from where ``tail`` would stand, so the first usable one on each side decides.
        """
        at = bisect_left(self.keys, tail)
        best, best_length = None, 0
        for side in (range(at - 1, -1, -1), range(at, len(self.keys))):
            for i in side:
                child, length = self.children[self.keys[i]], _common(self.keys[i], tail)
                if length <= best_length:
                    break
                if usable(child):
                    best, best_length = child, length
                    break
        return best, best_length


def _common(a: PageTokens, b: PageTokens) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
