"""Requests through the coordinator and scripted workers over real gRPC: pipelines, every handoff position, every kind of end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdd.errors import Code, PddError
from pdd.serving.text.model import TextModel
from tests.support.generation import EOS, Outcome, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import PATIENT_SURVIVAL, serving
from tests.support.tiny_models import make_tiny_llama
from tests.support.worker_script import KV_BYTES_PER_TOKEN, TICK_S, Script, opened

HANDOFFS = (0, 1, 2, 15, 16, 17)
MODES = ("one_shot", "catch_up")


def scripted_ids(ids: Sequence[int], then: int = 50) -> object:
    """A token function that plays ``ids`` and then repeats ``then``."""
    return lambda prompt_ids, log_ids: ids[len(log_ids)] if len(log_ids) < len(ids) else then


def check_same(outcome: Outcome, request: object, token: object = hashed_token) -> None:
    records, reason = expected(token, request)
    assert list(outcome.records) == records
    assert outcome.finish_reason == reason


@pytest.mark.parametrize("mode", MODES)
async def test_every_handoff_position_yields_the_single_worker_stream(mode: str) -> None:
    """Case 40: k relay tokens, then main; no repeat, no gap, one finish event."""
    async with serving(hashed_token, policy={"catch_up_chunk": 4}) as (cluster, coordinator):
        for k in HANDOFFS:
            request = make_request(f"k{k}", prompt_ids=range(30, 47 + k % 2), handoff_at=k, handoff=mode)
            outcome = await collect(coordinator, request)
            check_same(outcome, request)
            assert outcome.origins == ["relay"] * k + ["main"] * (24 - k)
            timeline = outcome.timeline
            assert (timeline.pipeline, timeline.handoff, timeline.fallbacks) == ("relay", mode, 0)
            assert timeline.main_prefill_tokens == 0
            assert timeline.wan_kv_tokens == len(request.prompt_ids) - 1
            assert timeline.wan_kv_bytes == timeline.wan_kv_tokens * KV_BYTES_PER_TOKEN == 2 * timeline.wan_kv_wire_bytes
            assert timeline.handoff_start_s is not None
            assert timeline.handoff_start_s <= timeline.handoff_done_s <= timeline.e2e_s
        assert cluster.worker("main").proposed >= sum(24 - k for k in HANDOFFS)


async def test_catch_up_gives_main_chunks_while_the_relay_decodes() -> None:
    script = Script(kv_gate=opened(False))
    scripts = {"main-0": script, "relay-0": Script(step_s=0.01)}
    async with serving(hashed_token, policy={"catch_up_chunk": 4, "handoff": "catch_up"}, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(120), pipeline="relay")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 20:
                cluster.worker("main").script.kv_gate.set()
        outcome = Outcome(tuple(deltas))
        check_same(outcome, request)
        assert outcome.timeline.handoff == "catch_up"
        ingests = cluster.worker("main").ingests
        chunks = [len(ids) for _, ids, decode in ingests if not decode]
        assert set(chunks) == {4}
        assert len(chunks) >= 4
        assert [decode for _, _, decode in ingests] == [False] * len(chunks) + [True]
        # Back to back: every position given once, none left out.
        assert [at for at, _, _ in ingests] == [sum(len(i[1]) for i in ingests[:n]) for n in range(len(ingests))]
        assert len(ingests[-1][1]) <= 4 + 2  # a chunk, and what the relay proposed while it was told to stop


async def test_auto_hands_over_in_one_shot_where_the_relay_is_short_of_rows() -> None:
    script = Script(kv_gate=opened(False))
    async with serving(hashed_token, scripts={"main-0": script, "relay-0": Script(step_s=0.01, max_rows=1)}) as (cluster, coordinator):
        request = make_request(sampling=params(40), pipeline="relay")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 5:
                script.kv_gate.set()
        outcome = Outcome(tuple(deltas))
        check_same(outcome, request)
        assert outcome.timeline.handoff == "one_shot"
        assert outcome.timeline.handoff_reason.startswith("relay_crowded")
        assert [decode for _, _, decode in cluster.worker("main").ingests] == [True]
        assert 5 <= outcome.timeline.relay_tokens < 40


async def test_the_client_gets_relay_tokens_at_once() -> None:
    """Main's KV never comes while the first ten are read."""
    script = Script(kv_gate=opened(False))
    async with serving(hashed_token, scripts={"main-0": script}) as (_, coordinator):
        stream = coordinator.generate(make_request(sampling=params(200), pipeline="relay"))
        first = [await asyncio.wait_for(anext(stream), 2.0) for _ in range(10)]
        assert {delta.origin for delta in first} == {"relay"}
        await stream.aclose()


