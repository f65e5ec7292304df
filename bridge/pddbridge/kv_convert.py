"""Pages -> wire order -> pages, for any :class:`KVPool`, page table and ranges. Bit-exact, each byte moved once.

A copy is of *units*: the longest pieces that are contiguous both in the pages and on the wire (one head of one token; all heads of a
token; a whole page). What moves them is the pool's: ``pddbridge.native.moves``, one call for all, or numpy. ``numpy.take`` and
``numpy.put`` move units by index, one ``memmove`` each: unlike a strided or a fancy-indexed assignment they neither loop over values nor
make a copy in between. Either way scattered pages cost what consecutive ones do (``benchmarks/kv_convert.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat, zip_longest
from typing import Final, TypeAlias

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_block import check_block, locate_plane
from pddbridge.kv_pool import KVPool, PlaneStorage, empty_on_lines
from pddbridge.kv_spec import HeadRange, KVGroup, KVPlane, LayerRange, TokenRange
from pddbridge.native.moves import MOVE, NativeMoves

__all__ = ["KVPool", "read_block", "read_blocks", "write_block", "write_blocks"]

# Planes that share an array are copied in turns of this size, so that a cache line which holds both is fetched once: well under a
# last-level cache, and so much over a call's cost that this is not felt.
_TURN_BYTES: Final = 1 << 20

# Units [U] of the pages as void, which of them [N] intp, and the values [N] void on the wire.
_Move: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
_Job: TypeAlias = "tuple[_Pages, KVBlock]"
# By tokens, and by strides, shape and heads of a plane's view.
_Plans: TypeAlias = "dict[tuple[TokenRange, tuple[int, ...], tuple[int, ...], int, int], list[_Part]]"


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
    pages = _Pages(pool, page_table, group, index, tokens, heads, {})
    block = KVBlock(plane, layers, tokens, heads, _target(pool, group.planes[index], layers, tokens, heads, out))
    _copy(pool, [(pages, block)], to_wire=True, fresh=out is None)
    return block


def read_blocks(pool: KVPool, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
    """All KV of ``tokens`` that the pool stores: one block per group and plane, its layers, the heads of the layout's shard.

    ``out``: one array per block, as :func:`read_block` has it. Faster than plane by plane where planes share an array.
    """
    jobs: list[_Job] = []
    plans: _Plans = {}
    given: Iterator[np.ndarray | None] = repeat(None) if out is None else iter(out)
    for group in pool.spec.groups:
        layers = LayerRange(group.first_layer, group.first_layer + group.num_layers)
        for index, plane in enumerate(group.planes):
            heads = pool.layout.heads_of(plane)
            pages = _Pages(pool, page_table, group, index, tokens, heads, plans)
            values = _target(pool, plane, layers, tokens, heads, next(given))
            jobs.append((pages, KVBlock(plane.name, layers, tokens, heads, values)))
    _copy(pool, jobs, to_wire=True, fresh=out is None)
    return tuple(block for _, block in jobs)


def write_block(pool: KVPool, page_table: np.ndarray, block: KVBlock) -> None:
    """Place ``block`` into the pages of ``page_table`` [P] integer; touches nothing outside the block's ranges. Raises ValueError."""
    write_blocks(pool, page_table, (block,))


def write_blocks(pool: KVPool, page_table: np.ndarray, blocks: Sequence[KVBlock]) -> None:
    """As :func:`write_block`, layer by layer: faster where planes share an array. Raises ValueError with nothing written."""
    jobs: list[_Job] = []
    plans: _Plans = {}
    for block in blocks:
        group, index = check_block(pool.spec, block)
        pages = _Pages(pool, page_table, group, index, block.tokens, block.heads, plans)
        if len(np.unique(pages.numbers)) != len(pages.numbers):
            raise ValueError(f"page_table: a page is named twice among those of {block.tokens}: {pages.numbers.tolist()}")
        jobs.append((pages, block))
    _copy(pool, jobs, to_wire=False)


@dataclass(frozen=True)
class _Part:
    """Wire bytes ``[start, stop)`` of a layer <-> units ``which`` [N] intp of ``unit_bytes``, counted from the first stored byte."""

    start: int
    stop: int
    unit_bytes: int
    which: np.ndarray

    @cached_property
    def last(self) -> int:
        """The largest of ``which``, none of which is negative."""
        assert self.which.dtype == np.int64
        assert self.which.flags.c_contiguous
        assert self.which.min() >= 0
        return int(self.which.max())


