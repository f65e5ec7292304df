"""The TCP link on real sockets: exact through cuts, flips and lost replies; and fenced as the design says."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, read_blocks
from pddbridge.kv_handshake import hello, welcome
from pddbridge.kv_layout import interleaved_heads
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import LARGEST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, encode_frame_header, frame_of, payload_view
from pddbridge.links import tcp_io
from pddbridge.links.tcp import KVServer, SenderSettings, TransferFailed
from pddbridge.links.tcp_peer import Peer
from tests.support.cutting_proxy import Fault
from tests.support.kv import bits, blocks_of, fill_slowly, random_planes
from tests.support.tcp_link import (
    FAST,
    NUM_TOKENS,
    ONE,
    PLANES,
    RECEIVER,
    SENDER,
    SPEC,
    TOKENS,
    assert_exact,
    between,
    eventually,
    frame,
    push_in_chunks,
    raw_connection,
    receiving,
    send_raw,
    sending,
)


async def test_a_transfer_is_exact_and_both_sides_report_it() -> None:
    async with receiving() as target, sending() as sender:
        source, table = KVPool.zeros(interleaved_heads(16, SPEC.dtype), SPEC, 8), np.array([7, 0, 3, 1, 6, 2, 5])
        fill_slowly(source, table, PLANES, LayerRange(0, 4), TokenRange(0, NUM_TOKENS), HeadRange(0, 3))
        target.server.expect(1, TOKENS)
        acked: list[int] = []
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS, on_acked=acked.append)
        for start in range(TOKENS.start, TOKENS.stop, 32):
            for block in read_blocks(source, table, TokenRange(start, min(start + 32, TOKENS.stop))):
                transfer.push(block)
        report = await transfer.done()
        assert report.tokens == TOKENS
        assert (len(acked), sum(acked)) == (report.num_frames, report.bytes)
        assert report.bytes == len(TOKENS) * SPEC.bytes_per_token
        assert target.completed == {1: report}
        assert_exact(target)
        counters = target.server.counters
        assert (counters.bytes_received, counters.frames_refused, counters.late_frames_dropped) == (report.bytes, 0, 0)
        assert sender.counters.bytes_sent == report.bytes
        assert counters.num_open == 1
        await target.server.fence(1)
        assert target.server.counters.num_open == 0
        assert sender.counters.num_open == 0


@pytest.mark.parametrize(("taken", "largest"), [(MAX_PAYLOAD_BYTES, 1 << 20), (3 << 20, 3 << 20), (1 << 40, 4 << 20)])
async def test_large_blocks_travel_in_frames_as_large_as_the_link_and_its_receiver_allow(
    monkeypatch: pytest.MonkeyPatch, taken: int, largest: int
) -> None:
    """A link that is as fast as one likes: frames of 4 MiB to a receiver that takes them, smaller ones to others and on a new link."""
    spec = KVSpec.gqa(2, 4, 64, "float32")
    monkeypatch.setattr(Peer, "wire_bytes_s", property(lambda peer: 1e9 if peer.num_connections else None))
    seen: list[KVBlock] = []

    async def place(_: int, block: KVBlock) -> None:
        seen.append(block)

    done: list[int] = []
    ends = (place, lambda i, _: done.append(i), lambda i, f: pytest.fail(str(f)))
    server = KVServer(replace(RECEIVER, kv_spec=spec), *ends, max_payload_bytes=taken)
    port = await server.start("127.0.0.1", 0)
    tokens = TokenRange(0, 6000)  # 24 MB
    planes = random_planes(spec, 6000, seed=4)
    most: list[int] = []
    async with sending(FAST, replace(SENDER, kv_spec=spec)) as sender:
        for transfer_id in (8, 9):
            seen.clear()
            server.expect(transfer_id, tokens)
            transfer = sender.open("127.0.0.1", port, 22, transfer_id, tokens)
            for block in blocks_of(spec, planes, tokens):
                transfer.push(block)
            report = await transfer.done()
            assert report.num_frames == len(seen) > 5
            most.append(max(block.values.nbytes for block in seen))
    await server.close()
    assert done == [8, 9]
    assert most[0] <= 256 << 10
    assert 0.9 * largest < most[1] <= largest
    for block in seen:
        want = planes[block.plane][block.layers.start : block.layers.stop, block.tokens.start : block.tokens.stop]
        assert np.array_equal(bits(block.values), bits(want))


async def test_a_frame_larger_than_the_receiver_takes_is_refused_before_any_of_it_is_kept() -> None:
    spec = KVSpec.gqa(2, 4, 64, "float32")
    tokens = TokenRange(0, 600)
    values = np.zeros((2, len(tokens), 4, 64), np.float32)
    header = frame_of(spec, 1, 22, 0, KVBlock("k", LayerRange(0, 2), tokens, HeadRange(0, 4), values), max_bytes=4 << 20)
    assert MAX_PAYLOAD_BYTES < header.payload_bytes <= LARGEST_PAYLOAD_BYTES
    for taken in (MAX_PAYLOAD_BYTES, LARGEST_PAYLOAD_BYTES):
        handshake = replace(RECEIVER, kv_spec=spec)
        async with receiving(handshake, max_payload_bytes=taken) as target:
            target.may_place.clear()
            target.server.expect(1, tokens)
            sock = await raw_connection(target.port, replace(SENDER, kv_spec=spec))
            with contextlib.suppress(OSError):
                await tcp_io.send(sock, encode_frame_header(header), payload_view(values))
            if taken == LARGEST_PAYLOAD_BYTES:
                await eventually(lambda target=target: target.num_placing == 1)
                target.place_error = RuntimeError("these pages are for something else")
            else:
                await eventually(lambda target=target: target.server.counters.frames_refused == 1)
                assert target.num_placing == 0
            sock.close()


# The hello is about 400 bytes; a frame of 16 tokens here is 80 + 4 * 16 * 3 * 8 * 2 = 3,152 bytes.
@pytest.mark.parametrize("at", [0, 100, 430, 470, 2000, 5000, 9000])
@pytest.mark.parametrize("kind", ["cut", "flip"])
async def test_case_18_a_cut_or_flipped_connection_is_replaced_and_the_transfer_exact(kind: str, at: int) -> None:
    async with receiving() as target, sending(ONE) as sender, between(target, Fault(kind, at)) as (proxy, port):  # type: ignore[arg-type]
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS)
        push_in_chunks(transfer)
        report = await transfer.done()
        assert report.bytes == len(TOKENS) * SPEC.bytes_per_token == target.server.counters.bytes_received
        assert target.completed[1].bytes == report.bytes
        assert proxy.num_connections == 2
        assert_exact(target)
        if kind == "flip":
            assert target.server.counters.frames_refused == 1
        if at >= 430:
            assert report.num_repeated > 0
            assert sender.counters.frames_resent > 0


@pytest.mark.parametrize("position", ["header", "payload"])
async def test_a_frame_with_a_flipped_bit_is_not_acknowledged(position: str) -> None:
    """The only frame's only good copy comes on the second connection; until then nothing is placed."""
    head = len(hello(SENDER, 22))
    at = head + (40 if position == "header" else 80 + 77)
    async with receiving() as target, sending(ONE) as sender, between(target, Fault("flip", at)) as (_, port):
        target.server.expect(1, TokenRange(0, 2))
        transfer = sender.open("127.0.0.1", port, 22, 1, TokenRange(0, 2))
        target.may_place.clear()
        transfer.push(next(blocks_of(SPEC, PLANES, TokenRange(0, 2))))
        await eventually(lambda: target.num_placing == 1)
        assert target.server.counters.frames_refused == 1
        assert transfer.report.bytes == 0
        target.may_place.set()
        await eventually(lambda: transfer.report.bytes > 0)
        assert target.num_placed == 1
        assert transfer.report.num_repeated == 1


