"""Who sends next on a shared link: each schedule's order, classes, the bound on waiting for any mix, and receivers that share a link."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddbridge.kv_spec import TokenRange
from pddbridge.link_schedule import SCHEDULES, LinkRules, Priority, Schedule, WaitingTransfer, choose_transfer
from pddbridge.links.shared_link import frame_bytes, unsent_bytes
from pddbridge.links.tcp import KVSender
from tests.support.tcp_link import ONE, RECEIVER, SENDER, Target, eventually, push_in_chunks, receiving

SMALL, LARGE = 10, 10_000
SLOW = replace(ONE, max_bytes_per_s=100e3)  # a frame of these tests takes 2 ms


def waiting(remaining: int, deadline_s: float | None = None, priority: Priority = Priority.NORMAL, last_turn: int = 0) -> WaitingTransfer:
    return WaitingTransfer(priority, remaining, deadline_s, 0.0, last_turn)


@pytest.mark.parametrize(("schedule", "wanted"), [("fair", 0), ("shortest", 1), ("deadline", 2)])
def test_each_schedule_has_its_order(schedule: Schedule, wanted: int) -> None:
    those = [waiting(LARGE, 9.0, last_turn=1), waiting(SMALL, 8.0, last_turn=2), waiting(LARGE, 5.0, last_turn=3)]
    turn = choose_transfer(those, LinkRules(schedule), turn=4, now_s=1.0)
    assert (turn.index, turn.reason) == (wanted, "first")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_classes_go_first_and_the_background_last_whatever_the_schedule(schedule: Schedule) -> None:
    those = [
        waiting(SMALL, 1.5, Priority.BACKGROUND),
        waiting(SMALL, 1.5, Priority.NORMAL),
        waiting(LARGE, None, Priority.URGENT, last_turn=3),
    ]
    assert choose_transfer(those, LinkRules(schedule), 1, 1.0).index == 2
    assert choose_transfer(those[:2], LinkRules(schedule), 1, 1.0).index == 1
    assert choose_transfer(those[:1], LinkRules(schedule), 1, 1.0).reason == "alone"


def test_a_missed_deadline_does_not_make_others_miss_theirs() -> None:
    those = [waiting(SMALL, 3.0), waiting(LARGE, 8.0), waiting(SMALL, None)]
    rules = LinkRules("deadline")
    assert choose_transfer(those, rules, 1, 2.0).index == 0
    assert choose_transfer(those, rules, 1, 4.0).index == 1
    assert choose_transfer(those[::2], rules, 1, 4.0).index == 1


def test_the_background_ages_only_once_it_has_waited_long() -> None:
    rules = LinkRules("shortest", aged_turn=4, background_after_s=10.0)
    those = [waiting(SMALL, priority=Priority.BACKGROUND), waiting(LARGE, last_turn=3)]
    assert choose_transfer(those, rules, 4, 9.9).index == 1
    assert choose_transfer(those, rules, 4, 10.0).index == 0
    assert choose_transfer(those, rules, 5, 10.0).index == 1


@given(
    schedule=st.sampled_from(SCHEDULES),
    sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=8),
    deadlines=st.lists(st.none() | st.floats(0, 1e3), min_size=8, max_size=8),
    classes=st.lists(st.sampled_from((Priority.URGENT, Priority.NORMAL)), min_size=8, max_size=8),
    aged_turn=st.integers(2, 9),
)
def test_nobody_waits_for_more_than_a_bounded_number_of_turns(
    schedule: Schedule, sizes: list[int], deadlines: list[float | None], classes: list[Priority], aged_turn: int
) -> None:
    """Everybody always has more to send, which is the worst for whoever is last in the schedule's order."""
    rules = LinkRules(schedule, aged_turn)
    last = [0] * len(sizes)
    for turn in range(1, 4 * aged_turn * len(sizes)):
        those = [WaitingTransfer(classes[i], sizes[i], deadlines[i], 0.0, last[i]) for i in range(len(sizes))]
        chosen = choose_transfer(those, rules, turn, turn / 10).index
        last[chosen] = turn
        assert turn - min(last) <= aged_turn * len(sizes)


@pytest.mark.parametrize("wrong", [{"schedule": "random"}, {"aged_turn": 1}, {"background_after_s": 0.0}])
def test_rules_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="LinkRules"):
        LinkRules(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nobody"):
        choose_transfer([], LinkRules(), 1, 0.0)


def test_frames_and_socket_buffers_follow_the_measured_rate() -> None:
    assert frame_bytes(None) == 256 << 10
    assert frame_bytes(5e6) == 125_000, "40 Mbit/s: 25 ms"
    assert (frame_bytes(1e3), frame_bytes(1e12), frame_bytes(1e12, 1 << 20)) == (32 << 10, 4 << 20, 1 << 20)
    assert unsent_bytes(5e6) == 1 << 16
    assert unsent_bytes(2e9) == 8 << 20
    assert unsent_bytes(5.1e6) == unsent_bytes(4.9e6)


def push(sender: KVSender, target: Target, transfer_id: int, num_tokens: int, epoch: int = 22, **options: object) -> None:
    tokens = TokenRange(0, num_tokens)
    target.server.expect(transfer_id, tokens)
    transfer = sender.open("127.0.0.1", target.port, epoch, transfer_id, tokens, **options)  # type: ignore[arg-type]
    push_in_chunks(transfer, tokens, chunk=1)


async def test_a_small_transfer_that_comes_later_overtakes_a_huge_one_on_the_wire() -> None:
    async with receiving() as target:
        sender = KVSender(SENDER, SLOW, {"a-b": LinkRules("shortest")})
        try:
            push(sender, target, 1, 100, link="a-b")
            await eventually(lambda: target.num_placed > 0)
            push(sender, target, 2, 5, link="a-b")
            await eventually(lambda: len(target.completed) == 2)
            assert list(target.completed) == [2, 1]
            last_small = len(target.placed_ids) - 1 - target.placed_ids[::-1].index(2)
            assert last_small < 40, "of 210 frames; some of the huge one had left before the small one came"
            assert sum(sender.turns.values()) == 210
        finally:
            await sender.close()


async def test_receivers_behind_one_link_share_its_turns_and_a_silent_one_holds_up_nobody() -> None:
    async with receiving() as near, receiving(replace(RECEIVER, epoch=23, name="main-2")) as other:
        # Given up only long after the test: who waited for the silent one to be given up would not be through within its time.
        sender = KVSender(SENDER, replace(ONE, stall_timeout_s=600.0), {"a-b": LinkRules("shortest")})
        try:
            near.may_place.clear()  # takes frames until its buffers are full, and never acknowledges one
            push(sender, near, 1, 60, link="a-b")
            await eventually(lambda: near.num_placing == 16, 60)
            push(sender, other, 1, 100, 23, link="a-b")
            await eventually(lambda: len(other.completed) == 1, 60)
            assert not near.completed
            assert near.num_placing == 16
            near.may_place.set()
            await eventually(lambda: len(near.completed) == 1, 60)
            with pytest.raises(ValueError, match="a-c"):
                push(sender, other, 2, 5, 23, link="a-c")
        finally:
            await sender.close()
