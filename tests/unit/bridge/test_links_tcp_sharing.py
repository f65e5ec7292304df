"""What a TCP link shares out: frames over connections, turns between transfers, the event loop between it and everything else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.link_schedule import LinkRules
from pddbridge.links.tcp import KVServer
from tests.support.kv import blocks_of, random_planes
from tests.support.tcp_link import (
    FAST,
    ONE,
    RECEIVER,
    SENDER,
    TOKENS,
    assert_exact,
    eventually,
    place_nowhere,
    push_in_chunks,
    receiving,
    sending,
)


async def test_frames_are_striped_over_several_connections() -> None:
    async with receiving() as target, sending(replace(FAST, num_connections=3)) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer, chunk=1)
        # 16 placings per connection at most: more at once means more than one carries frames
        await eventually(lambda: target.num_placing > 32)
        assert target.num_placing <= 48
        target.may_place.set()
        await transfer.done()
        assert sender.counters.connections_opened == 3
        assert_exact(target)


async def test_transfers_that_share_a_connection_take_turns() -> None:
    """On a fair link; of equal transfers on any other the first goes on, which makes nobody later and the first earlier."""
    for schedule, order in (("fair", [1, 2] * 80), ("shortest", [1] * 80 + [2] * 80)):
        async with receiving() as target, sending(ONE, links={"a-b": LinkRules(schedule, aged_turn=1000)}) as sender:
            tokens = TokenRange(0, 40)
            transfers = []
            target.may_place.clear()
            for transfer_id in (1, 2):
                target.server.expect(transfer_id, tokens)
                transfer = sender.open("127.0.0.1", target.port, 22, transfer_id, tokens, link="a-b")
                push_in_chunks(transfer, tokens, chunk=1)
                transfers.append(transfer)
            target.may_place.set()
            await asyncio.gather(*(transfer.done() for transfer in transfers))
            assert target.placed_ids == order


async def test_the_loop_has_a_turn_after_every_frame() -> None:
    """The kernel takes small frames at once; sending them all in one turn would hold up everything else on the loop."""
    async with receiving() as target, sending(ONE) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer, chunk=1)
        num_frames, turns = transfer.num_queued, 0
        async with asyncio.timeout(10):
            while transfer.num_queued:
                await asyncio.sleep(0)
                turns += 1
        assert turns >= num_frames == 190


async def test_large_frames_do_not_hold_up_the_loop() -> None:
    """Checksums and copies of both ends on one loop: a few milliseconds at a time at most."""
    spec = KVSpec.gqa(8, 8, 64, "bfloat16")
    server = KVServer(replace(RECEIVER, kv_spec=spec), place_nowhere, lambda *_: None, lambda *_: None)
    port = await server.start("127.0.0.1", 0)
    tokens = TokenRange(0, 2000)
    planes = random_planes(spec, 2000, seed=5)
    async with sending(FAST, replace(SENDER, kv_spec=spec)) as sender:
        server.expect(1, tokens)
        transfer = sender.open("127.0.0.1", port, 22, 1, tokens)
        for block in blocks_of(spec, planes, tokens):
            transfer.push(block)
        gaps, last = [], time.monotonic()
        while not transfer.ended:
            await asyncio.sleep(0)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        assert (await transfer.done()).bytes == 2000 * spec.bytes_per_token
    await server.close()
    assert sorted(gaps)[len(gaps) // 2] < 0.02
