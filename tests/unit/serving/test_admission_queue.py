"""The queue at the edge as the coordinator uses it: turns between tenants, refusals with a time to come again, and nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from pdd.errors import Code, PddError
from pdd.flow_config import FlowConfig
from pdd.policy.admission import Claims, MainRoom
from pdd.serving.admission_queue import AdmissionQueue
from pdd.serving.request import GenerationRequest
from tests.support.generation import make_request, params


class Edge:
    """``order``: names of requests in order of their start. Each ends when it is told to."""

    def __init__(self, room: MainRoom, **flow: float) -> None:
        self.room = room
        self.registry = CollectorRegistry()
        self.queue = AdmissionQueue(FlowConfig.model_validate(flow), lambda: self.room, self.registry)
        self.order: list[str] = []
        self.may_end: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, tenant: str = "a", prompt: int = 10, timeout_s: float = 10.0) -> None:
        request = replace(make_request(name, range(5, 5 + prompt), params(2), timeout_s=timeout_s), tenant=tenant)
        self.may_end[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(request))
        await settle()

    async def end(self, name: str) -> None:
        self.may_end[name].set()
        await self.tasks[name]
        await settle()

    async def refused(self, name: str) -> PddError:
        with pytest.raises(PddError) as caught:
            await self.tasks[name]
        return caught.value

    def value(self, metric: str, **labels: str) -> float:
        return self.registry.get_sample_value(metric, labels) or 0.0

    def check_empty(self) -> None:
        assert (self.queue.num_waiting, self.queue.claims) == (0, Claims())

    async def _run(self, request: GenerationRequest) -> None:
        async with self.queue.admitted(request) as waited_s:
            assert waited_s >= 0
            self.order.append(request.request_id)
            await self.may_end[request.request_id].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_tenant_s_flood_waits_for_its_turns() -> None:
    edge = Edge(MainRoom(1000, 1, 1))
    for number in range(4):
        await edge.come(f"a{number}", "a")
    await edge.come("b0", "b")
    assert edge.order == ["a0"]
    assert edge.value("pdd:num_requests_waiting") == 4
    assert edge.value("pdd:waiting_tokens") == 4 * 12
    for name in ("a0", "a1", "b0", "a2", "a3"):  # b comes with what a has had by then: being late owes nothing
        assert edge.order[-1] == name
        await edge.end(name)
    edge.check_empty()
    assert edge.value("pdd:requests_started_total", reason="room") == 5


async def test_beyond_the_room_one_asks_at_a_time() -> None:
    edge = Edge(MainRoom(30, 9, 1))
    for name in "wxyz":
        await edge.come(name)
    assert edge.order == ["w", "x"]
    edge.queue.granted("w")
    await settle()
    assert edge.order == ["w", "x"], "x has not been granted"
    edge.queue.granted("x")
    await settle()
    assert edge.order == ["w", "x", "y"]
    assert edge.value("pdd:requests_started_total", reason="asks") == 1
    edge.queue.granted("nobody")
    await edge.end("y")
    assert edge.order == ["w", "x", "y", "z"]
    for name in "wxz":
        await edge.end(name)
    edge.check_empty()


async def test_a_full_queue_refuses_with_a_time_to_come_again() -> None:
    edge = Edge(MainRoom(1000, 1, 1), max_waiting_requests=2)
    for name, tenant in (("w", "a"), ("x", "a"), ("y", "a"), ("z", "b")):
        await edge.come(name, tenant)
    error = await edge.refused("y")  # in z's place: its tenant has most there
    assert (error.code, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 1.0)
    assert "allowed are 2" in error.message
    assert edge.value("pdd:requests_refused_total", reason="queue_full") == 1
    for name in "wxz":
        await edge.end(name)
    assert edge.order == ["w", "x", "z"]
    edge.check_empty()


async def test_nobody_waits_longer_than_is_allowed_nor_than_its_own_time() -> None:
    edge = Edge(MainRoom(1000, 1, 1), max_wait_s=0.15)
    await edge.come("w")
    await edge.come("x")
    await edge.come("y", timeout_s=0.05)
    assert (await edge.refused("y")).code is Code.DEADLINE_EXCEEDED
    error = await edge.refused("x")
    assert (error.code, error.message) == (Code.RESOURCE_EXHAUSTED, "no room at main for 0.15 s")
    await edge.end("w")
    edge.check_empty()


async def test_who_leaves_while_it_waits_or_runs_leaves_nothing_behind() -> None:
    edge = Edge(MainRoom(1000, 1, 1))
    for name in "wxy":
        await edge.come(name)
    for name in "xw":
        edge.tasks[name].cancel()
        await settle()
    assert edge.order == ["w", "y"]
    await edge.end("y")
    edge.check_empty()


async def test_room_that_comes_without_anything_ending_is_seen() -> None:
    edge = Edge(MainRoom(1000, 1, 1))
    await edge.come("w")
    await edge.come("x")
    edge.room = MainRoom(1000, 2, 2)
    async with asyncio.timeout(3):
        while edge.order != ["w", "x"]:
            await asyncio.sleep(0.01)
    edge.room = MainRoom(0, 0, 0)
    await edge.come("y")
    assert edge.order == ["w", "x", "y"], "no main at all: what is to be done then is decided elsewhere"
    for name in "wxy":
        await edge.end(name)
    edge.check_empty()


async def test_a_request_that_would_wait_too_long_by_what_was_measured_is_refused_at_once() -> None:
    edge = Edge(MainRoom(1000, 1, 1), max_wait_s=0.5)
    for number in range(6):
        await edge.come(f"w{number}")
    for number in range(4):
        await asyncio.sleep(0.05)
        await edge.end(f"w{number}")
    names = [f"x{number}" for number in range(40)]
    for name in names:
        await edge.come(name)
    refused = [task for name in names if (task := edge.tasks[name]).done()]
    assert 10 <= len(refused) < 40, "about ten go through in 0.5 s, at 20 per second or less"
    errors = [task.exception() for task in refused]
    assert all(isinstance(error, PddError) and error.retry_after_s is not None and "per second" in error.message for error in errors)
    assert edge.value("pdd:requests_refused_total", reason="too_slow") == len(refused)
    for task in edge.tasks.values():
        task.cancel()
    await asyncio.gather(*edge.tasks.values(), return_exceptions=True)
    edge.check_empty()
