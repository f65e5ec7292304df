"""Transfers to main that outlive their request: they bring the prefix for later, and stop for everything that matters more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdd.serving.coordinator import Coordinator
from pddbridge.rpc.gen import worker_pb2 as pb
from tests.support.counters import counted
from tests.support.generation import Outcome, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import serving
from tests.support.worker_script import Script, opened

FAST: dict[str, object] = {"min_tokens": 10, "deadline_s": 5.0}


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.serving.background.POLL_S", 0.01)


def prompt(number: int) -> tuple[int, ...]:
    return tuple(range(40 + number, 60 + number))


def scripts(**main: object) -> dict[str, Script]:
    return {"main-0": Script(kv_gate=opened(False), remembers=True, **main), "relay-0": Script(remembers=True)}  # type: ignore[arg-type]


async def relayed(coordinator: Coordinator, number: int = 0, name: str = "first") -> Outcome:
    """A request that ends on the relay: main's KV is held back by its gate."""
    request = make_request(name, prompt(number), params(8), pipeline="relay")
    outcome = await collect(coordinator, request)
    assert list(outcome.records) == expected(hashed_token, request)[0]
    assert set(outcome.origins) == {"relay"}
    return outcome


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(5000):
        if reached():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("the state was not reached")


def ended(coordinator: Coordinator, outcome: str) -> float:
    return counted(coordinator, "pdd:background_transfers_total", outcome=outcome)


async def test_the_transfer_completes_after_its_request_and_the_next_one_hits() -> None:
    script = scripts()
    async with serving(hashed_token, policy={"background": FAST}, scripts=script) as (cluster, coordinator):
        outcome = await relayed(coordinator)
        timeline = outcome.timeline
        assert (timeline.pipeline, timeline.ended_on) == ("relay", "relay")
        assert (timeline.transfer, timeline.transfer_reason) == ("background", "valuable")
        assert counted(coordinator, "pdd:background_transfers_running") == 1
        assert coordinator.num_running == 0
        assert cluster.worker("main").rows
        await until(lambda: not cluster.worker("relay").rows)
        await until(lambda: bool(cluster.worker("prefill").priorities))
        assert cluster.worker("prefill").priorities == [("main-0", pb.TRANSFER_PRIORITY_BACKGROUND)]
        script["main-0"].kv_gate.set()
        await until(lambda: ended(coordinator, "complete") == 1)
        await cluster.wait_idle()
        assert counted(coordinator, "pdd:background_kv_bytes_total") == 1900
        assert counted(coordinator, "pdd:kv_transfer_bytes_total", link="a-b") == 1900
        again = await collect(coordinator, make_request("second", prompt(0)))
        assert again.timeline.main_hit_tokens == 19
        assert set(again.origins) == {"main"}
        assert counted(coordinator, "pdd:requests_ended_on_total", pipeline="relay", on="relay") == 1


@pytest.mark.parametrize(
    ("background", "reason"),
    [({"min_tokens": 20}, "too_short"), ({**FAST, "max_transfers": 0}, "off"), ({**FAST, "max_bytes": 1000}, "too_large")],
)
async def test_what_is_not_worth_it_is_stopped_with_its_request(background: dict[str, object], reason: str) -> None:
    async with serving(hashed_token, policy={"background": background}, scripts=scripts()) as (cluster, coordinator):
        outcome = await relayed(coordinator)
        assert (outcome.timeline.transfer, outcome.timeline.transfer_reason) == ("stopped", reason)
        await cluster.wait_idle()
        assert cluster.worker("main").received_bytes == 0
        assert counted(coordinator, "pdd:main_transfers_unneeded_total", end="stopped", reason=reason) == 1


async def test_no_more_than_so_many_at_once() -> None:
    script = scripts()
    async with serving(hashed_token, policy={"background": {**FAST, "max_transfers": 1}}, scripts=script) as (_, coordinator):
        await relayed(coordinator, 0, "one")
        second = await relayed(coordinator, 1, "two")
        assert (second.timeline.transfer, second.timeline.transfer_reason) == ("stopped", "too_many")
        assert counted(coordinator, "pdd:background_transfers_running") == 1
        script["main-0"].kv_gate.set()
        await until(lambda: ended(coordinator, "complete") == 1)