async def test_lost_acknowledgements_are_given_again_without_placing_again() -> None:
    async with receiving() as target, sending(ONE) as sender:
        async with between(target, *[Fault("cut_replies", len(welcome(RECEIVER)) + at) for at in (0, 20, 60)]) as (proxy, port):
            target.server.expect(1, TOKENS)
            transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS)
            push_in_chunks(transfer)
            report = await transfer.done()
            assert proxy.num_connections > 1
        assert target.num_placed == report.num_frames
        assert target.server.counters.bytes_received == report.bytes
        assert_exact(target)


async def test_a_repeated_frame_after_adoption_and_release_is_acknowledged() -> None:
    """The acknowledgements are lost on the way, the receiver is done with the transfer meanwhile: the sender still learns of success."""
    async with receiving() as target, sending(ONE) as sender, between(target, Fault("stall", 10**9)) as (proxy, port):
        target.server.expect(1, TokenRange(0, 4))
        transfer = sender.open("127.0.0.1", port, 22, 1, TokenRange(0, 4))
        target.may_place.clear()
        push_in_chunks(transfer, TokenRange(0, 4))
        await eventually(lambda: target.num_placing == 2)
        proxy.drop_all()  # before any acknowledgement
        target.may_place.set()
        await eventually(lambda: 1 in target.completed)
        await target.server.fence(1)
        report = await transfer.done()
        assert report.bytes == 4 * SPEC.bytes_per_token == target.server.counters.bytes_received
        assert target.server.counters.late_frames_dropped == 0


async def test_a_frame_that_comes_again_while_it_is_being_placed_waits_for_that() -> None:
    async with receiving() as target, sending(ONE) as sender, between(target) as (proxy, port):
        target.may_place.clear()
        target.server.expect(1, TokenRange(0, 4))
        transfer = sender.open("127.0.0.1", port, 22, 1, TokenRange(0, 4))
        push_in_chunks(transfer, TokenRange(0, 4))
        await eventually(lambda: target.num_placing == 2)
        proxy.drop_all()
        await eventually(lambda: proxy.num_connections == 2 and sender.counters.frames_resent == 2)
        await asyncio.sleep(0.05)
        assert target.num_placing == 2
        assert transfer.report.bytes == 0
        target.may_place.set()
        await transfer.done()
        assert target.num_placed == 2


