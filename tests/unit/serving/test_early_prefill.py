"""Prefill starts when the relay has reserved, not a round trip later when main has; whoever is to get its KV does, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdd.serving import reservation
from tests.support.generation import Outcome, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import serving
from tests.support.worker_script import Script, opened


def check_same(outcome: Outcome, request: object) -> None:
    records, reason = expected(hashed_token, request)
    assert (list(outcome.records), outcome.finish_reason) == (records, reason)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("pipeline", ["relay", "direct", "local", None])
async def test_prefill_does_not_wait_for_main(pipeline: str | None) -> None:
    gate = opened(False)
    async with serving(hashed_token, scripts={"main-0": Script(reserve_gate=gate)}) as (cluster, coordinator):
        prefill, relay, main = (cluster.worker(role) for role in ("prefill", "relay", "main"))
        request = make_request(pipeline=pipeline)
        running = asyncio.create_task(collect(coordinator, request))
        if pipeline == "direct":  # no relay is asked, so main is waited for
            await until(lambda: len(main.opens) == 1)
            assert prefill.opens == []
        else:
            await until(lambda: relay.received_bytes > 0)
            assert [target.target for target in prefill.opens[0].push_to] == ["relay-0"]
        gate.set()
        check_same(await running, request)
        assert len(prefill.opens) == 1
        pushed_to = {target.target for target in prefill.opens[0].push_to}
        assert pushed_to == {"local": {"relay-0"}, "direct": {"main-0"}}.get(pipeline or "", {"relay-0", "main-0"})
        assert (main.received_bytes > 0) == (pipeline != "local")
        await cluster.wait_idle()


async def test_it_is_withdrawn_where_main_has_no_room_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold prefill's pages for somebody who holds none at main: two of those could wait for each other."""
    monkeypatch.setattr(reservation, "EARLY_LEAD_S", 0.05)
    gate = opened(False)
    async with serving(hashed_token, scripts={"main-0": Script(reserve_gate=gate)}) as (cluster, coordinator):
        prefill = cluster.worker("prefill")
        request = make_request(pipeline="relay")
        running = asyncio.create_task(collect(coordinator, request))
        await until(lambda: len(prefill.opens) == 1)
        await until(lambda: not prefill.rows)
        gate.set()
        check_same(await running, request)
        assert len(prefill.opens) == 2
        await cluster.wait_idle()


async def test_a_prefill_that_is_lost_before_main_answers_is_made_up_for() -> None:
    gate = opened(False)
    scripts = {"main-0": Script(reserve_gate=gate), "prefill-0": Script(prefill_gate=opened(False))}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        prefill = cluster.worker("prefill")
        request = make_request(pipeline="relay")
        running = asyncio.create_task(collect(coordinator, request))
        await until(lambda: len(prefill.rows) == 1)
        next(iter(prefill.rows.values())).die()
        await until(lambda: not prefill.rows)
        gate.set()
        check_same(await running, request)
        await cluster.wait_idle()


async def test_the_relay_s_first_tokens_do_not_wait_for_main_either() -> None:
    gate = opened(False)
    async with serving(hashed_token, scripts={"main-0": Script(reserve_gate=gate)}) as (cluster, coordinator):
        main = cluster.worker("main")
        request = make_request(sampling=params(60), pipeline="relay")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 5:
                assert main.received_bytes == 0
                gate.set()
        outcome = Outcome(tuple(deltas))
        check_same(outcome, request)
        timeline = outcome.timeline
        assert timeline.relay_tokens >= 5
        assert timeline.relay_kv_s is not None
        assert timeline.ttft_s is not None
        assert timeline.relay_kv_s <= timeline.ttft_s
        assert (timeline.decision, timeline.fallbacks) == ("forced", 0)
        assert len(cluster.worker("prefill").opens) == 1
        assert {target.target for target in cluster.worker("prefill").opens[0].push_to} == {"relay-0", "main-0"}
        assert main.received_bytes > 0
        await cluster.wait_idle()


async def test_a_relay_that_talks_already_is_not_given_up_for_a_main_that_is_near() -> None:
    gate = opened(False)
    scripts = {"main-0": Script(reserve_gate=gate, hit_tokens=1000)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(80))
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 3:
                gate.set()
        outcome = Outcome(tuple(deltas))
        check_same(outcome, request)
        assert (outcome.timeline.pipeline, outcome.timeline.decision) == ("relay", "relay_first")
        assert outcome.origins[-1] == "main"
        await cluster.wait_idle()


@pytest.mark.parametrize("ends", ["stop", "length"])
async def test_an_answer_that_ends_before_main_answers(ends: str) -> None:
    """A stop ends it there and then; at the length limit main's answer says what becomes of its transfer."""
    gate = opened(False)
    async with serving(hashed_token, scripts={"main-0": Script(reserve_gate=gate)}) as (cluster, coordinator):
        free = expected(hashed_token, make_request(sampling=params(40)))[0]
        stop = {"stop_token_ids": frozenset({free[6].token_id})} if ends == "stop" else {}
        request = make_request(sampling=params(40 if ends == "stop" else 7, **stop), pipeline="relay")
        running = asyncio.create_task(collect(coordinator, request))
        if ends == "length":
            await until(lambda: cluster.worker("relay").received_bytes > 0)
            await asyncio.sleep(0.05)
            assert not running.done()
            gate.set()
        outcome = await running
        check_same(outcome, request)
        assert outcome.origins == ["relay"] * len(outcome.ids)
        assert outcome.timeline.pipeline == "relay"
        gate.set()
        await cluster.wait_idle()


async def test_the_relay_dies_between_its_first_tokens_and_main_s_answer() -> None:
    gate = opened(False)
    scripts = {"main-0": Script(reserve_gate=gate), "relay-0": Script(break_at=6)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(40), pipeline="relay")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 6:
                asyncio.get_running_loop().call_later(0.05, gate.set)
        outcome = Outcome(tuple(deltas))
        check_same(outcome, request)
        assert outcome.origins == ["relay"] * 6 + ["main"] * 34
        await cluster.wait_idle()
