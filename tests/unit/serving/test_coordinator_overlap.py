"""Overlap through the coordinator and scripted workers over real gRPC: the same tokens, and what happens when somebody differs or dies."""

from __future__ import annotations

import asyncio

import pytest

from pdd.serving.paced_delivery import PacedDelivery
from pdd.serving.request import Delta
from pdd.serving.text.model import TextModel
from tests.support.generation import Outcome, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import serving
from tests.support.tiny_models import make_tiny_llama
from tests.support.worker_script import Script, opened

NO_PACE = {"handoff": "overlap", "catch_up_chunk": 4, "handoff_rules": {"pace": 1.0, "max_tokens": 8}}


def slow_and_fast(**main: object) -> dict[str, Script]:
    """A main that is faster than the relay, so that it is first before long."""
    return {"relay-0": Script(step_s=0.008), "main-0": Script(step_s=0.002, **main)}  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, 1, 2, 15, 16, 17])
async def test_every_position_yields_the_single_worker_stream(k: int) -> None:
    async with serving(hashed_token, policy={"catch_up_chunk": 4}, scripts=slow_and_fast()) as (cluster, coordinator):
        request = make_request(prompt_ids=range(30, 47), sampling=params(60), handoff_at=k, handoff="overlap")
        outcome = await collect(coordinator, request)
        records, reason = expected(hashed_token, request)
        assert (list(outcome.records), outcome.finish_reason) == (records, reason)
        timeline = outcome.timeline
        assert outcome.origins == ["relay"] * timeline.relay_tokens + ["main"] * timeline.main_tokens
        assert timeline.relay_tokens >= k
        assert timeline.main_tokens > 0
        assert (timeline.handoff, timeline.fallbacks, timeline.handoff_rewinds) == ("overlap", 0, 0)
        assert timeline.handoff_reason.startswith("forced")
        assert cluster.worker("main").rewinds == 0
        sample = coordinator.metrics.registry.get_sample_value
        assert sample("pdd:handoff_total", {"mode": "overlap", "reason": "forced"}) == 1
        assert sample("pdd:duplicate_tokens_total") == timeline.handoff_duplicates <= 60
        assert sample("pdd:handoff_gap_seconds_count", {"mode": "overlap"}) == 1


async def test_auto_overlaps_and_says_why() -> None:
    script = Script(kv_gate=opened(False), step_s=0.002)
    async with serving(hashed_token, scripts={"main-0": script, "relay-0": Script(step_s=0.008)}) as (_, coordinator):
        request = make_request(sampling=params(80), pipeline="relay")
        deltas = []
        async for delta in coordinator.generate(request):
            deltas.append(delta)
            if len(deltas) == 5:
                script.kv_gate.set()
        outcome = Outcome(tuple(deltas))
        assert list(outcome.records) == expected(hashed_token, request)[0]
        assert (outcome.timeline.handoff, outcome.origins[-1]) == ("overlap", "main")
        assert outcome.timeline.handoff_reason.startswith("gap_shows")


async def test_a_main_that_differs_is_rewound_and_counted() -> None:
    scripts = {"relay-0": Script(step_s=0.004), "main-0": Script(step_s=0.03, differs_at=frozenset({3, 4, 6, 30}))}
    async with serving(hashed_token, policy=NO_PACE, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(40), handoff_at=3)
        outcome = await collect(coordinator, request)
        log: list[int] = []
        for token_id, origin in zip(outcome.ids, outcome.origins, strict=True):
            plain = hashed_token(request.prompt_ids, log)
            other = 10 + (plain - 9) % 290
            assert token_id == (other if origin == "main" and len(log) in scripts["main-0"].differs_at else plain)
            log.append(token_id)
        assert outcome.origins == sorted(outcome.origins, reverse=True)
        assert outcome.origins[3] == "relay"
        assert outcome.origins[30] == "main", "there it was first, so its token counts"
        assert outcome.timeline.handoff_rewinds == cluster.worker("main").rewinds >= 1
        assert coordinator.metrics.registry.get_sample_value("pdd:handoff_rewinds_total") == outcome.timeline.handoff_rewinds


async def test_main_dies_and_the_relay_goes_on() -> None:
    """It breaks when it is to propose a position, long before it could be first."""
    scripts = {"relay-0": Script(step_s=0.004), "main-0": Script(step_s=0.02, break_at=8)}
    async with serving(hashed_token, policy=NO_PACE, scripts=scripts) as (cluster, coordinator):
        request = make_request(sampling=params(40), handoff_at=5)
        outcome = await collect(coordinator, request)
        assert list(outcome.records) == expected(hashed_token, request)[0]
        if cluster.worker("main").script.break_at is None:  # it did come to propose there
            assert outcome.timeline.fallbacks == 1
            assert outcome.origins[:12] == ["relay"] * 12, "what comes of a main that is back by then is another matter"


