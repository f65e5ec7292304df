"""The lossless codec: values split into byte planes, each plane by itself through zstd level 1, or as it is where that does not help.

The exponent's bytes of neighbouring KV values resemble each other, the mantissa's do not; mixed, neither compresses. Of bfloat16 the sign
is first rotated to the low end, so that the eight bits of the exponent share one plane.

Payload: per plane, from the least significant byte up: mode (1 byte: 0 stored, 1 zstd), bytes that follow (4, little endian), those bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np
import zstandard

from pddbridge.codecs_base import CodecError, CodecId, SizeBounds, byte_view, check_size, raw_bytes

_PLANE: Final = struct.Struct("<BI")
_STORED: Final = 0
_ZSTD: Final = 1
_LEVEL: Final = 1
# Smallest zstd frame of more than nothing: magic 4, descriptor 1, content size 1, one block header 3 and, for a run, one byte.
_SMALLEST_FRAME_BYTES: Final = 10
# Compressing costs as much for a plane that does not shrink as for one that does; a sample tells.
_SAMPLE_BYTES: Final = 4096
_WORTH_IT: Final = 0.97
_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class ZstdPlanesCodec:
    """Bit-exact for every dtype and every bit pattern."""

    codec_id: CodecId = CodecId.ZSTD_PLANES
    lossless: bool = True

    def takes(self, dtype: np.dtype[np.generic]) -> bool:
        return True

    def size_bounds(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> SizeBounds:
        size = raw_bytes(shape, dtype)
        per_plane = min(size // dtype.itemsize, _SMALLEST_FRAME_BYTES)
        return SizeBounds(min(dtype.itemsize * (_PLANE.size + per_plane), size), size - 1)

    def encode(self, values: np.ndarray) -> bytes | memoryview | None:
        planes = _split(values)
        parts: list[bytes | memoryview] = []
        # A context of its own per call: they are not safe to share between threads.
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)
        for plane in planes:
            mode, data = _encode_plane(compressor, plane)
            parts += [_PLANE.pack(mode, len(data)), data]
        if sum(map(len, parts)) >= values.nbytes:
            return None
        return b"".join(parts)

    def decode_into(self, payload: bytes | bytearray | memoryview, values: np.ndarray) -> None:
        check_size(self, payload, values)
        view, at = memoryview(payload), 0
        planes = np.empty((values.dtype.itemsize, values.size), np.uint8)
        decompressor = zstandard.ZstdDecompressor()
        for plane in planes:
            if at + _PLANE.size > len(view):
                raise CodecError(f"ZSTD_PLANES: ends inside the header of a plane, at byte {at}")
            mode, size = _PLANE.unpack_from(view, at)
            at += _PLANE.size
            if at + size > len(view):
                raise CodecError(f"ZSTD_PLANES: a plane of {size} bytes at byte {at} of {len(view)}")
            _decode_plane(decompressor, mode, view[at : at + size], plane)
            at += size
        if at != len(view):
            raise CodecError(f"ZSTD_PLANES: {len(view) - at} bytes after the last plane")
        _join(planes, values)


def _encode_plane(compressor: zstandard.ZstdCompressor, plane: np.ndarray) -> tuple[int, bytes | memoryview]:
    if len(plane) > 4 * _SAMPLE_BYTES:
        middle = len(plane) // 2
        if len(compressor.compress(plane[middle : middle + _SAMPLE_BYTES].data)) > _WORTH_IT * _SAMPLE_BYTES:
            return _STORED, plane.data
    coded = compressor.compress(plane.data)
    return (_ZSTD, coded) if len(coded) < len(plane) else (_STORED, plane.data)


def _decode_plane(decompressor: zstandard.ZstdDecompressor, mode: int, data: memoryview, plane: np.ndarray) -> None:
    if mode == _STORED:
        if len(data) != len(plane):
            raise CodecError(f"ZSTD_PLANES: a stored plane of {len(data)} bytes, must be {len(plane)}")
        plane[...] = np.frombuffer(data, np.uint8)
    elif mode == _ZSTD:
        try:
            # What the frame claims is what would be allocated, so it is checked first.
            stated = zstandard.frame_content_size(data)
            if stated != len(plane):
                raise CodecError(f"ZSTD_PLANES: a plane that claims {stated} bytes, must be {len(plane)}")
            plain = decompressor.decompress(data, max_output_size=len(plane), allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"ZSTD_PLANES: {error}") from error
        if len(plain) != len(plane):
            raise CodecError(f"ZSTD_PLANES: a plane of {len(plain)} bytes, must be {len(plane)}")
        plane[...] = np.frombuffer(plain, np.uint8)
    else:
        raise CodecError(f"ZSTD_PLANES: mode {mode}, allowed {_STORED} and {_ZSTD}")


def _split(values: np.ndarray) -> np.ndarray:
    """[itemsize, n] uint8, C-contiguous."""
    if values.dtype == _BFLOAT16:
        bits = byte_view(values).view("<u2")
        planes = np.empty((2, bits.size), np.uint8)
        np.right_shift(bits, 7, out=planes[1], casting="unsafe")
        low = bits << np.uint16(1)
        low |= bits >> np.uint16(15)
        planes[0] = low.view(np.uint8)[::2]
        return planes
    return np.ascontiguousarray(byte_view(values).reshape(-1, values.dtype.itemsize).T)


def _join(planes: np.ndarray, values: np.ndarray) -> None:
    """The inverse of :func:`_split`."""
    if values.dtype == _BFLOAT16:
        bits = byte_view(values).view("<u2")
        np.left_shift(planes[1], 7, out=bits, dtype=np.uint16, casting="unsafe")
        bits |= planes[0] >> np.uint8(1)
        bits |= (planes[0] & np.uint8(1)).astype(np.uint16) << np.uint16(15)
    else:
        byte_view(values).reshape(-1, values.dtype.itemsize)[...] = planes.T


ZSTD_PLANES: Final = ZstdPlanesCodec()
