"""Which (plane, layer, token, head) cells of a transfer are taken. One bit of truth for what is there, what overlaps and what lacks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange

# Group, plane, and absolute ranges: what one frame covers.
Rectangle = tuple[int, int, LayerRange, TokenRange, HeadRange]
# The same in integers: group, plane, start and stop of layers, tokens and heads.
Cells = tuple[int, int, int, int, int, int, int, int]


def rectangle_of(cells: Cells) -> Rectangle:
    """Raises ValueError for ranges that are none."""
    group, plane, l0, l1, t0, t1, h0, h1 = cells
    return group, plane, LayerRange(l0, l1), TokenRange(t0, t1), HeadRange(h0, h1)


class Coverage:
    """Cells of ``tokens`` for every plane of ``spec``, restricted to ``heads`` (absolute) where given.

    One bit per cell: about a thousandth of the KV it stands for, and its size is fixed by what was expected, not by what arrives. Tokens
    come first, so that what a chunk covers, all layers and heads of some tokens, lies in one piece.
    """

    def __init__(self, spec: KVSpec, tokens: TokenRange, heads: HeadRange | None = None) -> None:
        self.tokens = tokens
        self._first_layers = [group.first_layer for group in spec.groups]
        self._heads: list[list[HeadRange]] = []
        self._taken: list[list[np.ndarray]] = []
        self.num_free = 0
        for group in spec.groups:
            ranges = [heads or HeadRange(0, plane.num_heads) for plane in group.planes]
            for plane, given in zip(group.planes, ranges, strict=True):
                if given.stop > plane.num_heads:
                    raise ValueError(f"heads: given {given}, plane {plane.name!r} has {plane.num_heads} heads")
            self._heads.append(ranges)
            self._taken.append([np.zeros((len(tokens), group.num_layers, -(-len(r) // 8)), np.uint8) for r in ranges])
            self.num_free += sum(len(tokens) * group.num_layers * len(r) for r in ranges)

    def contains(self, group: int, plane: int, tokens: TokenRange, heads: HeadRange) -> bool:
        """Whether the ranges lie inside what is expected (layers are the spec's business)."""
        expected = self._heads[group][plane]
        return (
            self.tokens.start <= tokens.start
            and tokens.stop <= self.tokens.stop
            and expected.start <= heads.start
            and heads.stop <= expected.stop
        )

    def any_taken(self, group: int, plane: int, layers: LayerRange, tokens: TokenRange, heads: HeadRange) -> bool:
        """Whether some cell of the rectangle is taken."""
        cells = self._cells(group, plane, layers, tokens)
        return bool((cells if heads == self._heads[group][plane] else cells & self._bits(group, plane, heads)).any())

    def take(self, group: int, plane: int, layers: LayerRange, tokens: TokenRange, heads: HeadRange) -> bool:
        """Take a rectangle, unless some cell of it is taken: False, and nothing has changed."""
        if self.any_taken(group, plane, layers, tokens, heads):
            return False
        cells = self._cells(group, plane, layers, tokens)
        if heads == self._heads[group][plane]:
            cells.fill(0xFF)  # what is above the last head counts for nothing
        else:
            cells |= self._bits(group, plane, heads)
        self.num_free -= len(layers) * len(tokens) * len(heads)
        return True

    def mark(self, group: int, plane: int, layers: LayerRange, tokens: TokenRange, heads: HeadRange) -> None:
        """Take the cells of a rectangle that lie inside what is expected, whether they are free or not."""
        mine = self._heads[group][plane]
        t0, t1 = max(tokens.start, self.tokens.start), min(tokens.stop, self.tokens.stop)
        h0, h1 = max(heads.start, mine.start), min(heads.stop, mine.stop)
        if t0 < t1 and h0 < h1:
            cells, bits = self._cells(group, plane, layers, TokenRange(t0, t1)), self._bits(group, plane, HeadRange(h0, h1))
            self.num_free -= int(np.unpackbits(~cells & bits).sum())
            cells |= bits

    def taken(self) -> Iterator[Rectangle]:
        """Disjoint rectangles that hold exactly the taken cells; one per plane and token range when whole chunks were taken."""
        for group, planes in enumerate(self._taken):
            for plane, bits in enumerate(planes):
                heads = self._heads[group][plane]
                cells = _unpacked(bits, 0, len(heads))
                yield from self._rectangles(group, plane, cells, self._first_layers[group], self.tokens.start, heads.start)

    def free_within(self, group: int, plane: int, layers: LayerRange, tokens: TokenRange, heads: HeadRange) -> Iterator[Rectangle]:
        """Disjoint rectangles that hold exactly the free cells of a rectangle."""
        assert self.contains(group, plane, tokens, heads)
        first_head = self._heads[group][plane].start
        cells = ~_unpacked(self._cells(group, plane, layers, tokens), heads.start - first_head, heads.stop - first_head)
        yield from self._rectangles(group, plane, cells, layers.start, tokens.start, heads.start)

    @staticmethod
    def _rectangles(group: int, plane: int, cells: np.ndarray, layer: int, token: int, head: int) -> Iterator[Rectangle]:
        """Of the True cells [tokens, layers, heads]; the last three arguments are absolute: where ``cells`` starts."""
        for t0, t1 in _runs(cells):
            for l0, l1 in _runs(cells[t0]):
                row = cells[t0, l0]
                for h0, h1 in _runs(row):
                    if row[h0]:
                        yield (
                            group,
                            plane,
                            LayerRange(layer + l0, layer + l1),
                            TokenRange(token + t0, token + t1),
                            HeadRange(head + h0, head + h1),
                        )

    def _cells(self, group: int, plane: int, layers: LayerRange, tokens: TokenRange) -> np.ndarray:
        """Of all heads: uint8 [tokens, layers, bytes], a view."""
        assert self.tokens.start <= tokens.start
        assert tokens.stop <= self.tokens.stop
        first_layer, first_token = self._first_layers[group], self.tokens.start
        return self._taken[group][plane][
            tokens.start - first_token : tokens.stop - first_token,
            layers.start - first_layer : layers.stop - first_layer,
        ]

    def _bits(self, group: int, plane: int, heads: HeadRange) -> np.ndarray:
        """Of ``heads``: uint8 [bytes], the first head in the lowest bit."""
        mine = self._heads[group][plane]
        assert mine.start <= heads.start
        assert heads.stop <= mine.stop
        bits = (1 << heads.stop - mine.start) - (1 << heads.start - mine.start)
        return np.frombuffer(bits.to_bytes(-(-len(mine) // 8), "little"), np.uint8)


def _unpacked(bits: np.ndarray, first: int, stop: int) -> np.ndarray:
    """bool [tokens, layers, heads ``first`` to ``stop``]."""
    return np.unpackbits(bits, axis=-1, count=stop, bitorder="little")[..., first:].view(np.bool_)


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` of equal neighbours along the first axis."""
    flat = rows.reshape(len(rows), -1)
    changes = np.flatnonzero((flat[1:] != flat[:-1]).any(axis=1)) + 1
    ends = [0, *changes.tolist(), len(rows)]
    yield from pairwise(ends)