@dataclass(frozen=True)
class _Run:
    """Layers of a block, one after the other from its layer ``first`` on, whose pages have equal strides, so that ``parts`` are the same.
    ``places`` as :class:`pddbridge.kv_pool.LayerRun` · ``offset``: bytes from a plane's first stored byte to the block's first head.
    """

    first: int
    storages: Sequence[PlaneStorage]
    places: np.ndarray
    offset: int
    parts: list[_Part]


class _Pages:
    """Where the tokens of one plane lie in the pages of a layer. ``plans``: of this page table, shared by planes that lie alike. Raises
    ValueError for ranges or pages outside the pool.
    """

    def __init__(
        self, pool: KVPool, page_table: np.ndarray, group: KVGroup, plane: int, tokens: TokenRange, heads: HeadRange, plans: _Plans
    ) -> None:
        stored = pool.layout.heads_of(group.planes[plane])
        if heads.start < stored.start or heads.stop > stored.stop:
            raise ValueError(f"heads: given {heads}, the pool stores {stored}")
        self.numbers = _touched_pages(pool, page_table, tokens)
        self._pool, self._plane, self._tokens, self._plans = pool, plane, tokens, plans
        self._heads = slice(heads.start - stored.start, heads.stop - stored.start)

    def runs(self, block: KVBlock) -> Iterator[_Run]:
        """All layers of ``block``. Layers of equal strides are copied alike, so the work per layer is next to none: for a few hundred KB,
        microseconds of it would be felt.
        """
        for run in self._pool.runs[self._plane]:
            start, stop = max(run.start, block.layers.start), min(run.start + len(run.storages), block.layers.stop)
            if start >= stop:
                continue
            alike = run.storages[start - run.start : stop - run.start]
            view = alike[0].view
            key = (self._tokens, view.strides, view.shape, self._heads.start, self._heads.stop)
            if key not in self._plans:
                self._plans[key] = _plan(view[:, :, self._heads], self.numbers, self._tokens)
            places = run.places[start - run.start : stop - run.start]
            yield _Run(start - block.layers.start, alike, places, self._heads.start * view.strides[2], self._plans[key])

    def moves(self, block: KVBlock) -> Iterator[tuple[_Move, ...]]:
        """For each of the block's layers what numpy is to copy, in turns of about ``_TURN_BYTES``."""
        wire = block.values.reshape(len(block.layers), -1).view(np.uint8)
        for run in self.runs(block):
            rows = wire[run.first : run.first + len(run.storages)]
            parts = []
            for part in run.parts:
                units = [storage.units(run.offset, part.unit_bytes) for storage in run.storages]
                values = rows[:, part.start : part.stop].view(np.dtype((np.void, part.unit_bytes)))
                step = max(1, _TURN_BYTES // part.unit_bytes)
                turns = [slice(i, i + step) for i in range(0, len(part.which), step)]
                parts += [list(zip(units, repeat(part.which[turn]), values[:, turn], strict=False)) for turn in turns]
            yield from zip(*parts, strict=True)


def _copy(pool: KVPool, jobs: Sequence[_Job], *, to_wire: bool, fresh: bool = False) -> None:
    """Layer by layer, the jobs in turns. ``fresh``: into memory that was allocated for it."""
    if (native := native_of(pool)) is not None:
        _copy_natively(native, jobs, to_wire, fresh)
        return
    move = _take if to_wire else _put
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


def native_of(pool: KVPool) -> NativeMoves | None:
    """What moves the pool's units if numpy does not."""
    return pool.native


def _copy_natively(native: NativeMoves, jobs: Sequence[_Job], to_wire: bool, fresh: bool) -> None:
    moves, kept, num_bytes = [], [], 0
    for pages, block in jobs:
        if not block.values.size:
            continue
        wire, layer_bytes = block.values.ctypes.data, block.values.nbytes // len(block.layers)
        num_bytes += block.values.nbytes
        for run in pages.runs(block):
            first_wire = wire + run.first * layer_bytes
            layers = (block.layers.start + run.first, len(run.storages), run.places.ctypes.data, run.offset)
            smallest = int(run.places[:, 1].min())
            for part in run.parts:
                # The call takes addresses, so what numpy would notice has to be true.
                assert run.offset + (part.last + 1) * part.unit_bytes <= smallest
                moves.append((*layers, first_wire + part.start, layer_bytes, part.which.ctypes.data, len(part.which), part.unit_bytes))
            kept.append(run)
    if moves:
        native.make(np.array(moves, MOVE), num_bytes, to_wire=to_wire, fresh=fresh)


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
