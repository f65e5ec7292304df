"""How the Triton kernels of this op cut their work, by head size, dtype and what a GPU's processor holds. Imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Gpu:
    """What the host must know of a device. ``family``: the nearest of the targets below, whose tiles it gets ·
    ``shared_memory_bytes``: what one program may have at most.
    """

    family: str
    num_processors: int
    shared_memory_bytes: int


# Processors as of A100 (A100 white paper), H100 SXM (H100 white paper) and MI300X (CDNA 3 white paper); shared memory per thread block from
# the CUDA C++ programming guide's table of compute capabilities, LDS per compute unit from the CDNA 3 instruction set manual.
SM80: Final = Gpu("sm80", 108, 163 * 1024)
SM90: Final = Gpu("sm90", 132, 227 * 1024)
GFX942: Final = Gpu("gfx942", 304, 64 * 1024)


@dataclass(frozen=True)
class Geometry:
    """What attention is planned and compiled for: one engine has one. ``itemsize``: bytes of the wider of query and KV dtype."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    itemsize: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """The matrix products' head size: a power of two, no less than they take."""
        return max(16, next_power_of_two(self.head_dim))


@dataclass(frozen=True)
class Tile:
    """A program's share of work: ``rows`` rows of queries (a row is one query head of one token) against ``keys`` keys at a time.

    ``programs``: how many of these a processor holds at once, roughly; work is cut so that all of them have some · ``min_split_keys``: a
    key range is not cut into shorter pieces than this, since each piece costs a partial result.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    min_split_keys: int


@dataclass(frozen=True)
class Tiles:
    """``few``: for rows of few new tokens, which are bound by reading keys · ``many``: for chunks and longer extends, bound by products."""

    few: Tile
    many: Tile


MAX_GROUP: Final = 64
MAX_HEAD_DIM: Final = 256

# (rows, keys, warps) of tiles for chunks by family and padded head size, 16-bit: the largest that compiled without spilling a register for
# every model of pddkernels.shapes. From 64 rows on sm_90 takes warp-group products, whose operands are in shared memory.
_MANY: Final[dict[str, dict[int, tuple[int, int, int]]]] = {
    "sm90": {64: (128, 64, 8), 128: (128, 64, 8), 256: (64, 32, 8)},
    "sm80": {64: (128, 64, 8), 128: (128, 32, 8), 256: (64, 32, 8)},
    "gfx942": {64: (128, 64, 4), 128: (128, 32, 4), 256: (64, 32, 4)},
}
# float32 products run without tensor cores, on operands in registers: low tiles, for exact tests rather than speed.
_MANY_FLOAT32: Final = (16, 16, 8)


def next_power_of_two(n: int) -> int:
    """The smallest that is no less than ``n``."""
    return 1 << max(0, n - 1).bit_length()


def tiles_for(geometry: Geometry, gpu: Gpu) -> Tiles:
    """Tiles that fit the GPU's shared memory and, as compiled for the targets above, its registers.

    Raises ValueError for a geometry without tiles, which :func:`unsupported` names first.
    """
    reason = unsupported(geometry)
    if reason is not None:
        raise ValueError(reason)
    dim, is_half = geometry.padded_dim, geometry.itemsize <= 2
    rows, keys, warps = _MANY[gpu.family][max(64, dim)] if is_half else _MANY_FLOAT32
    group_rows = next_power_of_two(geometry.group)
    few_keys, few_warps = (32 if dim == 256 else 64, 4) if is_half else _MANY_FLOAT32[1:]
    return Tiles(
        few=_tile(geometry, gpu, max(16, group_rows), few_keys, few_warps, programs=3, min_split_keys=256),
        many=_tile(geometry, gpu, max(rows, group_rows), keys, warps, programs=1, min_split_keys=1024),
    )


def unsupported(geometry: Geometry) -> str | None:
    """Why the kernels cannot serve a geometry, None if they can."""
    if geometry.head_dim > MAX_HEAD_DIM:
        return f"head_dim: given {geometry.head_dim}, allowed: up to {MAX_HEAD_DIM}"
    if geometry.group > MAX_GROUP:
        return f"heads / kv_heads: given {geometry.group}, allowed: up to {MAX_GROUP}"
    return None


def _tile(geometry: Geometry, gpu: Gpu, rows: int, keys: int, num_warps: int, *, programs: int, min_split_keys: int) -> Tile:
    stage_bytes = 2 * keys * geometry.padded_dim * geometry.itemsize
    query_bytes = rows * geometry.padded_dim * geometry.itemsize
    fitting = (gpu.shared_memory_bytes - query_bytes) // stage_bytes
    # A stage is a block of keys and values in flight. AMD's compiler keeps one of them in registers.
    num_stages = min(2, 1 + fitting) if gpu.family == "gfx942" else min(3, fitting)
    return Tile(rows, keys, num_warps, max(1, num_stages), programs, min_split_keys)
