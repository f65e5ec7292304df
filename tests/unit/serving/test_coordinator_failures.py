"""Workers that fail, die, stall or lie: the request goes on from its log, counted, or ends with a real status. Never silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdd.errors import Code, PddError
from pdd.serving.coordinator import Coordinator
from pdd.serving.request import Delta, GenerationRequest
from tests.support.generation import Outcome, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import serving
from tests.support.worker_script import Script, opened


def fallbacks(coordinator: Coordinator) -> dict[str, float]:
    (family,) = [f for f in coordinator.metrics.registry.collect() if f.name == "pdd:fallbacks"]
    return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}


def check(outcome: Outcome, request: GenerationRequest) -> None:
    records, reason = expected(hashed_token, request)
    assert list(outcome.records) == records
    assert outcome.finish_reason == reason


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(5000):
        if reached():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError("the state was not reached")


async def drain(stream: AsyncIterator[Delta]) -> None:
    async for _ in stream:
        pass


async def test_prefill_refuses_and_main_recomputes_counted() -> None:
    """Case 55: the answer is right either way; the counter and the timeline tell."""
    for pipeline in ("direct", "relay"):
        async with serving(hashed_token, scripts={"prefill-0": Script(fail_prefill=("INTERNAL", "boom"))}) as (cluster, coordinator):
            request = make_request(pipeline=pipeline)
            outcome = await collect(coordinator, request)
            check(outcome, request)
            assert fallbacks(coordinator) == {"prefill_lost": 1}
            assert outcome.timeline.fallbacks == 1
            assert outcome.timeline.wan_kv_bytes == 0
            assert outcome.timeline.main_prefill_tokens == 19 == cluster.worker("main").computed_prompt_tokens


async def test_prefill_dies_while_the_relay_already_decodes() -> None:
    """Main's share of the KV is lost. The relay keeps the user fed, main computes and then takes over from the log."""
    scripts = {"main-0": Script(kv_gate=opened(False), prefill_gate=opened(False)), "relay-0": Script(step_s=0.004)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(150), pipeline="relay")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 3:
                for row in list(cluster.worker("prefill").rows.values()):
                    row.die()
            if len(deltas) == 10:
                scripts["main-0"].prefill_gate.set()
        outcome = Outcome(tuple(deltas))
        check(outcome, request)
        assert outcome.origins[:10] == ["relay"] * 10
        assert outcome.origins[-1] == "main"
        assert fallbacks(coordinator) == {"prefill_lost": 1}
        assert outcome.timeline.main_prefill_tokens == 19


@pytest.mark.parametrize("break_at", [0, 1, 2, 15, 16, 17])
async def test_relay_dies_while_relaying_and_main_continues_from_the_log(break_at: int) -> None:
    main = Script(kv_gate=opened(False))
    async with serving(hashed_token, scripts={"relay-0": Script(break_at=break_at), "main-0": main}) as (cluster, coordinator):
        request = make_request(pipeline="relay")
        task = asyncio.create_task(collect(coordinator, request))
        await until(lambda: bool(fallbacks(coordinator)))
        main.kv_gate.set()
        outcome = await task
        check(outcome, request)
        assert outcome.origins == ["relay"] * break_at + ["main"] * (24 - break_at)
        assert fallbacks(coordinator) == {"relay_lost": 1}
        assert outcome.timeline.main_prefill_tokens == 0
        assert len(cluster.worker("main").opens) == 1


async def test_transfer_to_main_fails_and_main_recomputes_behind_the_relay() -> None:
    scripts = {"main-0": Script(push_fails=True), "relay-0": Script(step_s=0.004)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(150), pipeline="relay")
        outcome = await collect(coordinator, request)
        check(outcome, request)
        assert fallbacks(coordinator) == {"transfer_failed": 1}
        assert outcome.timeline.main_tokens > 0
        assert outcome.timeline.main_prefill_tokens == 19
        first, second = cluster.worker("main").opens
        assert first.request_id != second.request_id


