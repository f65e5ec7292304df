"""The lossy codecs: int8 and fp8 (OCP e4m3) codes with one scale per block of neighbouring dims of a head of a token. Only where allowed.

A block is ``BLOCK_DIMS`` values, the last of a head may be shorter. Its scale is the block's largest magnitude over the largest code,
rounded up to bfloat16, so no code overflows. Payload: scales [layers, tokens, heads, blocks] bfloat16, then codes [layers, tokens, heads,
dim], one byte each. Blocks with a NaN or an infinity have no scale: such values go raw.

Errors, for a block with scale s, before rounding to the values' dtype: int8 at most s / 2; fp8 at most the larger of |x| / 16 and s / 1024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

from pddbridge.codecs_base import CodecError, CodecId, SizeBounds, check_size, raw_bytes

BLOCK_DIMS: Final = 32
_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_FP8: Final = np.dtype(ml_dtypes.float8_e4m3fn)
_INT8: Final = np.dtype(np.int8)
_FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float16), _BFLOAT16)
# As floats, every code once: a table look-up is several times faster than a cast from fp8.
_FP8_VALUES: Final = np.arange(256, dtype=np.uint8).view(_FP8).astype(np.float32)


@dataclass(frozen=True)
class ScaledCodec:
    """``largest_code``: what a block's largest magnitude becomes. Use :data:`INT8` and :data:`FP8`."""

    codec_id: CodecId
    codes: np.dtype[np.generic]
    largest_code: float
    lossless: bool = False

    def takes(self, dtype: np.dtype[np.generic]) -> bool:
        return dtype in _FLOATS

    def size_bounds(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> SizeBounds:
        size = raw_bytes(shape[:-1], _BFLOAT16) * _num_blocks(shape[-1]) + raw_bytes(shape, self.codes)
        return SizeBounds(size, size)

    def encode(self, values: np.ndarray) -> bytes | memoryview | None:
        if not self.takes(values.dtype):
            raise ValueError(f"{self.codec_id.name}: given {values.dtype}, allowed {[str(d) for d in _FLOATS]}")
        bounds = self.size_bounds(values.shape, values.dtype)
        if bounds.smallest >= values.nbytes:
            return None
        wide = values.astype(np.float32)
        starts = np.arange(0, values.shape[-1], BLOCK_DIMS)
        largest = np.maximum.reduceat(np.abs(wide), starts, axis=-1)
        if not np.isfinite(largest).all():
            return None
        scales = _round_up(largest / np.float32(self.largest_code), largest)
        wide /= np.repeat(np.where(scales > 0, scales, 1).astype(np.float32), _block_sizes(values.shape[-1]), axis=-1)
        codes = np.rint(wide, out=wide).astype(np.int8) if self.codes == _INT8 else wide.astype(_FP8)
        return scales.tobytes() + codes.tobytes()

    def decode_into(self, payload: bytes | bytearray | memoryview, values: np.ndarray) -> None:
        check_size(self, payload, values)
        if not self.takes(values.dtype):
            raise CodecError(f"{self.codec_id.name}: values of {values.dtype} are never coded so")
        scales_shape = (*values.shape[:-1], _num_blocks(values.shape[-1]))
        num_scales = raw_bytes(scales_shape, _BFLOAT16) // 2
        scales = np.frombuffer(payload, _BFLOAT16, num_scales).reshape(scales_shape).astype(np.float32)
        if not (np.isfinite(scales) & (scales >= 0)).all():
            raise CodecError(f"{self.codec_id.name}: a scale that is negative or not finite")
        codes = np.frombuffer(payload, np.uint8, offset=2 * num_scales).reshape(values.shape)
        wide = codes.view(np.int8).astype(np.float32) if self.codes == _INT8 else _FP8_VALUES[codes]
        if not np.abs(wide).max() <= self.largest_code:
            raise CodecError(f"{self.codec_id.name}: a code that is never written")
        wide *= np.repeat(scales, _block_sizes(values.shape[-1]), axis=-1)
        # Rounding may lift the largest values of float16 or bfloat16 above what they can hold.
        limit = np.float32(ml_dtypes.finfo(values.dtype).max)
        values[...] = np.clip(wide, -limit, limit, out=wide)


def _num_blocks(dim: int) -> int:
    return -(-dim // BLOCK_DIMS)


def _block_sizes(dim: int) -> np.ndarray:
    sizes = np.full(_num_blocks(dim), BLOCK_DIMS)
    sizes[-1] = dim - BLOCK_DIMS * (len(sizes) - 1)
    return sizes


def _round_up(scales: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Non-negative float32 to the next bfloat16 that is not smaller; above 0 where ``largest`` is, though the quotient underflowed."""
    bits = (scales.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    np.maximum(bits, largest > 0, out=bits)
    return bits.astype(np.uint16).view(_BFLOAT16)


INT8: Final = ScaledCodec(CodecId.INT8_BLOCKS, _INT8, 127.0)
FP8: Final = ScaledCodec(CodecId.FP8_BLOCKS, _FP8, 448.0)
