"""The worker service over real gRPC and the real KV link, with the in-test engine: cases 7, 8, 20, 25, 41 and 78 at the worker's edge."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence

import pytest

from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.engine import Step
from pddbridge.rpc.gen import worker_pb2
from tests.support.fake_engine import KV_SPEC, FakeEngine, expected_log
from tests.support.worker_harness import Attached, WorkerHarness

PROMPT = list(range(40, 63))
BYTES = KV_SPEC.bytes_per_token


async def relay_and_main(prompt: Sequence[int], prefill: WorkerHarness, receivers: Sequence[WorkerHarness]) -> list[Attached]:
    """Reserve at the receivers, prefill with pushes to those that lack something; all streams, prefill's last."""
    streams = [r.attach().open("r", prompt, transfer=True, decode=False, max_tokens=12) for r in receivers]
    reserved = [(await stream.until("reserved")).reserved for stream in streams]
    targets = [worker.target(r) for worker, r in zip(receivers, reserved, strict=True) if r.transfer_id]
    sender = prefill.attach().open("r", prompt, decode=False, push_to=targets)
    for _ in targets:
        await sender.until("pushed")
    for stream in streams:
        await stream.until("kv_complete")
    return [*streams, sender]


async def test_info_tells_what_a_coordinator_compares() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        info = await worker.stub.Info(worker_pb2.InfoRequest())
        assert (info.name, info.engine, info.ready, info.page_size, info.num_pages) == ("w", "fake", True, 8, 16)
        assert (info.max_context_tokens, info.vocab_size, info.kv_bytes_per_token, info.kv_dtype) == (100, 300, BYTES, "float32")
        assert info.epoch == worker.service.epoch != 0
        assert len(info.fingerprint) == 64


async def until_chosen(worker: WorkerHarness, num_tokens: int) -> None:
    async with asyncio.timeout(20):
        info = await worker.stub.Info(worker_pb2.InfoRequest())
        while info.tokens_chosen["argmax"] < num_tokens:
            await asyncio.sleep(0.01)
            info = await worker.stub.Info(worker_pb2.InfoRequest())
    assert dict(info.engine_fallbacks) == {"no_device": 1}


async def test_info_tells_what_the_engine_has_counted_by_the_time_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.worker.step_loop.COUNTS_EVERY_S", 1e6)
    async with WorkerHarness("w", FakeEngine) as worker:
        stream = worker.attach().open("r", PROMPT)
        await stream.tokens(8)
        await until_chosen(worker, 8)
        await stream.half_close()
        ledger = await worker.assert_idle()
        assert dict(ledger.tokens_chosen) == {"argmax": 8}
        assert ledger.graphed_steps == ledger.steps > 0


async def test_info_tells_what_the_engine_counts_while_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.worker.step_loop.COUNTS_EVERY_S", 0.0)
    steps, told = itertools.count(), threading.Event()

    def hold(step: Step) -> None:
        if next(steps) == 5:
            assert told.wait(20)

    async with WorkerHarness("w", lambda: FakeEngine(before_step=hold)) as worker:
        stream = worker.attach().open("r", PROMPT)
        await until_chosen(worker, 1)
        told.set()
        assert await stream.tokens(8) == expected_log(PROMPT, 8)
        await stream.half_close()


async def test_one_worker_computes_and_decodes() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        stream = worker.attach().open("r", PROMPT)
        assert await stream.tokens(8) == expected_log(PROMPT, 8)
        assert stream.kinds()[:2] == ["reserved", "prefilled"]
        positions = [event.tokens.position for event in stream.seen if event.WhichOneof("event") == "tokens"]
        assert positions == list(range(8))
        await stream.half_close()


@pytest.mark.parametrize("length", [1, 2, 8, 9, 16, 17, 23])
async def test_prefill_relay_and_main_give_the_single_engine_run(length: int) -> None:
    prompt = PROMPT[:length]
    async with (
        WorkerHarness("p", lambda: FakeEngine(page_size=12)) as prefill,
        WorkerHarness("relay", lambda: FakeEngine(page_size=5)) as relay,
        WorkerHarness("main", lambda: FakeEngine(page_size=8)) as main,
    ):
        on_relay, on_main, on_prefill = await relay_and_main(prompt, prefill, [relay, main])
        log = expected_log(prompt, 12)
        on_relay.ingest(0, [], decode=True)
        relayed = await on_relay.tokens(3)
        on_relay.seal()
        sealed = (await on_relay.until("sealed")).sealed.length
        relayed = on_relay.ids()
        assert len(relayed) == sealed
        on_main.ingest(0, relayed, decode=True)
        rest = await on_main.tokens(12 - sealed)
        assert relayed + rest == log
        for stream in (on_relay, on_main, on_prefill):
            await stream.half_close()
        for worker in (relay, main):
            ledger = await worker.assert_idle()
            assert (ledger.kv_bytes_received, ledger.computed_prompt_tokens) == ((length - 1) * BYTES, 0)
        sent = await prefill.assert_idle()
        assert (sent.kv_bytes_sent, sent.computed_prompt_tokens) == (2 * (length - 1) * BYTES, length - 1)


