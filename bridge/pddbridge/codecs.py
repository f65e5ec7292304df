"""Every codec by its wire id and by the name that a config uses: what links and policies import."""

from __future__ import annotations

from typing import Final

from pddbridge.codecs_base import RAW, Codec, CodecError, CodecId, SizeBounds, encode_frame
from pddbridge.codecs_planes import ZSTD_PLANES
from pddbridge.codecs_scaled import FP8, INT8

CODECS: Final[dict[CodecId, Codec]] = {codec.codec_id: codec for codec in (RAW, ZSTD_PLANES, INT8, FP8)}
CODEC_NAMES: Final[dict[str, CodecId]] = {
    "raw": CodecId.RAW,
    "zstd": CodecId.ZSTD_PLANES,
    "int8": CodecId.INT8_BLOCKS,
    "fp8": CodecId.FP8_BLOCKS,
}

__all__ = ["CODECS", "CODEC_NAMES", "Codec", "CodecError", "CodecId", "SizeBounds", "encode_frame"]
