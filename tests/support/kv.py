"""Builders for KV tests: values that name their own place, and a slow filler that knows the layouts independently of kv_convert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool
from pddbridge.kv_layout import KVLayout
from pddbridge.kv_layout_catalogue import GQA_LAYOUTS
from pddbridge.kv_sender import OutgoingFrame, Sender
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange

LAYOUTS = GQA_LAYOUTS
BITS: dict[int, type[np.uint8] | type[np.uint16] | type[np.uint32]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
Where = int | np.ndarray


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
        planes[plane.name] = code.astype(np.float32).astype(spec.np_dtype_of(plane))
    return planes


def random_planes(spec: KVSpec, num_tokens: int, seed: int) -> dict[str, np.ndarray]:
    """As coded_planes with random bit patterns, NaNs with payloads among them."""
    rng = np.random.default_rng(seed)
    planes = {}
    for plane in spec.groups[0].planes:
        dtype = spec.np_dtype_of(plane)
        kind = BITS[dtype.itemsize]
        shape = (spec.num_layers, num_tokens, plane.num_heads, plane.head_dim)
        planes[plane.name] = rng.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True).view(dtype)
    return planes


def _definition(pool: KVPool, group_plane: int, page: Where, slot: Where, head: Where) -> tuple[int, tuple[Where | slice, ...]]:
    """Which array of a layer, and the index in it of the vectors [..., dim] at these pages, slots and heads (those of the shard), by the
    layout's documentation, not by its axis names. Planes beyond the second (scales) have a second array where planes are fused.
    """
    layout, planes = pool.layout, pool.spec.groups[0].planes
    dim = planes[group_plane].head_dim
    which, plane = divmod(group_plane, 2)
    row = 2 * head + plane
    match layout.name:
        case "head_major":
            return group_plane, (page, head, slot)
        case "token_major":
            return group_plane, (page, slot, head)
        case "interleaved_heads":
            return which, (page, slot, row)
        case "vllm_nhd":
            return which, (plane, page, slot, head)
        case "vllm_hnd":
            return which, (plane, page, head, slot)
        case "vllm_paged_nhd":
            return which, (page, plane, slot, head)
        case "vllm_paged_hnd":
            return which, (page, plane, head, slot)
        case "tpu_ragged":
            return which, (page, slot, row, slice(dim))
        case "tpu_ragged_packed":
            return which, (page, slot, row // layout.pack, row % layout.pack, slice(dim))
        case "tpu_ragged_dim64":
            return which, (page, slot, head // layout.pack, head % layout.pack, slice(plane * dim, plane * dim + dim))
        case "vllm_mla":
            start = plane * planes[0].head_dim
            return 0, (page, slot, slice(start, start + dim))
        case "tpu_mla":
            start = plane * (-(-planes[0].head_dim // 128) * 128)
            return 0, (page, slot // layout.pack, slot % layout.pack, slice(start, start + dim))
    raise AssertionError(layout.name)


def cell(pool: KVPool, page_table: np.ndarray, layer: int, plane: int, token: int, head: int) -> np.ndarray:
    """View [dim] of one vector, by the layout's name and definition in the documentation."""
    page, slot = divmod(token, pool.layout.page_size)
    which, index = _definition(pool, plane, int(page_table[page]), slot, head)
    return pool.arrays[layer][which][index]


def fill_slowly(
    pool: KVPool,
    page_table: np.ndarray,
    planes: dict[str, np.ndarray],
    layers: LayerRange,
    tokens: TokenRange,
    heads: HeadRange,
    only: str | None = None,
) -> None:
    """Write a rectangle of every plane (of as many heads as it has), or of plane ``only``, where the layout's documentation says."""
    first = pool.layout.heads.start if pool.layout.heads else 0
    positions = np.arange(tokens.start, tokens.stop)[:, None]
    size = pool.layout.page_size
    page, slot = np.asarray(page_table)[positions // size], positions % size
    for p, (name, values) in enumerate(planes.items()):
        if only not in (None, name):
            continue
        head = np.arange(heads.start, min(heads.stop, values.shape[2]))
        which, index = _definition(pool, p, page, slot, head[None, :] - first)
        for layer in range(layers.start, layers.stop):
            stored = bits(pool.arrays[layer][which])
            wanted = bits(values[layer])[tokens.start : tokens.stop, head]
            stored[index] = wanted


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


def frames_of(sender: Sender) -> list[OutgoingFrame]:
    """All that it would send now."""
    frames = []
    while (frame := sender.next_frame()) is not None:
        frames.append(frame)
    return frames
