"""What is queued on a link holds up what comes next, by turns, and is forgotten as it leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.link import LinkSnapshot, delaying_bytes
from pdd.policy.pipeline import PipelineSnapshot, choose_pipeline, predict_kv_s
from pdd.policy_config import PolicyConfig

BUSY = LinkSnapshot(goodput_bytes_s=5e6, queued_bytes=20_000_000, num_transfers=2)
BASE = PipelineSnapshot(100, 20_000, 5e6, 0.03, "available", 0, 8)  # 2 MB missing


def test_transfers_take_turns_so_each_goes_before_for_as_much_again_at_most() -> None:
    assert delaying_bytes(BUSY, 2_000_000) == 4_000_000
    assert delaying_bytes(BUSY, 50_000_000) == 20_000_000
    assert delaying_bytes(LinkSnapshot(), 2_000_000) == 0


def test_what_left_since_is_taken_off() -> None:
    assert delaying_bytes(replace(BUSY, age_s=3.5), 2_000_000) == 2_500_000
    assert delaying_bytes(replace(BUSY, age_s=60.0), 2_000_000) == 0
    assert delaying_bytes(replace(BUSY, goodput_bytes_s=None, age_s=60.0), 50_000_000) == 20_000_000


def test_the_prediction_counts_what_is_queued_and_the_choice_follows() -> None:
    assert predict_kv_s(BASE) == pytest.approx(0.43)
    assert choose_pipeline(BASE, None, PolicyConfig()).pipeline == "direct"
    busy = replace(BASE, link=BUSY)
    assert predict_kv_s(busy) == pytest.approx(0.03 + 6 / 5)
    assert choose_pipeline(busy, None, PolicyConfig()).pipeline == "relay"
    assert predict_kv_s(replace(busy, main_miss_tokens=0)) == 0.0


def test_the_link_s_own_measure_counts_where_there_is_no_other() -> None:
    unknown = replace(BASE, goodput_bytes_s=None)
    assert predict_kv_s(replace(unknown, link=LinkSnapshot())) is None
    assert predict_kv_s(replace(unknown, link=LinkSnapshot(goodput_bytes_s=10e6))) == pytest.approx(0.23)


@given(
    queued=st.integers(0, 10**12),
    transfers=st.integers(0, 100),
    age=st.floats(0, 1e4),
    miss=st.integers(1, 10**6),
    more=st.integers(0, 10**6),
)
def test_more_to_send_never_arrives_sooner(queued: int, transfers: int, age: float, miss: int, more: int) -> None:
    link = LinkSnapshot(5e6, 4e6, 0.03, queued, transfers, age)
    few = predict_kv_s(replace(BASE, main_miss_tokens=miss, link=link))
    many = predict_kv_s(replace(BASE, main_miss_tokens=miss + more, link=link))
    alone = predict_kv_s(replace(BASE, main_miss_tokens=miss))
    assert few is not None
    assert many is not None
    assert alone is not None
    assert alone <= few <= many
