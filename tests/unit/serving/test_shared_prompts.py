"""Requests with the same prompt: its KV is computed once and moved once, and nobody is held up by whoever brings it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from pdd.errors import PddError
from pdd.serving.coordinator import Coordinator
from pdd.serving.shared_prompts import PromptShare, SharedPrompts
from tests.support.generation import Outcome, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import Cluster, serving
from tests.support.worker_script import KV_BYTES_PER_TOKEN, Script, opened

PROMPT = tuple(range(40, 60))
KV_TOKENS = len(PROMPT) - 1


def remembering(**main: object) -> dict[str, Script]:
    return {"prefill-0": Script(remembers=True), "relay-0": Script(remembers=True), "main-0": Script(remembers=True, **main)}


def choice(number: int, max_tokens: int = 12, **fields: object):
    return make_request(f"c{number}", PROMPT, params(max_tokens, seed=number), **fields)


async def all_choices(coordinator: Coordinator, count: int, **fields: object) -> list[Outcome]:
    requests = [choice(number, **fields) for number in range(count)]
    outcomes = await asyncio.gather(*(collect(coordinator, request) for request in requests))
    for request, outcome in zip(requests, outcomes, strict=True):
        assert list(outcome.records) == expected(hashed_token, request)[0]
    return outcomes


def check_computed_and_moved_once(cluster: Cluster, relays: bool) -> None:
    assert cluster.worker("prefill").computed_prompt_tokens == KV_TOKENS
    assert cluster.worker("main").received_bytes == KV_TOKENS * KV_BYTES_PER_TOKEN
    assert cluster.worker("relay").received_bytes == (KV_TOKENS * KV_BYTES_PER_TOKEN if relays else 0)
    assert cluster.worker("main").computed_prompt_tokens == cluster.worker("relay").computed_prompt_tokens == 0
    assert len(cluster.worker("prefill").opens) == 1


@pytest.mark.parametrize("pipeline", ["direct", "relay"])
async def test_equal_prompts_are_computed_once_and_moved_once(pipeline: str) -> None:
    async with serving(hashed_token, scripts=remembering()) as (cluster, coordinator):
        outcomes = await all_choices(coordinator, 5, pipeline=pipeline)
        check_computed_and_moved_once(cluster, relays=pipeline == "relay")
        assert [o.timeline.wan_kv_tokens for o in outcomes] == [KV_TOKENS, 0, 0, 0, 0]
        assert all(o.timeline.fallbacks == 0 for o in outcomes)


async def test_followers_relay_before_main_has_anything_and_hand_off_when_it_has() -> None:
    gate = opened(False)
    async with serving(hashed_token, scripts=remembering(kv_gate=gate)) as (cluster, coordinator):
        streams = [coordinator.generate(choice(number, handoff_at=3)) for number in range(3)]
        for stream in streams:
            assert (await anext(stream)).origin == "relay"
        assert cluster.worker("main").received_bytes == 0
        assert len(cluster.worker("main").opens) == 1, "only the leader asked main for pages"
        gate.set()
        for stream in streams:
            rest = [delta async for delta in stream]
            assert rest[-1].timeline is not None
            assert (rest[-1].timeline.relay_tokens, rest[-1].timeline.main_tokens) == (3, 9)
        check_computed_and_moved_once(cluster, relays=True)


async def test_kv_that_is_at_main_first_is_still_moved_to_the_relay_once() -> None:
    gate = opened(False)
    scripts = remembering()
    scripts["relay-0"].kv_gate = gate
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        running = asyncio.create_task(all_choices(coordinator, 3, handoff_at=4))
        while not cluster.worker("main").known:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        assert len(cluster.worker("relay").opens) == 1
        gate.set()
        await running
        check_computed_and_moved_once(cluster, relays=True)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
@pytest.mark.parametrize("when", ["before any KV", "while followers relay"])
async def test_without_the_leader_another_brings_the_kv(how: str, when: str) -> None:
    gate, prefill = opened(False), opened(when != "before any KV")
    scripts = remembering(kv_gate=gate)
    scripts["prefill-0"].prefill_gate = prefill
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        timeout_s = 1.0 if how == "failed" else 10.0
        leader = asyncio.create_task(collect(coordinator, make_request("leader", PROMPT, params(12), handoff_at=3, timeout_s=timeout_s)))
        while not cluster.worker("main").opens:
            await asyncio.sleep(0.001)
        followers = [asyncio.create_task(collect(coordinator, choice(number, handoff_at=3))) for number in range(2)]
        while when == "while followers relay" and cluster.worker("relay").proposed < 9 and not leader.done():
            await asyncio.sleep(0.001)
        if how == "cancelled":
            leader.cancel()
        with pytest.raises((PddError, asyncio.CancelledError)):
            await leader
        prefill.set()
        gate.set()
        for outcome in await asyncio.gather(*followers):
            assert len(outcome.records) == 12
            assert outcome.timeline.main_prefill_tokens == 0
        assert cluster.worker("main").received_bytes == KV_TOKENS * KV_BYTES_PER_TOKEN


async def test_a_leader_that_ends_on_the_relay_leaves_main_to_the_next() -> None:
    gate = opened(False)
    async with serving(hashed_token, scripts=remembering(kv_gate=gate)) as (cluster, coordinator):
        leader = asyncio.create_task(collect(coordinator, choice(0, max_tokens=4, pipeline="relay")))
        followers = [asyncio.create_task(collect(coordinator, choice(number, handoff_at=6))) for number in (1, 2)]
        await leader
        gate.set()
        for outcome in await asyncio.gather(*followers):
            assert (outcome.timeline.relay_tokens, outcome.timeline.main_tokens) == (6, 6)
        assert cluster.worker("main").received_bytes == KV_TOKENS * KV_BYTES_PER_TOKEN


async def test_a_relay_lost_before_main_is_opened_is_made_up_for() -> None:
    gate = opened(False)
    scripts = remembering(kv_gate=gate)
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        leader = coordinator.generate(choice(0, handoff_at=2))
        await anext(leader)
        scripts["relay-0"].break_at = 5
        follower = asyncio.create_task(collect(coordinator, choice(1, handoff_at=8)))
        while scripts["relay-0"].break_at is not None:
            await asyncio.sleep(0.001)
        gate.set()
        outcome = await follower
        assert len(outcome.records) == 12
        assert outcome.timeline.fallbacks == 1
        assert cluster.worker("main").computed_prompt_tokens == 0
        await leader.aclose()


async def test_a_cache_that_keeps_nothing_makes_nobody_wait() -> None:
    async with serving(hashed_token) as (cluster, coordinator):
        await all_choices(coordinator, 3, pipeline="relay")
        assert cluster.worker("prefill").computed_prompt_tokens == 3 * KV_TOKENS


async def test_tenants_share_nothing() -> None:
    async with serving(hashed_token, scripts=remembering()) as (cluster, coordinator):
        mine, theirs = choice(0, pipeline="direct"), choice(1, pipeline="direct")
        await asyncio.gather(collect(coordinator, mine), collect(coordinator, theirs.__class__(**{**vars(theirs), "tenant": "other"})))
        assert cluster.worker("prefill").computed_prompt_tokens == 2 * KV_TOKENS


async def test_a_follower_waits_no_longer_than_its_own_time() -> None:
    gate = opened(False)
    scripts = remembering()
    scripts["prefill-0"].prefill_gate = gate
    async with serving(hashed_token, scripts=scripts) as (_, coordinator):
        leader = coordinator.generate(choice(0))
        first = asyncio.ensure_future(anext(leader))
        await asyncio.sleep(0)
        with pytest.raises(PddError, match=r"not finished after 0\.(2|1\d*) s"):  # less what it waited at the edge
            await collect(coordinator, choice(1, timeout_s=0.2))
        gate.set()
        await first
        await leader.aclose()


async def test_a_follower_that_waited_long_enough_runs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.serving.begin_run.SHARE_WAIT_S", 0.05)
    gate = opened(False)
    scripts = remembering()
    scripts["prefill-0"].prefill_gate = gate
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        leader, follower = (asyncio.create_task(collect(coordinator, choice(number))) for number in range(2))
        while len(cluster.worker("prefill").opens) < 2:
            await asyncio.sleep(0.001)
        gate.set()
        await leader
        assert (await follower).timeline.fallbacks == 1
        assert coordinator.metrics.registry.get_sample_value("pdd:fallbacks_total", {"reason": "shared_late"}) == 1


async def members(shares: list[PromptShare], may_relay: bool) -> AsyncIterator[list[asyncio.Task[str]]]:
    tasks = [asyncio.create_task(share.enter(may_relay, False, 5.0)) for share in shares]
    try:
        yield tasks
    finally:
        await asyncio.gather(*tasks)


async def test_every_wait_ends_when_everybody_before_has_left() -> None:
    prompts = SharedPrompts()
    shares = [prompts.join("t", PROMPT) for _ in range(4)]
    async with aclosing(members(shares, may_relay=True)) as entered:
        async for tasks in entered:
            for share, task in zip(shares, tasks, strict=True):
                assert await task == "lead"
                share.leave()
                share.leave()
    assert len(prompts) == 0
