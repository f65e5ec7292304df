"""Case 25: a request is cancelled in each of its states, twice; every holder lets go promptly and the next request is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdd.errors import Code, PddError
from pdd.serving.coordinator import Coordinator
from tests.support.generation import collect, hashed_token, make_request, params
from tests.support.scripted_workers import Cluster, serving
from tests.support.worker_script import Script, opened

# state: (scripts, override, when the state is reached)
Reached = Callable[[Cluster, int], bool]
STATES: dict[str, tuple[dict[str, Script], dict[str, object], Reached]] = {
    "opening": ({"main-0": Script(reserve_gate=opened(False))}, {}, lambda c, n: bool(c.worker("main").rows)),
    "opening_relay": ({"relay-0": Script(reserve_gate=opened(False))}, {}, lambda c, n: bool(c.worker("relay").rows)),
    "prefilling": ({"prefill-0": Script(prefill_gate=opened(False))}, {"pipeline": "relay"}, lambda c, n: bool(c.worker("prefill").rows)),
    "awaiting_kv": ({"main-0": Script(kv_gate=opened(False))}, {"pipeline": "direct"}, lambda c, n: bool(c.worker("main").incoming)),
    "relaying": ({"main-0": Script(kv_gate=opened(False))}, {"pipeline": "relay"}, lambda c, n: n >= 3),
    "relay_sealed": ({"main-0": Script(kv_gate=opened(False))}, {"handoff_at": 2}, lambda c, n: n == 2),
    "sealing": ({"relay-0": Script(ignore_seal=True)}, {"pipeline": "relay"}, lambda c, n: n >= 1),
    "main": ({}, {"handoff_at": 2}, lambda c, n: n >= 5),
}


async def reach(
    coordinator: Coordinator, cluster: Cluster, override: dict[str, object], reached: Reached
) -> tuple[AsyncIterator, asyncio.Task]:
    """A generator in the wanted state, and the task that reads it."""
    stream = coordinator.generate(make_request(sampling=params(220), **override))
    num_read = 0

    async def read() -> None:
        nonlocal num_read
        async for _ in stream:
            num_read += 1

    reader = asyncio.create_task(read())
    for _ in range(1000):
        if reached(cluster, num_read):
            return stream, reader
        await asyncio.sleep(0.001)
    raise TimeoutError("the state was not reached")


@pytest.mark.parametrize("state", list(STATES))
async def test_cancelling_the_reader_frees_every_holder(state: str) -> None:
    scripts, override, reached = STATES[state]
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        stream, reader = await reach(coordinator, cluster, override, reached)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reader, 1.0)
        await stream.aclose()
        await stream.aclose()
        assert coordinator.num_running == 0
        await asyncio.wait_for(cluster.wait_idle(), 1.0)
        for script in scripts.values():
            for gate in (script.reserve_gate, script.prefill_gate, script.kv_gate):
                gate.set()
        assert (await collect(coordinator, make_request("next", pipeline="direct"))).finish_reason == "length"


async def test_closing_before_the_first_token_and_after_the_last() -> None:
    async with serving(hashed_token) as (cluster, coordinator):
        never_started = coordinator.generate(make_request("a"))
        await never_started.aclose()
        assert all(worker.opens == [] for worker in cluster.workers)
        finished = coordinator.generate(make_request("b"))
        async for delta in finished:
            if delta.finish_reason is not None:
                break
        await finished.aclose()
        await finished.aclose()


async def test_a_deadline_ends_the_request_everywhere() -> None:
    for name, script in (("main-0", Script(reserve_gate=opened(False))), ("main-0", Script(kv_gate=opened(False)))):
        async with serving(hashed_token, scripts={name: script}) as (cluster, coordinator):
            with pytest.raises(PddError) as caught:
                await asyncio.wait_for(collect(coordinator, make_request(timeout_s=0.2, pipeline="direct")), 2.0)
            assert caught.value.code is Code.DEADLINE_EXCEEDED
            assert 0 < cluster.worker("main").opens[0].timeout_s <= 0.2
            assert coordinator.metrics.registry.get_sample_value("pdd:requests_total", {"outcome": "deadline_exceeded"}) == 1


async def test_closing_the_coordinator_ends_what_runs() -> None:
    async with serving(hashed_token, scripts={"main-0": Script(kv_gate=opened(False))}) as (cluster, coordinator):
        stream = coordinator.generate(make_request(sampling=params(220), pipeline="relay"))
        await anext(stream)
        await coordinator.close()
        await asyncio.wait_for(cluster.wait_idle(), 1.0)
        with pytest.raises(PddError, match="shutting down"):
            async for _ in stream:
                pass


async def test_a_cancellation_together_with_an_event_is_not_lost() -> None:
    """Cancel right behind a token, many times: with a wait that swallows cancellations some of these requests run on."""
    scripts = {"main-0": Script(kv_gate=opened(False)), "relay-0": Script(step_s=0.0)}
    async with serving(hashed_token, scripts=scripts) as (_, coordinator):
        for number in range(40):
            stream = coordinator.generate(make_request(f"r{number}", sampling=params(220), pipeline="relay"))
            for _ in range(1 + number % 5):
                await anext(stream)
            await asyncio.wait_for(stream.aclose(), 1.0)
            assert coordinator.num_running == 0
