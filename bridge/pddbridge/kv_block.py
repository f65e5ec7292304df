"""KV blocks: which plane of which group a block belongs to, whether it is well formed, and how it is cut to the size of a frame."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, KVGroup, KVSpec, LayerRange, TokenRange

_LINE_BYTES: Final = 64


def locate_plane(spec: KVSpec, plane: str, layers: LayerRange) -> tuple[KVGroup, int]:
    """The group that ``layers`` lie in and the index of ``plane`` in it. Raises ValueError if there is none."""
    for group in spec.groups:
        if group.first_layer <= layers.start and layers.stop <= group.first_layer + group.num_layers:
            names = [p.name for p in group.planes]
            if plane not in names:
                raise ValueError(f"plane: given {plane!r}, allowed {names} for {layers}")
            return group, names.index(plane)
    raise ValueError(f"layers: {layers} lies in no group of the spec, which has {spec.num_layers} layers in {len(spec.groups)} groups")


def check_block(spec: KVSpec, block: KVBlock) -> tuple[KVGroup, int]:
    """As :func:`locate_plane`, and checks ranges, shape, dtype and order of ``block.values`` against ``spec``. Raises ValueError."""
    group, plane_index = locate_plane(spec, block.plane, block.layers)
    plane = group.planes[plane_index]
    if block.heads.stop > plane.num_heads:
        raise ValueError(f"KVBlock.heads: given {block.heads}, plane {plane.name!r} has {plane.num_heads} heads")
    want = (len(block.layers), len(block.tokens), len(block.heads), plane.head_dim)
    if block.values.shape != want or block.values.dtype != spec.np_dtype_of(plane):
        given = f"{block.values.dtype}{list(block.values.shape)}"
        raise ValueError(f"KVBlock.values: given {given}, its ranges and the spec say {spec.dtype_of(plane)}{list(want)}")
    if not block.values.flags.c_contiguous:
        raise ValueError("KVBlock.values: must be C-contiguous")
    return group, plane_index


def split_block(block: KVBlock, max_bytes: int) -> Iterator[KVBlock]:
    """Cut ``block`` into blocks of at most ``max_bytes``, in wire order, without copying: each part is contiguous in the whole.

    By layers; a layer that is too large by tokens; a token that is too large by heads. An empty block gives nothing. Raises ValueError
    when one head of one token is larger than ``max_bytes``.
    """
    if 0 < block.values.nbytes <= max_bytes:
        yield block
        return
    num_tokens, num_heads = len(block.tokens), len(block.heads)
    head_bytes = block.values.shape[-1] * block.values.dtype.itemsize
    if head_bytes > max_bytes:
        raise ValueError(f"split_block: one head of one token has {head_bytes} bytes, max_bytes is {max_bytes}")
    if not num_tokens:
        return
    token_bytes = num_heads * head_bytes
    layers_at_once = max(1, max_bytes // (num_tokens * token_bytes))
    tokens_at_once = num_tokens if num_tokens * token_bytes <= max_bytes else max(1, max_bytes // token_bytes)
    heads_at_once = num_heads if token_bytes <= max_bytes else max_bytes // head_bytes
    for layer in range(0, len(block.layers), layers_at_once):
        layer_stop = min(layer + layers_at_once, len(block.layers))
        for token in range(0, num_tokens, tokens_at_once):
            token_stop = min(token + tokens_at_once, num_tokens)
            for head in range(0, num_heads, heads_at_once):
                head_stop = min(head + heads_at_once, num_heads)
                yield KVBlock(
                    block.plane,
                    LayerRange(block.layers.start + layer, block.layers.start + layer_stop),
                    TokenRange(block.tokens.start + token, block.tokens.start + token_stop),
                    HeadRange(block.heads.start + head, block.heads.start + head_stop),
                    block.values[layer:layer_stop, token:token_stop, head:head_stop],
                )


def room_for(spec: KVSpec, num_tokens: int) -> int:
    """Bytes that :func:`arrays_in` needs for ``num_tokens``."""
    return sum(_on_lines(math.prod(shape) * dtype.itemsize) for shape, dtype in _whole_blocks(spec, num_tokens))


def arrays_in(memory: np.ndarray, spec: KVSpec, num_tokens: int) -> tuple[np.ndarray, ...]:
    """Where to make all KV of ``num_tokens``: one array [layers, tokens, heads, dim] per group and plane, all heads, one after the other in
    ``memory`` uint8 [``room_for``], each beginning on a cache line if that does.
    """
    arrays, start = [], 0
    for shape, dtype in _whole_blocks(spec, num_tokens):
        num_bytes = math.prod(shape) * dtype.itemsize
        arrays.append(memory[start : start + num_bytes].view(dtype).reshape(shape))
        start += _on_lines(num_bytes)
    return tuple(arrays)


def check_out(spec: KVSpec, num_tokens: int, out: Sequence[np.ndarray]) -> None:
    """Raises ValueError unless ``out`` is what :func:`arrays_in` gives: writable, C-contiguous."""
    want = list(_whole_blocks(spec, num_tokens))
    if len(out) != len(want):
        raise ValueError(f"out: given {len(out)} arrays, {len(want)} are needed")
    for index, (array, (shape, dtype)) in enumerate(zip(out, want, strict=True)):
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous or not array.flags.writeable:
            given = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"out[{index}]: given {given}, must be {dtype}{list(shape)}, C-contiguous and writable")


def _whole_blocks(spec: KVSpec, num_tokens: int) -> Iterator[tuple[tuple[int, int, int, int], np.dtype]]:
    for group in spec.groups:
        for plane in group.planes:
            yield (group.num_layers, num_tokens, plane.num_heads, plane.head_dim), spec.np_dtype_of(plane)


def _on_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
