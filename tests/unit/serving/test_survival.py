"""Workers that hang without dying, fail again and again, or swallow everything: noticed within a bound, and never made worse by us."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdd.errors import Code, PddError
from pdd.serving.coordinator import Coordinator
from tests.support.generation import Outcome, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import serving
from tests.support.worker_script import Script, opened

TWO_MAINS = (("prefill-0", "prefill", "a"), ("main-0", "main", "b"), ("main-1", "main", "b"))
QUICK = {"watch_interval_s": 0.05, "answer_timeout_s": 0.1, "lost_after_s": 0.4, "stuck_after_s": 5.0, "silent_after_s": 30.0}
BOUND_S = 3.0


def value(coordinator: Coordinator, name: str, **labels: str) -> float:
    return coordinator.metrics.registry.get_sample_value(name, labels) or 0.0


def scripts_of(hanging: Script) -> dict[str, Script]:
    """Main-0 hangs some time; on ties it is chosen first."""
    return {"main-0": hanging}


async def answer_while(coordinator: Coordinator, hang: asyncio.Event | None, script: Script, request_name: str) -> tuple[Outcome, float]:
    """One direct request; ``script`` is made to hang after 4 tokens. The outcome, and the largest gap between two tokens."""
    request = make_request(request_name, sampling=params(12), pipeline="direct")
    deltas, gap_s, last_s = [], 0.0, time.monotonic()
    async for delta in coordinator.generate(request):
        deltas.append(delta)
        gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
        if len(deltas) == 4 and hang is not None:
            hang.clear()
    outcome = Outcome(tuple(deltas))
    records, reason = expected(hashed_token, request)
    assert list(outcome.records) == records
    assert outcome.finish_reason == reason
    return outcome, gap_s


async def test_metrics_tell_what_the_engines_of_workers_count() -> None:
    async with serving(hashed_token, survival=QUICK) as (cluster, coordinator):
        cluster.worker("main").tokens_chosen = {"drawn": 7, "host_penalties": 2}
        cluster.worker("relay").engine_fallbacks = {"some_slower_path": 1}
        async with asyncio.timeout(20):
            while not value(coordinator, "pdd:worker_engine_fallbacks_total", worker="relay-0", reason="some_slower_path"):
                await asyncio.sleep(0.01)
            while not value(coordinator, "pdd:worker_tokens_chosen_total", worker="main-0", by="drawn"):
                await asyncio.sleep(0.01)
        assert value(coordinator, "pdd:worker_tokens_chosen_total", worker="main-0", by="drawn") == 7
        assert value(coordinator, "pdd:worker_tokens_chosen_total", worker="main-0", by="host_penalties") == 2


async def test_a_worker_whose_step_thread_hangs_is_lost_though_it_answers_well() -> None:
    hanging = Script(silent_at=4)
    async with serving(hashed_token, roles=TWO_MAINS, scripts=scripts_of(hanging), survival=QUICK) as (cluster, coordinator):
        pool = coordinator._pool
        hanging.step_age_s = 4.9
        running = asyncio.create_task(answer_while(coordinator, None, hanging, "r"))
        await asyncio.sleep(0.5)
        assert not running.done(), "below the bound it is trusted"
        hanging.step_age_s = 5.1
        _, gap_s = await asyncio.wait_for(running, BOUND_S)
        assert gap_s < BOUND_S
        assert len(cluster.workers[2].opens) == 1
        assert value(coordinator, "pdd:worker_given_up_total", worker="main-0", reason="stuck") == 1
        assert not pool.worker("main-0").ready
        assert "step thread" in pool.worker("main-0").reason
        assert pool.unhealthy() == (), "another main is there"
        hanging.step_age_s, hanging.silent_at = 0.0, None
        async with asyncio.timeout(BOUND_S):
            while not pool.worker("main-0").usable:
                await asyncio.sleep(0.01)


async def test_a_worker_that_answers_nothing_while_its_stream_stays_open_is_lost() -> None:
    """As a stopped process or a link that swallows everything: no end, no reset, no error."""
    hanging = Script(silent_at=4, info_gate=opened(True))
    async with serving(hashed_token, roles=TWO_MAINS, scripts=scripts_of(hanging), survival=QUICK) as (_, coordinator):
        _, gap_s = await asyncio.wait_for(answer_while(coordinator, hanging.info_gate, hanging, "r"), BOUND_S)
        assert QUICK["lost_after_s"] * 0.9 < gap_s < BOUND_S
        assert value(coordinator, "pdd:worker_given_up_total", worker="main-0", reason="no_answer") == 1
        hanging.info_gate.set()


async def test_one_unanswered_question_loses_nothing() -> None:
    slow = Script(step_s=0.05)
    async with serving(hashed_token, roles=TWO_MAINS, scripts=scripts_of(slow), survival=QUICK) as (cluster, coordinator):
        running = asyncio.create_task(answer_while(coordinator, None, slow, "r"))
        await asyncio.sleep(0.05)
        slow.info_gate.clear()
        await asyncio.sleep(0.15)
        slow.info_gate.set()
        await running
        assert cluster.workers[2].opens == []


async def test_a_request_that_owes_tokens_and_says_nothing_is_lost_alone() -> None:
    survival = {**QUICK, "silent_after_s": 0.3}
    hanging = Script(silent_at=4)
    async with serving(hashed_token, roles=TWO_MAINS, scripts=scripts_of(hanging), survival=survival) as (_, coordinator):
        _, gap_s = await asyncio.wait_for(answer_while(coordinator, None, hanging, "r"), BOUND_S)
        assert 0.25 < gap_s < BOUND_S
        assert coordinator._pool.worker("main-0").ready, "its process does well"
        assert value(coordinator, "pdd:worker_given_up_total", worker="main-0", reason="silent") == 1


async def test_waiting_for_a_place_a_prefill_or_a_transfer_is_not_silence() -> None:
    survival = {**QUICK, "silent_after_s": 0.1}
    scripts = {"main-0": Script(kv_gate=opened(False)), "prefill-0": Script(prefill_gate=opened(False))}
    roles = TWO_MAINS[:2]
    async with serving(hashed_token, roles=roles, scripts=scripts, survival=survival) as (_, coordinator):
        running = asyncio.create_task(answer_while(coordinator, None, Script(), "r"))
        await asyncio.sleep(0.5)
        scripts["prefill-0"].prefill_gate.set()
        await asyncio.sleep(0.5)
        scripts["main-0"].kv_gate.set()
        outcome, _ = await running
        assert outcome.timeline.fallbacks == 0


async def test_all_mains_failing_makes_no_storm() -> None:
    """Every main refuses everything, always. Attempts per request and per second stay bounded, each request ends with a clear error, and
    once they are well again, service returns by itself."""
    roles = (*TWO_MAINS, ("main-2", "main", "b"))
    broken = {name: Script(refuse=("INTERNAL", "boom")) for name in ("main-0", "main-1", "main-2")}
    survival = {**QUICK, "breaker": {"failures": 3, "first_s": 0.2, "longest_s": 0.4}}
    async with serving(hashed_token, roles=roles, scripts=broken, survival=survival) as (cluster, coordinator):
        mains = cluster.workers[1:]
        began_s, num_requests = time.monotonic(), 0
        while (lasted_s := time.monotonic() - began_s) < 1.5:
            before = sum(len(main.opens) for main in mains)
            request = make_request(f"r-{num_requests}", pipeline="direct")
            num_requests += 1
            with pytest.raises(PddError) as caught:
                await collect(coordinator, request)
            assert caught.value.code is Code.UNAVAILABLE
            assert sum(len(main.opens) for main in mains) - before <= len(mains) + 1, "each main at most once more than it was chosen first"
            await asyncio.sleep(0.002)
        attempts = sum(len(main.opens) for main in mains)
        assert num_requests > 15
        assert attempts <= 3 * (3 + 1 + lasted_s / 0.2), (attempts, num_requests)
        assert sum(value(coordinator, "pdd:worker_breaker_opened_total", worker=main.name) for main in mains) >= 3
        assert all(value(coordinator, "pdd:worker_breaker", worker=main.name) > 0 for main in mains)
        for script in broken.values():
            script.refuse = None
        await asyncio.sleep(0.45)
        records, _ = expected(hashed_token, make_request())
        assert list((await collect(coordinator, make_request("well", pipeline="direct"))).records) == records
        assert coordinator._pool.unhealthy() == ()


async def test_one_request_is_opened_on_a_bounded_number_of_workers() -> None:
    roles = (("prefill-0", "prefill", "a"), *((f"main-{i}", "main", "b") for i in range(8)))
    scripts = {f"main-{i}": Script(refuse=("INTERNAL", "boom")) for i in range(8)}
    async with serving(hashed_token, roles=roles, scripts=scripts, survival={**QUICK, "max_attempts": 5}) as (cluster, coordinator):
        with pytest.raises(PddError, match="given up after 5 attempts"):
            await collect(coordinator, make_request(pipeline="direct"))
        assert sum(len(worker.opens) for worker in cluster.workers) == 5


async def test_a_failing_worker_is_avoided_and_tried_again() -> None:
    """Two mains, one always fails: requests succeed, few of them meet it, and when it is well it takes its share again."""
    scripts = {"main-0": Script(refuse=("INTERNAL", "boom"))}
    survival = {**QUICK, "breaker": {"failures": 2, "first_s": 0.2, "longest_s": 0.2}}
    async with serving(hashed_token, roles=TWO_MAINS, scripts=scripts, survival=survival) as (cluster, coordinator):
        began_s = time.monotonic()
        for number in range(20):
            await answer_while(coordinator, None, Script(), f"r-{number}")
        assert len(cluster.workers[1].opens) <= 2 + 1 + (time.monotonic() - began_s) / 0.2
        scripts["main-0"].refuse = None
        async with asyncio.timeout(BOUND_S):
            number = 100
            while coordinator._pool.worker("main-0").breaker.state != "closed":
                await answer_while(coordinator, None, Script(), f"r-{number}")
                number += 1


async def test_prompts_that_begin_alike_go_to_the_same_main_until_it_is_loaded() -> None:
    async with serving(hashed_token, roles=TWO_MAINS, survival=QUICK) as (cluster, coordinator):
        pool = coordinator._pool
        system = tuple(range(40, 140))
        for number in range(6):
            prompt = (*system, 200 + number)
            await collect(coordinator, make_request(f"r-{number}", prompt, pipeline="direct"))
        assert sorted(len(main.opens) for main in cluster.workers[1:]) == [0, 6]
        assert value(coordinator, "pdd:routes_total", role="main", reason="prefix") == 5
        favourite = next(worker for worker in pool.workers if worker.name == cluster.workers[1].name)
        favourite.num_held += 7
        await collect(coordinator, make_request("r-7", (*system, 1), pipeline="direct"))
        favourite.num_held -= 7
        assert sorted(len(main.opens) for main in cluster.workers[1:]) == [1, 6]
        assert value(coordinator, "pdd:routes_total", role="main", reason="prefix_yields") == 1
