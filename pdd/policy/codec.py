"""Which codec a link uses, from what the link delivers and what the codecs can do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pddbridge.codecs_base import CodecId, CodecSpeed

# Coding takes processor time from prefill and decode; a gain smaller than this is not worth it.
MIN_GAIN = 1.15


def coded_bytes_s(goodput_bytes_s: float, speed: CodecSpeed, busy_share: float = 0.0) -> float:
    """Raw bytes per second through encoder, link and decoder, which work at the same time: the slowest decides. ``busy_share``: of the
    coding thread's time that others take.
    """
    free_share = 1.0 - busy_share
    return min(speed.encode_bytes_s * free_share, goodput_bytes_s * speed.ratio, speed.decode_bytes_s * free_share)


def choose_codec(
    goodput_bytes_s: float | None,
    speeds: Sequence[CodecSpeed],
    *,
    allow_lossy: bool = False,
    busy_share: float = 0.0,
    min_gain: float = MIN_GAIN,
) -> CodecId:
    """The codec that moves most raw bytes per second; RAW where none gains ``min_gain`` over it or nothing is known of the link
    (``goodput_bytes_s`` None). Of codecs within ``min_gain`` of each other a lossless one goes first. Lossy ones only if ``allow_lossy``.
    """
    if goodput_bytes_s is None or goodput_bytes_s <= 0:
        return CodecId.RAW
    found = CodecId.RAW
    found_bytes_s = goodput_bytes_s
    for speed in sorted(speeds, key=lambda s: not s.lossless):
        if speed.codec_id is CodecId.RAW or not (speed.lossless or allow_lossy):
            continue
        bytes_s = coded_bytes_s(goodput_bytes_s, speed, busy_share)
        if bytes_s >= min_gain * found_bytes_s:
            found, found_bytes_s = speed.codec_id, bytes_s
    return found
