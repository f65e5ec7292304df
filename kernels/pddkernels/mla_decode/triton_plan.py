"""How the Triton kernel of multi-head latent attention cuts its work: the plan of the other attention, with groups of heads in the place
of KV heads. Imports no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from pddkernels.ragged_paged_attention.triton_plan import Plan, plan
from pddkernels.ragged_paged_attention.triton_tiles import Geometry, Gpu, Tile, Tiles, next_power_of_two


@dataclass(frozen=True)
class LatentShape:
    """``itemsize``: bytes of the wider of query and KV dtype."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    page_size: int
    itemsize: int


# (most rows, keys, warps, stages, programs per processor) of a tile, 16-bit: a row's accumulator is as wide as the latent, so rows are what
# registers allow. With 512 + 64 values, 64 rows would take sm_90's warp-group products, and spill; 32 do neither.
_TILES: Final[dict[str, tuple[int, int, int, int, int]]] = {
    "sm90": (32, 32, 8, 3, 2),
    "sm80": (32, 32, 8, 3, 1),
    "gfx942": (32, 16, 4, 2, 1),
}
_TILE_FLOAT32: Final = (16, 16, 8, 2, 1)


def unsupported(shape: LatentShape) -> str | None:
    """Why the kernel cannot serve a shape, None if it can."""
    for name, dim in (("latent_dim", shape.latent_dim), ("rope_dim", shape.rope_dim)):
        if dim < 16 or dim != next_power_of_two(dim):
            return f"{name}: given {dim}, allowed: powers of two from 16"
    return None


def tile_for(shape: LatentShape, gpu: Gpu) -> Tile:
    rows, keys, num_warps, num_stages, programs = _TILES[gpu.family] if shape.itemsize <= 2 else _TILE_FLOAT32
    rows = min(rows, max(16, next_power_of_two(shape.num_heads)))
    return Tile(rows, keys, num_warps, num_stages, programs, min_split_keys=256)


def plan_mla(
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    *,
    shape: LatentShape,
    tile: Tile,
    num_processors: int,
    device: torch.device,
) -> Plan:
    """Plan one ragged batch, arrays as in the engine contract (numpy, integer).

    The plan's ``num_kv_heads`` are groups of heads that share a tile; each group reads all latents. Raises ValueError for a shape that the
    kernel cannot serve, or heads that do not fill their groups.
    """
    reason = unsupported(shape)
    if reason is not None:
        raise ValueError(reason)
    num_groups = max(1, shape.num_heads // tile.rows)
    if shape.num_heads % num_groups:
        raise ValueError(f"num_heads: given {shape.num_heads}, allowed: up to {tile.rows}, or a multiple of it")
    geometry = Geometry(shape.num_heads, num_groups, shape.latent_dim, shape.page_size, shape.itemsize)
    return plan(
        row_starts,
        context_lens,
        page_tables,
        geometry=geometry,
        tiles=Tiles(few=tile, many=tile),
        windows=(None,),
        num_processors=num_processors,
        device=device,
    )
