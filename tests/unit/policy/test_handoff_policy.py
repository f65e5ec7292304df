"""The handoff state machine under every interleaving of relay tokens, confirmations and seals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.handoff import Commit, HandoffSnapshot, IngestChunk, Overlap, OverlapRules, SealRelay, Wait, next_action, reader_interval_s
from pdd.policy.handoff_choice import HandoffChoiceRules, HandoffChoiceSnapshot, choose_handoff, predict_gap_s

CHOICE = HandoffChoiceRules(catch_up_chunk=64, crowded_share=0.75, crowded_gap_s=0.5, hidden_itls=1.5)
RULES = OverlapRules(max_tokens=10, max_gap_s=2.0, pace=1.25)
# A relay with room, main far away: 20 ms a token as a rule, 25 just now, 2 ms per ingested one.
USUAL = HandoffChoiceSnapshot(10, 2, 8, False, 0.1, True, 0.002, 0.025, 0.02)


@pytest.mark.parametrize(
    ("forced", "changes", "mode", "reason"),
    [
        (None, {}, "overlap", "gap_shows"),
        (None, {"backlog_tokens": 64}, "overlap", "gap_shows"),
        (None, {"backlog_tokens": 65}, "overlap", "backlog"),
        (None, {"backlog_tokens": 65, "rtt_s": 0.0, "extend_s_per_token": 0.0}, "overlap", "backlog"),
        # 4 ms away: 4 + max(20, 25) ms is within 1.5 x 20 ms
        (None, {"rtt_s": 0.004}, "one_shot", "gap_hidden"),
        (None, {"rtt_s": 0.006}, "overlap", "gap_shows"),
        (None, {"rtt_s": 0.004, "backlog_tokens": 20}, "overlap", "gap_shows"),
        # main has a step under way for others, of 25 ms
        (None, {"rtt_s": 0.004, "main_is_alone": False}, "overlap", "gap_shows"),
        (None, {"rtt_s": 0.004, "main_is_alone": False, "steady_itl_s": 0.04}, "one_shot", "gap_hidden"),
        (None, {"rtt_s": 0.0, "steady_itl_s": None}, "overlap", "gap_shows"),
        (None, {"rtt_s": 0.0, "main_itl_s": None}, "overlap", "gap_shows"),
        (None, {"relay_running": 5}, "overlap", "gap_shows"),
        (None, {"relay_running": 6}, "one_shot", "relay_crowded"),
        (None, {"relay_running": 6, "backlog_tokens": 200}, "one_shot", "relay_crowded"),  # 0.1 + 200 x 0.002 s
        (None, {"relay_running": 6, "backlog_tokens": 201}, "catch_up", "relay_crowded"),
        (None, {"relay_running": 8, "main_itl_s": None, "extend_s_per_token": None, "backlog_tokens": 64}, "one_shot", "relay_crowded"),
        (None, {"relay_running": 8, "main_itl_s": None, "extend_s_per_token": None, "backlog_tokens": 65}, "catch_up", "relay_crowded"),
        (None, {"relay_stops_by_itself": True}, "one_shot", "relay_limited"),
        (None, {"relay_stops_by_itself": True, "backlog_tokens": 65}, "catch_up", "relay_limited"),
        ("one_shot", {"backlog_tokens": 900}, "one_shot", "forced"),
        ("catch_up", {"backlog_tokens": 0}, "catch_up", "forced"),
        ("overlap", {"relay_running": 8}, "overlap", "forced"),
    ],
)
def test_mode_and_reason(forced: str | None, changes: dict[str, object], mode: str, reason: str) -> None:
    decision = choose_handoff(forced, replace(USUAL, **changes), CHOICE)
    assert (decision.mode, decision.reason) == (mode, reason)


def test_the_predicted_gap_is_a_round_trip_and_what_main_computes() -> None:
    assert predict_gap_s(USUAL) == pytest.approx(0.1 + 0.025)
    assert predict_gap_s(replace(USUAL, backlog_tokens=50)) == pytest.approx(0.1 + 0.1)
    assert predict_gap_s(replace(USUAL, main_is_alone=False)) == pytest.approx(0.1 + 0.025 + 0.025)
    assert predict_gap_s(replace(USUAL, main_itl_s=None, extend_s_per_token=None)) is None
    assert choose_handoff(None, USUAL, CHOICE).predicted_gap_s == pytest.approx(0.125)
    assert "10 tokens behind, one-shot gap 0.125 s" in choose_handoff(None, USUAL, CHOICE).text


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({"sent_tokens": 29}, Overlap(29)),
        ({"main_delay_s": None, "overlap_tokens": 99}, Wait()),  # it has shown nothing yet
        ({}, Wait()),
        ({"cover_s": 0.191}, SealRelay("covered")),  # 0.2 s of delay, 25 ms between tokens are no gap, and 10 are sure
        ({"cover_s": 0.189}, Wait()),
        ({"main_delay_s": 0.009}, SealRelay("covered")),
        ({"steady_itl_s": 0.06, "cover_s": 0.177}, SealRelay("covered")),  # gaps of 60 ms are what tokens come with as a rule
        ({"steady_itl_s": 0.06, "cover_s": 0.175}, Wait()),
        ({"usual_delay_s": 0.3, "cover_s": 0.289}, Wait()),  # it was quick three times; as a rule it is not
        ({"usual_delay_s": 0.3, "cover_s": 0.291}, SealRelay("covered")),
        ({"usual_delay_s": 0.1, "cover_s": 0.189}, Wait()),  # nor is it as quick as ever just now
        ({"relay_itl_s": None, "cover_s": 0.199}, Wait()),
        ({"relay_itl_s": None, "cover_s": 0.2}, SealRelay("covered")),
        ({"overlap_tokens": 9}, Wait()),
        ({"overlap_tokens": 10}, SealRelay("bounded")),
        ({"overlap_tokens": 10, "main_delay_s": 2.1}, Wait()),  # the stall would be too long
        ({"overlap_tokens": 10, "seal_sent": True}, Wait()),
        ({"overlap_tokens": 10, "relay_proposes": False}, Wait()),
        ({"sent_tokens": 29, "seal_sent": True}, Overlap(29)),  # what comes while it stops
        ({"sent_tokens": 29, "relay_proposes": False}, Overlap(29)),
    ],
)
def test_in_an_overlap(changes: dict[str, object], action: object) -> None:
    snapshot = HandoffSnapshot(30, 30, False, True, False, False, None, overlap_tokens=5, main_delay_s=0.2, cover_s=0.0, relay_itl_s=0.02)
    assert next_action("overlap", 8, RULES, replace(snapshot, **changes)) == action


@pytest.mark.parametrize(
    ("relay_itl_s", "steady_itl_s", "interval_s"),
    [
        (0.04, 0.04, 0.05),  # a quarter more than the relay's: something is held back
        (0.02, 0.04, 0.04),  # as tokens will come from main
        (0.034, 0.04, 0.0425),
        (0.09, 0.04, 0.05),  # the relay is slow for a moment: that shows, and no gap may be longer for it
        (0.04, None, 0.05),
        (None, 0.04, 0.04),
        (None, None, 0.0),
    ],
)
def test_how_far_apart_tokens_go_to_the_reader(relay_itl_s: float | None, steady_itl_s: float | None, interval_s: float) -> None:
    assert reader_interval_s(1.25, relay_itl_s, steady_itl_s) == pytest.approx(interval_s)


def test_overlap_catches_up_before_main_decodes() -> None:
    behind = HandoffSnapshot(20, 0, False, True, False, False, None)
    assert next_action("overlap", 8, RULES, behind) == IngestChunk(0, 8)
    assert next_action("overlap", 8, RULES, replace(behind, sent_tokens=8, ingesting=True, behind_before=20)) == Wait()
    assert next_action("overlap", 8, RULES, replace(behind, sent_tokens=16, ingesting=True, behind_before=12)) == Wait()
    assert next_action("overlap", 8, RULES, replace(behind, sent_tokens=16, behind_before=12)) == Overlap(16)
    # the relay is faster than the catching up: main decodes from where it is
    assert next_action("overlap", 8, RULES, replace(behind, log_tokens=28, sent_tokens=8, behind_before=20)) == Overlap(8)
    assert next_action("overlap", 8, RULES, replace(behind, log_tokens=3, relay_proposes=False)) == Commit(0)


@given(
    mode=st.sampled_from(["one_shot", "catch_up"]),
    chunk=st.integers(1, 8),
    backlog=st.integers(0, 40),
    limit=st.none() | st.integers(0, 60),
    relay=st.booleans(),
    events=st.lists(st.sampled_from(["token", "confirm", "sealed"]), max_size=80),
)
def test_every_interleaving_gives_main_the_whole_log_once(
    mode: str, chunk: int, backlog: int, limit: int | None, relay: bool, events: list[str]
) -> None:
    """A simulated relay and main obey; in the end it is committed, in order, without a gap, and never while the relay could propose."""
    log = backlog if limit is None else min(backlog, limit)
    sent, ingested, committed = 0, 0, False
    behind_before: int | None = None
    proposes, seal_sent = relay, False
    chunks: list[int] = []
    for event in [*events, *["confirm", "sealed"] * 60]:
        while not committed:
            action = next_action(
                mode, chunk, RULES, HandoffSnapshot(log, sent, ingested < sent, proposes, seal_sent, limit is not None, behind_before)
            )
            if isinstance(action, Wait):
                break
            if isinstance(action, SealRelay):
                assert not seal_sent
                assert limit is None
                assert log - sent <= chunk or mode == "one_shot" or log - sent >= behind_before
                seal_sent = True
            elif isinstance(action, IngestChunk):
                assert mode == "catch_up"
                assert (action.position, action.num_tokens) == (sent, chunk)
                assert not proposes or ingested == sent  # one in flight while the relay runs
                behind_before = log - sent
                sent += chunk
                assert sent <= log
                chunks.append(chunk)
            elif isinstance(action, Commit):
                assert not proposes
                assert action.position == sent
                assert mode == "one_shot" or log - sent <= chunk
                committed = True
        if event == "token" and proposes and (limit is None or log < limit):
            log += 1
        elif event == "confirm":
            ingested = sent
        elif event == "sealed" and proposes and (seal_sent or (limit is not None and log == limit)):
            proposes = False
        elif event == "sealed" and limit is not None and proposes:
            log = limit  # a limited relay reaches its limit by itself
    assert committed
    assert mode == "catch_up" or not chunks


def test_a_relay_that_outruns_the_catching_up_is_sealed() -> None:
    """It proposes as many tokens per round as a chunk has: catching up must end all the same, after one round."""
    log, sent, behind_before = 20, 0, None
    actions = []
    for _ in range(50):
        action = next_action("catch_up", 4, RULES, HandoffSnapshot(log, sent, False, True, False, False, behind_before))
        actions.append(action)
        if isinstance(action, SealRelay):
            break
        behind_before = log - sent
        sent, log = sent + 4, log + 4
    assert [type(a) for a in actions] == [IngestChunk, SealRelay]
