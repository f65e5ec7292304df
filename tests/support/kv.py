"""Builders for KV tests: values that name their own place, and a slow filler that knows the layouts independently of kv_convert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool
from pddbridge.kv_layout import KVLayout, head_major, interleaved_heads, token_major
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange

LAYOUTS = {"interleaved_heads": interleaved_heads, "head_major": head_major, "token_major": token_major}
BITS: dict[int, type[np.uint16] | type[np.uint32]] = {2: np.uint16, 4: np.uint32}


def bits(array: np.ndarray) -> np.ndarray:
    """Bit patterns, so that NaN equals itself."""
    return array.view(BITS[array.dtype.itemsize])


def coded_planes(spec: KVSpec, num_tokens: int) -> dict[str, np.ndarray]:
    """Plane name -> [layers, tokens, heads, dim] of a one-group spec. In float32 each value names its plane, layer, token, head, dim."""
    planes = {}
    for p, plane in enumerate(spec.groups[0].planes):
        shape = (spec.num_layers, num_tokens, plane.num_heads, plane.head_dim)
        layer, token, head, dim = np.indices(shape)
        code = (((p * 8 + layer) * 256 + token) * 16 + head) * 16 + dim
        planes[plane.name] = code.astype(np.float32).astype(spec.np_dtype)
    return planes


def random_planes(spec: KVSpec, num_tokens: int, seed: int) -> dict[str, np.ndarray]:
    """As coded_planes with random bit patterns, NaNs with payloads among them."""
    rng = np.random.default_rng(seed)
    kind = BITS[spec.np_dtype.itemsize]
    return {
        plane.name: rng.integers(
            0, np.iinfo(kind).max, (spec.num_layers, num_tokens, plane.num_heads, plane.head_dim), dtype=kind, endpoint=True
        ).view(spec.np_dtype)
        for plane in spec.groups[0].planes
    }


def cell(pool: KVPool, page_table: np.ndarray, layer: int, plane: int, token: int, head: int) -> np.ndarray:
    """View [dim] of one vector, by the layout's name and definition in the documentation."""
    page, slot = int(page_table[token // pool.layout.page_size]), token % pool.layout.page_size
    arrays = pool.arrays[layer]
    match pool.layout.name:
        case "interleaved_heads":
            return arrays[0][page, slot, 2 * head + plane]
        case "head_major":
            return arrays[plane][page, head, slot]
        case "token_major":
            return arrays[plane][page, slot, head]
    raise AssertionError(pool.layout.name)


def fill_slowly(
    pool: KVPool, page_table: np.ndarray, planes: dict[str, np.ndarray], layers: LayerRange, tokens: TokenRange, heads: HeadRange
) -> None:
    """Write a rectangle of every plane, vector by vector."""
    first = pool.layout.heads.start if pool.layout.heads else 0
    for p, values in enumerate(planes.values()):
        for layer in range(layers.start, layers.stop):
            for token in range(tokens.start, tokens.stop):
                for head in range(heads.start, heads.stop):
                    bits(cell(pool, page_table, layer, p, token, head - first))[...] = bits(values[layer, token, head])


def canary_pool(layout: KVLayout, spec: KVSpec, num_pages: int) -> KVPool:
    """A pool whose every byte is 0xA5."""
    pool = KVPool.zeros(layout, spec, num_pages)
    for arrays in pool.arrays:
        for array in arrays:
            bits(array)[...] = 0xA5A5A5A5 & np.iinfo(bits(array).dtype).max
    return pool


def same_pools(a: KVPool, b: KVPool) -> bool:
    """Whether every bit of two pools of one layout is equal."""
    pairs = zip(a.arrays, b.arrays, strict=True)
    return all(np.array_equal(bits(x), bits(y)) for xs, ys in pairs for x, y in zip(xs, ys, strict=True))


def blocks_of(spec: KVSpec, planes: dict[str, np.ndarray], tokens: TokenRange, heads: HeadRange | None = None) -> Iterator[KVBlock]:
    """One block per plane: all layers of ``tokens``."""
    for plane in spec.groups[0].planes:
        h = heads or HeadRange(0, plane.num_heads)
        values = np.ascontiguousarray(planes[plane.name][:, tokens.start : tokens.stop, h.start : h.stop])
        yield KVBlock(plane.name, LayerRange(0, spec.num_layers), tokens, h, values)
