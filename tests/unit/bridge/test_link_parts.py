"""The small parts of a link: whose turn it is, pacing, measuring, gathering acknowledgements, warm memory, what lacks, notes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pddbridge.kv_coverage import Coverage, Rectangle
from pddbridge.kv_notes import MAX_RECTANGLES, NOTE_BYTES, Note, decode_have_body, decode_note, encode_have, encode_note, have_body_bytes
from pddbridge.kv_spec import HeadRange, KVGroup, KVPlane, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import LARGEST_PAYLOAD_BYTES, FrameHeader, Kind, Reply, decode_reply, encode_reply
from pddbridge.links.frame_buffers import FrameBuffers
from pddbridge.links.schedule import LinkRules, Pacer, Priority, Turns
from pddbridge.links.stats import GoodputMeter, RoundTrip
from pddbridge.links.tcp_inbound import Arrivals, Room
from tests.support.tcp_link import frame

SPEC = KVSpec((KVGroup(0, 2, (KVPlane("k", 3, 2), KVPlane("v", 3, 2))), KVGroup(2, 1, (KVPlane("latent", 1, 4),))), "bfloat16")
TOKENS = TokenRange(4, 11)


@dataclass(eq=False)
class Waiting:
    priority: Priority
    remaining_bytes: int = 100
    deadline_s: float | None = None


def test_turns_go_round_within_a_class_and_down_the_classes() -> None:
    turns: Turns[Waiting] = Turns(LinkRules("fair", background_after_s=10.0))
    a, b, low = Waiting(Priority.NORMAL), Waiting(Priority.NORMAL), Waiting(Priority.BACKGROUND)
    assert not turns
    assert turns.take(0.0) is None
    for one in (low, a, b, a):
        turns.add(one, 0.0)
    order = []
    for turn in range(24):
        now_s = 0.0 if turn < 12 else 10.0
        assert turns.next(now_s, lambda one: one is low) is low
        one = turns.take(now_s)
        assert one is not None
        order.append("ab"[one is b] if one is not low else "l")
        turns.add(one, now_s)
    assert "".join(order) == "abababababababa" + "l" + "babababa", "the background's turn comes when it has waited for 10 s"
    assert turns.num_taken == {"first": 21, "aged": 3}
    turns.remove(lambda one: one is a)
    assert turns.take(10.0, lambda one: one is a) is None
    turns.clear()
    assert not turns


def test_a_pacer_holds_the_rate_and_saves_nothing_up() -> None:
    pacer = Pacer(100.0)
    assert pacer.delay_s(5.0) == 0
    pacer.spent(50, 5.0)
    assert pacer.delay_s(5.0) == pytest.approx(0.5)
    pacer.spent(50, 5.0)
    assert pacer.delay_s(5.75) == pytest.approx(0.25)
    assert pacer.delay_s(100.0) == 0
    pacer.spent(50, 100.0)
    assert pacer.delay_s(100.0) == pytest.approx(0.5)
    free = Pacer(None)
    free.spent(10**12, 0.0)
    assert free.delay_s(0.0) == 0


def test_goodput_is_measured_while_something_is_in_flight_only() -> None:
    meter = GoodputMeter()
    meter.delivered(10, 1.0, True)
    assert meter.bytes_per_s is None
    meter.started(1.0)
    meter.delivered(100, 1.01, True)  # a short burst: a first guess
    assert meter.bytes_per_s == pytest.approx(10_000)
    for start in (10.0, 20.0, 30.0):  # idle in between does not count
        meter.started(start)
        for i in range(1, 11):
            meter.started(start + i / 10)
            meter.delivered(500, start + i / 10, i == 10)
    assert meter.bytes_per_s == pytest.approx(5000)
    meter.started(40.0)
    meter.delivered(1, 40.01, True)  # a better measurement is there
    assert meter.bytes_per_s == pytest.approx(5000)
    meter.started(50.0)
    for i in range(1, 101):
        meter.delivered(1000, 50 + i / 10, False)
    assert 9900 < meter.bytes_per_s < 10_000


def test_the_round_trip_is_smoothed() -> None:
    trip = RoundTrip()
    trip.measured(0.8)
    trip.measured(0.0)
    assert trip.smoothed_s == pytest.approx(0.7)


def header(sequence: int) -> FrameHeader:
    return frame(1, 22, TokenRange(0, 4), sequence)[0]


def test_an_acknowledgement_never_speaks_for_a_frame_that_is_not_placed() -> None:
    arrivals = Arrivals()
    first, second, third, fourth = (arrivals.add(header(i)) for i in range(4))
    arrivals.settle(second, placed=True)
    assert arrivals.take() is None
    assert arrivals.num_unanswered == 4
    arrivals.settle(first, placed=True)
    taken = arrivals.take()
    assert taken is not None
    assert taken.sequence == 1
    assert arrivals.take() is None
    arrivals.settle(fourth, placed=True)
    arrivals.settle(third, placed=False)  # refused on its own
    taken = arrivals.take()
    assert taken is not None
    assert taken.sequence == 3
    last = arrivals.add(header(4))
    arrivals.settle(last, placed=False)
    assert arrivals.take() is None
    assert arrivals.num_unanswered == 0


async def test_room_for_frames_is_counted_and_a_frame_larger_than_all_of_it_goes_alone() -> None:
    room = Room(4)
    assert [await room.take(size) for size in (1, 2)] == [1, 2]
    waiting = asyncio.create_task(room.take(9))
    for size in (1, 2):
        await asyncio.sleep(0)
        assert not waiting.done()
        room.give_back(size)
    assert await asyncio.wait_for(waiting, 5) == 4
    waiting = asyncio.create_task(room.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    room.give_back(4)
    assert await asyncio.wait_for(waiting, 5) == 1


def test_warm_memory_is_given_again_only_when_nobody_refers_to_it() -> None:
    buffers = FrameBuffers()
    first = buffers.take(1 << 20)
    kept = first.view(np.uint16).reshape(2, -1)[1:]
    address = first.__array_interface__["data"][0]
    del first
    second = buffers.take(1 << 19)
    assert second.__array_interface__["data"][0] != address
    assert second.shape == (1 << 19,)
    view = kept.reshape(-1).view(np.uint8).data
    del kept
    third = buffers.take(1 << 20)
    assert third.__array_interface__["data"][0] != address  # a memoryview holds it
    del view
    assert buffers.take(1 << 20).__array_interface__["data"][0] == address
    many = [buffers.take(LARGEST_PAYLOAD_BYTES) for _ in range(40)]
    assert len({one.__array_interface__["data"][0] for one in many}) == 40
    assert buffers.take(10).shape == (10,)


@st.composite
def rectangles(draw: st.DrawFn) -> Rectangle:
    group = draw(st.integers(0, 1))
    plane = draw(st.integers(0, len(SPEC.groups[group].planes) - 1))

    def within(low: int, high: int) -> tuple[int, int]:
        start = draw(st.integers(low, high - 1))
        return start, draw(st.integers(start + 1, high))

    first = SPEC.groups[group].first_layer
    layers = LayerRange(*within(first, first + SPEC.groups[group].num_layers))
    return group, plane, layers, TokenRange(*within(0, 14)), HeadRange(*within(0, SPEC.groups[group].planes[plane].num_heads))


Cell = tuple[int, int, int, int, int]


def cells(rectangle: Rectangle, heads: HeadRange | None = None) -> set[Cell]:
    """One by one; those inside TOKENS (and ``heads``)."""
    group, plane, layer_range, token_range, head_range = rectangle
    return {
        (group, plane, layer, token, head)
        for layer in range(layer_range.start, layer_range.stop)
        for token in range(max(token_range.start, TOKENS.start), min(token_range.stop, TOKENS.stop))
        for head in range(head_range.start, head_range.stop)
        if heads is None or heads.start <= head < heads.stop
    }


@given(st.lists(rectangles(), max_size=6), rectangles())
@settings(max_examples=150, deadline=None)
def test_what_is_there_and_what_lacks_add_up(marked: list[Rectangle], asked: Rectangle) -> None:
    coverage = Coverage(SPEC, TOKENS)
    num_cells = coverage.num_free
    there: set[Cell] = set()
    for rectangle in marked:
        coverage.mark(*rectangle)
        there |= cells(rectangle)
    told = [cells(rectangle) for rectangle in coverage.taken()]
    assert sum(map(len, told)) == len(there) == num_cells - coverage.num_free
    assert set().union(*told) == there
    start, stop = max(asked[3].start, TOKENS.start), min(asked[3].stop, TOKENS.stop)
    if start < stop:
        inside = (*asked[:3], TokenRange(start, stop), asked[4])
        lacking = [cells(rectangle) for rectangle in coverage.free_within(*inside)]
        assert set().union(*lacking) == cells(inside) - there
        assert sum(map(len, lacking)) == len(cells(inside) - there)
    data = encode_have(1, 2, 3, coverage.taken())
    assert decode_have_body(data[NOTE_BYTES:], SPEC) == list(coverage.taken())


def test_whole_chunks_make_one_rectangle_per_plane() -> None:
    coverage = Coverage(SPEC, TOKENS)
    for start in range(TOKENS.start, TOKENS.stop):
        for plane in (0, 1):
            coverage.mark(0, plane, LayerRange(0, 2), TokenRange(start, start + 1), HeadRange(0, 3))
    assert len(list(coverage.taken())) == 2


def test_a_shard_is_told_only_of_its_heads() -> None:
    spec = KVSpec.gqa(1, 4, 2, "float32")
    coverage = Coverage(spec, TOKENS, HeadRange(1, 3))
    coverage.mark(0, 0, LayerRange(0, 1), TokenRange(0, 100), HeadRange(0, 2))
    assert list(coverage.taken()) == [(0, 0, LayerRange(0, 1), TOKENS, HeadRange(1, 2))]


def test_no_more_is_told_than_a_body_may_hold() -> None:
    many = ((0, 0, LayerRange(0, 1), TokenRange(2 * i, 2 * i + 1), HeadRange(0, 1)) for i in range(MAX_RECTANGLES + 5))
    data = encode_have(1, 2, 3, many)
    note = decode_note(data[:NOTE_BYTES], (Kind.HAVE,))
    assert note.value == MAX_RECTANGLES
    assert have_body_bytes(note) == len(data) - NOTE_BYTES < 1 << 16


def test_a_reply_is_a_note() -> None:
    assert encode_reply(Reply(5, 6, 7, None)) == encode_note(Note(Kind.ACK, 5, 6, 7))
    assert decode_reply(encode_note(Note(Kind.NACK, 5, 6, 7, 2))).reason == 2
    with pytest.raises(ValueError, match="encode_note"):
        encode_note(Note(Kind.ACK, 1 << 64, 0, 0))
