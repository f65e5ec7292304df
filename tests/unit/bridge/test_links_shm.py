"""The shared-memory link: exact, bounded by its slots, fenced and stalled as the design says; killed processes leave nothing."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from dataclasses import replace

import numpy as np
import pytest

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_blocks
from pddbridge.kv_layout import interleaved_heads
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.links import shm_io
from pddbridge.links.schedule import Priority
from pddbridge.links.shm import ShmServer, SlotSettings, reachable
from pddbridge.links.tcp import KVSender, KVServer, TransferFailed
from tests.support.kv import blocks_of, canary_pool, fill_slowly, random_planes, same_pools
from tests.support.shm_link import (
    FEW,
    assert_exact,
    child,
    drop_connections,
    eventually,
    num_arenas,
    open_to,
    push_in_chunks,
    receiving,
    says,
    sending,
)
from tests.support.slot_link_child import PLACED_FIRST, PLANES, SENDER, SPEC, TOKENS, TRANSFER_ID


async def test_a_transfer_is_exact_between_unequal_pages_and_both_sides_report_it() -> None:
    before = num_arenas()
    async with receiving() as target, sending() as sender:
        source, table = KVPool.zeros(interleaved_heads(16, SPEC.dtype), SPEC, 8), np.array([7, 0, 3, 1, 6, 2, 5])
        fill_slowly(source, table, PLANES, LayerRange(0, 4), TokenRange(0, TOKENS.stop), HeadRange(0, 3))
        target.server.expect(1, TOKENS)
        acked: list[int] = []
        transfer = sender.open("127.0.0.1", target.port, target.epoch, 1, TOKENS, on_acked=acked.append)
        for start in range(TOKENS.start, TOKENS.stop, 32):
            for block in read_blocks(source, table, TokenRange(start, min(start + 32, TOKENS.stop))):
                transfer.push(block)
        report = await transfer.done()
        assert report.bytes == len(TOKENS) * SPEC.bytes_per_token == sum(acked) == sender.counters.bytes_sent
        assert target.completed == {1: report}
        assert target.server.counters.bytes_received == report.bytes
        assert_exact(target)
        assert target.shm.counters.num_connections == sender.counters.connections_opened == 1
        assert num_arenas() > before
        await target.server.fence(1)
        assert target.server.counters.num_open == sender.counters.num_open == 0
    del transfer
    await eventually(lambda: num_arenas() == before)


async def test_the_slots_bound_what_is_under_way() -> None:
    async with receiving() as target, sending(FEW) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer, chunk=1)
        await eventually(lambda: target.num_placing == 3)
        await asyncio.sleep(0.05)
        assert target.num_placing == 3
        target.may_place.set()
        await transfer.done()
        assert_exact(target)


async def test_large_blocks_fill_whole_slots() -> None:
    spec = KVSpec.gqa(2, 4, 64, "float32")
    tokens, planes = TokenRange(0, 9000), random_planes(spec, 9000, seed=4)
    seen: list[bool] = []

    async def place(_: int, block: KVBlock) -> None:
        want = planes[block.plane][block.layers.start : block.layers.stop, block.tokens.start : block.tokens.stop]
        seen.append(block.values.tobytes() == want.tobytes())

    handshake = replace(SENDER, kv_spec=spec, epoch=secrets.randbits(64))
    server = KVServer(handshake, place, lambda *_: None, lambda *_: None)
    shm = ShmServer(handshake, server.incoming)
    shm.start()
    async with sending(FEW, replace(SENDER, kv_spec=spec)) as sender:
        server.expect(9, tokens)
        transfer = sender.open("127.0.0.1", 1, handshake.epoch, 9, tokens)
        for block in blocks_of(spec, planes, tokens):
            transfer.push(block)
        report = await transfer.done()
    assert len(seen) == report.num_frames == 8  # of each layer and plane a whole slot, and what is left
    assert all(seen)
    await shm.close()
    await server.close()


async def test_a_broken_connection_is_replaced_with_a_new_arena_and_the_transfer_exact() -> None:
    async with receiving() as target, sending(FEW) as sender:
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer, chunk=1)
        for count in (10, 60):
            await eventually(lambda count=count: target.num_placed > count)  # type: ignore[misc]
            drop_connections()
        report = await transfer.done()
        assert report.num_repeated == sender.counters.frames_resent > 0
        assert sender.counters.connections_opened == 3
        assert_exact(target)


async def test_a_receiver_that_always_breaks_is_given_up() -> None:
    async with receiving() as target, sending(FEW) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer)
        while not transfer.ended:
            await asyncio.sleep(0.002)
            drop_connections()
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "UNAVAILABLE"


async def test_failures_before_a_transfer_are_not_held_against_it() -> None:
    async def break_one(listener: socket.socket) -> None:
        sock, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listener), 10)
        sock.close()

    handshake = replace(SENDER, epoch=secrets.randbits(64), name="main-1")
    placed = asyncio.Event()

    async def place(_: int, block: KVBlock) -> None:
        placed.set()

    async with sending(SlotSettings(max_attempts=2, backoff_s=0.2)) as sender:
        listener = shm_io.listen(handshake.epoch)
        first = sender.open("127.0.0.1", 1, handshake.epoch, 1, TOKENS)
        await break_one(listener)
        await asyncio.sleep(0.02)  # the break has been seen, and the next try is due in a while
        first.cancel()
        second = sender.open("127.0.0.1", 1, handshake.epoch, 2, TOKENS)
        push_in_chunks(second)
        await break_one(listener)
        listener.close()
        server = KVServer(handshake, place, lambda *_: None, lambda *_: None)
        server.expect(2, TOKENS)
        shm = ShmServer(handshake, server.incoming)
        shm.start()
        await second.done()
        assert placed.is_set()
        await shm.close()
        await server.close()


async def test_a_slot_is_not_used_again_before_its_frame_was_answered() -> None:
    """A cancelled transfer's frames are still being read; other transfers go on with the other slots."""
    async with receiving() as target, sending(FEW) as sender:
        other_tokens = TokenRange(0, 40)
        target.server.expect(1, TOKENS)
        target.server.expect(2, other_tokens)
        target.may_place.clear()
        first = open_to(sender, target)
        push_in_chunks(first, TokenRange(50, 51))  # two planes: two of three slots
        await eventually(lambda: target.num_placing == 2)
        first.cancel()
        second = open_to(sender, target, 2, other_tokens)
        push_in_chunks(second, other_tokens, chunk=1)
        await eventually(lambda: target.num_placing == 3)
        target.may_place.set()
        await second.done()
        expected = canary_pool(target.pool.layout, SPEC, 12)
        for tokens in (other_tokens, TokenRange(50, 51)):
            fill_slowly(expected, target.table, PLANES, LayerRange(0, 4), tokens, HeadRange(0, 3))
        assert same_pools(target.pool, expected)


