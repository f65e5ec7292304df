"""Pages -> wire order -> pages, for any :class:`KVLayout`, page table and ranges. Pure numpy, bit-exact, each byte moved as a bit pattern.

Everything works on a :class:`KVPool`, host arrays that an engine owns or lends. The layout's axis names decide what is where;
the shape is only checked against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_block import check_block, locate_plane
from pddbridge.kv_layout import KVLayout
from pddbridge.kv_spec import HeadRange, KVGroup, KVSpec, LayerRange, TokenRange

# Copies are of bit patterns: NaN payloads survive, and numpy's own integer loops are faster than those of bfloat16.
_BITS: Final[dict[int, np.dtype[np.unsignedinteger]]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_CANONICAL: Final = ("page", "slot", "head", "dim")
# A run of consecutive pages is one strided copy; where runs are shorter than this on average, one gather per layer is faster
# (measured: strided copies win from about four pages on, a gather moves what it reads twice).
_MIN_PAGES_PER_RUN: Final = 4


@dataclass(frozen=True)
class KVPool:
    """``arrays[layer]``: the arrays of that layer, as ``layout.array_shapes`` says. Raises ValueError where they differ."""

    layout: KVLayout
    spec: KVSpec
    arrays: tuple[tuple[np.ndarray, ...], ...]

    def __post_init__(self) -> None:
        if self.layout.dtype != self.spec.dtype:
            raise ValueError(f"KVPool: layout dtype {self.layout.dtype!r} differs from spec dtype {self.spec.dtype!r}")
        if len(self.arrays) != self.spec.num_layers:
            raise ValueError(f"KVPool.arrays: given {len(self.arrays)} layers, the spec has {self.spec.num_layers}")
        for group in self.spec.groups:
            want = self.layout.array_shapes(group, self.num_pages)
            for layer in range(group.first_layer, group.first_layer + group.num_layers):
                given = tuple(array.shape for array in self.arrays[layer])
                if given != want:
                    raise ValueError(f"KVPool.arrays[{layer}]: given shapes {given}, layout {self.layout.name!r} says {want}")
                for array in self.arrays[layer]:
                    if array.dtype != self.spec.np_dtype:
                        raise ValueError(f"KVPool.arrays[{layer}]: given dtype {array.dtype}, the spec says {self.spec.dtype}")

    @staticmethod
    def zeros(layout: KVLayout, spec: KVSpec, num_pages: int) -> KVPool:
        """A pool of fresh arrays."""
        arrays = tuple(
            tuple(np.zeros(shape, spec.np_dtype) for shape in layout.array_shapes(group, num_pages))
            for group in spec.groups
            for _ in range(group.num_layers)
        )
        return KVPool(layout, spec, arrays)

    @property
    def num_pages(self) -> int:
        return int(self.arrays[0][0].shape[self.layout.axes.index("page")])


def read_block(pool: KVPool, page_table: np.ndarray, plane: str, layers: LayerRange, tokens: TokenRange, heads: HeadRange) -> KVBlock:
    """Copy a rectangle of ``plane`` out of the pages of ``page_table`` [P] integer: token t is in page ``page_table[t // page_size]``.

    ``layers`` must lie in one group. Raises ValueError for anything outside the pool.
    """
    group, plane_index = locate_plane(pool.spec, plane, layers)
    first_head = _check_heads(pool.layout, group, plane_index, heads)
    pages = _touched_pages(pool, page_table, tokens)
    shape = (len(layers), len(tokens), len(heads), group.planes[plane_index].head_dim)
    values = np.empty(shape, pool.spec.np_dtype)
    bits = values.view(_BITS[values.dtype.itemsize])
    moves = _plan(pages, tokens, pool.layout.page_size)
    for i, layer in enumerate(range(layers.start, layers.stop)):
        stored = _canonical_view(pool, layer, plane_index, len(group.planes))[:, :, first_head : first_head + len(heads)]
        for move in moves:
            _wire_side(bits[i], move)[...] = stored[move.pages, move.slots]
    return KVBlock(plane, layers, tokens, heads, values)


def write_block(pool: KVPool, page_table: np.ndarray, block: KVBlock) -> None:
    """Place ``block`` into the pages of ``page_table`` [P] integer; touches nothing outside the block's ranges. Raises ValueError."""
    group, plane_index = check_block(pool.spec, block)
    first_head = _check_heads(pool.layout, group, plane_index, block.heads)
    pages = _touched_pages(pool, page_table, block.tokens)
    if len(np.unique(pages)) != len(pages):
        raise ValueError(f"page_table: a page is named twice among those of {block.tokens}: {pages.tolist()}")
    bits = block.values.view(_BITS[block.values.dtype.itemsize])
    moves = _plan(pages, block.tokens, pool.layout.page_size)
    for i, layer in enumerate(range(block.layers.start, block.layers.stop)):
        stored = _canonical_view(pool, layer, plane_index, len(group.planes))[:, :, first_head : first_head + len(block.heads)]
        for move in moves:
            stored[move.pages, move.slots] = _wire_side(bits[i], move)


def read_blocks(pool: KVPool, page_table: np.ndarray, tokens: TokenRange) -> tuple[KVBlock, ...]:
    """All KV of ``tokens`` that the pool stores: one block per group and plane, its layers, the heads of the layout's shard."""
    return tuple(
        read_block(
            pool,
            page_table,
            plane.name,
            LayerRange(group.first_layer, group.first_layer + group.num_layers),
            tokens,
            pool.layout.heads_of(plane),
        )
        for group in pool.spec.groups
        for plane in group.planes
    )


@dataclass(frozen=True)
class _Move:
    """Wire tokens ``[start, stop)`` <-> ``[pages, slots]`` of the canonical view; ``paged``: (pages, slots) of the wire side."""

    start: int
    stop: int
    pages: int | slice | np.ndarray
    slots: slice
    paged: tuple[int, int] | None


def _plan(pages: np.ndarray, tokens: TokenRange, page_size: int) -> list[_Move]:
    """The copies that make up one layer: a partial first page, whole pages in as few copies as pays, a partial last page."""
    if not len(tokens):
        return []
    moves: list[_Move] = []
    first_page = tokens.start // page_size
    lead = tokens.start % page_size
    done = 0
    if lead:
        done = min(page_size - lead, len(tokens))
        moves.append(_Move(0, done, int(pages[0]), slice(lead, lead + done), None))
    whole_from = (tokens.start + done) // page_size - first_page
    num_whole = (len(tokens) - done) // page_size
    whole = pages[whole_from : whole_from + num_whole]
    if num_whole:
        cuts = (np.flatnonzero(np.diff(whole) != 1) + 1).tolist()
        runs = list(zip([0, *cuts], [*cuts, num_whole], strict=True))
        if len(runs) > 1 and num_whole < _MIN_PAGES_PER_RUN * len(runs):
            moves.append(_Move(done, done + num_whole * page_size, whole, slice(None), (num_whole, page_size)))
        else:
            for start, stop in runs:
                page = int(whole[start])
                moves.append(
                    _Move(
                        done + start * page_size,
                        done + stop * page_size,
                        slice(page, page + stop - start),
                        slice(None),
                        (stop - start, page_size),
                    )
                )
    done += num_whole * page_size
    if done < len(tokens):
        moves.append(_Move(done, len(tokens), int(pages[-1]), slice(0, len(tokens) - done), None))
    return moves


def _wire_side(layer_bits: np.ndarray, move: _Move) -> np.ndarray:
    """The move's tokens in one layer of a wire block [tokens, heads, dim], shaped as the pages are."""
    part = layer_bits[move.start : move.stop]
    return part if move.paged is None else part.reshape(*move.paged, *part.shape[1:])


def _canonical_view(pool: KVPool, layer: int, plane_index: int, num_planes: int) -> np.ndarray:
    """One plane of one layer as [page, slot, head, dim], bit patterns, without a copy."""
    arrays, axes = pool.arrays[layer], list(pool.layout.axes)
    array = arrays[0] if pool.layout.fused else arrays[plane_index]
    if "plane_head" in axes:
        axis = axes.index("plane_head")
        array = array[(slice(None),) * axis + (slice(plane_index, None, num_planes),)]
        axes[axis] = "head"
    elif "plane" in axes:
        axis = axes.index("plane")
        array = array[(slice(None),) * axis + (plane_index,)]
        del axes[axis]
    return array.view(_BITS[array.dtype.itemsize]).transpose([axes.index(name) for name in _CANONICAL])


def _check_heads(layout: KVLayout, group: KVGroup, plane_index: int, heads: HeadRange) -> int:
    """Index of ``heads.start`` in the stored shard."""
    stored = layout.heads_of(group.planes[plane_index])
    if heads.start < stored.start or heads.stop > stored.stop:
        raise ValueError(f"heads: given {heads}, the pool stores {stored}")
    return heads.start - stored.start


def _touched_pages(pool: KVPool, page_table: np.ndarray, tokens: TokenRange) -> np.ndarray:
    """The entries of ``page_table`` that ``tokens`` lie in, as int64."""
    if page_table.ndim != 1 or not np.issubdtype(page_table.dtype, np.integer):
        raise ValueError(f"page_table: given {page_table.dtype}{list(page_table.shape)}, must be one integer per page")
    size = pool.layout.page_size
    if tokens.stop > len(page_table) * size:
        raise ValueError(f"tokens: given {tokens}, the page table holds {len(page_table)} pages of {size}")
    if not len(tokens):
        return np.empty(0, np.int64)
    pages = page_table[tokens.start // size : (tokens.stop - 1) // size + 1].astype(np.int64)
    if pages.min() < 0 or pages.max() >= pool.num_pages:
        raise ValueError(f"page_table: entries must be in [0, {pool.num_pages}), given {pages.tolist()}")
    return pages
