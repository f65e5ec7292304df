"""Direct, relay or local, with the reason and the predictions."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.lengths import LengthPrediction
from pdd.policy.link import LinkSnapshot
from pdd.policy.pipeline import (
    Pipeline,
    PipelineDecision,
    PipelineSnapshot,
    RelayState,
    budget_s,
    choose_pipeline,
    predict_kv_s,
    predict_prefill_s,
    predict_wait_s,
)
from pdd.policy_config import PolicyConfig

POLICY = PolicyConfig()
# SmolLM2-135M in bfloat16, 1,000 tokens over 40 Mbit/s and 30 ms
BASE = PipelineSnapshot(1000, 23040, 5e6, 0.03, "available", 0, 8)
# A long prompt over a slow link, a short answer, everything learned
SINGULAR = replace(
    BASE,
    main_miss_tokens=8000,
    prefill_tokens=8000,
    prefill_s_per_token=0.001,
    prefill_step_tokens=256,
    relay_s_per_token=0.02,
    output=LengthPrediction(8, 16),
    local_open=True,
)
LEVEL = {"direct": 0, "relay": 1, "local": 2}


def choose(snapshot: PipelineSnapshot, forced: Pipeline | None = None, **policy: object) -> PipelineDecision:
    return choose_pipeline(snapshot, forced, PolicyConfig.model_validate(policy))


def test_prediction_is_a_round_trip_plus_bytes_over_goodput() -> None:
    assert predict_kv_s(BASE) == pytest.approx(0.03 + 4.608)
    assert predict_kv_s(replace(BASE, main_miss_tokens=0)) == 0.0
    assert predict_kv_s(replace(BASE, goodput_bytes_s=None)) is None


def test_kv_leaves_while_prefill_computes_but_for_what_its_last_step_makes() -> None:
    slow_link = replace(BASE, prefill_tokens=1000, prefill_s_per_token=0.001, prefill_step_tokens=256)
    assert predict_prefill_s(slow_link) == pytest.approx(1.0)
    assert predict_wait_s(slow_link) == pytest.approx(0.03 + 4.608 - 1.0)
    assert predict_kv_s(slow_link) == pytest.approx(0.03 + 4.608)
    fast_link = replace(slow_link, goodput_bytes_s=1e9)
    assert predict_wait_s(fast_link) == pytest.approx(0.03 + 256 * 23040 / 1e9)
    assert choose(fast_link).pipeline == "direct"


def test_a_busy_link_counts_as_it_delivers_now() -> None:
    assert predict_wait_s(replace(BASE, link=LinkSnapshot(goodput_bytes_s=1e6, num_transfers=1))) == pytest.approx(0.03 + 23.04)
    assert predict_wait_s(replace(BASE, link=LinkSnapshot(goodput_bytes_s=1e6))) == pytest.approx(0.03 + 4.608)
    assert predict_wait_s(replace(BASE, link=LinkSnapshot(goodput_bytes_s=1e7))) == pytest.approx(0.03 + 2.304)


def test_what_is_known_to_go_before_counts_instead_of_what_the_link_told() -> None:
    told = replace(BASE, link=LinkSnapshot(goodput_bytes_s=5e6, queued_bytes=10**9, num_transfers=9))
    assert predict_wait_s(replace(told, ahead_bytes=5e6)) == pytest.approx(0.03 + 4.608 + 1.0)
    assert choose(replace(told, main_miss_tokens=100, ahead_bytes=0.0)).pipeline == "direct"


@pytest.mark.parametrize(
    ("changes", "forced", "pipeline", "reason"),
    [
        ({}, None, "relay", "over_budget"),
        ({"main_miss_tokens": 100}, None, "direct", "within_budget"),
        ({"main_miss_tokens": 0, "goodput_bytes_s": None}, None, "direct", "within_budget"),
        ({"goodput_bytes_s": None}, None, "relay", "link_unmeasured"),
        ({"main_miss_tokens": 100, "relayed_tokens": 1}, None, "relay", "relay_first"),
        ({"relayed_tokens": 1}, None, "relay", "over_budget"),
        ({}, "direct", "direct", "forced"),
        ({"main_miss_tokens": 0}, "relay", "relay", "forced"),
        ({"main_miss_tokens": 0}, "local", "local", "forced"),
        ({"relay": "none"}, None, "direct", "no_relay"),
        ({"relay": "none"}, "relay", "direct", "no_relay"),
        ({"relay": "none"}, "local", "direct", "no_relay"),
        ({"relay": "none"}, "direct", "direct", "forced"),
        ({"relay": "full", "relay_running": 8}, None, "direct", "relay_full"),
        ({"relay": "full", "relay_running": 8}, "relay", "direct", "relay_full"),
        ({"relay": "full", "relay_running": 8}, "local", "direct", "relay_full"),
        ({"relay": "lost"}, "relay", "direct", "relay_lost"),
        ({"main_available": False}, None, "relay", "main_lost"),
        ({"main_available": False}, "direct", "relay", "main_lost"),
        ({"main_available": False}, "local", "relay", "main_lost"),
    ],
)
def test_decisions(changes: dict[str, object], forced: Pipeline | None, pipeline: str, reason: str) -> None:
    decision = choose_pipeline(replace(BASE, **changes), forced, POLICY)
    assert (decision.pipeline, decision.reason) == (pipeline, reason)
    assert decision.text


def test_the_text_carries_the_figures() -> None:
    assert "1000 tokens, 23.04 MB, predicted 4.638 s" in choose(BASE).text
    assert "8 of 8" in choose(replace(BASE, relay="full", relay_running=8)).text


def test_nobody_to_decode_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="main is not available"):
        choose(replace(BASE, main_available=False, relay="lost"))


def test_room_below_the_target_is_spent_before_the_relay_is() -> None:
    """23 MB in 4.6 s: too long for 0.5 s, not for a target of 6 s; prefill's own time counts against the target."""
    decision = choose(BASE, ttft_target_s=6.0)
    assert (decision.pipeline, decision.reason, decision.budget_s) == ("direct", "within_target", 6.0)
    slow = replace(BASE, prefill_tokens=1000, prefill_s_per_token=0.002)
    assert choose(slow, ttft_target_s=4.0).pipeline == "relay"
    assert choose(slow, ttft_target_s=4.7).pipeline == "direct"
    assert choose(replace(BASE, main_miss_tokens=10), ttft_target_s=0.01).reason == "within_budget", "the budget itself always stands"