async def test_a_slow_reader_does_not_hold_up_the_handoff() -> None:
    async with serving(hashed_token) as (cluster, coordinator):
        stream = coordinator.generate(make_request(pipeline="relay", handoff_at=3))
        await anext(stream)
        await cluster.wait_idle()  # the request finished at every worker while one token was read
        assert len([delta async for delta in stream]) == 23


async def test_main_cache_hit_moves_the_miss_only() -> None:
    scripts = {"main-0": Script(hit_tokens=13), "relay-0": Script(hit_tokens=5)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        outcome = await collect(coordinator, make_request(handoff_at=2))
        assert (outcome.timeline.main_hit_tokens, outcome.timeline.wan_kv_tokens) == (13, 6)
        assert {t.target: t.first_token for t in cluster.worker("prefill").opens[0].push_to} == {"main-0": 13, "relay-0": 5}
        assert cluster.worker("relay").received_bytes == 14 * KV_BYTES_PER_TOKEN


@pytest.mark.parametrize("pipeline", ["direct", "relay"])
@pytest.mark.parametrize("prompt_ids", [(7,), (7, 8), tuple(range(40, 60))])
async def test_nothing_missing_needs_no_prefill(pipeline: str, prompt_ids: tuple[int, ...]) -> None:
    scripts = {"main-0": Script(hit_tokens=99), "relay-0": Script(hit_tokens=99)}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        request = make_request(prompt_ids=prompt_ids, pipeline=pipeline)
        outcome = await collect(coordinator, request)
        check_same(outcome, request)
        assert cluster.worker("prefill").opens == []
        assert outcome.timeline.wan_kv_bytes == 0


async def direct_without_a_relayed_token(**options: object) -> Outcome:
    """A first request for which main is chosen alone, however busy the machine is: main is as near as it was told to be, and the relay,
    which has reserved and could make tokens before main has answered, gets its KV when it was let go of, and main only then.
    """
    gates = {"main-0": Script(kv_gate=opened(False), **options.pop("main", {})), "relay-0": Script(kv_gate=opened(False))}  # type: ignore[arg-type]
    unasked = {**PATIENT_SURVIVAL, "watch_interval_s": 3600.0}
    async with serving(hashed_token, scripts=gates, survival=unasked, **options) as (cluster, coordinator):  # type: ignore[arg-type]
        coordinator._pool.worker("main-0").rtts_s.extend([0.001] * 16)
        relay = cluster.worker("relay")
        task = asyncio.create_task(collect(coordinator, make_request()))
        async with asyncio.timeout(60):
            while not relay.opens or relay.rows:
                assert not task.done()
                await asyncio.sleep(TICK_S)
        assert cluster.worker("main").rows
        for script in gates.values():
            script.kv_gate.set()
        outcome = await task
        assert relay.proposed == 0
        sample = coordinator.metrics.registry.get_sample_value
        assert sample("pdd:pipeline_total", {"pipeline": "direct", "reason": "within_budget"}) == 1
        return outcome


async def test_auto_goes_direct_within_budget_and_relays_over_it() -> None:
    """The declared rate is 5 MB/s: 19 misses of 100 B are nothing, misses of 1 MB are not, a cache hit is again."""
    outcome = await direct_without_a_relayed_token()
    assert (outcome.timeline.pipeline, outcome.timeline.relay_tokens) == ("direct", 0)
    assert "within" in outcome.timeline.pipeline_reason
    async with serving(hashed_token, kv_bytes_per_token=1_000_000) as (_, coordinator):
        outcome = await collect(coordinator, make_request("large"))
        assert outcome.timeline.pipeline == "relay"
        assert "over" in outcome.timeline.pipeline_reason
        sample = coordinator.metrics.registry.get_sample_value
        assert sample("pdd:pipeline_total", {"pipeline": "relay", "reason": "over_budget"}) == 1
    outcome = await direct_without_a_relayed_token(kv_bytes_per_token=1_000_000, main={"hit_tokens": 18})
    assert outcome.timeline.pipeline == "direct"


async def test_direct_starts_main_without_waiting_for_its_kv_event() -> None:
    """The command to decode is sent with the reservation; main starts by itself when its KV is there."""
    script = Script(kv_gate=opened(False))
    async with serving(hashed_token, scripts={"main-0": script}) as (cluster, coordinator):
        task = asyncio.create_task(collect(coordinator, make_request()))
        main = cluster.worker("main")
        for _ in range(500):
            if main.ingests:
                break
            await asyncio.sleep(0.002)
        assert main.ingests == [(0, (), True)]
        assert not task.done()
        script.kv_gate.set()
        assert (await task).origins == ["main"] * 24


async def test_without_a_relay_worker_main_is_opened_to_decode() -> None:
    roles = (("prefill-0", "prefill", "a"), ("main-0", "main", "b"))
    async with serving(hashed_token, roles=roles) as (cluster, coordinator):
        request = make_request()
        outcome = await collect(coordinator, request)
        check_same(outcome, request)
        assert cluster.worker("main").opens[0].decode
        assert cluster.worker("main").ingests == []


async def test_a_full_relay_degrades_to_direct() -> None:
    script = Script(max_rows=1)
    gate = opened(False)
    async with serving(hashed_token, scripts={"relay-0": script, "main-0": Script(kv_gate=gate)}) as (_, coordinator):
        first = coordinator.generate(make_request("first", pipeline="relay"))
        await anext(first)
        second = asyncio.create_task(collect(coordinator, make_request("second", pipeline="relay")))
        await asyncio.sleep(0.05)
        gate.set()
        outcome = await second
        assert (outcome.timeline.pipeline, outcome.timeline.fallbacks) == ("direct", 0)
        assert "relay runs" in outcome.timeline.pipeline_reason
        await first.aclose()


async def test_a_relay_that_does_not_reserve_is_not_waited_for() -> None:
    script = Script(reserve_gate=opened(False))
    async with serving(hashed_token, scripts={"relay-0": script}) as (_, coordinator):
        outcome = await collect(coordinator, make_request(pipeline="relay"))
        assert outcome.timeline.pipeline == "direct"
        assert outcome.timeline.ttft_s < 2.0


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_max_tokens_holds_at_the_boundary(max_tokens: int, k: int) -> None:
    """Case 42."""
    async with serving(hashed_token) as (cluster, coordinator):
        request = make_request(sampling=params(max_tokens), handoff_at=k)
        outcome = await collect(coordinator, request)
        check_same(outcome, request)
        assert (len(outcome.ids), outcome.finish_reason) == (max_tokens, "length")
        if max_tokens <= k:
            assert cluster.worker("main").proposed == 0


@pytest.mark.parametrize("k", [0, 1, 2])
async def test_a_stop_token_first_ends_at_once(k: int) -> None:
    """Cases 41 and 42: EOS, or a stop id of the user's, as token 1; main's KV still on its way. Nothing stays reserved."""
    script = Script(kv_gate=opened(k == 0))
    for sampling, first in ((params(5), EOS), (params(5, stop_token_ids=frozenset({77})), 77)):
        async with serving(scripted_ids([first]), scripts={"main-0": script}) as (_, coordinator):
            outcome = await asyncio.wait_for(collect(coordinator, make_request(sampling=sampling, handoff_at=k)), 1.0)
            assert (outcome.ids, outcome.finish_reason) == ([first], "stop")


@pytest.mark.parametrize("k", [0, 1, 2, 5])
async def test_ignore_eos_and_min_tokens_hold_on_both_sides(k: int) -> None:
    """Case 43."""
    async with serving(scripted_ids([EOS] * 9)) as (_, coordinator):
        outcome = await collect(coordinator, make_request("ignore", sampling=params(5, ignore_eos=True), handoff_at=k))
        assert (outcome.ids, outcome.finish_reason) == ([EOS] * 5, "length")
        outcome = await collect(coordinator, make_request("min", sampling=params(9, min_tokens=3), handoff_at=k))
        assert (outcome.ids, outcome.finish_reason) == ([EOS] * 4, "stop")


@pytest.mark.parametrize("k", [0, 1, 2, 3])
async def test_logprob_records_are_carried(k: int) -> None:
    """Case 45: 200 alternatives per token are more than any fixed buffer of 128."""
    async with serving(hashed_token) as (_, coordinator):
        for num_logprobs in (0, 20, 200):
            request = make_request(f"n{num_logprobs}", sampling=params(6, num_logprobs=num_logprobs), handoff_at=k)
            outcome = await collect(coordinator, request)
            check_same(outcome, request)
            assert [len(r.top_logprobs) for r in outcome.records] == [num_logprobs] * 6


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(make_tiny_llama(tmp_path_factory.mktemp("tiny") / "model"))


ANSWER = "The sun, the moon \U0001f30d and STOP then more"


@pytest.mark.parametrize("want_end", ["STOP", "n, t", "moon \U0001f30d", "T"])
async def test_stop_strings_across_every_boundary(text_model: TextModel, want_end: str) -> None:
    """Cases 44 and 49: wherever the handoff is, text, tokens, usage and reason are the same, and nothing after the match is counted."""
    ids = text_model.encode(ANSWER, add_special=False)
    seen = set()
    async with serving(scripted_ids(ids), text_model=text_model) as (cluster, coordinator):
        for k in range(0, len(ids)):
            sampling = params(len(ids))
            request = make_request(f"k{k}", sampling=sampling, stop_strings=(want_end,), want_text=True, handoff_at=k)
            outcome = await collect(coordinator, request)
            assert outcome.text == ANSWER[: ANSWER.index(want_end)]
            assert outcome.finish_reason == "stop"
            assert outcome.ids == ids[: len(outcome.ids)]
            assert want_end in text_model_text(text_model, outcome.ids)
            assert want_end not in text_model_text(text_model, outcome.ids[:-1])
            seen.add(tuple(outcome.ids))
        await cluster.wait_idle()
    assert len(seen) == 1


def text_model_text(text_model: TextModel, ids: Sequence[int]) -> str:
    return b"".join(text_model.token_bytes(i) for i in ids).decode(errors="replace")


async def test_text_of_a_split_character_comes_whole(text_model: TextModel) -> None:
    ids = text_model.encode(ANSWER, add_special=False)
    async with serving(scripted_ids(ids), text_model=text_model) as (_, coordinator):
        for k in range(0, len(ids) + 1):
            request = make_request(f"k{k}", sampling=params(len(ids)), want_text=True, handoff_at=k)
            outcome = await collect(coordinator, request)
            assert outcome.text == ANSWER
            assert all("�" not in delta.text for delta in outcome.deltas)


async def test_concurrent_requests_do_not_mix() -> None:
    """Case 39: same public id, different internal ids and prompts; ending one leaves the others alone."""
    async with serving(hashed_token) as (cluster, coordinator):
        requests = [make_request(f"same-{i}", prompt_ids=range(40 + i, 60 + i), handoff_at=3 * i) for i in range(4)]
        doomed = coordinator.generate(make_request("same-4", sampling=params(200), handoff_at=190))
        await anext(doomed)
        tasks = [asyncio.create_task(collect(coordinator, request)) for request in requests]
        await doomed.aclose()
        for request, task in zip(requests, tasks, strict=True):
            check_same(await task, request)
        assert len({o.request_id for w in cluster.workers for o in w.opens if w.role == "main"}) == 5


@pytest.mark.parametrize("smaller", ["main-0", "relay-0", "prefill-0"])
@pytest.mark.parametrize("prompt_tokens", [50, 70])
async def test_a_prompt_over_the_smaller_side_is_refused_before_any_kv_moves(smaller: str, prompt_tokens: int) -> None:
    """Case 56: limits 64 and 48, whichever side is the smaller."""
    scripts = {name: Script(max_context_tokens=48 if name == smaller else 64) for name in ("prefill-0", "relay-0", "main-0")}
    async with serving(hashed_token, scripts=scripts) as (cluster, coordinator):
        assert coordinator.limits.max_context_tokens == 48
        with pytest.raises(PddError, match=f"48 tokens of context .{smaller} ") as caught:
            await collect(coordinator, make_request(prompt_ids=[5] * prompt_tokens, sampling=params(1)))
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert all(worker.opens == [] for worker in cluster.workers)


@pytest.mark.parametrize(
    ("prompt_ids", "max_tokens", "override", "message"),
    [
        ((), 1, {}, "no tokens"),
        ((5, 300), 1, {}, r"prompt\[1\]: given 300"),
        ((5, -1), 1, {}, r"prompt\[1\]: given -1"),
        ([5] * 256, 1, {}, "no room"),
        ([5] * 200, 57, {}, "max_tokens: given 57"),
        ((5, 6), 1, {"handoff_at": 1, "pipeline": "direct"}, "handoff_at"),
    ],
)
async def test_bad_requests_are_refused_by_name(
    prompt_ids: Sequence[int], max_tokens: int, override: dict[str, object], message: str
) -> None:
    async with serving(hashed_token) as (cluster, coordinator):
        with pytest.raises(PddError, match=message) as caught:
            await collect(coordinator, make_request(prompt_ids=prompt_ids, sampling=params(max_tokens), **override))
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert all(worker.opens == [] for worker in cluster.workers)
        assert (await collect(coordinator, make_request("next"))).finish_reason == "length"


async def test_a_prompt_that_just_fits_is_served() -> None:
    async with serving(hashed_token) as (_, coordinator):
        assert len((await collect(coordinator, make_request(prompt_ids=[5] * 255, sampling=params(1)))).ids) == 1


async def test_overrides_only_where_allowed() -> None:
    async with serving(hashed_token, serving={"allow_override": False}) as (_, coordinator):
        with pytest.raises(PddError) as caught:
            await collect(coordinator, make_request(handoff_at=1))
        assert caught.value.code is Code.PERMISSION_DENIED


async def test_too_many_requests_are_refused_and_the_next_is_served() -> None:
    gate = opened(False)
    scripts = {"main-0": Script(kv_gate=gate)}
    async with serving(hashed_token, serving={"max_queued_requests": 2}, scripts=scripts) as (_, coordinator):
        held = [coordinator.generate(make_request(f"held{i}", handoff_at=1)) for i in range(2)]
        for stream in held:
            await anext(stream)
        with pytest.raises(PddError) as caught:
            await collect(coordinator, make_request("third"))
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        for stream in held:
            await stream.aclose()
        gate.set()
        assert (await collect(coordinator, make_request("fourth"))).finish_reason == "length"
        sample = coordinator.metrics.registry.get_sample_value
        assert sample("pdd:requests_total", {"outcome": "resource_exhausted"}) == 1
        assert sample("pdd:requests_total", {"outcome": "cancelled"}) == 2
        assert sample("pdd:requests_total", {"outcome": "length"}) == 1
        assert sample("pdd:num_requests_running") == 0


async def test_metrics_count_tokens_by_origin() -> None:
    async with serving(hashed_token) as (_, coordinator):
        await collect(coordinator, make_request(handoff_at=5))
        sample = coordinator.metrics.registry.get_sample_value
        assert sample("pdd:generation_tokens_total", {"origin": "relay"}) == 5
        assert sample("pdd:generation_tokens_total", {"origin": "main"}) == 19
        assert sample("pdd:prompt_tokens_total") == 20
        assert sample("pdd:handoff_total", {"mode": "one_shot", "reason": "relay_limited"}) == 1
        assert sample("pdd:inter_token_latency_seconds_count") == 23
        assert sample("pdd:kv_transfer_bytes_total", {"link": "a-b"}) == 19 * KV_BYTES_PER_TOKEN
        assert sample("pdd:kv_transfer_wire_bytes_total", {"link": "a-b"}) == 19 * KV_BYTES_PER_TOKEN / 2
        assert sample("pdd:kv_pushes_total", {"target": "main-0", "codec": "ZSTD_PLANES"}) == 1
        assert sample("pdd:prefix_cache_queries_total", {"role": "main"}) == 19
        assert sample("pdd:prefix_cache_hits_total", {"role": "main"}) == 0