async def test_it_is_given_up_at_its_deadline() -> None:
    async with serving(hashed_token, policy={"background": {**FAST, "deadline_s": 0.1}}, scripts=scripts()) as (cluster, coordinator):
        await relayed(coordinator)
        await until(lambda: ended(coordinator, "deadline") == 1)
        await cluster.wait_idle()


async def test_it_gives_way_when_others_need_the_link() -> None:
    """A direct request has 190 MB to send over 5 MB/s, 38 s; a second is as long as others may have to wait."""
    script = scripts()
    async with serving(hashed_token, policy={"background": FAST}, scripts=script, kv_bytes_per_token=10_000_000) as (cluster, coordinator):
        await relayed(coordinator)
        assert ended(coordinator, "link_busy") == 0
        other = asyncio.create_task(collect(coordinator, make_request("other", prompt(1), pipeline="direct")))
        await until(lambda: ended(coordinator, "link_busy") == 1)
        script["main-0"].kv_gate.set()
        await other
        await cluster.wait_idle()


async def test_it_ends_with_a_worker_that_dies() -> None:
    async with serving(hashed_token, policy={"background": FAST}, scripts=scripts()) as (cluster, coordinator):
        await relayed(coordinator)
        for row in list(cluster.worker("main").rows.values()):
            row.die()
        await until(lambda: ended(coordinator, "failed") == 1)
        await cluster.wait_idle()


async def test_it_ends_with_the_coordinator() -> None:
    async with serving(hashed_token, policy={"background": FAST}, scripts=scripts()) as (cluster, coordinator):
        await relayed(coordinator)
        await coordinator.close()
        assert ended(coordinator, "cancelled") == 1
        await cluster.wait_idle()


async def test_a_request_that_wants_the_same_prompt_makes_it_urgent_again() -> None:
    script = scripts()
    async with serving(hashed_token, policy={"background": FAST}, scripts=script) as (cluster, coordinator):
        await relayed(coordinator)
        second = asyncio.create_task(collect(coordinator, make_request("second", prompt(0), pipeline="direct")))
        await until(lambda: len(cluster.worker("prefill").priorities) == 2)
        assert cluster.worker("prefill").priorities[-1] == ("main-0", pb.TRANSFER_PRIORITY_NORMAL)
        script["main-0"].kv_gate.set()
        outcome = await second
        assert outcome.timeline.main_hit_tokens == 19, "nothing was sent twice"
        assert cluster.worker("main").received_bytes == 1900


async def test_what_was_cut_is_brought_when_the_link_is_idle() -> None:
    script = scripts()
    script["main-0"].kv_gate.set()
    async with serving(hashed_token, policy={"background": FAST}, scripts=script) as (cluster, coordinator):
        outcome = await collect(coordinator, make_request("cut", prompt(0), pipeline="local"))
        assert outcome.timeline.transfer == "cut"
        await until(lambda: ended(coordinator, "complete") == 1)
        await cluster.wait_idle()
        (target,) = cluster.worker("prefill").opens[-1].push_to
        assert (target.target, target.priority) == ("main-0", pb.TRANSFER_PRIORITY_BACKGROUND)
        again = await collect(coordinator, make_request("second", prompt(0)))
        assert again.timeline.main_hit_tokens == 19


async def test_what_was_cut_waits_while_the_link_is_busy_and_is_forgotten_in_time() -> None:
    script = scripts()
    async with serving(hashed_token, policy={"background": {**FAST, "candidate_s": 0.3}}, scripts=script) as (cluster, coordinator):
        other = asyncio.create_task(collect(coordinator, make_request("other", prompt(1), pipeline="direct")))
        await until(lambda: bool(cluster.worker("prefill").opens))
        await collect(coordinator, make_request("cut", prompt(0), pipeline="local"))
        await until(lambda: ended(coordinator, "forgotten") == 1)
        assert cluster.worker("main").received_bytes == 0
        script["main-0"].kv_gate.set()
        await other
