"""Pages -> wire order -> pages, for any :class:`KVPool`, page table and ranges. Pure numpy, bit-exact, each byte moved once.

A copy is of *units*: the longest pieces that are contiguous both in the pages and on the wire (one head of one token; all heads of a
token; a whole page). ``numpy.take`` and ``numpy.put`` move units by index, one ``memmove`` each: unlike a strided or a fancy-indexed
assignment they neither loop over values nor make a copy in between, and scattered pages cost what consecutive ones do
(``benchmarks/kv_convert.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat, zip_longest
from operator import attrgetter
from typing import Final, TypeAlias

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_block import check_block, locate_plane
from pddbridge.kv_pool import KVPool, empty_on_lines
from pddbridge.kv_spec import HeadRange, KVGroup, KVPlane, LayerRange, TokenRange

__all__ = ["KVPool", "read_block", "read_blocks", "write_block", "write_blocks"]

# Planes that share an array are copied in turns of this size, so that a cache line which holds both is fetched once: well under a
# last-level cache, and so much over a call's cost that this is not felt.
_TURN_BYTES: Final = 1 << 20

# Units [U] of the pages as void, which of them [N] intp, and the values [N] void on the wire.
_Move: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
_Job: TypeAlias = "tuple[_Pages, KVBlock]"


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
    pages = _Pages(pool, page_table, group, index, tokens, heads)
    block = KVBlock(plane, layers, tokens, heads, _target(pool, group.planes[index], layers, tokens, heads, out))
    _copy([(pages, block)], _take)
    return block


def read_blocks(pool: KVPool, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
    """All KV of ``tokens`` that the pool stores: one block per group and plane, its layers, the heads of the layout's shard.

    ``out``: one array per block, as :func:`read_block` has it. Faster than plane by plane where planes share an array.
    """
    jobs = []
    given: Iterator[np.ndarray | None] = repeat(None) if out is None else iter(out)
    for group in pool.spec.groups:
        layers = LayerRange(group.first_layer, group.first_layer + group.num_layers)
        for index, plane in enumerate(group.planes):
            heads = pool.layout.heads_of(plane)
            pages = _Pages(pool, page_table, group, index, tokens, heads)
            values = _target(pool, plane, layers, tokens, heads, next(given))
            jobs.append((pages, KVBlock(plane.name, layers, tokens, heads, values)))
    _copy(jobs, _take)
    return tuple(block for _, block in jobs)


def write_block(pool: KVPool, page_table: np.ndarray, block: KVBlock) -> None:
    """Place ``block`` into the pages of ``page_table`` [P] integer; touches nothing outside the block's ranges. Raises ValueError."""
    write_blocks(pool, page_table, (block,))


def write_blocks(pool: KVPool, page_table: np.ndarray, blocks: Sequence[KVBlock]) -> None:
    """As :func:`write_block`, layer by layer: faster where planes share an array. Raises ValueError with nothing written."""
    jobs = []
    for block in blocks:
        group, index = check_block(pool.spec, block)
        pages = _Pages(pool, page_table, group, index, block.tokens, block.heads)
        if len(np.unique(pages.numbers)) != len(pages.numbers):
            raise ValueError(f"page_table: a page is named twice among those of {block.tokens}: {pages.numbers.tolist()}")
        jobs.append((pages, block))
    _copy(jobs, _put)


@dataclass(frozen=True)
class _Part:
    """Wire bytes ``[start, stop)`` of a layer <-> units ``which`` [N] intp of ``unit_bytes``, counted from the first stored byte."""

    start: int
    stop: int
    unit_bytes: int
    which: np.ndarray


