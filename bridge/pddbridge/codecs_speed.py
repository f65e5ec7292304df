"""How fast a codec is on this machine and how much it saves of given values: what the choice of a codec is based on."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from pddbridge.codecs_base import Codec, CodecSpeed, encode_frame


def measure_speed(codec: Codec, values: np.ndarray, repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> CodecSpeed:
    """Code ``values`` [layers, tokens, heads, dim], KV of the kind that will be sent (noise does not get smaller); best of ``repeats``."""
    codec_id, payload = encode_frame(codec, values)
    if codec_id != codec.codec_id:
        return CodecSpeed(codec.codec_id, codec.lossless, 1.0, float("inf"), float("inf"))
    out = np.empty_like(values)
    encode_s = min(_seconds(lambda: encode_frame(codec, values), clock) for _ in range(repeats))
    decode_s = min(_seconds(lambda: codec.decode_into(payload, out), clock) for _ in range(repeats))
    return CodecSpeed(codec.codec_id, codec.lossless, values.nbytes / len(payload), values.nbytes / encode_s, values.nbytes / decode_s)


def _seconds(act: Callable[[], object], clock: Callable[[], float]) -> float:
    started_s = clock()
    act()
    return max(clock() - started_s, 1e-9)
