"""Which codec a link uses, from what the link delivers and what the codecs can do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pddbridge.codecs_base import CodecId, CodecSpeed

# Coding takes processor time from prefill and decode; a gain smaller than this is not worth it.
MIN_GAIN = 1.15
# Goodput so close to what the codec itself manages says nothing about the link.
_CODEC_IS_THE_LIMIT = 0.7


def coded_bytes_s(link_bytes_s: float, speed: CodecSpeed, busy_share: float = 0.0) -> float:
    """Raw bytes per second through encoder, link and decoder, which work at the same time: the slowest decides. ``busy_share``: of the
    coding thread's time that others take.
    """
    return min(link_bytes_s * speed.ratio, _codec_bytes_s(speed, busy_share))


def link_bytes_s(
    goodput_bytes_s: float | None, wire_bytes_s: float | None, in_use: CodecSpeed | None, busy_share: float = 0.0
) -> float | None:
    """What the link itself can do, from raw bytes per second delivered with ``in_use`` (None: raw) and from those of the payloads that
    carried them. None when that is not known, or when the codec held the link up.
    """
    if not goodput_bytes_s or not wire_bytes_s:
        return None
    if in_use is not None and goodput_bytes_s >= _CODEC_IS_THE_LIMIT * _codec_bytes_s(in_use, busy_share):
        return None
    return wire_bytes_s


def choose_codec(
    link_bytes_s: float | None,
    speeds: Sequence[CodecSpeed],
    *,
    allow_lossy: bool = False,
    busy_share: float = 0.0,
    min_gain: float = MIN_GAIN,
) -> CodecId:
    """The codec that moves most raw bytes per second; RAW where none gains ``min_gain`` over it or nothing is known of the link
    (``link_bytes_s`` None). Of codecs within ``min_gain`` of each other a lossless one goes first. Lossy ones only if ``allow_lossy``.
    """
    if link_bytes_s is None or link_bytes_s <= 0:
        return CodecId.RAW
    found, found_bytes_s = CodecId.RAW, link_bytes_s
    for speed in sorted(speeds, key=lambda s: not s.lossless):
        if speed.codec_id is CodecId.RAW or not (speed.lossless or allow_lossy):
            continue
        bytes_s = coded_bytes_s(link_bytes_s, speed, busy_share)
        if bytes_s >= min_gain * found_bytes_s:
            found, found_bytes_s = speed.codec_id, bytes_s
    return found


def _codec_bytes_s(speed: CodecSpeed, busy_share: float) -> float:
    return min(speed.encode_bytes_s, speed.decode_bytes_s) * (1.0 - busy_share)
