"""KV whose heads lie in several pools, one per tensor-parallel shard: read in the order of the model's heads, each head once, and written
wherever it is stored. A shard's place among the pools means nothing; only the heads that its layout names do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_block import check_block
from pddbridge.kv_convert import read_block, write_block
from pddbridge.kv_pool import KVPool
from pddbridge.kv_spec import HeadRange, KVPlane, LayerRange, TokenRange


def read_shards(pools: Sequence[KVPool], page_table: np.ndarray, tokens: TokenRange) -> tuple[KVBlock, ...]:
    """All KV of ``tokens``: for each group and plane one block per piece of heads, in the order of the heads.

    Of replicas, the first is read. Raises ValueError if a head is in no pool.
    """
    blocks = []
    for group in pools[0].spec.groups:
        layers = LayerRange(group.first_layer, group.first_layer + group.num_layers)
        for plane in group.planes:
            for pool, heads in _pieces(pools, plane):
                blocks.append(read_block(pool, page_table, plane.name, layers, tokens, heads))
    return tuple(blocks)


def write_shards(pools: Sequence[KVPool], page_table: np.ndarray, block: KVBlock) -> None:
    """Place ``block`` into every pool that stores heads of it. Raises ValueError, with nothing written, if one of them is in no pool."""
    group, index = check_block(pools[0].spec, block)
    wanted = set(range(block.heads.start, block.heads.stop))
    parts = []
    for pool in pools:
        stored = pool.layout.heads_of(group.planes[index])
        start, stop = max(stored.start, block.heads.start), min(stored.stop, block.heads.stop)
        if start < stop:
            wanted -= set(range(start, stop))
            parts.append((pool, HeadRange(start, stop)))
    _refuse_missing(wanted, group.planes[index])
    for pool, heads in parts:
        values = block.values[:, :, heads.start - block.heads.start : heads.stop - block.heads.start]
        write_block(pool, page_table, KVBlock(block.plane, block.layers, block.tokens, heads, np.ascontiguousarray(values)))


def _pieces(pools: Sequence[KVPool], plane: KVPlane) -> list[tuple[KVPool, HeadRange]]:
    """Who gives which heads: ascending, without gap or overlap."""
    pieces: list[tuple[KVPool, HeadRange]] = []
    done = 0
    for pool, stored in sorted(((pool, pool.layout.heads_of(plane)) for pool in pools), key=lambda pair: pair[1].start):
        if stored.start > done:
            break
        if stored.stop > done:
            pieces.append((pool, HeadRange(done, stored.stop)))
            done = stored.stop
    covered = {head for pool in pools for head in range(pool.layout.heads_of(plane).start, pool.layout.heads_of(plane).stop)}
    _refuse_missing(set(range(plane.num_heads)) - covered, plane)
    return pieces


def _refuse_missing(heads: set[int], plane: KVPlane) -> None:
    if heads:
        raise ValueError(f"pools: heads {sorted(heads)} of plane {plane.name!r} are in none of them")
