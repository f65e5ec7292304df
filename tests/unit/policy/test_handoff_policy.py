"""The handoff state machine under every interleaving of relay tokens, confirmations and seals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.handoff import Commit, HandoffSnapshot, IngestChunk, SealRelay, Wait, choose_handoff, next_action


@pytest.mark.parametrize(
    ("forced", "log_tokens", "mode"),
    [
        (None, 0, "one_shot"),
        (None, 64, "one_shot"),
        (None, 65, "catch_up"),
        ("one_shot", 900, "one_shot"),
        ("catch_up", 0, "catch_up"),
    ],
)
def test_mode(forced: str | None, log_tokens: int, mode: str) -> None:
    assert choose_handoff(forced, log_tokens, 64) == mode


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
                mode, chunk, HandoffSnapshot(log, sent, ingested < sent, proposes, seal_sent, limit is not None, behind_before)
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
        action = next_action("catch_up", 4, HandoffSnapshot(log, sent, False, True, False, False, behind_before))
        actions.append(action)
        if isinstance(action, SealRelay):
            break
        behind_before = log - sent
        sent, log = sent + 4, log + 4
    assert [type(a) for a in actions] == [IngestChunk, SealRelay]