@pytest.mark.parametrize("primed", [0, 11, 16, 22, 23])
async def test_only_the_missing_suffix_travels(primed: int) -> None:
    async with WorkerHarness("p", FakeEngine) as prefill, WorkerHarness("main", lambda: FakeEngine(page_size=12)) as main:
        if primed:
            earlier = main.attach().open("earlier", [*PROMPT[:primed], *[7] * 13], max_tokens=1)
            await earlier.tokens(1)
            await earlier.half_close()
        before = await main.assert_idle()
        on_main, on_prefill = await relay_and_main(PROMPT, prefill, [main])
        on_main.ingest(0, [], decode=True)
        assert await on_main.tokens(12) == expected_log(PROMPT, 12)
        missing = 22 - min(primed, 22)
        complete = next(event.kv_complete for event in on_main.seen if event.WhichOneof("event") == "kv_complete")
        assert (complete.received_tokens, complete.received_bytes) == (missing, missing * BYTES)
        pushed = [event.pushed for event in on_prefill.seen if event.WhichOneof("event") == "pushed"]
        assert [(p.target, p.tokens, p.bytes) for p in pushed] == ([("main", missing, missing * BYTES)] if missing else [])
        for stream in (on_main, on_prefill):
            await stream.half_close()
        ledger = await main.assert_idle()
        assert ledger.kv_bytes_received == missing * BYTES
        assert ledger.computed_prompt_tokens == before.computed_prompt_tokens
        assert (await prefill.assert_idle()).kv_bytes_sent == missing * BYTES


async def test_a_target_that_lacks_nothing_is_told_pushed_at_once() -> None:
    async with WorkerHarness("p", FakeEngine) as prefill:
        nothing = worker_pb2.PushTarget(target="main", first_token=22)
        stream = prefill.attach().open("r", PROMPT, decode=False, push_to=[nothing])
        pushed = (await stream.until("pushed")).pushed
        assert (pushed.target, pushed.tokens, pushed.bytes) == ("main", 0, 0)
        await stream.half_close()


async def test_a_small_window_moves_a_long_prompt_piece_by_piece() -> None:
    prompt = [(7 * i) % 290 for i in range(90)]
    limits = ExecutorLimits(push_window_bytes=4 * BYTES, push_piece_bytes=3 * BYTES)
    async with WorkerHarness("p", FakeEngine, limits=limits) as prefill, WorkerHarness("main", lambda: FakeEngine(page_size=12)) as main:
        on_main, on_prefill = await relay_and_main(prompt, prefill, [main])
        on_main.ingest(0, [], decode=True)
        assert await on_main.tokens(8) == expected_log(prompt, 8)
        for stream in (on_main, on_prefill):
            await stream.half_close()


async def test_a_failed_push_is_told_and_the_other_target_still_gets_its_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerHarness("p", FakeEngine) as prefill, WorkerHarness("main", FakeEngine) as main:
        posted: list[m.Command] = []
        post = prefill.step_loop.post
        monkeypatch.setattr(prefill.step_loop, "post", lambda command: (posted.append(command), post(command)))
        on_main = main.attach().open("r", PROMPT, transfer=True)
        good = main.target((await on_main.until("reserved")).reserved)
        bad = worker_pb2.PushTarget(target="gone", host="127.0.0.1", port=main.kv_port, epoch=good.epoch, transfer_id=999, first_token=0)
        on_prefill = prefill.attach().open("r", PROMPT, decode=False, push_to=[bad, good])
        events = [await on_prefill.next() for _ in range(4)]
        failed = [event.failed for event in events if event.WhichOneof("event") == "failed"]
        assert [(f.target, f.code) for f in failed] == [("gone", "NOT_FOUND")]
        assert m.PushEnded("r", "gone") in posted  # nothing more is read for it
        assert sorted(str(kind) for kind in on_prefill.kinds()) == ["failed", "prefilled", "pushed", "reserved"]
        assert await on_main.tokens(8) == expected_log(PROMPT, 8)
        for stream in (on_main, on_prefill):
            await stream.half_close()
        assert (await main.ledger()).late_frames_dropped > 0
