"""What is under way on a link: drained by class and schedule, and what of it goes before one more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.line_rate import SETTLED_S, LineRate
from pdd.policy.link_queue import LinkQueue
from pdd.policy.link_schedule import Priority, Schedule

URGENT, NORMAL, BACKGROUND = Priority.URGENT, Priority.NORMAL, Priority.BACKGROUND
ONE, OTHER = "prefill-0", "prefill-1"


def queue(schedule: Schedule = "shortest") -> LinkQueue:
    """A long one behind a relay, a short one that is waited for, one in the background."""
    made = LinkQueue(schedule)
    made.add("relayed", 1000.0, NORMAL, ONE)
    made.add("direct", 100.0, URGENT, ONE)
    made.add("background", 500.0, BACKGROUND, ONE)
    made.advance(10.0, {ONE: 100.0})  # the first call only tells the time
    return made


def test_higher_classes_go_before_and_lower_ones_do_not() -> None:
    made = queue()
    assert made.ahead_bytes(200.0, URGENT, ONE, 100.0) == 100.0
    assert made.ahead_bytes(50.0, URGENT, ONE, 100.0) == 0.0, "shortest first"
    assert made.ahead_bytes(50.0, NORMAL, ONE, 100.0) == 100.0
    assert made.ahead_bytes(50.0, BACKGROUND, ONE, 100.0) == 1100.0


def test_where_they_take_turns_as_much_of_each_goes_before() -> None:
    made = queue("fair")
    assert made.ahead_bytes(50.0, URGENT, ONE, 100.0) == 50.0
    assert made.ahead_bytes(200.0, URGENT, ONE, 100.0) == 100.0


def test_it_drains_by_class_and_shortest_first() -> None:
    made = queue()
    made.add("short", 200.0, NORMAL, ONE)
    made.advance(12.5, {ONE: 100.0})  # 250 bytes: the urgent one, then 150 of the short
    assert made.ahead_bytes(1e9, URGENT, ONE, 100.0) == 0.0
    assert made.remaining_bytes(background=False) == 1050.0
    assert made.remaining_bytes(background=True) == 500.0
    assert made.remaining_bytes(background=False, besides="relayed") == 50.0
    assert made.ahead_bytes(60.0, NORMAL, ONE, 100.0) == 50.0
    made.advance(100.0, {ONE: 100.0})
    assert made.remaining_bytes(background=False) == made.remaining_bytes(background=True) == 0.0
    assert len(made) == 4, "those that have not arrived are still open"


def test_fair_ones_drain_alike() -> None:
    made = LinkQueue("fair")
    for key, num_bytes in (("a", 10.0), ("b", 100.0), ("c", 100.0)):
        made.add(key, num_bytes, NORMAL, ONE)
    made.advance(0.0, {ONE: 1.0})
    made.advance(90.0, {ONE: 1.0})
    assert made.remaining_bytes(background=False) == pytest.approx(120.0)
    assert made.ahead_bytes(60.0, NORMAL, ONE, 100.0) == pytest.approx(120.0)
    assert made.ahead_bytes(59.0, NORMAL, ONE, 100.0) == pytest.approx(118.0)


def test_what_ends_or_changes_class_counts_at_once_and_what_is_gone_does_not_mind() -> None:
    made = queue()
    made.remove("direct")
    made.remove("direct")
    made.set_priority("direct", URGENT)
    made.set_priority("relayed", BACKGROUND)
    assert len(made) == 2
    assert made.ahead_bytes(1e9, NORMAL, ONE, 100.0) == 0.0
    made.advance(1000.0, {})
    assert made.remaining_bytes(background=True) == 1500.0, "nothing is known to have left"


def test_senders_drain_each_at_its_own_rate_and_share_the_line() -> None:
    made = LinkQueue("shortest")
    made.add("a", 1000.0, NORMAL, ONE)
    made.advance(0.0, {ONE: 100.0})
    made.advance(SETTLED_S, {ONE: 100.0})  # alone it has the line
    made.add("b", 1000.0, NORMAL, OTHER)
    told = {ONE: 100.0, OTHER: 100.0}  # they say what they had before
    made.advance(SETTLED_S + 2, told)
    assert made.remaining_bytes(background=False, besides="b") == pytest.approx(600.0 - 100.0)
    assert made.remaining_bytes(background=False, besides="a") == pytest.approx(1000.0 - 100.0)
    made.advance(SETTLED_S + 4, {ONE: 60.0, OTHER: 40.0})  # by now what each leaves the other
    assert made.remaining_bytes(background=False, besides="b") == pytest.approx(500.0 - 100.0)
    assert made.remaining_bytes(background=False, besides="a") == pytest.approx(900.0 - 80.0)
    made.advance(SETTLED_S + 5, {ONE: 60.0})
    assert made.remaining_bytes(background=False, besides="a") == pytest.approx(820.0), "nothing is known to have left"


def test_senders_take_turns_as_far_as_the_rate_does_not_say_so_already() -> None:
    made = queue()
    made.add("theirs", 300.0, BACKGROUND, OTHER)
    made.advance(10.0, {ONE: 100.0, OTHER: 100.0})
    assert made.ahead_bytes(200.0, URGENT, ONE, 50.0) == 100.0, "half of the line: what it gets has the other in it"
    assert made.ahead_bytes(200.0, URGENT, ONE, 100.0) == 100.0 + 300.0, "all of it, as it was alone: nobody else knows who waits"
    assert made.ahead_bytes(100.0, URGENT, ONE, 100.0) == 100.0 + 200.0, "no more of theirs than of its own"
    assert made.ahead_bytes(200.0, URGENT, "prefill-2", 100.0) == pytest.approx(200.0 + 200.0)
    assert made.ahead_bytes(1e9, URGENT, "prefill-2", 100.0) == pytest.approx(1600.0 + 300.0)
    assert made.ahead_bytes(200.0, URGENT, "prefill-2", 100.0 / 3) == pytest.approx(0.0)


def test_of_a_line_that_nothing_is_known_of_one_that_begins_takes_turns() -> None:
    made = LinkQueue("shortest")
    made.add("a", 300.0, NORMAL, ONE)
    made.add("b", 500.0, NORMAL, OTHER)
    assert made.ahead_bytes(200.0, NORMAL, "prefill-2", 100.0) == 400.0
    assert made.ahead_bytes(400.0, NORMAL, ONE, 100.0) == 300.0


def test_a_line_is_what_its_senders_tell_once_they_have_shared_it_for_a_while() -> None:
    line = LineRate()
    both = {ONE: 5.0, OTHER: 5.0}
    assert line.shares(0.0, both) == both, "nothing else is known"
    assert line.shares(1.0, {ONE: 6.0}) == {ONE: 6.0}
    assert line.shares(2.0, both) == {ONE: 3.0, OTHER: 3.0}, "it may be that each has told of the whole"
    assert line.shares(SETTLED_S + 1.9, both) == {ONE: 3.0, OTHER: 3.0}
    assert line.shares(SETTLED_S + 2, both) == both
    assert line.shares(SETTLED_S + 3, {ONE: 8.0}) == {ONE: 8.0}
    assert line.shares(SETTLED_S + 4, {ONE: 8.0, OTHER: 3.0}) == {ONE: 5.0, OTHER: 3.0}
    assert line.shares(SETTLED_S + 5, {}) == {}
    assert line.shares(2 * SETTLED_S + 6, {ONE: 20.0, OTHER: 20.0}) == {ONE: 10.0, OTHER: 10.0}, "the line has what one tells"


transfers = st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from(list(Priority))), max_size=8)


@given(
    given=transfers,
    schedule=st.sampled_from(["fair", "shortest", "deadline"]),
    num_bytes=st.floats(0, 1e6),
    more=st.floats(0, 1e6),
    priority=st.sampled_from(list(Priority)),
    passed_s=st.floats(0, 100),
)
def test_more_to_send_never_has_less_ahead_and_time_takes_off_what_it_can(
    given: list[tuple[float, Priority]], schedule: Schedule, num_bytes: float, more: float, priority: Priority, passed_s: float
) -> None:
    made = LinkQueue(schedule)
    for key, (size, of) in enumerate(given):
        made.add(key, size, of, ONE)
    for sender in (ONE, OTHER):
        assert made.ahead_bytes(num_bytes, priority, sender, 100.0) <= made.ahead_bytes(num_bytes + more, priority, sender, 100.0)
    total = sum(size for size, _ in given)
    assert made.ahead_bytes(num_bytes, priority, ONE, 100.0) <= total + 1e-6
    made.advance(0.0, {ONE: 1000.0})
    made.advance(passed_s, {ONE: 1000.0})
    left = made.remaining_bytes(background=False) + made.remaining_bytes(background=True)
    assert left == pytest.approx(max(0.0, total - 1000.0 * passed_s), abs=1e-3)
