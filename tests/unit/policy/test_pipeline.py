"""Direct or relay, with the reason and the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.pipeline import PipelineSnapshot, choose_pipeline, predict_kv_s

# SmolLM2-135M in bfloat16, 1,000 tokens over 40 Mbit/s and 30 ms
BASE = PipelineSnapshot(1000, 23040, 5e6, 0.03, "available", 0, 8)


def test_prediction_is_a_round_trip_plus_bytes_over_goodput() -> None:
    assert predict_kv_s(BASE) == pytest.approx(0.03 + 4.608)
    assert predict_kv_s(replace(BASE, main_miss_tokens=0)) == 0.0
    assert predict_kv_s(replace(BASE, goodput_bytes_s=None)) is None


@pytest.mark.parametrize(
    ("changes", "forced", "pipeline", "reason"),
    [
        ({}, None, "relay", "over_budget"),
        ({"main_miss_tokens": 100}, None, "direct", "within_budget"),
        ({"main_miss_tokens": 0, "goodput_bytes_s": None}, None, "direct", "within_budget"),
        ({"goodput_bytes_s": None}, None, "relay", "link_unmeasured"),
        ({}, "direct", "direct", "forced"),
        ({"main_miss_tokens": 0}, "relay", "relay", "forced"),
        ({"relay": "none"}, None, "direct", "no_relay"),
        ({"relay": "none"}, "relay", "direct", "no_relay"),
        ({"relay": "none"}, "direct", "direct", "forced"),
        ({"relay": "full", "relay_running": 8}, None, "direct", "relay_full"),
        ({"relay": "full", "relay_running": 8}, "relay", "direct", "relay_full"),
        ({"relay": "lost"}, "relay", "direct", "relay_lost"),
        ({"main_available": False}, None, "relay", "main_lost"),
        ({"main_available": False}, "direct", "relay", "main_lost"),
    ],
)
def test_decisions(changes: dict[str, object], forced: str | None, pipeline: str, reason: str) -> None:
    decision = choose_pipeline(replace(BASE, **changes), forced, direct_budget_s=0.5)
    assert (decision.pipeline, decision.reason) == (pipeline, reason)
    assert decision.text


def test_the_text_carries_the_figures() -> None:
    assert "1000 tokens, 23.04 MB, predicted 4.638 s" in choose_pipeline(BASE, None, 0.5).text
    assert "8 of 8" in choose_pipeline(replace(BASE, relay="full", relay_running=8), None, 0.5).text


def test_nobody_to_decode_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="main is not available"):
        choose_pipeline(replace(BASE, main_available=False, relay="lost"), None, 0.5)


@given(miss=st.integers(0, 10_000), more=st.integers(0, 10_000), goodput=st.floats(1e3, 1e10), budget=st.floats(0, 10))
def test_a_larger_miss_never_turns_relay_into_direct(miss: int, more: int, goodput: float, budget: float) -> None:
    snapshot = replace(BASE, main_miss_tokens=miss, goodput_bytes_s=goodput)
    if choose_pipeline(snapshot, None, budget).pipeline == "relay":
        assert choose_pipeline(replace(snapshot, main_miss_tokens=miss + more), None, budget).pipeline == "relay"
