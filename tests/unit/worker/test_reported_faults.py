"""Faults that users of such systems reported, at two workers and the link between them: cases 24, 31, 35 and 118."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack

import pytest

from pddbridge.engine import Step
from pddbridge.kv_spec import TokenRange
from pddbridge.links.tcp import PROTOCOL_VERSION, Handshake, KVSender, TransferFailed
from tests.support.fake_engine import KV_SPEC, FakeEngine, expected_log
from tests.support.kv import blocks_of, random_planes
from tests.support.worker_harness import WorkerHarness

PROMPT = list(range(40, 97))  # 56 positions in steps of 16


@pytest.mark.parametrize("client_cancels", [True, False])
async def test_case_24_pages_that_await_kv_come_back_though_prefill_is_gone(client_cancels: bool) -> None:
    """The sender is killed half way. With the client's cancellation pages come back at once, without it by the deadline; what a late sender
    of the same transfer says is not listened to.
    """
    tokens = TokenRange(0, len(PROMPT) - 1)
    blocks = list(blocks_of(KV_SPEC, random_planes(KV_SPEC, tokens.stop, seed=1), TokenRange(0, 20)))
    async with WorkerHarness("main", FakeEngine) as main:
        handshake = Handshake(PROTOCOL_VERSION, main.runtime.fingerprint, KV_SPEC, 77, "prefill")
        sender, late = KVSender(handshake), KVSender(handshake)
        stream = main.attach().open("r", PROMPT, transfer=True, max_tokens=4, timeout_s=30.0 if client_cancels else 1.0)
        reserved = (await stream.until("reserved")).reserved
        where = ("127.0.0.1", main.kv_port, reserved.epoch, reserved.transfer_id, tokens)
        half = sender.open(*where)
        for block in blocks:
            half.push(block)
        async with asyncio.timeout(5):
            while half.report.num_frames < len(blocks):
                await asyncio.sleep(0.005)
        assert (await main.ledger()).pinned_pages > 0
        # kill -9: sockets close, nobody says goodbye.
        for task in [task for peer in sender._peers.values() for task in peer._tasks]:
            task.cancel()
        if client_cancels:
            await stream.half_close()
        else:
            failed = (await stream.until("failed")).failed
            assert failed.code == "DEADLINE_EXCEEDED"
        before = (await main.assert_idle()).late_frames_dropped
        again = late.open(*where)
        for block in blocks:
            again.push(block)
        with pytest.raises(TransferFailed, match="fenced"):
            await again.done()
        assert (await main.assert_idle()).late_frames_dropped > before
        await late.close()
        await sender.close()


async def test_case_31_a_main_that_restarts_on_its_port_is_served_by_the_same_prefill() -> None:
    """What was under way fails at once, naming main; the next request's KV goes to the new process within seconds."""
    reached, may_go_on = threading.Event(), threading.Event()

    def stop(step: Step) -> None:
        if step.context_lens[0] == 32:
            reached.set()
            assert may_go_on.wait(10)

    async with WorkerHarness("prefill", lambda: FakeEngine(before_step=stop)) as prefill:
        async with AsyncExitStack() as life:
            first = WorkerHarness("main", FakeEngine)
            await first.__aenter__()
            life.push_async_callback(first.__aexit__, RuntimeError, RuntimeError("killed"), None)  # nobody asks whether it is idle
            life.push_async_callback(first.traffic.close)  # before anybody can be told: sockets close, nobody says goodbye
            stream = first.attach().open("r", PROMPT, transfer=True)
            target = first.target((await stream.until("reserved")).reserved)
            sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
            assert await asyncio.to_thread(reached.wait, 10)
        async with WorkerHarness("main", FakeEngine, kv_port=first.kv_port) as second, asyncio.timeout(5):
            assert second.service.epoch != first.service.epoch
            may_go_on.set()
            failed = (await sender.until_failed()).failed
            assert (failed.target, failed.code) == ("main", "UNAVAILABLE")
            await sender.half_close()
            await prefill.assert_idle()
            stream = second.attach().open("r", PROMPT, transfer=True)
            target = second.target((await stream.until("reserved")).reserved)
            sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
            await sender.until("pushed")
            assert await stream.tokens(8) == expected_log(PROMPT, 8)
            for end in (sender, stream):
                await end.half_close()
            assert (await second.assert_idle()).computed_prompt_tokens == 0


async def test_case_35_prefill_that_raises_after_two_chunks_ends_the_receiver_at_once() -> None:
    def raises(step: Step) -> None:
        if step.context_lens[0] == 32:
            raise RuntimeError("prefill broke")

    async with WorkerHarness("prefill", lambda: FakeEngine(before_step=raises)) as prefill, WorkerHarness("main", FakeEngine) as main:
        stream = main.attach().open("r", PROMPT, transfer=True, max_tokens=4)
        target = main.target((await stream.until("reserved")).reserved)
        started = time.monotonic()
        source = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
        failed = (await source.until("failed")).failed
        assert (failed.code, "prefill broke" in failed.message) == ("INTERNAL", True)
        told = (await stream.until("failed")).failed
        assert time.monotonic() - started < 3.0  # a second where nothing else runs
        assert (told.code, "the sender stopped" in told.message) == ("UNAVAILABLE", True)
        for worker in (prefill, main):
            await worker.assert_idle()


async def test_case_118_a_prefix_is_found_by_its_own_tenant_alone_on_both_sides() -> None:
    async with WorkerHarness("prefill", FakeEngine) as prefill, WorkerHarness("main", FakeEngine) as main:
        found = []
        for number, tenant in enumerate(("one", "two", "one")):
            stream = main.attach().open(f"r-{number}", PROMPT, transfer=True, max_tokens=2, tenant=tenant)
            reserved = (await stream.until("reserved")).reserved
            push_to = [main.target(reserved)] if reserved.transfer_id else []
            source = prefill.attach().open(f"p-{number}", PROMPT, decode=False, push_to=push_to, tenant=tenant)
            at_prefill = (await source.until("reserved")).reserved.hit_tokens
            await source.until("pushed" if push_to else "prefilled")
            await stream.tokens(2)
            found.append((at_prefill, reserved.hit_tokens))
            await source.half_close()
            await stream.half_close()
            for worker in (prefill, main):
                await worker.assert_idle()
        assert found[:2] == [(0, 0), (0, 0)]
        assert min(found[2]) > 0
