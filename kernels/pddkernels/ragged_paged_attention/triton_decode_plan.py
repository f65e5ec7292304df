"""A plan for decode rows that stays where it is: what a captured graph of a step reads, filled anew before each replay.

A graph has the grids and addresses of its capture. So the sizes here are bounds that hold for any contexts, and what a step leaves of them
is zeros, which are items and merges of no token: their programs end at once. Imports no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from pddkernels.ragged_paged_attention.triton_plan import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    TABLE_COLUMNS,
    Plan,
    Work,
    new_slots,
    packed,
    split,
    tile_items,
    views,
)
from pddkernels.ragged_paged_attention.triton_tiles import Geometry, Tile, Tiles

_NUM_SHARED: Final = 2  # arrays before those of the windows: slots and how many of them


@dataclass(frozen=True)
class Capacity:
    """Of one launch over decode rows: at most so many items, merges and partial results, see ``triton_plan.Work``."""

    items: int
    merges: int
    partials: int


def capacity(num_rows: int, most_keys: int, tile: Tile, num_kv_heads: int, num_processors: int) -> Capacity:
    """What :func:`triton_plan.split` makes at most of ``num_rows`` rows that see up to ``most_keys`` keys each.

    A row of x shares is cut in x + 1/2 pieces, rounded down, at least one, and the shares of all rows are ``fill`` together, the programs
    that the device holds over KV heads. So rows have ``num_rows + fill`` pieces at most. A row that is cut has 3/2 shares or more: there
    are ``2/3 fill`` of them, and their pieces are ``4/3 fill``. Nor are pieces shorter than ``tile.min_split_keys``.
    """
    programs = tile.programs * num_processors
    # A window may begin inside a block of keys.
    blocks = -(-most_keys // tile.keys) + 1
    most_pieces = max(1, blocks * tile.keys // tile.min_split_keys)
    items = min(num_rows + programs // num_kv_heads, num_rows * most_pieces)
    if most_pieces == 1:
        return Capacity(items, 0, 0)
    merges = min(num_rows, 2 * programs // (3 * num_kv_heads))
    return Capacity(items, merges, min(num_rows * most_pieces, 4 * programs // (3 * num_kv_heads)))


class DecodePlan:
    """Up to ``num_rows`` rows of one new token each, of up to ``max_context_tokens`` tokens with it. ``plan``: its tensors stay; rows that
    a step does not fill are stored nowhere and attend to nothing, their results are arbitrary.
    """

    def __init__(
        self,
        num_rows: int,
        max_context_tokens: int,
        *,
        geometry: Geometry,
        tiles: Tiles,
        windows: Sequence[int | None],
        num_processors: int,
        device: torch.device,
    ) -> None:
        self._tile, self._num_processors = tiles.few, num_processors
        self._capacities = {
            window: capacity(
                num_rows, min(max_context_tokens, window or max_context_tokens), tiles.few, geometry.num_kv_heads, num_processors
            )
            for window in dict.fromkeys(windows)
        }
        self._shapes: list[tuple[int, ...]] = [(num_rows,), (1,)]
        for size in self._capacities.values():
            self._shapes += [(size.items, ITEM_FIELDS), (size.merges, MERGE_FIELDS)]
        pages = -(-max_context_tokens // geometry.page_size)
        tables = torch.zeros((num_rows, -(-pages // TABLE_COLUMNS) * TABLE_COLUMNS), dtype=torch.int32, device=device)
        buffer = packed([np.zeros(shape, np.int32) for shape in self._shapes], device).to(device)
        slots, num_tokens, *work_arrays = views(buffer, self._shapes)
        works = {
            window: (Work(tiles.few, work_arrays[2 * i], work_arrays[2 * i + 1], size.partials),)
            for i, (window, size) in enumerate(self._capacities.items())
        }
        shape = (*(size for array_shape in self._shapes for size in array_shape), *tables.shape)
        self.plan = Plan(geometry, tables, slots, num_tokens, works, buffer, shape)

    def fill(self, context_lens: np.ndarray, page_tables: np.ndarray) -> None:
        """Plan a step: ``context_lens`` [R], ``page_tables`` [R, P] as in the engine contract. What the device was told before reads the
        former plan, what it is told after reads this one; the host waits for neither.
        """
        geometry, count = self.plan.geometry, len(context_lens)
        rows, ones, contexts = np.arange(count), np.ones(count, np.int64), context_lens.astype(np.int64)
        starts = np.arange(count + 1)
        arrays = [np.zeros(shape, np.int32) for shape in self._shapes]
        arrays[0][:count] = new_slots(ones, starts, contexts, page_tables, geometry.page_size)
        arrays[1][0] = count
        for i, (window, size) in enumerate(self._capacities.items()):
            whole = tile_items(rows, starts, ones, contexts, self._tile.rows // geometry.group, window)
            items, merges = split(whole, self._tile, geometry.num_kv_heads, self._num_processors)
            assert int(merges[:, 3].sum()) <= size.partials
            arrays[_NUM_SHARED + 2 * i][: len(items)] = items
            arrays[_NUM_SHARED + 2 * i + 1][: len(merges)] = merges
        device = self.plan.buffer.device
        self.plan.buffer.copy_(packed(arrays, device), non_blocking=True)
        # Of tables that are as wide as the longest context, what this step's longest needs. No item reads what is beyond its own row's.
        width = int(contexts.max()) // geometry.page_size + 1
        tables = packed([np.ascontiguousarray(page_tables[:, :width], np.int32)], device)[: count * width].view(count, width)
        self.plan.page_tables[:count, :width].copy_(tables, non_blocking=True)
