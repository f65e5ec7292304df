"""Two prefill workers that push over one line: what a coordinator tells of it, beside what is really there."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

from pdd.config import EmulatedLink
from pdd.launch.link_emulator import LinkEmulator, ProxyPort
from pdd.policy.link_queue import LinkQueue
from pdd.topology import Address
from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.link_schedule import LinkRules, Priority
from pddbridge.links.stats import LinkStats
from pddbridge.links.tcp import KVSender, KVServer
from tests.support.generation import collect, hashed_token, make_request, params
from tests.support.scripted_workers import serving
from tests.support.tcp_link import FAST, RECEIVER, SENDER, eventually, place_nowhere
from tests.support.worker_script import Script, opened
from tests.unit.serving.test_link_state import state

SPEC = KVSpec.gqa(8, 8, 64, "bfloat16")
RATE_BYTES_S = 8e6
ROLES = (("prefill-0", "prefill", "a"), ("prefill-1", "prefill", "a"), ("relay-0", "relay", "a"), ("main-0", "main", "b"))


async def test_what_is_left_of_two_senders_is_told_though_each_gets_half() -> None:
    """Of a line of 8 MB/s, looked at while both send. By one sender's rate twice too little would seem to have left."""
    piece = TokenRange(0, 64)
    values = (
        np.random.default_rng(0)
        .integers(0, 1 << 16, (8, len(piece), 8, 64), dtype=np.uint16)
        .view(SPEC.np_dtype_of(SPEC.groups[0].planes[0]))
    )
    num_tokens = int(2 * RATE_BYTES_S / SPEC.bytes_per_token) // len(piece) * len(piece)
    async with AsyncExitStack() as stack:
        emulator = LinkEmulator()
        stack.push_async_callback(emulator.close)
        server = KVServer(replace(RECEIVER, kv_spec=SPEC), place_nowhere, lambda *_: None, lambda *_: None)
        port = await server.start("127.0.0.1", 0)
        stack.push_async_callback(server.close)
        ends = ProxyPort("a", "b", Address("127.0.0.1", 0), Address("127.0.0.1", port))
        there = await emulator.add(ends, EmulatedLink(rate_mbit_s=RATE_BYTES_S * 8e-6, rtt_ms=10.0))
        senders: dict[str, KVSender] = {}
        for number, name in enumerate(("prefill-0", "prefill-1")):
            senders[name] = KVSender(replace(SENDER, kv_spec=SPEC, epoch=30 + number, name=name), FAST, {"wan": LinkRules()})
            stack.push_async_callback(senders[name].close)
        for number, sender in enumerate(senders.values(), 1):
            tokens = TokenRange(0, num_tokens)
            server.expect(number, tokens)
            push = sender.open(there.host, there.port, RECEIVER.epoch, number, tokens, link="wan")
            for first in range(0, num_tokens, len(piece)):
                for plane in SPEC.groups[0].planes:
                    push.push(KVBlock(plane.name, LayerRange(0, 8), TokenRange(first, first + len(piece)), HeadRange(0, 8), values))

        def stats() -> dict[str, LinkStats]:
            return {name: next(iter(sender.stats().values())) for name, sender in senders.items() if sender.stats()}

        def gone() -> int:
            return sum(one.delivered_bytes for one in stats().values())

        await eventually(lambda: gone() > 1.5 * RATE_BYTES_S)  # a rate is told of the latest two seconds
        queue = LinkQueue("shortest")
        before, left = gone(), dict.fromkeys(senders, 1e9)
        for name, num_bytes in left.items():
            queue.add(name, num_bytes, Priority.NORMAL, name)

        def look() -> bool:
            told = {name: one.goodput_bytes_per_s for name, one in stats().items() if one.goodput_bytes_per_s is not None}
            queue.advance(time.monotonic(), told)
            return gone() - before > 1.5 * RATE_BYTES_S

        await eventually(look)
        assert sum(left.values()) - queue.remaining_bytes(background=False) == pytest.approx(gone() - before, rel=0.35)


async def test_a_request_is_predicted_by_the_worker_whose_prefill_has_begun() -> None:
    """That one has more to do now, so the other would be chosen for the next; and its way to main is a slow one."""
    gate = opened(False)
    scripts = {"main-0": Script(reserve_gate=gate), "relay-0": Script(kv_event_gate=opened(False))}
    async with serving(hashed_token, roles=ROLES, scripts=scripts, kv_bytes_per_token=10_000) as (cluster, coordinator):
        for worker, rate in zip(cluster.workers, (5e6, 5e3), strict=False):
            worker.links = [state("main-0", "tcp", 5000, goodput_bytes_s=rate, num_transfers=1)]
        slow = coordinator._pool.worker("prefill-1")
        main = coordinator._pool.worker("main-0")
        await eventually(lambda: slow.link_to(main.place) is not None)
        running = asyncio.create_task(collect(coordinator, make_request(sampling=params(24))))
        await eventually(lambda: cluster.worker("relay").received_bytes > 0)
        assert len(cluster.workers[0].opens) == 1
        gate.set()
        assert (await running).timeline.decision == "within_budget"