async def test_a_fence_waits_for_the_writer_and_drops_what_is_late() -> None:
    async with receiving() as target, sending(ONE) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer, TokenRange(5, 21))
        await eventually(lambda: target.num_placing == 2)
        fence = asyncio.create_task(target.server.fence(1))
        again = asyncio.create_task(target.server.fence(1))
        await asyncio.sleep(0.02)
        assert not fence.done()
        target.may_place.set()
        await asyncio.gather(fence, again)
        assert target.num_placing == 0
        assert target.server.counters.num_open == 0
        before = [arrays[0].tobytes() for arrays in target.pool.arrays]
        push_in_chunks(transfer, TokenRange(21, 53))
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "CANCELLED"
        await asyncio.sleep(0.02)
        assert [arrays[0].tobytes() for arrays in target.pool.arrays] == before
        assert target.completed == {}
        await target.server.fence(1)
        await target.server.fence(12345)


async def test_late_frames_are_answered_dropped_and_counted() -> None:
    async with receiving() as target:
        target.server.expect(1, TokenRange(0, 8))
        target.server.expect(2, TokenRange(0, 8))
        sock = await raw_connection(target.port)
        assert await send_raw(sock, *frame(1, 22, TokenRange(0, 4))) == 0
        await target.server.fence(1)
        assert await send_raw(sock, *frame(1, 22, TokenRange(4, 8))) == 2  # fenced
        assert await send_raw(sock, *frame(1, 22, TokenRange(0, 4))) == 2  # a duplicate of a dead transfer's is as dead
        assert await send_raw(sock, *frame(77, 22, TokenRange(0, 4))) == 1  # unknown
        assert await send_raw(sock, *frame(2, 21, TokenRange(0, 4))) == 3  # another life's
        assert target.server.counters.late_frames_dropped == 4
        assert await send_raw(sock, *frame(2, 22, TokenRange(0, 4))) == 0  # the connection is good for others
        assert target.placed_ids == [1, 2]
        sock.close()


async def test_a_frame_with_impossible_ranges_fails_its_transfer_on_both_sides() -> None:
    async with receiving() as target:
        target.server.expect(1, TokenRange(0, 8))
        sock = await raw_connection(target.port)
        assert await send_raw(sock, *frame(1, 22, TokenRange(0, 4))) == 0
        assert await send_raw(sock, *frame(1, 22, TokenRange(3, 6))) == 4
        assert target.failed[1].code == "INTERNAL"
        assert target.server.counters.frames_refused == 1
        assert await send_raw(sock, *frame(1, 22, TokenRange(4, 8))) == 2
        await target.server.fence(1)
        assert target.server.counters.num_open == 0
        sock.close()


async def test_a_place_that_fails_fails_the_transfer_on_both_sides() -> None:
    async with receiving() as target, sending() as sender:
        target.place_error = RuntimeError("no such page")
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer)
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code in ("INTERNAL", "CANCELLED")
        assert "no such page" in target.failed[1].message
        await target.server.fence(1)
        assert target.server.counters.num_open == 0


async def test_an_idle_connection_is_used_again_and_a_dead_one_replaced() -> None:
    async with receiving() as target, sending(ONE) as sender, between(target) as (proxy, port):
        for transfer_id in (1, 2):
            target.server.expect(transfer_id, TokenRange(0, 4))
            transfer = sender.open("127.0.0.1", port, 22, transfer_id, TokenRange(0, 4))
            push_in_chunks(transfer, TokenRange(0, 4))
            await transfer.done()
        assert proxy.num_connections == 1
        assert sender.counters.connections_opened == 1
        proxy.drop_all()
        await eventually(lambda: target.server.counters.num_connections == 0)
        target.server.expect(3, TokenRange(0, 4))
        transfer = sender.open("127.0.0.1", port, 22, 3, TokenRange(0, 4))
        push_in_chunks(transfer, TokenRange(0, 4))
        await transfer.done()
        assert proxy.num_connections == 2


async def test_an_id_in_use_and_an_empty_range_are_refused() -> None:
    async with receiving() as target, sending() as sender:
        target.server.expect(1, TOKENS)
        sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        with pytest.raises(ValueError, match="in use"):
            target.server.expect(1, TOKENS)
        with pytest.raises(ValueError, match="in use"):
            sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        await target.server.fence(1)
        with pytest.raises(ValueError, match="in use"):
            target.server.expect(1, TOKENS)
        for act in (
            lambda: target.server.expect(2, TokenRange(4, 4)),
            lambda: sender.open("127.0.0.1", target.port, 22, 2, TokenRange(4, 4)),
        ):
            with pytest.raises(ValueError, match="empty"):
                act()
        with pytest.raises(ValueError, match="num_connections"):
            SenderSettings(num_connections=0)


async def test_closing_with_everything_open_ends_everything() -> None:
    before = asyncio.all_tasks()
    async with receiving() as target, sending() as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer)
        await eventually(lambda: target.num_placing > 0)
        await sender.close()
        with pytest.raises(TransferFailed):
            await transfer.done()
    await eventually(lambda: asyncio.all_tasks() <= before)
    assert target.num_placing == 0
