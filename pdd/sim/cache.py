"""Prefix caches under the virtual clock. Two kinds of prompt: a session's growing context, and chains of block ids out of a trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

Chain = tuple[tuple[Hashable, int], ...]


class Prompt:
    """``chain``: parts from the beginning, each an id that stands for itself and all before it, with its tokens. A session's context is one
    part that grows under the same id; a trace's prompt is one part per block.
    """

    __slots__ = ("chain", "num_tokens")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.num_tokens = sum(tokens for _, tokens in chain)


def beginning(chain: Chain, num_tokens: int) -> Chain:
    """The first ``num_tokens`` of it."""
    parts: list[tuple[Hashable, int]] = []
    for part, tokens in chain:
        if num_tokens <= 0:
            break
        parts.append((part, min(tokens, num_tokens)))
        num_tokens -= tokens
    return tuple(parts)


class PrefixCache:
    """Keeps the parts that were used latest, of ``capacity_tokens`` in all. A part is hit as far as it was put in, and the parts after one
    that is not hit whole are not hit.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._parts: OrderedDict[Hashable, int] = OrderedDict()
        self.num_tokens = 0

    def hit_tokens(self, chain: Sequence[tuple[Hashable, int]]) -> int:
        """Tokens from the beginning that are held; what is hit counts as used now."""
        for part, _ in chain:
            if part not in self._parts:
                break
            self._parts.move_to_end(part)
        return self.peek_tokens(chain)

    def peek_tokens(self, chain: Sequence[tuple[Hashable, int]]) -> int:
        """As ``hit_tokens``, without counting as use."""
        total = 0
        for part, tokens in chain:
            held = self._parts.get(part, 0)
            total += min(held, tokens)
            if held < tokens:
                break
        return total

    def put(self, chain: Sequence[tuple[Hashable, int]]) -> None:
        """All of it is held now. What was used longest ago leaves; of it, the end of a chain before its beginning."""
        for part, tokens in reversed(chain):  # the beginning last, so that it is the younger
            held = self._parts.pop(part, 0)
            self._parts[part] = max(held, tokens)
            self.num_tokens += max(held, tokens) - held
        while self.num_tokens > self._capacity and len(self._parts) > 1:
            _, tokens = self._parts.popitem(last=False)
            self.num_tokens -= tokens
