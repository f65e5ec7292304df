"""A request that no worker is left for: it outlasts a worker's return, or ends with a real status. Never silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdd.errors import Code, PddError
from pdd.serving.coordinator import Coordinator
from pdd.serving.request import Delta
from pdd.serving.worker_events import Failed
from tests.support.generation import Outcome, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import serving
from tests.support.worker_script import Script, opened


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(5000):
        if reached():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("the state was not reached")


async def drain(stream: AsyncIterator[Delta]) -> None:
    async for _ in stream:
        pass


async def test_everything_dead_is_unavailable_not_silence() -> None:
    scripts = {"main-0": Script(step_s=0.02)}
    async with serving(hashed_token, scripts=scripts, survival={"return_wait_s": 0.3}) as (cluster, coordinator):
        stream = coordinator.generate(make_request(sampling=params(200), handoff_at=3))
        for _ in range(6):
            await anext(stream)
        for worker in cluster.workers:
            await worker.kill()
        with pytest.raises(PddError) as caught:
            await asyncio.wait_for(drain(stream), 5.0)
        assert caught.value.code is Code.UNAVAILABLE
        with pytest.raises(PddError) as caught:
            await asyncio.wait_for(collect(coordinator, make_request("next")), 5.0)
        assert caught.value.code is Code.UNAVAILABLE
        assert coordinator.unhealthy_workers()
        assert coordinator.metrics.registry.get_sample_value("pdd:waits_for_return_total", {"outcome": "none"}) == 2


@pytest.mark.parametrize("first_back", ["main-0", "relay-0"])
@pytest.mark.parametrize("num_before", [0, 6])
async def test_a_request_that_nobody_is_left_for_outlasts_the_return_of_a_worker(first_back: str, num_before: int) -> None:
    """One worker of each role, all of them dead at once: whoever is back first computes prompt and log, and goes on."""
    scripts = {"main-0": Script(step_s=0.02)} if num_before else {"prefill-0": Script(prefill_gate=opened(False))}
    async with serving(hashed_token, scripts=scripts, survival={"watch_interval_s": 0.05}) as (cluster, coordinator):
        request = make_request(sampling=params(40), handoff_at=3)
        deltas: list[Delta] = []
        reached = asyncio.Event()

        async def read() -> None:
            async for delta in coordinator.generate(request):
                deltas.append(delta)
                if len(deltas) == num_before:
                    reached.set()

        reading = asyncio.create_task(read())
        await (reached.wait() if num_before else until(lambda: len(cluster.worker("main").opens) > 0))
        for worker in cluster.workers:
            await worker.kill()
        await asyncio.sleep(0.3)
        assert not reading.done()
        back = next(worker for worker in cluster.workers if worker.name == first_back)
        back.epoch = 2
        await back.start()
        await asyncio.wait_for(reading, 5.0)
        outcome = Outcome(tuple(deltas))
        records, reason = expected(hashed_token, request)
        assert (list(outcome.records), outcome.finish_reason) == (records, reason)
        assert back.opens[-1].log_ids == [record.token_id for record in outcome.records[: len(back.opens[-1].log_ids)]]
        assert len(back.opens[-1].log_ids) >= num_before
        assert coordinator.metrics.registry.get_sample_value("pdd:waits_for_return_total", {"outcome": "back"}) == 1


async def trip(coordinator: Coordinator, *names: str) -> None:
    """Their breakers open, as after failures of other requests."""
    for name in names:
        worker = coordinator._pool.worker(name)
        while worker.status != "broken":
            stream = worker.attach(1.0)
            worker.heard(stream, Failed(Code.INTERNAL, "boom", died=False))
            worker.detach(stream)


@pytest.mark.parametrize("held_back", ["main-0", "relay-0"])
async def test_an_answer_that_has_begun_goes_on_at_a_worker_held_back_for_its_failures(held_back: str) -> None:
    """The other one, which made the tokens so far, is gone for good."""
    survival = {"return_wait_s": 0.3, "breaker": {"failures": 2, "first_s": 60.0}}
    carrier = "main-0" if held_back == "relay-0" else "relay-0"
    scripts = {carrier: Script(step_s=0.02)}
    async with serving(hashed_token, scripts=scripts, survival=survival) as (cluster, coordinator):
        await trip(coordinator, held_back)
        assert coordinator.unhealthy_workers() == (held_back,)
        request = make_request(sampling=params(40))
        stream = coordinator.generate(request)
        deltas = [await anext(stream) for _ in range(3)]
        await next(worker for worker in cluster.workers if worker.name == carrier).kill()
        async with asyncio.timeout(5):
            deltas += [delta async for delta in stream]
        outcome = Outcome(tuple(deltas))
        assert (list(outcome.records), outcome.finish_reason) == expected(hashed_token, request)
        assert coordinator._pool.worker(held_back).usable, "it has shown that it works"
        assert coordinator.unhealthy_workers() == (carrier,)
        value = coordinator.metrics.registry.get_sample_value
        role = carrier.removesuffix("-0")
        lost = [value("pdd:fallbacks_total", {"reason": f"{each}_lost"}) for each in ("main", "relay")]
        assert lost[("main", "relay").index(role)], lost


async def test_a_request_that_has_not_begun_is_no_trial_for_a_worker_held_back() -> None:
    async with serving(hashed_token, survival={"breaker": {"failures": 2, "first_s": 60.0}}) as (cluster, coordinator):
        await trip(coordinator, "main-0", "relay-0")
        with pytest.raises(PddError) as caught:
            await asyncio.wait_for(collect(coordinator, make_request()), 5.0)
        assert caught.value.code is Code.UNAVAILABLE
        assert not cluster.worker("main").opens


async def test_who_is_lost_is_named_for_what_it_is_and_a_worker_that_came_back_is_tried_again() -> None:
    """Main's process dies; the relay computes in its place, and its connection breaks; it comes back as the same process."""
    scripts = {"main-0": Script(step_s=0.02), "relay-0": Script(step_s=0.02)}
    survival = {"watch_interval_s": 0.05, "return_wait_s": 5.0}
    async with serving(hashed_token, scripts=scripts, survival=survival) as (cluster, coordinator):
        request = make_request(sampling=params(60), handoff_at=3)
        stream = coordinator.generate(request)
        deltas = [await anext(stream) for _ in range(6)]
        await cluster.worker("main").kill()
        deltas += [await anext(stream) for _ in range(6)]
        relay = cluster.worker("relay")
        assert relay.opens[-1].log_ids, "it stands in for main"
        await relay.kill()
        await until(lambda: not coordinator._pool.worker("relay-0").ready)
        await relay.start()
        async with asyncio.timeout(5):
            deltas += [delta async for delta in stream]
        outcome = Outcome(tuple(deltas))
        assert (list(outcome.records), outcome.finish_reason) == expected(hashed_token, request)
        value = coordinator.metrics.registry.get_sample_value
        assert value("pdd:fallbacks_total", {"reason": "main_lost"}) == 1
        assert value("pdd:fallbacks_total", {"reason": "relay_lost"}) == 1