async def test_a_sender_that_stops_tells_the_receiver() -> None:
    async with receiving() as target, sending() as sender:
        for transfer_id, tokens in ((1, TOKENS), (2, TokenRange(0, 4))):
            target.server.expect(transfer_id, tokens)
        transfer, other = open_to(sender, target), open_to(sender, target, 2, TokenRange(0, 4))
        push_in_chunks(transfer, TokenRange(5, 21))
        await eventually(lambda: target.num_placed == 2)
        transfer.cancel()
        await eventually(lambda: 1 in target.failed)
        assert (target.failed[1].code, target.failed[1].message) == ("UNAVAILABLE", "the sender stopped: cancelled")
        await sender.close()
        await eventually(lambda: 2 in target.failed)
        assert other.ended


async def test_a_receiver_that_is_gone_is_noticed_before_anything_is_sent() -> None:
    async with sending(FEW) as sender:
        async with receiving() as target:
            transfer = open_to(sender, target)
            await eventually(lambda: target.shm.counters.num_connections == 1)
            await eventually(lambda: sender.stats()[target.epoch].num_connections == 1)  # its handshake ends a moment later
        with pytest.raises(TransferFailed, match="3 times in a row") as caught:
            await asyncio.wait_for(transfer.done(), 5)
        assert caught.value.code == "UNAVAILABLE"


async def test_transfers_take_turns_by_class_and_the_link_measures_itself() -> None:
    async with receiving() as target, sending(FEW) as sender:
        order: list[int] = []
        tokens = TokenRange(0, 24)
        target.may_place.clear()
        for transfer_id, priority in ((1, Priority.BACKGROUND), (2, Priority.URGENT)):
            target.server.expect(transfer_id, tokens)
            transfer = sender.open(
                "127.0.0.1",
                target.port,
                target.epoch,
                transfer_id,
                tokens,
                on_acked=lambda _, transfer_id=transfer_id: order.append(transfer_id),  # type: ignore[misc]
                priority=priority,
            )
            push_in_chunks(transfer, tokens, chunk=1)
        await eventually(lambda: target.num_placing == 3)
        assert sender.stats()[target.epoch].queued_bytes == 2 * 24 * SPEC.bytes_per_token
        target.may_place.set()
        await eventually(lambda: len(order) == 96)
        assert order.count(1) == order.count(2) == 48
        assert order[:50].count(2) > 40
        stats = sender.stats()[target.epoch]
        assert stats.queued_bytes == 0
        assert stats.goodput_bytes_per_s is not None
        assert stats.goodput_bytes_per_s > 0
        assert stats.round_trip_s is not None
        assert 0 < stats.round_trip_s < 5