class _Pages:
    """Where the tokens of one plane lie in the pages of a layer. Raises ValueError for ranges or pages outside the pool."""

    def __init__(self, pool: KVPool, page_table: np.ndarray, group: KVGroup, plane: int, tokens: TokenRange, heads: HeadRange) -> None:
        stored = pool.layout.heads_of(group.planes[plane])
        if heads.start < stored.start or heads.stop > stored.stop:
            raise ValueError(f"heads: given {heads}, the pool stores {stored}")
        self.numbers = _touched_pages(pool, page_table, tokens)
        self._pool, self._plane, self._tokens = pool, plane, tokens
        self._heads = slice(heads.start - stored.start, heads.stop - stored.start)

    def moves(self, block: KVBlock) -> Iterator[tuple[_Move, ...]]:
        """For each of the block's layers what to copy, in turns of about ``_TURN_BYTES``. Layers of equal strides are copied alike, so the
        work per layer is next to none: for a few hundred KB, microseconds of it would be felt.
        """
        wire = block.values.reshape(len(block.layers), -1).view(np.uint8)
        storages = [planes[self._plane] for planes in self._pool.planes[block.layers.start : block.layers.stop]]
        first = 0
        for strides, alike in groupby(storages, key=attrgetter("strides")):
            run = list(alike)
            rows = wire[first : first + len(run)]
            first += len(run)
            parts = []
            for part in _plan(run[0].view[:, :, self._heads], self.numbers, self._tokens):
                units = [storage.units(self._heads.start * strides[2], part.unit_bytes) for storage in run]
                values = rows[:, part.start : part.stop].view(np.dtype((np.void, part.unit_bytes)))
                step = max(1, _TURN_BYTES // part.unit_bytes)
                turns = [slice(i, i + step) for i in range(0, len(part.which), step)]
                parts += [list(zip(units, repeat(part.which[turn]), values[:, turn], strict=False)) for turn in turns]
            yield from zip(*parts, strict=True)


def _copy(jobs: Sequence[_Job], move: Callable[[_Move], None]) -> None:
    """Layer by layer, the jobs in turns."""
    by_layer: dict[int, list[tuple[_Move, ...]]] = {}
    for pages, block in jobs:
        if block.values.size:
            for layer, moves in enumerate(pages.moves(block), block.layers.start):
                by_layer.setdefault(layer, []).append(moves)
    for _, moves_of_jobs in sorted(by_layer.items()):
        for turn in zip_longest(*moves_of_jobs):
            for found in turn:
                if found is not None:
                    move(found)


def _take(move: _Move) -> None:
    units, which, values = move
    # Every index was checked; in mode "raise" numpy would go through a buffer of its own.
    units.take(which, None, values, "clip")


def _put(move: _Move) -> None:
    units, which, values = move
    units.put(which, values)


def _target(pool: KVPool, plane: KVPlane, layers: LayerRange, tokens: TokenRange, heads: HeadRange, out: np.ndarray | None) -> np.ndarray:
    """``out`` if it fits, a fresh array for None. Raises ValueError."""
    shape = (len(layers), len(tokens), len(heads), plane.head_dim)
    dtype = pool.spec.np_dtype_of(plane)
    if out is None:
        return empty_on_lines(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out: given {out.dtype}{list(out.shape)}, must be {dtype}{list(shape)}, C-contiguous and writable")
    return out


def _plan(view: np.ndarray, pages: np.ndarray, tokens: TokenRange) -> list[_Part]:
    """The parts that make up ``tokens`` of ``view`` [page, slot, head, dim]: whole pages where a page's order is the wire's, and tokens at
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

    def by_token(start: int, stop: int) -> _Part:
        positions = np.arange(start, stop)
        first = pages[positions // page_size - first_page] * page_stride + positions % page_size * slot_stride
        return copy(start, stop, first, piece, [page_stride, slot_stride], inner)

    def copy(start: int, stop: int, first: np.ndarray, piece: int, strides: list[int], inner: list[tuple[int, int]]) -> _Part:
        unit = math.gcd(piece, *strides, *(stride for _, stride in inner))
        for size, stride in [*inner, (piece // unit, unit)]:
            first = (first[:, None] + np.arange(size) * stride).reshape(-1)
        return _Part((start - tokens.start) * token_bytes, (stop - tokens.start) * token_bytes, unit, first // unit)

    whole_start, whole_stop = -(-tokens.start // page_size) * page_size, tokens.stop // page_size * page_size
    if page_size == 1 or inner or slot_stride != token_bytes or whole_start >= whole_stop:
        return [by_token(tokens.start, tokens.stop)]
    whole = pages[whole_start // page_size - first_page : whole_stop // page_size - first_page]
    copies = [by_token(tokens.start, whole_start)] if tokens.start < whole_start else []
    copies.append(copy(whole_start, whole_stop, whole * page_stride, page_size * token_bytes, [page_stride], []))
    if whole_stop < tokens.stop:
        copies.append(by_token(whole_stop, tokens.stop))
    return copies


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