async def test_the_relay_dies_and_main_goes_on() -> None:
    scripts = {"relay-0": Script(step_s=0.004, break_at=9), "main-0": Script(step_s=0.03)}
    async with serving(hashed_token, policy=NO_PACE, scripts=scripts) as (_, coordinator):
        request = make_request(sampling=params(20), handoff_at=5)
        outcome = await collect(coordinator, request)
        assert list(outcome.records) == expected(hashed_token, request)[0]
        assert outcome.origins == ["relay"] * 9 + ["main"] * 11
        assert outcome.timeline.fallbacks == 0, "main was on its way"


async def test_a_slow_main_is_waited_for_so_long_only() -> None:
    """Its steps last until the reader has two more tokens of the relay's, the relay's until the reader has the last one."""
    deltas: list[Delta] = []
    relay, main = Script(step_s=0.004), Script(step_s=0.004)
    policy = {**NO_PACE, "handoff_rules": {"pace": 1.0, "max_tokens": 8, "max_gap_s": 30.0}}
    async with serving(hashed_token, policy=policy, scripts={"relay-0": relay, "main-0": main}) as (cluster, coordinator):
        rows = cluster.worker("relay").rows
        relay.step_held = lambda position: len(deltas) < position
        main.step_held = lambda position: len(deltas) < position + 2 and any(not row.sealed for row in rows.values())
        request = make_request(sampling=params(40), handoff_at=5)
        async for delta in coordinator.generate(request):
            deltas.append(delta)  # noqa: PERF401 - the steps look at what is there
        outcome = Outcome(tuple(deltas))
        assert list(outcome.records) == expected(hashed_token, request)[0]
        assert outcome.timeline.main_tokens > 0
        assert 5 + 8 <= outcome.timeline.relay_tokens <= 5 + 8 + 22  # well before the end, on a busy machine, too
        assert coordinator.metrics.registry.get_sample_value("pdd:handoff_overlap_total", {"end": "bounded"}) == 1


async def test_a_reader_that_goes_away_frees_everybody() -> None:
    scripts = {"relay-0": Script(step_s=0.004), "main-0": Script(step_s=0.02)}
    async with serving(hashed_token, policy={"handoff": "overlap"}, scripts=scripts) as (cluster, coordinator):
        stream = coordinator.generate(make_request(sampling=params(200), handoff_at=2))
        await anext(stream)
        while not cluster.worker("main").ingests:
            await asyncio.sleep(0.001)
        await stream.aclose()


@pytest.mark.parametrize("fields", [{"stop_token_ids"}, {"num_logprobs": 3}])
async def test_stops_and_records_are_those_of_the_log(fields: object) -> None:
    request = make_request(sampling=params(40))
    records, _ = expected(hashed_token, request)
    stop = {"stop_token_ids": frozenset({records[11].token_id})} if fields == {"stop_token_ids"} else {"num_logprobs": 3}
    async with serving(hashed_token, policy=NO_PACE, scripts=slow_and_fast()) as (_, coordinator):
        request = make_request(sampling=params(40, **stop), handoff_at=4)
        outcome = await collect(coordinator, request)
        assert (list(outcome.records), outcome.finish_reason) == expected(hashed_token, request)


async def test_a_stop_string_across_the_boundary(tmp_path_factory: pytest.TempPathFactory) -> None:
    text_model = TextModel.load(make_tiny_llama(tmp_path_factory.mktemp("text") / "model"))
    async with serving(hashed_token, policy=NO_PACE, scripts=slow_and_fast(), text_model=text_model) as (_, coordinator):
        free = await collect(coordinator, make_request("free", want_text=True, pipeline="direct"))
        for at in (3, 5, 6, 7):
            stop = free.text[6:9]
            cut = await collect(coordinator, make_request(f"cut-{at}", want_text=True, stop_strings=(stop,), handoff_at=at))
            assert cut.text == free.text[: free.text.index(stop)]
            assert cut.finish_reason == "stop"
            assert cut.ids == free.ids[: len(cut.ids)]


async def test_what_is_held_back_goes_out_with_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pace at which it would come by and by, and a relay that is done at once: everything goes out with its last token."""
    rules = {"pace": 4.0, "max_cover_s": 1000.0, "max_tokens": 1000}
    scripts = {"relay-0": Script(step_s=0.03), "main-0": Script(step_s=1000.0)}
    close, held = PacedDelivery.close, []

    def closing(delivery: PacedDelivery) -> None:
        held.append(len(delivery._held))
        close(delivery)

    monkeypatch.setattr(PacedDelivery, "close", closing)
    async with serving(hashed_token, policy={"handoff": "overlap", "handoff_rules": rules}, scripts=scripts) as (cluster, coordinator):
        deltas = []
        async for delta in coordinator.generate(request := make_request(sampling=params(60), handoff_at=6)):
            deltas.append(delta)
            if cluster.worker("main").ingests:  # from now on the pace is that of the steps before
                scripts["relay-0"].step_s = 0.0
        assert list(Outcome(tuple(deltas)).records) == expected(hashed_token, request)[0]
        assert held[0] >= 20, "most of it was held back until the end"
        assert deltas[-1].finish_reason == "length"
