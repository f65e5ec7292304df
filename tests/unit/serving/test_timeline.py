"""Stamps and what is made of them."""

from __future__ import annotations

import pytest

from pdd.serving.timeline import TimelineRecorder


def test_latencies_from_token_stamps() -> None:
    now = [100.0]
    recorder = TimelineRecorder(clock=lambda: now[0])
    gaps = []
    for at, origin in ((101.5, "relay"), (101.6, "relay"), (102.6, "main"), (102.7, "main")):
        now[0] = at
        recorder.accepted(origin)
        gaps.append(recorder.delivered(origin))
    now[0] = 103.0
    timeline = recorder.build()
    assert gaps[0] is None
    assert gaps[1:] == pytest.approx([0.1, 1.0, 0.1])
    assert (timeline.ttft_s, timeline.second_token_s) == (pytest.approx(1.5), pytest.approx(1.6))
    assert (timeline.max_itl_s, timeline.e2e_s) == (pytest.approx(1.0), pytest.approx(3.0))
    assert (timeline.relay_tokens, timeline.main_tokens) == (2, 2)


def test_what_did_not_happen_is_none() -> None:
    recorder = TimelineRecorder(clock=lambda: 5.0)
    assert recorder.delivered("main") is None
    timeline = recorder.build()
    assert timeline.ttft_s == 0.0
    assert (timeline.second_token_s, timeline.max_itl_s, timeline.handoff, timeline.main_kv_s) == (None, None, None, None)