def test_the_last_rows_of_a_relay_are_kept_for_who_needs_them_most() -> None:
    some = replace(BASE, main_miss_tokens=120)  # 0.58 s
    assert choose(some).reason == "over_budget"
    assert choose(replace(some, relay_running=6)).reason == "relay_busy"
    assert choose(replace(BASE, relay_running=6)).reason == "over_budget"
    assert choose(replace(some, relay_running=6), relay_load_weight=0).reason == "over_budget"
    assert budget_s(replace(some, relay_running=8), POLICY) == (0.5, None)


@pytest.mark.parametrize("relay", ["available", "full"])
def test_a_decision_has_no_figure_that_json_has_not(relay: RelayState) -> None:
    for running in (0, 7, 8, 9):
        for goodput in (None, 1.0, 5e6):
            snapshot = replace(SINGULAR, relay=relay, relay_running=running, goodput_bytes_s=goodput, relayed_tokens=running % 2)
            json.dumps(asdict(choose(snapshot)), allow_nan=False)


def test_what_came_late_lately_is_predicted_to_come_late_again() -> None:
    small = replace(BASE, main_miss_tokens=50)
    assert choose(small).pipeline == "direct"
    late = choose(replace(small, late_s=1.0))
    assert (late.pipeline, late.late_s) == ("relay", 1.0)
    assert late.predicted_wait_s == pytest.approx((choose(small).predicted_wait_s or 0.0) + 1.0)
    assert choose(replace(small, main_miss_tokens=0, late_s=1.0)).pipeline == "direct", "nothing is to come"


def test_whether_main_s_kv_can_come_in_time_for_the_request() -> None:
    learned = replace(BASE, output=LengthPrediction(10, 40), relay_s_per_token=0.1)
    assert choose(learned).ends_on_relay, "4 s of tokens, 4.6 s of KV"
    assert not choose(replace(learned, relay_s_per_token=0.2)).ends_on_relay
    assert not choose(replace(learned, relay_s_per_token=None)).ends_on_relay
    assert not choose(learned, "direct").ends_on_relay
    assert not choose(replace(learned, main_miss_tokens=100, late_s=5.0)).ends_on_relay, "only late by what was late before"


