"""The choice of a codec: off on fast links, lossless first, lossy only if allowed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.codec import MIN_GAIN, choose_codec, coded_bytes_s, link_bytes_s
from pddbridge.codecs_base import CodecId, CodecSpeed

ZSTD = CodecSpeed(CodecId.ZSTD_PLANES, True, 1.45, 0.35e9, 1.0e9)
INT8 = CodecSpeed(CodecId.INT8_BLOCKS, False, 1.88, 0.6e9, 1.6e9)
FP8 = CodecSpeed(CodecId.FP8_BLOCKS, False, 1.88, 0.23e9, 0.8e9)
ALL = (INT8, ZSTD, FP8)


@pytest.mark.parametrize(
    ("mbit_s", "allow_lossy", "wanted"),
    [
        (40, False, CodecId.ZSTD_PLANES),
        (1000, False, CodecId.ZSTD_PLANES),
        (2500, False, CodecId.RAW),  # 312 MB/s through an encoder of 350 MB/s: not worth the processor
        (10_000, False, CodecId.RAW),
        (40, True, CodecId.INT8_BLOCKS),
        (2500, True, CodecId.INT8_BLOCKS),
        (10_000, True, CodecId.RAW),
    ],
)
def test_the_link_decides(mbit_s: float, allow_lossy: bool, wanted: CodecId) -> None:
    assert choose_codec(mbit_s * 1e6 / 8, ALL, allow_lossy=allow_lossy) is wanted


def test_nothing_known_or_nothing_measured_is_raw() -> None:
    assert choose_codec(None, ALL, allow_lossy=True) is CodecId.RAW
    assert choose_codec(5e6, ()) is CodecId.RAW


def test_a_codec_that_declines_is_never_chosen() -> None:
    assert choose_codec(1.0, [CodecSpeed(CodecId.ZSTD_PLANES, True, 1.0, math.inf, math.inf)]) is CodecId.RAW


def test_a_lossy_codec_must_be_clearly_better_than_the_lossless_one() -> None:
    better = CodecSpeed(CodecId.INT8_BLOCKS, False, ZSTD.ratio * 1.05, 1e9, 1e9)
    assert choose_codec(5e6, [better, ZSTD], allow_lossy=True) is CodecId.ZSTD_PLANES
    assert choose_codec(5e6, [INT8, ZSTD], allow_lossy=True) is CodecId.INT8_BLOCKS


def test_a_busy_machine_codes_on_slower_links_only() -> None:
    assert choose_codec(100e6, [ZSTD]) is CodecId.ZSTD_PLANES
    assert choose_codec(100e6, [ZSTD], busy_share=0.8) is CodecId.RAW
    assert choose_codec(20e6, [ZSTD], busy_share=0.8) is CodecId.ZSTD_PLANES


@given(st.floats(1e3, 1e11), st.booleans(), st.floats(0, 0.99))
def test_it_never_chooses_what_is_slower_than_raw_or_not_allowed(goodput: float, allow_lossy: bool, busy: float) -> None:
    chosen = choose_codec(goodput, ALL, allow_lossy=allow_lossy, busy_share=busy)
    speeds = {speed.codec_id: speed for speed in ALL}
    if chosen is not CodecId.RAW:
        assert coded_bytes_s(goodput, speeds[chosen], busy) >= MIN_GAIN * goodput
        assert allow_lossy or speeds[chosen].lossless
    else:
        usable = [s for s in ALL if allow_lossy or s.lossless]
        assert all(coded_bytes_s(goodput, s, busy) < MIN_GAIN * goodput for s in usable)


def test_the_link_s_rate_is_told_from_what_was_delivered_with_a_codec() -> None:
    assert link_bytes_s(None, None, None) is None
    assert link_bytes_s(0.0, 0.0, ZSTD) is None
    assert link_bytes_s(5e6, 5e6, None) == 5e6
    assert link_bytes_s(5e6, 4e6, ZSTD) == 4e6


@pytest.mark.parametrize("mbit_s", [8, 40, 200, 1000])
def test_a_choice_is_stable_on_a_link_that_does_not_change(mbit_s: float) -> None:
    """What zstd delivers on the link leads to zstd again."""
    link = mbit_s * 1e6 / 8
    assert choose_codec(link, [ZSTD]) is CodecId.ZSTD_PLANES
    assert choose_codec(link_bytes_s(coded_bytes_s(link, ZSTD), link, ZSTD), [ZSTD]) is CodecId.ZSTD_PLANES


def test_a_link_that_became_fast_is_tried_raw_again() -> None:
    """Once the codec is what holds it up, goodput cannot show how fast the link is."""
    delivered = coded_bytes_s(1.25e9, ZSTD)
    assert link_bytes_s(delivered, delivered / ZSTD.ratio, ZSTD) is None
    assert choose_codec(link_bytes_s(delivered, delivered / ZSTD.ratio, ZSTD), [ZSTD]) is CodecId.RAW
