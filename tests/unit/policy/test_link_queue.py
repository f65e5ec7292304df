"""What is under way on a link: drained by class and schedule, and what of it goes before one more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.link_queue import LinkQueue
from pdd.policy.link_schedule import Priority, Schedule

URGENT, NORMAL, BACKGROUND = Priority.URGENT, Priority.NORMAL, Priority.BACKGROUND


def queue(schedule: Schedule = "shortest") -> LinkQueue:
    """A long one behind a relay, a short one that is waited for, one in the background."""
    made = LinkQueue(schedule)
    made.add("relayed", 1000.0, NORMAL)
    made.add("direct", 100.0, URGENT)
    made.add("background", 500.0, BACKGROUND)
    made.advance(10.0, 100.0)  # the first call only tells the time
    return made


def test_higher_classes_go_before_and_lower_ones_do_not() -> None:
    made = queue()
    assert made.ahead_bytes(200.0, URGENT) == 100.0
    assert made.ahead_bytes(50.0, URGENT) == 0.0, "shortest first"
    assert made.ahead_bytes(50.0, NORMAL) == 100.0
    assert made.ahead_bytes(50.0, BACKGROUND) == 1100.0


def test_where_they_take_turns_as_much_of_each_goes_before() -> None:
    made = queue("fair")
    assert made.ahead_bytes(50.0, URGENT) == 50.0
    assert made.ahead_bytes(200.0, URGENT) == 100.0


def test_it_drains_by_class_and_shortest_first() -> None:
    made = queue()
    made.add("short", 200.0, NORMAL)
    made.advance(12.5, 100.0)  # 250 bytes: the urgent one, then 150 of the short
    assert made.ahead_bytes(1e9, URGENT) == 0.0
    assert made.remaining_bytes(background=False) == 1050.0
    assert made.remaining_bytes(background=True) == 500.0
    assert made.remaining_bytes(background=False, besides="relayed") == 50.0
    assert made.ahead_bytes(60.0, NORMAL) == 50.0
    made.advance(100.0, 100.0)
    assert made.remaining_bytes(background=False) == made.remaining_bytes(background=True) == 0.0
    assert len(made) == 4, "those that have not arrived are still open"


def test_fair_ones_drain_alike() -> None:
    made = LinkQueue("fair")
    for key, num_bytes in (("a", 10.0), ("b", 100.0), ("c", 100.0)):
        made.add(key, num_bytes, NORMAL)
    made.advance(0.0, 1.0)
    made.advance(90.0, 1.0)
    assert made.remaining_bytes(background=False) == pytest.approx(120.0)
    assert made.ahead_bytes(60.0, NORMAL) == pytest.approx(120.0)
    assert made.ahead_bytes(59.0, NORMAL) == pytest.approx(118.0)


def test_what_ends_or_changes_class_counts_at_once_and_what_is_gone_does_not_mind() -> None:
    made = queue()
    made.remove("direct")
    made.remove("direct")
    made.set_priority("direct", URGENT)
    made.set_priority("relayed", BACKGROUND)
    assert len(made) == 2
    assert made.ahead_bytes(1e9, NORMAL) == 0.0
    made.advance(1000.0, None)
    assert made.remaining_bytes(background=True) == 1500.0, "nothing is known to have left"


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
        made.add(key, size, of)
    assert made.ahead_bytes(num_bytes, priority) <= made.ahead_bytes(num_bytes + more, priority)
    total = sum(size for size, _ in given)
    assert made.ahead_bytes(num_bytes, priority) <= total + 1e-6
    made.advance(0.0, 1000.0)
    made.advance(passed_s, 1000.0)
    left = made.remaining_bytes(background=False) + made.remaining_bytes(background=True)
    assert left == pytest.approx(max(0.0, total - 1000.0 * passed_s), abs=1e-3)
