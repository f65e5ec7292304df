"""KV from one engine's pages into another's as the link carries it: blocks cut into frames, headers and payloads as bytes, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pddbridge.engine import Engine, KVBlock
from pddbridge.kv_block import split_block
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.kv_wire import block_of, decode_frame_header, empty_values, encode_frame_header, frame_of, payload_view

_EPOCH = 1
# Small enough that even a tiny model's KV is several frames.
FRAME_BYTES = 1 << 16


def move_kv(source: Engine, source_pages: np.ndarray, target: Engine, target_pages: np.ndarray, tokens: TokenRange, seed: int) -> int:
    """Copy the KV of ``tokens`` from ``source_pages`` to ``target_pages`` [P] i32 and return the bytes of frames. Frames arrive in an order
    that ``seed`` shuffles: the receiver places by their ranges. Raises ValueError when the engines' KV specs differ, WireError for a frame
    that the receiver would refuse.
    """
    if source.kv_spec != target.kv_spec:
        raise ValueError(f"kv_spec: {source.kv_spec.facts()} on one side, {target.kv_spec.facts()} on the other")
    frames = list(encode(source.kv_spec, source.read_kv(source_pages, tokens)))
    for index in np.random.default_rng(seed).permutation(len(frames)):
        target.write_kv(target_pages, decode(target.kv_spec, *frames[index]))
    return sum(len(header) + len(payload) for header, payload in frames)


def encode(spec: KVSpec, blocks: Sequence[KVBlock]) -> Iterator[tuple[bytes, bytes]]:
    """Header and payload of every frame."""
    sequence = 0
    for block in blocks:
        for part in split_block(block, FRAME_BYTES):
            yield encode_frame_header(frame_of(spec, 1, _EPOCH, sequence, part)), bytes(payload_view(part.values))
            sequence += 1


def decode(spec: KVSpec, header: bytes, payload: bytes) -> KVBlock:
    """The block of one frame, checked as the receiver of a link checks it."""
    fields = decode_frame_header(header, spec)
    values = empty_values(fields, spec)
    payload_view(values)[:] = payload
    return block_of(fields, spec, values)
