"""Requests that are finished on the relay: nothing is sent to main, within bounds, and main comes in after all where it must."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pddbridge.rpc.gen import worker_pb2 as pb
from tests.support.counters import counted
from tests.support.generation import EOS, collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import serving
from tests.support.worker_script import Script, opened

# 19 tokens that main lacks are 190 MB, 38 s over the declared 40 Mbit/s: the relay is done long before, however busy the machine.
KV_BYTES = 10_000_000
LOCAL: dict[str, object] = {"min_miss_tokens": 10, "max_output_tokens": 40, "max_share": 1.0, "window": 100}
POLICY: dict[str, object] = {"direct_budget_s": 0.1, "local": LOCAL, "background": {"max_transfers": 0}}


def prompt(number: int) -> tuple[int, ...]:
    return tuple(range(40 + number, 60 + number))


def slow_main() -> dict[str, Script]:
    """Main's KV does not come while its gate is closed, so what is relayed ends on the relay, whose pace is then known."""
    return {"main-0": Script(kv_gate=opened(False))}


async def test_a_singular_request_ends_on_the_relay_and_nothing_goes_to_main() -> None:
    async with serving(hashed_token, policy=POLICY, scripts=slow_main(), kv_bytes_per_token=KV_BYTES) as (cluster, coordinator):
        main, prefill = cluster.worker("main"), cluster.worker("prefill")
        await collect(coordinator, make_request("teach", prompt(0), pipeline="relay"))
        sent_before, opens_before = main.received_bytes, len(prefill.opens)
        request = make_request("singular", prompt(1))
        outcome = await collect(coordinator, request)
        assert list(outcome.records) == expected(hashed_token, request)[0]
        assert set(outcome.origins) == {"relay"}
        timeline = outcome.timeline
        assert (timeline.pipeline, timeline.decision, timeline.ended_on) == ("local", "singular", "relay")
        assert (timeline.transfer, timeline.transfer_reason, timeline.redecision) == ("cut", "singular", "")
        assert (timeline.wan_kv_bytes, timeline.wan_kv_saved_bytes) == (0, 19 * KV_BYTES)
        assert main.received_bytes == sent_before
        assert [t.target for t in prefill.opens[opens_before].push_to] == ["relay-0"]
        assert counted(coordinator, "pdd:wan_kv_saved_bytes_total") == 19 * KV_BYTES
        assert counted(coordinator, "pdd:pipeline_total", pipeline="local", reason="singular") == 1
        assert counted(coordinator, "pdd:local_share") == 0.01
        assert counted(coordinator, "pdd:main_transfers_unneeded_total", end="cut", reason="singular") == 1
        record = coordinator.latest_decisions[-1]
        assert (record.pipeline, record.reason, record.outcome, record.output_tokens) == ("local", "singular", "length", 24)
        assert record.predicted_output_tokens == 24
        assert record.within_output is True


async def test_the_share_of_local_requests_is_bounded() -> None:
    policy = {**POLICY, "local": {**LOCAL, "max_share": 0.2, "window": 10}}
    async with serving(hashed_token, policy=policy, scripts=slow_main(), kv_bytes_per_token=KV_BYTES) as (_, coordinator):
        await collect(coordinator, make_request("teach", prompt(0), pipeline="relay"))
        pipelines = [(await collect(coordinator, make_request(f"r{n}", prompt(n + 1)))).timeline.pipeline for n in range(8)]
        assert pipelines.count("local") == 2
        assert pipelines[:2] == ["local"] * 2
        assert set(pipelines[2:]) == {"relay"}


def short_unless_asked(prompt_ids: Sequence[int], log_ids: Sequence[int]) -> int:
    """Answers end after four tokens, but for those to prompts that begin with 99."""
    return EOS if len(log_ids) == 3 and prompt_ids[0] != 99 else hashed_token(prompt_ids, log_ids)