async def test_transfer_to_the_relay_fails_and_main_waits_for_its_own() -> None:
    main = Script(kv_gate=opened(False))
    async with serving(hashed_token, scripts={"relay-0": Script(push_fails=True), "main-0": main}) as (_, coordinator):
        request = make_request(pipeline="relay")
        task = asyncio.create_task(collect(coordinator, request))
        await until(lambda: bool(fallbacks(coordinator)))
        main.kv_gate.set()
        outcome = await task
        check(outcome, request)
        assert set(outcome.origins) == {"main"}
        assert fallbacks(coordinator) == {"transfer_failed": 1}
        assert outcome.timeline.main_prefill_tokens == 0


@pytest.mark.parametrize("k", [0, 1, 16])
async def test_main_dies_when_it_is_given_the_log_and_the_relay_resumes(k: int) -> None:
    """The relay is sealed and kept until main's first token: it goes on to the end. Its own limit does not stop the request either."""
    async with serving(hashed_token, scripts={"main-0": Script(break_at=k)}) as (cluster, coordinator):
        request = make_request(handoff_at=k)
        outcome = await collect(coordinator, request)
        check(outcome, request)
        assert fallbacks(coordinator) == {"main_lost": 1}
        assert outcome.timeline.fallbacks == 1
        assert set(outcome.origins) == {"relay"}
        assert cluster.worker("relay").opens[0].max_propose_tokens == k
        assert len(cluster.worker("relay").opens) == 1


async def test_main_dies_during_a_handoff_without_a_limit_and_the_relay_resumes() -> None:
    main = Script(kv_gate=opened(False), break_ingest=True)
    async with serving(hashed_token, scripts={"main-0": main, "relay-0": Script(step_s=0.004)}) as (cluster, coordinator):
        request = make_request(sampling=params(60), pipeline="relay", handoff="one_shot")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 4:
                main.kv_gate.set()
        outcome = Outcome(tuple(deltas))
        check(outcome, request)
        assert set(outcome.origins) == {"relay"}
        assert fallbacks(coordinator) == {"main_lost": 1}
        assert (0, (), True) not in cluster.worker("relay").ingests
        (resumed,) = cluster.worker("relay").ingests
        assert resumed[1:] == ((), True)


async def test_main_dies_before_its_kv_came_and_the_relay_goes_on() -> None:
    scripts = {"main-0": Script(kv_gate=opened(False)), "relay-0": Script(step_s=0.004)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(60), pipeline="relay")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 3:
                for row in list(cluster.worker("main").rows.values()):
                    row.die()
        cluster.worker("main").script.kv_gate.set()
        outcome = Outcome(tuple(deltas))
        check(outcome, request)
        assert set(outcome.origins) == {"relay"}
        assert fallbacks(coordinator) == {"main_lost": 1}


async def test_main_dies_after_the_handoff_and_another_worker_continues() -> None:
    """Whole process gone. The relay's worker, the only one left, re-computes prompt and log."""
    async with serving(hashed_token, scripts={"main-0": Script(step_s=0.005)}) as (cluster, coordinator):
        request = make_request(sampling=params(100), handoff_at=3)
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 10:
                await cluster.worker("main").kill()
        outcome = Outcome(tuple(deltas))
        check(outcome, request)
        assert fallbacks(coordinator) == {"main_lost": 1}
        assert list(cluster.worker("relay").opens[-1].log_ids) == outcome.ids[: len(cluster.worker("relay").opens[-1].log_ids)]
        assert outcome.origins[-1] == "relay"


async def test_main_dies_in_direct_and_a_second_main_continues() -> None:
    roles = (("prefill-0", "prefill", "a"), ("main-0", "main", "b"), ("main-1", "main", "b"))
    async with serving(hashed_token, roles=roles, scripts={"main-0": Script(break_at=7)}) as (cluster, coordinator):
        request = make_request()
        outcome = await collect(coordinator, request)
        check(outcome, request)
        assert len(cluster.workers[2].opens[0].log_ids) == 7
        assert fallbacks(coordinator) == {"main_lost": 1}


