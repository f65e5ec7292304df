"""Which (plane, layer, token, head) cells of a transfer are taken. One bit of truth for what is there, what overlaps and what lacks."""

from __future__ import annotations

import numpy as np

from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange


class Coverage:
    """Cells of ``tokens`` for every plane of ``spec``, restricted to ``heads`` (absolute) where given.

    One bool per cell: under 1 % of the KV it stands for, and its size is fixed by what was expected, not by what arrives.
    """

    def __init__(self, spec: KVSpec, tokens: TokenRange, heads: HeadRange | None = None) -> None:
        self.tokens = tokens
        self._first_layers = [group.first_layer for group in spec.groups]
        self._heads: list[list[HeadRange]] = []
        self._taken: list[list[np.ndarray]] = []
        for group in spec.groups:
            ranges = [heads or HeadRange(0, plane.num_heads) for plane in group.planes]
            for plane, given in zip(group.planes, ranges, strict=True):
                if given.stop > plane.num_heads:
                    raise ValueError(f"heads: given {given}, plane {plane.name!r} has {plane.num_heads} heads")
            self._heads.append(ranges)
            self._taken.append([np.zeros((group.num_layers, len(tokens), len(r)), np.bool_) for r in ranges])
        self.num_free = sum(plane.size for group in self._taken for plane in group)

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
        return bool(self._cells(group, plane, layers, tokens, heads).any())

    def take(self, group: int, plane: int, layers: LayerRange, tokens: TokenRange, heads: HeadRange) -> None:
        """Take every cell of a rectangle that is free."""
        cells = self._cells(group, plane, layers, tokens, heads)
        assert not cells.any(), "a cell may be taken once"
        cells[...] = True
        self.num_free -= cells.size

    def _cells(self, group: int, plane: int, layers: LayerRange, tokens: TokenRange, heads: HeadRange) -> np.ndarray:
        assert self.contains(group, plane, tokens, heads)
        first_layer, first_token, first_head = self._first_layers[group], self.tokens.start, self._heads[group][plane].start
        return self._taken[group][plane][
            layers.start - first_layer : layers.stop - first_layer,
            tokens.start - first_token : tokens.stop - first_token,
            heads.start - first_head : heads.stop - first_head,
        ]
