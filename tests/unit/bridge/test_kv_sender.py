"""The sending side of a transfer: when it is done, what is sent again, what ends it."""

from __future__ import annotations

import pytest

from pddbridge.kv_sender import Sender, SenderState
from pddbridge.kv_spec import HeadRange, KVSpec, TokenRange
from pddbridge.kv_transfer import TransferFailed
from pddbridge.kv_wire import (
    NackReason,
)
from tests.support.kv import blocks_of, coded_planes, frames_of

SPEC = KVSpec.gqa(2, 3, 4, "float32")


def sender_with(num_chunks: int, max_attempts: int = 3) -> Sender:
    sender = Sender(SPEC, 1, 9, TokenRange(0, num_chunks * 2), max_attempts=max_attempts)
    planes = coded_planes(SPEC, num_chunks * 2)
    for i in range(num_chunks):
        for block in blocks_of(SPEC, planes, TokenRange(2 * i, 2 * i + 2)):
            sender.push(block)
    return sender


def test_done_needs_every_push_and_every_acknowledgement() -> None:
    sender = Sender(SPEC, 1, 9, TokenRange(0, 4))
    planes = coded_planes(SPEC, 4)
    for block in blocks_of(SPEC, planes, TokenRange(0, 2)):
        sender.push(block)
    for frame in frames_of(sender):
        assert sender.acked(frame.header.sequence) == frame.header.payload_bytes
    assert sender.state is SenderState.OPEN  # half is not pushed yet
    for block in blocks_of(SPEC, planes, TokenRange(2, 4)):
        sender.push(block)
    last, other = frames_of(sender)
    assert sender.acked(last.header.sequence)
    assert sender.acked(last.header.sequence) == 0  # no news
    assert sender.state is SenderState.OPEN
    assert sender.acked(other.header.sequence)
    assert sender.state is SenderState.DONE
    assert sender.report.bytes == 4 * SPEC.bytes_per_token


def test_a_lost_frame_is_sent_again_and_not_for_ever() -> None:
    sender = sender_with(1, max_attempts=3)
    for attempt in range(3):
        frames = frames_of(sender)
        assert len(frames) == 2
        assert {f.header.sequence for f in frames} == {0, 1}
        sender.lost(1, "cut")
        assert sender.num_queued == (1 if attempt < 2 else 0)
        if attempt < 2:
            sender.lost(0, "cut")
    assert sender.state is SenderState.FAILED
    assert sender.failure is not None
    assert sender.failure.code == "UNAVAILABLE"
    assert "3 times, last: cut" in sender.failure.message
    assert sender.num_owed == 0


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (NackReason.UNKNOWN, "NOT_FOUND"),
        (NackReason.FENCED, "CANCELLED"),
        (NackReason.EPOCH, "UNAVAILABLE"),
        (NackReason.REFUSED, "INTERNAL"),
        (NackReason.FAILED, "INTERNAL"),
    ],
)
def test_a_nack_ends_the_transfer(reason: NackReason, code: str) -> None:
    sender = sender_with(2)
    sender.next_frame()
    sender.nacked(reason)
    sender.fail(TransferFailed("INTERNAL", "too late"))
    assert sender.failure is not None
    assert sender.failure.code == code
    assert sender.next_frame() is None
    assert sender.acked(0) == 0


def test_what_may_not_be_pushed() -> None:
    sender = Sender(SPEC, 1, 9, TokenRange(4, 10), heads=HeadRange(1, 2))
    planes = coded_planes(SPEC, 12)
    for tokens, heads in (
        (TokenRange(3, 6), HeadRange(1, 2)),
        (TokenRange(8, 11), HeadRange(1, 2)),
        (TokenRange(4, 6), HeadRange(0, 2)),
        (TokenRange(4, 6), HeadRange(1, 3)),
    ):
        with pytest.raises(ValueError, match="outside"):
            sender.push(next(blocks_of(SPEC, planes, tokens, heads)))
    sender.push(next(blocks_of(SPEC, planes, TokenRange(4, 6), HeadRange(1, 2))))
    with pytest.raises(ValueError, match="pushed before"):
        sender.push(next(blocks_of(SPEC, planes, TokenRange(5, 7), HeadRange(1, 2))))
    sender.cancel()
    sender.push(next(blocks_of(SPEC, planes, TokenRange(5, 7), HeadRange(1, 2))))
    assert (sender.num_owed, sender.state) == (0, SenderState.CANCELLED)
    assert sender.failure is not None
    assert sender.failure.code == "CANCELLED"