async def test_a_fence_waits_for_writers_and_drops_what_comes_after() -> None:
    async with receiving() as target, sending() as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer, TokenRange(5, 21))
        await eventually(lambda: target.num_placing == 2)
        fence = asyncio.create_task(target.server.fence(1))
        await asyncio.sleep(0.02)
        assert not fence.done()
        target.may_place.set()
        await fence
        assert target.num_placing == target.server.counters.num_open == 0
        before = [arrays[0].tobytes() for arrays in target.pool.arrays]
        push_in_chunks(transfer, TokenRange(21, 53))
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "CANCELLED"
        await asyncio.sleep(0.02)
        assert [arrays[0].tobytes() for arrays in target.pool.arrays] == before
        assert target.completed == {}


async def test_a_place_that_fails_fails_the_transfer_on_both_sides() -> None:
    async with receiving() as target, sending() as sender:
        target.place_error = RuntimeError("no such page")
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer)
        with pytest.raises(TransferFailed):
            await transfer.done()
        assert "no such page" in target.failed[1].message
        await target.server.fence(1)
        assert target.server.counters.num_open == 0


async def test_a_receiver_that_places_nothing_fails_the_transfer_within_its_deadline() -> None:
    async with receiving() as target, sending(replace(FEW, stall_timeout_s=0.2)) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer)
        async with asyncio.timeout(5):
            with pytest.raises(TransferFailed) as caught:
                await transfer.done()
        assert caught.value.code == "DEADLINE_EXCEEDED"


async def test_one_receiver_takes_transfers_over_both_links() -> None:
    async with receiving() as target, sending() as shm:
        tcp = KVSender(SENDER)
        middle = TokenRange(40, 60)
        target.server.expect(1, TokenRange(5, 40))
        target.server.expect(2, middle)
        over_shm = open_to(shm, target, 1, TokenRange(5, 40))
        over_tcp = tcp.open("127.0.0.1", target.port, target.epoch, 2, middle)
        push_in_chunks(over_shm, TokenRange(5, 40))
        push_in_chunks(over_tcp, middle)
        await asyncio.gather(over_shm.done(), over_tcp.done())
        await tcp.close()
        assert_exact(target, TokenRange(5, 60))
        assert (shm.counters.bytes_sent, target.server.counters.num_open) == (35 * SPEC.bytes_per_token, 2)


async def test_a_sender_killed_half_way_leaves_nothing() -> None:
    """What it announced is placed from the memory it shared; the fence drains; neither mapping nor descriptor remains."""
    before = num_arenas()
    async with receiving() as target:
        target.server.expect(TRANSFER_ID, TOKENS)
        async with child("send", target.epoch) as process:
            await says(process, "sending")
            target.may_place.clear()
            await eventually(lambda: target.num_placing > 1 or target.completed != {})
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await eventually(lambda: target.shm.counters.num_connections == 0)
            assert target.completed == {}
            fence = asyncio.create_task(target.server.fence(TRANSFER_ID))
            await asyncio.sleep(0.02)
            assert not fence.done()
            target.may_place.set()
            await fence
        assert target.num_placing == target.server.counters.num_open == 0
        assert 0 < target.num_placed < 2 * len(TOKENS)
        await eventually(lambda: num_arenas() == before)


async def test_a_receiver_killed_half_way_fails_the_transfer_and_leaves_nothing() -> None:
    before, epoch = num_arenas(), secrets.randbits(64)
    async with sending(FEW) as sender, child("receive", epoch) as process:
        await says(process, "listening 0")
        transfer = sender.open("127.0.0.1", 1, epoch, TRANSFER_ID, TOKENS)
        push_in_chunks(transfer, chunk=1)
        await says(process, "placing")
        process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(5):
            with pytest.raises(TransferFailed) as caught:
                await transfer.done()
        assert caught.value.code == "UNAVAILABLE"
        assert sender.counters.bytes_sent <= PLACED_FIRST * 4 * 3 * 8 * 2
        assert (sender.counters.num_open, num_arenas()) == (0, before)
        assert not reachable(epoch)


async def test_closing_with_everything_open_ends_everything() -> None:
    before = asyncio.all_tasks()
    async with receiving() as target, sending() as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer)
        await eventually(lambda: target.num_placing > 0)
        await sender.close()
        with pytest.raises(TransferFailed):
            await transfer.done()
    await eventually(lambda: asyncio.all_tasks() <= before)
    assert target.num_placing == 0


def test_settings_out_of_bounds_are_refused() -> None:
    for field_name, value in (("num_slots", 0), ("num_slots", 65), ("stall_timeout_s", 0.0), ("max_attempts", 0)):
        with pytest.raises(ValueError, match=field_name):
            replace(FEW, **{field_name: value})  # type: ignore[arg-type]
