"""Pages -> wire order -> pages, for any :class:`KVPool`, page table and ranges. Pure numpy, bit-exact, each byte moved once.

A copy is of *units*: the longest pieces that are contiguous both in the pages and on the wire (one head of one token; all heads of a
token; a whole page). ``numpy.take`` and ``numpy.put`` move units by index, one ``memmove`` each: unlike a strided or a fancy-indexed
assignment they neither loop over values nor make a copy in between, and scattered pages cost what consecutive ones do
(``benchmarks/kv_convert.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat, zip_longest
from typing import Final

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_block import check_block, locate_plane
from pddbridge.kv_pool import KVPool
from pddbridge.kv_spec import HeadRange, KVGroup, KVPlane, LayerRange, TokenRange

__all__ = ["KVPool", "read_block", "read_blocks", "write_block", "write_blocks"]

# Planes that share an array are read in turns of this size, so that a cache line which holds both is fetched once: well under a core's
# level-2 cache, well over a call's cost.
_TURN_BYTES: Final = 1 << 18


def read_block(
    pool: KVPool,
    page_table: np.ndarray,
    plane: str,
    layers: LayerRange,
    tokens: TokenRange,
    heads: HeadRange,
    out: np.ndarray | None = None,
) -> KVBlock:
    """Copy a rectangle of ``plane`` out of the pages of ``page_table`` [P] integer: token t is in page ``page_table[t // page_size]``.

    ``layers`` must lie in one group. ``out``: where to, [layers, tokens, heads, dim] in the plane's dtype, C-contiguous; None for a fresh
    array. Raises ValueError for anything outside the pool, or an ``out`` that is not that.
    """
    group, index = locate_plane(pool.spec, plane, layers)
    place = _Place(pool, page_table, group, index, tokens, heads)
    values = _target(pool, group.planes[index], layers, tokens, heads, out)
    _read_all([place], [values], layers)
    return KVBlock(plane, layers, tokens, heads, values)


def read_blocks(pool: KVPool, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
    """All KV of ``tokens`` that the pool stores: one block per group and plane, its layers, the heads of the layout's shard.

    ``out``: one array per block, as :func:`read_block` has it. Faster than plane by plane where planes share an array.
    """
    blocks: list[KVBlock] = []
    given: Iterator[np.ndarray | None] = repeat(None) if out is None else iter(out)
    for group in pool.spec.groups:
        layers = LayerRange(group.first_layer, group.first_layer + group.num_layers)
        heads = [pool.layout.heads_of(plane) for plane in group.planes]
        places = [_Place(pool, page_table, group, i, tokens, stored) for i, stored in enumerate(heads)]
        values = [_target(pool, plane, layers, tokens, h, next(given)) for plane, h in zip(group.planes, heads, strict=True)]
        _read_all(places, values, layers)
        blocks += [KVBlock(p.name, layers, tokens, h, v) for p, h, v in zip(group.planes, heads, values, strict=True)]
    return tuple(blocks)


def write_block(pool: KVPool, page_table: np.ndarray, block: KVBlock) -> None:
    """Place ``block`` into the pages of ``page_table`` [P] integer; touches nothing outside the block's ranges. Raises ValueError."""
    write_blocks(pool, page_table, (block,))


def write_blocks(pool: KVPool, page_table: np.ndarray, blocks: Sequence[KVBlock]) -> None:
    """As :func:`write_block`, layer by layer: faster where planes share an array. Raises ValueError with nothing written."""
    placed = []
    for block in blocks:
        group, index = check_block(pool.spec, block)
        place = _Place(pool, page_table, group, index, block.tokens, block.heads)
        if len(np.unique(place.pages)) != len(place.pages):
            raise ValueError(f"page_table: a page is named twice among those of {block.tokens}: {place.pages.tolist()}")
        if block.values.size:
            placed.append((block, place))
    for layer in sorted({layer for block, _ in placed for layer in range(block.layers.start, block.layers.stop)}):
        for block, place in placed:
            if block.layers.start <= layer < block.layers.stop:
                wire = block.values[layer - block.layers.start].reshape(-1).view(np.uint8)
                for copy, units in place.copies(layer):
                    units.put(copy.which, wire[copy.start : copy.stop].view(units.dtype))


@dataclass(frozen=True)
class _Copy:
    """Wire bytes ``[start, stop)`` of a layer <-> units ``which`` [N] intp of ``unit_bytes``, counted from the first stored byte."""

    start: int
    stop: int
    unit_bytes: int
    which: np.ndarray


class _Place:
    """Where the tokens of one plane lie in the pages of a layer. Raises ValueError for ranges or pages outside the pool."""

    def __init__(self, pool: KVPool, page_table: np.ndarray, group: KVGroup, plane: int, tokens: TokenRange, heads: HeadRange) -> None:
        stored = pool.layout.heads_of(group.planes[plane])
        if heads.start < stored.start or heads.stop > stored.stop:
            raise ValueError(f"heads: given {heads}, the pool stores {stored}")
        self.pages = _touched_pages(pool, page_table, tokens)
        self._pool, self._plane, self._tokens = pool, plane, tokens
        self._heads = slice(heads.start - stored.start, heads.stop - stored.start)
        self._strides: tuple[int, ...] = ()
        self._copies: list[_Copy] = []

    def copies(self, layer: int) -> list[tuple[_Copy, np.ndarray]]:
        """The copies of ``layer``, each with the units [U] void that it counts in. Worked out once for layers of equal strides."""
        stored = self._pool.planes[layer][self._plane]
        if stored.view.strides != self._strides:
            self._strides = stored.view.strides
            self._copies = _plan(stored.view[:, :, self._heads], self.pages, self._tokens)
        values = stored.flat[self._heads.start * self._strides[2] // stored.flat.itemsize :]
        return [(copy, _as_units(values, copy.unit_bytes)) for copy in self._copies]


def _read(place: _Place, values: np.ndarray, layers: LayerRange, layer: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """What to copy for ``layer`` into ``values`` [layers, ...], in turns of about ``_TURN_BYTES``: (units, which of them, where to)."""
    wire = values[layer - layers.start].reshape(-1).view(np.uint8)
    turns = []
    for copy, units in place.copies(layer):
        target = wire[copy.start : copy.stop].view(units.dtype)
        step = max(1, _TURN_BYTES // copy.unit_bytes)
        turns += [(units, copy.which[i : i + step], target[i : i + step]) for i in range(0, len(copy.which), step)]
    return turns


def _read_all(places: list[_Place], values: list[np.ndarray], layers: LayerRange) -> None:
    """Layer by layer, the planes in turns."""
    if not values[0].size:
        return
    for layer in range(layers.start, layers.stop):
        by_plane = [_read(place, plane_values, layers, layer) for place, plane_values in zip(places, values, strict=True)]
        for turn in zip_longest(*by_plane):
            for move in turn:
                if move is not None:
                    units, which, target = move
                    # Every index was checked; in mode "raise" numpy would go through a buffer of its own.
                    units.take(which, out=target, mode="clip")


def _target(pool: KVPool, plane: KVPlane, layers: LayerRange, tokens: TokenRange, heads: HeadRange, out: np.ndarray | None) -> np.ndarray:
    """``out`` if it fits, a fresh array for None. Raises ValueError."""
    shape = (len(layers), len(tokens), len(heads), plane.head_dim)
    dtype = pool.spec.np_dtype_of(plane)
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out: given {out.dtype}{list(out.shape)}, must be {dtype}{list(shape)}, C-contiguous and writable")
    return out


def _plan(view: np.ndarray, pages: np.ndarray, tokens: TokenRange) -> list[_Copy]:
    """The copies that make up ``tokens`` of ``view`` [page, slot, head, dim]: whole pages where a page's order is the wire's, and tokens at
    either end of them; else all by token. Strides decide how a token is copied, never what is a token.
    """
    _, page_size, num_heads, head_dim = view.shape
    page_stride, slot_stride, head_stride, dim_stride = view.strides
    # The longest piece of a token that is contiguous on both sides, and the axes left over, outermost first.
    piece = view.itemsize
    inner: list[tuple[int, int]] = []
    for size, stride in ((head_dim, dim_stride), (num_heads, head_stride)):
        if size > 1 and stride == piece and not inner:
            piece *= size
        elif size > 1:
            inner.insert(0, (size, stride))
    token_bytes = num_heads * head_dim * view.itemsize
    first_page = tokens.start // page_size

    def by_token(start: int, stop: int) -> _Copy:
        positions = np.arange(start, stop)
        first = pages[positions // page_size - first_page] * page_stride + positions % page_size * slot_stride
        return copy(start, stop, first, piece, [page_stride, slot_stride], inner)

    def copy(start: int, stop: int, first: np.ndarray, piece: int, strides: list[int], inner: list[tuple[int, int]]) -> _Copy:
        unit = math.gcd(piece, *strides, *(stride for _, stride in inner))
        for size, stride in [*inner, (piece // unit, unit)]:
            first = (first[:, None] + np.arange(size) * stride).reshape(-1)
        return _Copy((start - tokens.start) * token_bytes, (stop - tokens.start) * token_bytes, unit, first // unit)

    whole_start, whole_stop = -(-tokens.start // page_size) * page_size, tokens.stop // page_size * page_size
    if page_size == 1 or inner or slot_stride != token_bytes or whole_start >= whole_stop:
        return [by_token(tokens.start, tokens.stop)]
    whole = pages[whole_start // page_size - first_page : whole_stop // page_size - first_page]
    copies = [by_token(tokens.start, whole_start)] if tokens.start < whole_start else []
    copies.append(copy(whole_start, whole_stop, whole * page_stride, page_size * token_bytes, [page_stride], []))
    if whole_stop < tokens.stop:
        copies.append(by_token(whole_stop, tokens.stop))
    return copies


def _as_units(values: np.ndarray, unit_bytes: int) -> np.ndarray:
    """The first whole units of contiguous ``values`` [N] as void [U], without a copy: numpy moves a void with one memmove."""
    per_unit = unit_bytes // values.itemsize
    return values[: len(values) // per_unit * per_unit].view(np.dtype((np.void, unit_bytes)))


def _touched_pages(pool: KVPool, page_table: np.ndarray, tokens: TokenRange) -> np.ndarray:
    """The entries of ``page_table`` that ``tokens`` lie in, as intp."""
    if page_table.ndim != 1 or not np.issubdtype(page_table.dtype, np.integer):
        raise ValueError(f"page_table: given {page_table.dtype}{list(page_table.shape)}, must be one integer per page")
    size = pool.layout.page_size
    if tokens.stop > len(page_table) * size:
        raise ValueError(f"tokens: given {tokens}, the page table holds {len(page_table)} pages of {size}")
    if not len(tokens):
        return np.empty(0, np.intp)
    pages = page_table[tokens.start // size : (tokens.stop - 1) // size + 1].astype(np.intp)
    if pages.min() < 0 or pages.max() >= pool.num_pages:
        raise ValueError(f"page_table: entries must be in [0, {pool.num_pages}), given {pages.tolist()}")
    return pages