async def test_an_answer_that_gets_longer_than_predicted_is_handed_to_main_after_all() -> None:
    policy = {**POLICY, "lengths": {"min_samples": 3}}
    scripts = {"relay-0": Script(step_s=0.004), **slow_main()}
    async with serving(short_unless_asked, policy=policy, scripts=scripts, kv_bytes_per_token=KV_BYTES) as (cluster, coordinator):
        for number in range(3):
            await collect(coordinator, make_request(f"short{number}", prompt(number), pipeline="relay"))
        scripts["main-0"].kv_gate.set()
        request = make_request("long", (99, *prompt(9)[1:]), params(120))
        outcome = await collect(coordinator, request)
        assert list(outcome.records) == expected(short_unless_asked, request)[0]
        timeline = outcome.timeline
        assert (timeline.pipeline, timeline.decision, timeline.redecision) == ("local", "singular", "overrun")
        assert timeline.predicted_output_tokens == 4
        assert outcome.origins[:9] == ["relay"] * 9, "twice what was predicted, and the one that was over it"
        assert timeline.ended_on == "main"
        assert (timeline.transfer, timeline.wan_kv_saved_bytes, timeline.wan_kv_bytes) == ("none", 0, 19 * KV_BYTES)
        assert (timeline.fallbacks, timeline.main_prefill_tokens) == (0, 0)
        assert len(cluster.worker("main").opens) == 5, "one per request, and one more when it joined"
        assert counted(coordinator, "pdd:pipeline_redecisions_total", reason="overrun") == 1
        assert counted(coordinator, "pdd:output_length_predictions_total", within="no") == 1


@pytest.mark.parametrize("break_at", [0, 3])
async def test_main_takes_over_from_the_log_when_the_relay_is_lost(break_at: int) -> None:
    """It gets the KV, as late as that may be, and computes nothing of the prompt itself."""
    async with serving(hashed_token, policy=POLICY, scripts={"relay-0": Script(break_at=break_at)}) as (cluster, coordinator):
        request = make_request(pipeline="local")
        outcome = await collect(coordinator, request)
        assert list(outcome.records) == expected(hashed_token, request)[0]
        assert outcome.origins == ["relay"] * break_at + ["main"] * (24 - break_at)
        timeline = outcome.timeline
        assert (timeline.pipeline, timeline.decision, timeline.redecision) == ("local", "forced", "relay_lost")
        assert (timeline.main_prefill_tokens, timeline.wan_kv_tokens, timeline.fallbacks) == (0, 19, 1)
        assert cluster.worker("main").computed_prompt_tokens == 0


async def test_main_takes_over_when_the_relay_never_got_its_kv() -> None:
    async with serving(hashed_token, policy=POLICY, scripts={"relay-0": Script(push_fails=True)}) as (_, coordinator):
        request = make_request(pipeline="local")
        outcome = await collect(coordinator, request)
        assert list(outcome.records) == expected(hashed_token, request)[0]
        assert set(outcome.origins) == {"main"}
        assert (outcome.timeline.redecision, outcome.timeline.main_prefill_tokens) == ("relay_lost", 0)


async def test_prefill_fails_and_main_computes() -> None:
    async with serving(hashed_token, policy=POLICY, scripts={"prefill-0": Script(fail_prefill=("INTERNAL", "boom"))}) as (_, coordinator):
        request = make_request(pipeline="local")
        outcome = await collect(coordinator, request)
        assert list(outcome.records) == expected(hashed_token, request)[0]
        assert outcome.timeline.main_prefill_tokens == 19


async def test_the_launch_config_can_force_it_however_long_answers_get() -> None:
    """Relay to the end for everything: what must never be the normal way, and what the collapse is shown with."""
    async with serving(hashed_token, policy={**POLICY, "pipeline": "local"}) as (cluster, coordinator):
        request = make_request(sampling=params(200))
        outcome = await collect(coordinator, request)
        assert set(outcome.origins) == {"relay"}
        assert len(outcome.ids) == 200
        assert (outcome.timeline.decision, outcome.timeline.transfer) == ("forced", "cut")
        assert cluster.worker("main").received_bytes == 0


async def test_a_full_relay_yields_direct_even_where_local_is_forced() -> None:
    async with serving(hashed_token, policy=POLICY, scripts={"relay-0": Script(max_rows=1, step_s=0.02)}) as (_, coordinator):
        first = asyncio.create_task(collect(coordinator, make_request("first", prompt(0), params(20), pipeline="local")))
        while counted(coordinator, "pdd:generation_tokens_total", origin="relay") < 1:
            await asyncio.sleep(0.001)
        second = await collect(coordinator, make_request("second", prompt(1), pipeline="local"))
        assert (second.timeline.pipeline, second.timeline.decision) == ("direct", "relay_full")
        assert "relay runs 1 of 1" in second.timeline.pipeline_reason
        assert (await first).timeline.pipeline == "local"