async def test_without_recompute_a_lost_prefill_is_an_error() -> None:
    policy = {"fallback_recompute": False}
    async with serving(hashed_token, policy=policy, scripts={"prefill-0": Script(fail_prefill=("INTERNAL", "boom"))}) as (
        cluster,
        coordinator,
    ):
        with pytest.raises(PddError, match="prefill-0: boom") as caught:
            await collect(coordinator, make_request())
        assert caught.value.code is Code.UNAVAILABLE
        assert cluster.worker("main").computed_prompt_tokens == 0


async def test_a_worker_that_came_back_is_used_again() -> None:
    async with serving(hashed_token) as (cluster, coordinator):
        relay = cluster.worker("relay")
        await relay.kill()
        outcome = await collect(coordinator, make_request("without", pipeline="relay"))
        assert outcome.timeline.pipeline == "direct"
        assert fallbacks(coordinator) == {"relay_lost": 1}
        relay.epoch = 2
        await relay.start()
        for _ in range(100):
            if not coordinator.unhealthy_workers():
                break
            await asyncio.sleep(0.05)
        outcome = await collect(coordinator, make_request("with", handoff_at=2))
        assert outcome.timeline.relay_tokens == 2


async def test_a_relay_that_does_not_seal_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.serving.handoff_run.SEAL_TIMEOUT_S", 0.05)
    main = Script(kv_gate=opened(False))
    relay = Script(ignore_seal=True, step_s=0.01)
    async with serving(hashed_token, scripts={"relay-0": relay, "main-0": main}) as (_, coordinator):
        request = make_request(sampling=params(40), pipeline="relay", handoff="one_shot")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 2:
                main.kv_gate.set()
        outcome = Outcome(tuple(deltas))
        check(outcome, request)
        assert outcome.origins[-1] == "main"
        assert fallbacks(coordinator) == {"relay_lost": 1}


@pytest.mark.parametrize("worker", ["relay-0", "main-0"])
async def test_a_token_that_contradicts_the_log_never_reaches_the_client(worker: str) -> None:
    async with serving(hashed_token, scripts={worker: Script(wrong_at=5)}) as (_, coordinator):
        request = make_request(handoff_at=8 if worker == "relay-0" else 3)
        outcome = await collect(coordinator, request)
        check(outcome, request)
        assert fallbacks(coordinator)[f"{worker[:-2]}_lost"] >= 1


@pytest.mark.parametrize("worker", ["relay-0", "main-0"])
async def test_an_id_outside_the_vocabulary_never_reaches_the_client_nor_another_worker(worker: str) -> None:
    """Case 78, on the way back: what a worker proposes is checked as what a client sends is."""
    async with serving(hashed_token, scripts={worker: Script(foreign_at=5)}) as (cluster, coordinator):
        request = make_request(handoff_at=8 if worker == "relay-0" else 3)
        outcome = await collect(coordinator, request)
        check(outcome, request)
        assert fallbacks(coordinator) == {f"{worker[:-2]}_lost": 1}
        told = [ids for other in cluster.workers for _, ids, _ in other.ingests] + [o.log_ids for w in cluster.workers for o in w.opens]
        assert all(token_id < 300 for ids in told for token_id in ids)


@pytest.mark.parametrize("code", [Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED])
@pytest.mark.parametrize("worker", ["main-0", "prefill-0"])
async def test_a_refusal_of_the_request_itself_is_passed_on(worker: str, code: Code) -> None:
    async with serving(hashed_token, scripts={worker: Script(refuse=(code.name, "not this one"))}) as (_, coordinator):
        with pytest.raises(PddError, match=f"{worker}: not this one") as caught:
            await collect(coordinator, make_request())
        assert caught.value.code is code
        assert fallbacks(coordinator) == {}


