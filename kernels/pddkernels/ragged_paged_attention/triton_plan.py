"""What a step's attention will do, decided once per step on the host and sent to the device in one copy: tiles, key ranges, page tables.

Imports no Triton, so that the choice of a path can be planned and tested where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch

from pddkernels.ragged_paged_attention.triton_tiles import Geometry, Tile, Tiles, next_power_of_two

ITEM_FIELDS: Final = 8
MERGE_FIELDS: Final = 4
_WORDS: Final = 4  # every array starts at a multiple of 16 bytes, which Triton's loads want to know
TABLE_COLUMNS: Final = 16  # page tables are padded to multiples of this, for the same reason


@dataclass(frozen=True)
class Work:
    """One launch: ``items`` [n, 8] i32 = (row, first token, tokens, first position, key begin, key end, partial, is split), padded with
    zeros, which are items of no token · ``merges`` [m, 4] i32 = (first token, tokens, first partial, partials), padded likewise, one for
    each tile whose keys are split · ``num_partials``, padded.
    """

    tile: Tile
    items: torch.Tensor
    merges: torch.Tensor
    num_partials: int


@dataclass(frozen=True)
class Plan:
    """``works``: per window of the model's layers the launches that attend it. All tensors are views of ``buffer`` [n] i32.

    ``slots`` [T or more] i32: page * page_size + place in the page of each new token, ``num_tokens`` [1] i32 of them valid.

    ``shape``: everything a launch's grid and arguments depend on; plans of one shape differ in ``buffer``'s values alone. What a captured
    graph takes is a plan whose sizes hold for any contexts: :mod:`triton_decode_plan`.
    """

    geometry: Geometry
    page_tables: torch.Tensor
    slots: torch.Tensor
    num_tokens: torch.Tensor
    works: Mapping[int | None, tuple[Work, ...]]
    buffer: torch.Tensor
    shape: tuple[int, ...]


def plan(
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    *,
    geometry: Geometry,
    tiles: Tiles,
    windows: Sequence[int | None],
    num_processors: int,
    device: torch.device,
) -> Plan:
    """Plan one ragged batch: ``row_starts`` [R+1], ``context_lens`` [R], ``page_tables`` [R, P] as in the engine contract (numpy, integer).

    ``windows``: those of the model's layers, None for full attention. ``num_processors``: of the device. Nothing waits for the device.
    """
    news = np.diff(row_starts).astype(np.int64)
    contexts = context_lens.astype(np.int64)
    is_few = news * geometry.group <= tiles.few.rows
    slots = new_slots(news, row_starts, contexts, page_tables, geometry.page_size)
    arrays: list[np.ndarray] = [_padded_tables(page_tables), _padded(slots[:, None]).reshape(-1), np.array([len(slots)], np.int32)]
    launches: list[tuple[int | None, Tile, int]] = []
    for window in dict.fromkeys(windows):
        for tile, rows in ((tiles.few, np.flatnonzero(is_few & (news > 0))), (tiles.many, np.flatnonzero(~is_few))):
            items = tile_items(rows, row_starts, news, contexts, tile.rows // geometry.group, window)
            items, merges = split(items, tile, geometry.num_kv_heads, num_processors)
            launches.append((window, tile, _bucket(int(merges[:, 3].sum()))))
            arrays += [_padded(items), _padded(merges)]
    buffer = packed(arrays, device).to(device, non_blocking=True)
    there = views(buffer, [array.shape for array in arrays])
    works: dict[int | None, tuple[Work, ...]] = {}
    for i, (window, tile, num_partials) in enumerate(launches):
        work = Work(tile, there[3 + 2 * i], there[4 + 2 * i], num_partials)
        works[window] = (*works.get(window, ()), work)
    shape = (*(size for array in arrays for size in array.shape), *(num_partials for *_, num_partials in launches))
    return Plan(geometry, there[0], there[1], there[2], works, buffer, shape)


def new_slots(news: np.ndarray, row_starts: np.ndarray, contexts: np.ndarray, page_tables: np.ndarray, page_size: int) -> np.ndarray:
    """int64 [T]: page * page_size + place in the page of each new token."""
    row = np.repeat(np.arange(len(news)), news)
    positions = np.arange(row_starts[-1], dtype=np.int64) + (contexts - row_starts[:-1])[row]
    return page_tables[row, positions // page_size].astype(np.int64) * page_size + positions % page_size


def tile_items(
    rows: np.ndarray, row_starts: np.ndarray, news: np.ndarray, contexts: np.ndarray, tile_tokens: int, window: int | None
) -> np.ndarray:
    """int64 [n, 8]: rows cut into tiles of up to ``tile_tokens`` tokens, key ranges whole."""
    num_tiles = -(-news[rows] // tile_tokens)
    row = np.repeat(rows, num_tiles)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile_tokens
    items = np.zeros((len(row), ITEM_FIELDS), np.int64)
    items[:, 0] = row
    items[:, 1] = row_starts[row] + offset
    items[:, 2] = np.minimum(tile_tokens, news[row] - offset)
    items[:, 3] = contexts[row] + offset
    items[:, 4] = 0 if window is None else np.maximum(0, items[:, 3] - window + 1)
    items[:, 5] = items[:, 3] + items[:, 2]
    return items


def split(items: np.ndarray, tile: Tile, num_kv_heads: int, num_processors: int) -> tuple[np.ndarray, np.ndarray]:
    """Items whose key ranges are cut where that fills the device or evens out its work, longest first, and the merges of those cut.

    Every range but a tile's first begins at a multiple of ``tile.keys``, which is what one pass of the kernel's loop takes.
    """
    first_block = items[:, 4] // tile.keys
    blocks = -(-items[:, 5] // tile.keys) - first_block
    share = max(1, -(-int(blocks.sum()) * num_kv_heads // (tile.programs * num_processors)))
    # To the nearest: cutting what is little more than a share in two would cost more partial results than it evens out.
    wanted = (2 * blocks + share) // (2 * share)
    pieces = np.maximum(1, np.minimum(wanted, blocks * tile.keys // tile.min_split_keys))
    size = -(-blocks // pieces)
    pieces = -(-blocks // np.maximum(1, size))  # rounding up may have left nothing for the last one
    source = np.repeat(np.arange(len(items)), pieces)
    piece = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut = items[source]
    begin = (first_block[source] + piece * size[source]) * tile.keys
    cut[:, 4] = np.maximum(items[source, 4], begin)
    cut[:, 5] = np.minimum(items[source, 5], begin + size[source] * tile.keys)
    is_split = pieces > 1
    first_partial = np.cumsum(np.where(is_split, pieces, 0)) - np.where(is_split, pieces, 0)
    cut[:, 6] = np.where(is_split[source], first_partial[source] + piece, 0)
    cut[:, 7] = is_split[source]
    merges = np.stack((items[:, 1], items[:, 2], first_partial, pieces), axis=1)[is_split]
    return cut[np.argsort(cut[:, 4] - cut[:, 5], kind="stable")], merges


def _bucket(count: int) -> int:
    """0, powers of two up to 64, then multiples of 64: few shapes, and little padding where padding costs."""
    return 0 if count == 0 else next_power_of_two(count) if count <= 64 else -(-count // 64) * 64


def _padded(array: np.ndarray) -> np.ndarray:
    out = np.zeros((_bucket(len(array)), array.shape[1]), np.int32)
    out[: len(array)] = array
    return out


def _padded_tables(page_tables: np.ndarray) -> np.ndarray:
    num_rows, num_pages = page_tables.shape
    width = TABLE_COLUMNS * _bucket(max(1, -(-num_pages // TABLE_COLUMNS)))
    out = np.zeros((_bucket(max(1, num_rows)), width), np.int32)
    out[:num_rows, :num_pages] = page_tables
    return out


def packed(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """int32 arrays in one buffer on the host, from where ``device`` fetches it without the host's waiting."""
    starts = _starts([array.shape for array in arrays])
    host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for start, array in zip(starts, arrays, strict=False):
        flat[start : start + array.size] = array.reshape(-1)
    return host


def views(buffer: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """What :func:`packed` put there, of arrays of ``shapes``."""
    places = zip(_starts(shapes), shapes, strict=False)
    return [buffer[start : start + math.prod(shape)].view(shape) for start, shape in places]


def _starts(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where each array begins, and the buffer's size."""
    return [0, *accumulate(-(-math.prod(shape) // _WORDS) * _WORDS for shape in shapes)]
