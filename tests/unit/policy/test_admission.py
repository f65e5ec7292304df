"""Who starts, waits and is refused at the edge; any order of arrivals and ends lets everybody finish; what refused clients are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.admission import (
    Claims,
    MainRoom,
    QueueLimits,
    WaitingRequest,
    claim_tokens,
    completion_rate,
    may_start,
    next_waiting,
    refuse_one,
    retry_after_s,
)

ROOM = MainRoom(tokens=100, rows=4, num_mains=1)
LIMITS = QueueLimits(max_requests=3, max_tokens=100, max_wait_s=10.0)


def waiting(*given: tuple[str, int]) -> list[WaitingRequest]:
    return [WaitingRequest(order, tenant, tokens) for order, (tenant, tokens) in enumerate(given)]


def test_a_claim_is_the_prompt_and_a_part_of_the_output() -> None:
    assert claim_tokens(50, 10_000, 256) == 306
    assert claim_tokens(50, 7, 256) == 57


@pytest.mark.parametrize(
    ("tokens", "claims", "wanted"),
    [
        (60, Claims(1, 40, 0), "room"),
        (61, Claims(1, 40, 0), "asks"),
        (61, Claims(1, 40, 1), None),
        (10_000, Claims(), "room"),
        (1, Claims(4, 4, 0), None),
        (1, Claims(3, 3, 3), "room"),
    ],
)
def test_it_starts_where_there_is_room_and_one_per_main_asks_where_there_may_be(tokens: int, claims: Claims, wanted: str | None) -> None:
    assert may_start(tokens, claims, ROOM) == wanted


def test_no_main_keeps_nobody_waiting() -> None:
    assert may_start(1, Claims(9, 900, 9), MainRoom(0, 0, 0)) == "no_main"


def test_the_least_served_tenant_s_oldest_comes_next() -> None:
    those = waiting(("a", 1), ("a", 1), ("b", 1), ("b", 1))
    assert next_waiting([], {}) is None
    for service, order in (({"a": 5, "b": 5}, 0), ({"a": 6, "b": 5}, 2), ({"b": 1}, 0)):
        chosen = next_waiting(those, service)
        assert chosen is not None
        assert chosen.order == order


def test_a_full_queue_costs_the_tenant_that_filled_it() -> None:
    flood = waiting(("a", 1), ("a", 1), ("a", 1), ("b", 1))
    refusal = refuse_one(flood, LIMITS, None)
    assert refusal is not None
    assert (refusal.order, refusal.reason) == (2, "queue_full")
    assert refuse_one(flood[:3], LIMITS, None) is None
    refusal = refuse_one(waiting(("a", 60), ("b", 41)), LIMITS, None)
    assert refusal is not None
    assert (refusal.order, refusal.reason) == (0, "tokens_full")
    assert refuse_one([], LIMITS, 0.001) is None


def test_who_would_wait_too_long_by_what_was_measured_is_refused_at_once() -> None:
    refusal = refuse_one(waiting(("a", 1), ("b", 1)), LIMITS, 0.19)
    assert refusal is not None
    assert (refusal.order, refusal.reason) == (1, "too_slow")
    assert refuse_one(waiting(("a", 1), ("b", 1)), LIMITS, 0.21) is None


def test_the_rate_is_of_lately_and_falls_while_nothing_ends() -> None:
    assert completion_rate([0.0, 1.0, 2.0], 2.0) is None
    assert completion_rate([0.0, 1.0, 2.0, 3.0], 3.0) == pytest.approx(1.0)
    assert completion_rate([0.0, 1.0, 2.0, 3.0], 6.0) == pytest.approx(0.5)
    assert completion_rate([0.0, 1.0, 2.0, 3.0], 62.0) is None
    assert completion_rate([5.0, 5.0, 5.0, 5.0], 5.0) is None


def test_a_refused_client_is_told_when_those_before_it_will_have_started() -> None:
    assert retry_after_s(9, 2.0, 1.0, 60.0) == 5
    assert retry_after_s(0, 3.0, 1.0, 60.0) == 1
    assert retry_after_s(9, 0.1, 1.0, 60.0) == 60
    assert retry_after_s(9, None, 2.0, 60.0) == 2


@given(
    requests=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 250)), min_size=1, max_size=30),
    ends=st.lists(st.integers(0, 10**6), min_size=30, max_size=30),
    grants=st.lists(st.booleans(), min_size=60, max_size=60),
    rows=st.integers(0, 5),
)
def test_whatever_comes_and_in_whatever_order_it_ends_everybody_starts(
    requests: list[tuple[str, int]], ends: list[int], grants: list[bool], rows: int
) -> None:
    """Main grants in its own time and whoever has been granted ends in any order. No state is reached from which nothing can move; what
    runs beyond the room was asked for one by one; no tenant is passed over while it is served least.
    """
    room = MainRoom(100, rows, 1)
    queue = waiting(*requests)
    service: dict[str, int] = {}
    running: list[tuple[WaitingRequest, bool]] = []  # with whether it still asks
    num_steps = 0
    while queue or running:
        num_steps += 1
        assert num_steps < 200
        claims = Claims(len(running), sum(one.tokens for one, _ in running), sum(asks for _, asks in running))
        chosen = next_waiting(queue, service)
        reason = None if chosen is None else may_start(chosen.tokens, claims, room)
        if chosen is not None and reason is not None:
            assert service.get(chosen.tenant, 0) == min(service.get(one.tenant, 0) for one in queue)
            assert len(running) < max(1, rows)
            if reason == "asks":
                assert claims.num_asking == 0
            elif running:
                assert claims.tokens + chosen.tokens <= room.tokens
            queue.remove(chosen)
            service[chosen.tenant] = service.get(chosen.tenant, 0) + chosen.tokens
            running.append((chosen, True))
            continue
        assert running, "nobody runs and nobody may start"
        asking = [i for i, (_, asks) in enumerate(running) if asks]
        if asking and grants[num_steps % len(grants)]:
            running[asking[0]] = (running[asking[0]][0], False)
        else:
            running.pop(ends[num_steps % len(ends)] % len(running))