async def test_a_request_with_the_prompt_of_a_local_one_finds_it_on_the_relay_and_brings_it_to_main() -> None:
    """The local one brings main nothing, so the other leads when it has ended."""
    scripts = {"main-0": Script(remembers=True), "relay-0": Script(remembers=True, step_s=0.01)}
    async with serving(hashed_token, policy=POLICY, scripts=scripts, kv_bytes_per_token=KV_BYTES) as (cluster, coordinator):
        first = asyncio.create_task(collect(coordinator, make_request("first", prompt(1), params(20), pipeline="local")))
        while counted(coordinator, "pdd:generation_tokens_total", origin="relay") < 1:
            await asyncio.sleep(0.001)
        request = make_request("second", prompt(1), params(120))
        outcome = await collect(coordinator, request)
        assert list(outcome.records) == expected(hashed_token, request)[0]
        assert (outcome.timeline.pipeline, outcome.timeline.decision, outcome.timeline.ended_on) == ("relay", "shared", "main")
        assert set((await first).origins) == {"relay"}
        assert cluster.worker("main").received_bytes == 19 * KV_BYTES


async def test_pushes_have_classes_by_who_waits_for_them() -> None:
    async with serving(hashed_token, policy=POLICY) as (cluster, coordinator):
        for name in ("direct", "relay"):
            await collect(coordinator, make_request(name, prompt(0), pipeline=name))
        direct, relay = (list(command.push_to) for command in cluster.worker("prefill").opens)
        assert [(t.target, t.priority) for t in direct] == [("main-0", pb.TRANSFER_PRIORITY_URGENT)]
        assert [(t.target, t.priority) for t in relay] == [
            ("relay-0", pb.TRANSFER_PRIORITY_URGENT),
            ("main-0", pb.TRANSFER_PRIORITY_NORMAL),
        ]
        assert direct[0].deadline_s == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize(
    ("break_at", "then"), [(None, pb.TRANSFER_PRIORITY_NORMAL), (2, pb.TRANSFER_PRIORITY_URGENT)], ids=["longer", "relay_lost"]
)
async def test_a_transfer_that_would_come_too_late_goes_in_the_lowest_class_until_it_is_waited_for(break_at: int | None, then: int) -> None:
    scripts = {**slow_main(), "relay-0": Script()}
    policy = {**POLICY, "lengths": {"min_samples": 3}}
    async with serving(short_unless_asked, policy=policy, scripts=scripts, kv_bytes_per_token=KV_BYTES) as (cluster, coordinator):
        for number in range(3):
            await collect(coordinator, make_request(f"short{number}", prompt(number), pipeline="relay"))
        prefill = cluster.worker("prefill")
        assert prefill.priorities == []
        scripts["relay-0"].break_at = break_at
        request = make_request("long", (99, *prompt(9)[1:]), params(60), pipeline="relay")
        running = asyncio.create_task(collect(coordinator, request))
        while not prefill.priorities:
            await asyncio.sleep(0.001)
        scripts["main-0"].kv_gate.set()
        assert list((await running).records) == expected(short_unless_asked, request)[0]
        assert [(t.target, t.priority) for t in prefill.opens[-1].push_to] == [
            ("relay-0", pb.TRANSFER_PRIORITY_URGENT),
            ("main-0", pb.TRANSFER_PRIORITY_BACKGROUND),
        ]
        assert prefill.priorities == [("main-0", then)]


async def test_direct_requests_turn_to_the_relay_while_kv_comes_later_than_the_figures_say() -> None:
    """1,900 bytes over 5 MB/s are nothing to wait for, but main's KV takes half a second to show up."""
    scripts = {"main-0": Script(kv_gate=opened(False))}
    policy = {**POLICY, "direct_budget_s": 0.25}
    async with serving(hashed_token, policy=policy, scripts=scripts) as (_, coordinator):
        pipelines = []
        for number in range(8):
            running = asyncio.create_task(collect(coordinator, make_request(f"r{number}", prompt(number))))
            await asyncio.sleep(0.5)
            scripts["main-0"].kv_gate.set()
            pipelines.append((await running).timeline.pipeline)
            scripts["main-0"].kv_gate.clear()
        assert pipelines[0] == "direct"
        assert "relay" in pipelines


async def test_decisions_are_kept_with_what_came_of_them_the_latest_only() -> None:
    async with serving(hashed_token, policy={"num_decisions_kept": 2, "ttft_target_s": 5.0}) as (_, coordinator):
        for number in range(3):
            await collect(coordinator, make_request(f"r{number}", prompt(number), pipeline="relay"))
        records = coordinator.latest_decisions
        assert [r.request_id for r in records] == ["r1", "r2"]
        last = records[-1]
        assert last.kv_s is not None
        assert last.kv_error_s == pytest.approx(last.kv_s - (last.predicted_kv_s or 0.0))
        assert last.within_target is True
        assert last.ttft_s is not None
        assert counted(coordinator, "pdd:ttft_target_total", pipeline="relay", met="yes") == 3
        assert counted(coordinator, "pdd:prefix_hit_rate", role="main") == 0.0
        assert counted(coordinator, "pdd:prefix_hit_rate_gap") == 0.0