def test_a_singular_request_is_finished_on_the_relay() -> None:
    decision = choose(SINGULAR)
    assert (decision.pipeline, decision.reason) == ("local", "singular")
    assert decision.predicted_output_tokens == 16
    assert decision.predicted_relay_end_s == pytest.approx(8.0 + 16 * 0.02)
    assert decision.predicted_wait_s == pytest.approx(0.03 + 8000 * 23040 / 5e6 - 8.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"local_open": False}, "off"),
        ({"output": None}, "off"),
        ({"shared": True}, "shared"),
        ({"main_miss_tokens": 2047}, "short_prompt"),
        ({"output": LengthPrediction(8, 33)}, "long_answer"),
        ({"relay_s_per_token": None}, "unmeasured"),
        ({"relay_running": 5}, "relay_busy"),
        ({"relay_s_per_token": 1.3}, "kv_sooner"),
    ],
)
def test_what_keeps_a_request_from_being_local(changes: dict[str, object], why: str) -> None:
    decision = choose(replace(SINGULAR, **changes))
    assert (decision.pipeline, decision.reason) == ("relay", "over_budget")
    assert f"not local: {why}" in decision.text


snapshots = st.builds(
    PipelineSnapshot,
    main_miss_tokens=st.integers(0, 20_000),
    kv_bytes_per_token=st.sampled_from([100, 23040]),
    goodput_bytes_s=st.none() | st.floats(1e3, 1e10),
    rtt_s=st.floats(0, 1),
    relay=st.sampled_from(["available", "available", "none", "full", "lost"]),
    relay_running=st.integers(0, 9),
    relay_capacity=st.integers(0, 8),
    link=st.none()
    | st.builds(
        LinkSnapshot,
        goodput_bytes_s=st.none() | st.floats(1e3, 1e10),
        queued_bytes=st.integers(0, 10**10),
        num_transfers=st.integers(0, 9),
        age_s=st.floats(0, 10),
    ),
    prefill_s_per_token=st.none() | st.floats(0, 0.1),
    prefill_step_tokens=st.integers(0, 4096),
    relay_s_per_token=st.none() | st.floats(1e-4, 1.0),
    output=st.none() | st.builds(LengthPrediction, median_tokens=st.integers(1, 20), high_tokens=st.integers(1, 100)),
    late_s=st.floats(0, 10),
    local_open=st.booleans(),
    shared=st.booleans(),
)
policies = st.builds(
    PolicyConfig,
    direct_budget_s=st.floats(0, 10),
    ttft_target_s=st.none() | st.floats(0.01, 20),
    relay_load_weight=st.floats(0, 4),
)


@given(snapshot=snapshots, policy=policies, more=st.integers(0, 20_000), share=st.floats(0, 1))
def test_a_larger_miss_never_turns_relay_into_direct(snapshot: PipelineSnapshot, policy: PolicyConfig, more: int, share: float) -> None:
    def missing(tokens: int) -> PipelineSnapshot:
        return replace(snapshot, main_miss_tokens=tokens, prefill_tokens=int(share * tokens))

    less, greater = (choose_pipeline(missing(snapshot.main_miss_tokens + extra), None, policy) for extra in (0, more))
    if less.reason != "link_unmeasured":  # then nothing is compared
        assert LEVEL[less.pipeline] <= LEVEL[greater.pipeline]


@given(snapshot=snapshots, policy=policies, more=st.integers(0, 9))
def test_a_busier_relay_never_turns_direct_into_relay(snapshot: PipelineSnapshot, policy: PolicyConfig, more: int) -> None:
    idle, busy = (
        choose_pipeline(snapshot, None, policy),
        choose_pipeline(replace(snapshot, relay_running=snapshot.relay_running + more), None, policy),
    )
    assert LEVEL[busy.pipeline] <= LEVEL[idle.pipeline]


@given(snapshot=snapshots, policy=policies, forced=st.none() | st.sampled_from(["direct", "relay", "local"]))
def test_who_decides_to_use_a_relay_has_one_and_local_keeps_its_bounds(
    snapshot: PipelineSnapshot, policy: PolicyConfig, forced: Pipeline | None
) -> None:
    decision = choose_pipeline(snapshot, forced, policy)
    if decision.pipeline != "direct":
        assert snapshot.relay == "available"
    if decision.pipeline == "local" and forced is None:
        assert decision.reason == "singular"
        assert snapshot.local_open
        assert not snapshot.shared
        assert snapshot.main_miss_tokens >= policy.local.min_miss_tokens
        assert snapshot.output is not None
        assert snapshot.output.high_tokens <= policy.local.max_output_tokens
        assert decision.predicted_kv_s is not None
        assert decision.predicted_relay_end_s is not None
        assert decision.predicted_relay_end_s <= decision.predicted_kv_s
        assert snapshot.relay_running <= policy.local.max_relay_load * snapshot.relay_capacity