async def test_a_relay_out_of_pages_means_direct() -> None:
    async with serving(hashed_token, scripts={"relay-0": Script(refuse=("RESOURCE_EXHAUSTED", "no pages"))}) as (_, coordinator):
        outcome = await collect(coordinator, make_request(pipeline="relay"))
        assert outcome.timeline.pipeline == "direct"
        assert fallbacks(coordinator) == {}
        sample = coordinator.metrics.registry.get_sample_value
        assert sample("pdd:pipeline_total", {"pipeline": "direct", "reason": "relay_full"}) == 1


async def test_main_dies_before_a_limited_relay_is_done_and_the_relay_goes_past_its_limit() -> None:
    scripts = {"main-0": Script(kv_gate=opened(False)), "relay-0": Script(step_s=0.004)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(handoff_at=16)
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 3:
                for row in list(cluster.worker("main").rows.values()):
                    row.die()
        scripts["main-0"].kv_gate.set()
        outcome = Outcome(tuple(deltas))
        check(outcome, request)
        assert set(outcome.origins) == {"relay"}
        assert cluster.worker("relay").ingests == [(16, (), True)]
        assert fallbacks(coordinator) == {"main_lost": 1}


async def test_an_acknowledged_push_counts_before_main_says_so() -> None:
    """Prefill is done and gone, main's own word is still on the slow link, the relay dies: nothing needs to be computed again."""
    scripts = {"main-0": Script(kv_event_gate=opened(False)), "relay-0": Script(break_at=3)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(pipeline="relay")
        task = asyncio.create_task(collect(coordinator, request))
        await until(lambda: bool(fallbacks(coordinator)))
        scripts["main-0"].kv_event_gate.set()
        outcome = await task
        check(outcome, request)
        assert fallbacks(coordinator) == {"relay_lost": 1}
        assert len(cluster.worker("main").opens) == 1
        assert outcome.timeline.main_prefill_tokens == 0


async def test_losses_of_workers_that_are_not_needed_any_more_change_nothing() -> None:
    """Prefill dies with only its last word missing; the relay dies when main was already given the log."""
    scripts = {"prefill-0": Script(pushed_event_gate=opened(False)), "main-0": Script(step_s=0.1)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(5), handoff_at=2)
        task = asyncio.create_task(collect(coordinator, request))
        await until(lambda: bool(cluster.worker("main").ingests))
        for role in ("prefill", "relay"):
            for row in list(cluster.worker(role).rows.values()):
                row.die()
        outcome = await task
        check(outcome, request)
        assert fallbacks(coordinator) == {}
        assert len(cluster.worker("main").opens) == 1


async def test_broken_streams_leave_no_tasks_behind() -> None:
    def waiting() -> int:
        return sum("request" in repr(task.get_coro()) for task in asyncio.all_tasks())

    main = Script(kv_gate=opened(False))
    async with serving(hashed_token, scripts={"relay-0": Script(break_at=1), "main-0": main}) as (cluster, coordinator):
        task = asyncio.create_task(collect(coordinator, make_request(pipeline="relay")))
        await until(lambda: bool(fallbacks(coordinator)))
        held = waiting()
        main.kv_gate.set()
        await task
        await cluster.wait_idle()
        assert held > 0
        await until(lambda: waiting() == 0)


async def test_nobody_waits_for_ever_where_the_books_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by chaos: an exception after the answer, in what is only counted, left the client waiting without an end."""
    async with serving(hashed_token) as (_, coordinator):

        def broken(outcome: str, timeline: object) -> None:
            raise RuntimeError(outcome)

        monkeypatch.setattr(coordinator.metrics, "ended", broken)
        with pytest.raises(RuntimeError):
            async with asyncio.timeout(5):
                await drain(coordinator.generate(make_request(sampling=params(3))))
