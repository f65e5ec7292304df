"""What a codec is. Pure: values in, bytes out, and back. Owns the codecs' wire ids, their interface and the raw codec.

A coded payload is always smaller than the raw one; where it would not be, or where a codec cannot take the values, the frame goes raw. So a
receiver knows from the ranges alone what a payload may measure, before it allocates anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

import numpy as np


class CodecId(IntEnum):
    """8 bits on the wire. RAW: the bytes of the values in wire order. The others have a module each."""

    RAW = 0
    ZSTD_PLANES = 1
    INT8_BLOCKS = 2
    FP8_BLOCKS = 3


class CodecError(Exception):
    """A payload that is not what its codec writes for the values the frame's ranges describe."""


@dataclass(frozen=True)
class SizeBounds:
    """Smallest and largest payload in bytes, both possible."""

    smallest: int
    largest: int

    def __contains__(self, size: int) -> bool:
        return self.smallest <= size <= self.largest


@dataclass(frozen=True)
class CodecSpeed:
    """``ratio``: raw bytes per coded byte, 1 where the codec declines. Speeds in raw bytes per second of one thread."""

    codec_id: CodecId
    lossless: bool
    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float


class Codec(Protocol):
    """Stateless and safe to call from several threads. ``values`` are [layers, tokens, heads, dim], C-contiguous, not empty."""

    @property
    def codec_id(self) -> CodecId: ...
    @property
    def lossless(self) -> bool: ...

    def takes(self, dtype: np.dtype[np.generic]) -> bool:
        """Whether values of ``dtype`` can be coded at all."""

    def size_bounds(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> SizeBounds:
        """What a payload of values [shape] may measure; above the raw size nothing is sent."""

    def encode(self, values: np.ndarray) -> bytes | memoryview | None:
        """The payload; None when these values cannot be coded or would not get smaller. Raises ValueError for a dtype it does not take."""

    def decode_into(self, payload: bytes | bytearray | memoryview, values: np.ndarray) -> None:
        """Fill writable ``values``, allocating no more than their size a few times. Raises CodecError; ``values`` are then undefined."""


@dataclass(frozen=True)
class RawCodec:
    """The values themselves, without a copy."""

    codec_id: CodecId = CodecId.RAW
    lossless: bool = True

    def takes(self, dtype: np.dtype[np.generic]) -> bool:
        return True

    def size_bounds(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> SizeBounds:
        size = raw_bytes(shape, dtype)
        return SizeBounds(size, size)

    def encode(self, values: np.ndarray) -> bytes | memoryview | None:
        return byte_view(values).data

    def decode_into(self, payload: bytes | bytearray | memoryview, values: np.ndarray) -> None:
        check_size(self, payload, values)
        byte_view(values)[...] = np.frombuffer(payload, np.uint8)


def encode_frame(codec: Codec, values: np.ndarray) -> tuple[CodecId, bytes | memoryview]:
    """The payload of a frame and the codec it is really in: ``codec``, or RAW where ``codec`` declines the values or their dtype."""
    payload = codec.encode(values) if codec.takes(values.dtype) else None
    if payload is None:
        return CodecId.RAW, byte_view(values).data
    return codec.codec_id, payload


def check_size(codec: Codec, payload: bytes | bytearray | memoryview, values: np.ndarray) -> None:
    """Raises CodecError for a payload that ``codec`` never writes for such values."""
    bounds = codec.size_bounds(values.shape, values.dtype)
    if len(payload) not in bounds:
        raise CodecError(f"{codec.codec_id.name}: {len(payload)} bytes for {values.dtype}{list(values.shape)}, allowed {bounds}")


def raw_bytes(shape: Sequence[int], dtype: np.dtype[np.generic]) -> int:
    """In Python's integers, which do not overflow."""
    size = dtype.itemsize
    for length in shape:
        size *= int(length)
    return size


def byte_view(values: np.ndarray) -> np.ndarray:
    """The bytes of C-contiguous ``values`` as uint8 [n], without a copy. Raises ValueError where that is not possible."""
    if not values.flags.c_contiguous:
        raise ValueError("values must be C-contiguous")
    return values.reshape(-1).view(np.uint8)


RAW: Final = RawCodec()
