"""The TCP link over its life: breaks, another sender, stops, sharing, what it measures. Cases 13, 15, 17, 24, 35."""

from __future__ import annotations

import asyncio
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from crc32c import crc32c

from pddbridge.codecs import CodecId
from pddbridge.engine import KVBlock
from pddbridge.kv_convert import write_block
from pddbridge.kv_handshake import welcome
from pddbridge.kv_notes import NOTE_BYTES, Note, StopReason, decode_have_body, decode_note, encode_note, have_body_bytes
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import LARGEST_PAYLOAD_BYTES, Kind, NackReason, encode_frame_header, payload_view
from pddbridge.links import tcp_io
from pddbridge.links.tcp import KVSender, KVServer, Priority, SenderSettings, TransferFailed
from tests.support.cutting_proxy import Fault
from tests.support.kv import bits, blocks_of, random_planes
from tests.support.tcp_link import (
    FAST,
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

TOTAL_BYTES = len(TOKENS) * SPEC.bytes_per_token
WELCOME_BYTES = len(welcome(RECEIVER, (CodecId.RAW, CodecId.ZSTD_PLANES), LARGEST_PAYLOAD_BYTES))


async def send_note(sock: object, note: Note) -> None:
    await tcp_io.send(sock, encode_note(note), memoryview(b""))  # type: ignore[arg-type]


async def next_note(sock: object, *kinds: Kind) -> Note:
    return decode_note(await tcp_io.receive(sock, NOTE_BYTES), kinds)  # type: ignore[arg-type]


# Resuming.


async def test_after_a_break_only_what_the_receiver_lacks_is_sent_again() -> None:
    """Every acknowledgement is lost on the first connection, so all is in doubt; nothing of what was placed travels twice."""
    async with receiving() as target, sending(ONE) as sender:
        async with between(target, Fault("cut_replies", WELCOME_BYTES)) as (proxy, port):
            target.may_place.clear()
            target.server.expect(1, TOKENS)
            transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS)
            push_in_chunks(transfer, TokenRange(5, 53))
            await eventually(lambda: target.num_placing == 6)
            target.may_place.set()
            push_in_chunks(transfer, TokenRange(53, 100))
            report = await transfer.done()
            assert proxy.num_connections == 2
        assert report.bytes == TOTAL_BYTES
        assert target.completed[1].num_repeated == 0
        assert sender.counters.frames_resent <= report.num_frames - 6  # the six that were placed did not come again
        assert target.num_placed == report.num_frames
        assert_exact(target)


async def test_a_question_is_answered_with_few_rectangles() -> None:
    async with receiving() as target:
        target.server.expect(1, TokenRange(0, 12))
        sock = await raw_connection(target.port)
        for sequence, (start, stop) in enumerate([(0, 4), (8, 12), (4, 6)]):
            assert await send_raw(sock, *frame(1, 22, TokenRange(start, stop), sequence)) == 0
        await send_note(sock, Note(Kind.ASK, 1, 22, 99))
        have = await next_note(sock, Kind.HAVE)
        assert (have.transfer_id, have.epoch, have.sequence) == (1, 22, 99)
        placed = decode_have_body(await tcp_io.receive(sock, have_body_bytes(have)), SPEC)
        whole = (LayerRange(0, 4), HeadRange(0, 3))
        assert placed == [(0, 0, whole[0], TokenRange(a, b), whole[1]) for a, b in ((0, 6), (8, 12))]
        for transfer_id, epoch, reason in ((2, 22, NackReason.UNKNOWN), (1, 21, NackReason.EPOCH)):
            await send_note(sock, Note(Kind.ASK, transfer_id, epoch, 5))
            assert (await next_note(sock, Kind.NACK)).value == reason
        await target.server.fence(1)
        await send_note(sock, Note(Kind.ASK, 1, 22, 6))
        assert (await next_note(sock, Kind.NACK)).value == NackReason.FENCED
        sock.close()


@pytest.mark.parametrize("chunk", [16, 7])
async def test_another_sender_goes_on_where_one_died(chunk: int) -> None:
    """The second process cuts its chunks elsewhere; asking first, it sends what lacks and nothing else."""
    async with receiving() as target:
        target.server.expect(1, TOKENS)
        async with sending(ONE) as first:
            broken = first.open("127.0.0.1", target.port, 22, 1, TOKENS)
            push_in_chunks(broken, TokenRange(5, 53), chunk=16)
            await eventually(lambda: broken.report.num_frames == 6)
            for peer in first._peers.values():  # killed: it says no farewell
                peer._fail_all(TransferFailed("INTERNAL", "killed"))
        found: list[int] = []
        async with sending(ONE, replace(SENDER, epoch=12)) as second:
            transfer = second.open("127.0.0.1", target.port, 22, 1, TOKENS, on_acked=found.append, resume=True)
            push_in_chunks(transfer, chunk=chunk)
            report = await transfer.done()
            assert report.bytes == TOTAL_BYTES == sum(found)
            assert second.counters.frames_resent == 0
        assert target.completed[1].bytes == target.server.counters.bytes_received == TOTAL_BYTES
        assert target.completed[1].num_repeated == target.server.counters.frames_refused == 0
        assert_exact(target)


# Silence.


# Restarts and ends.


async def test_case_35_a_sender_that_stops_half_way_says_so() -> None:
    async with receiving() as target, sending(ONE) as sender:
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer, TokenRange(5, 53))
        await eventually(lambda: target.num_placed == 6)
        transfer.cancel()
        await eventually(lambda: 1 in target.failed, timeout_s=1.0)
        assert target.failed[1].code == "UNAVAILABLE"
        assert "stopped" in target.failed[1].message
        await target.server.fence(1)
        assert (target.server.counters.num_open, target.completed) == (0, {})


async def test_a_sender_that_ends_says_farewell_and_one_that_gives_up_too() -> None:
    async with receiving() as target:
        for transfer_id in (1, 2):
            target.server.expect(transfer_id, TOKENS)
        async with sending(ONE) as sender:
            sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
            await eventually(lambda: target.server.counters.num_connections == 1)
        await eventually(lambda: 1 in target.failed, timeout_s=1.0)
        target.may_place.clear()
        async with sending(replace(ONE, stall_timeout_s=0.2)) as sender:
            stalled = sender.open("127.0.0.1", target.port, 22, 2, TOKENS)
            push_in_chunks(stalled, TokenRange(5, 21))
            with pytest.raises(TransferFailed, match="DEADLINE"):
                await stalled.done()
            await eventually(lambda: 2 in target.failed, timeout_s=1.0)


async def test_a_stop_of_what_is_complete_dead_or_unknown_is_no_news() -> None:
    async with receiving() as target:
        target.server.expect(1, TokenRange(0, 4))
        target.server.expect(2, TokenRange(0, 4))
        sock = await raw_connection(target.port)
        for sequence, block in enumerate(blocks_of(SPEC, PLANES, TokenRange(0, 4))):
            header = replace(frame(1, 22, TokenRange(0, 4), sequence)[0], plane="kv".index(block.plane))
            payload = bytes(payload_view(block.values))
            assert await send_raw(sock, replace(header, payload_crc=crc32c(payload)), payload) == 0
        assert 1 in target.completed
        for transfer_id, epoch in ((1, 22), (77, 22), (2, 21)):
            await send_note(sock, Note(Kind.STOP, transfer_id, epoch, 0, StopReason.CANCELLED))
        await send_note(sock, Note(Kind.PING, 0, 22, 3))
        assert (await next_note(sock, Kind.PONG)).sequence == 3
        assert target.failed == {}
        sock.close()


async def test_case_24_a_completion_that_comes_after_the_owner_gave_up_is_ignored() -> None:
    async with receiving() as target, sending(ONE) as sender:
        tokens = TokenRange(0, 4)
        target.may_place.clear()
        target.server.expect(1, tokens)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, tokens)
        push_in_chunks(transfer, tokens)
        await eventually(lambda: target.num_placing == 2)
        fence = asyncio.create_task(target.server.fence(1))  # the deadline; the last writers are at work
        await asyncio.sleep(0)
        target.may_place.set()
        await fence
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "CANCELLED"
        assert (target.completed, target.failed, target.server.counters.num_open) == ({}, {}, 0)


async def test_case_13_late_chunks_of_an_aborted_request_never_reach_the_next_owner_of_its_pages() -> None:
    """A pool of exactly one request's size: A is aborted, B gets its pages, then A's held-back frames arrive."""
    async with receiving() as target:
        sock = await raw_connection(target.port)
        held_back = [frame(1, 22, TokenRange(start, start + 16), sequence=start) for start in (16, 32)]
        target.server.expect(1, TokenRange(0, 100))
        assert await send_raw(sock, *frame(1, 22, TokenRange(0, 16))) == 0
        await target.server.fence(1)
        planes = random_planes(SPEC, 100, seed=99)
        target.server.expect(2, TokenRange(0, 100))
        async with sending(ONE) as sender:
            transfer = sender.open("127.0.0.1", target.port, 22, 2, TokenRange(0, 100))
            for start in range(0, 100, 20):
                for block in blocks_of(SPEC, planes, TokenRange(start, start + 20)):
                    transfer.push(block)
                if start < 40:
                    assert await send_raw(sock, *held_back[start // 20]) == NackReason.FENCED
            await transfer.done()
        assert target.server.counters.late_frames_dropped == 2
        before = [array.copy() for arrays in target.pool.arrays for array in arrays]
        for block in blocks_of(SPEC, planes, TokenRange(0, 100)):
            write_block(target.pool, target.table, block)
        after = [array for arrays in target.pool.arrays for array in arrays]
        assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(before, after, strict=True))  # B's already, bit by bit
        sock.close()


async def test_case_15_sent_blocks_stay_the_links_until_the_receiver_has_placed_them() -> None:
    async with receiving() as target, sending(ONE) as sender:
        tokens = TokenRange(0, 4)
        target.may_place.clear()
        target.server.expect(1, tokens)
        acked: list[int] = []
        transfer = sender.open("127.0.0.1", target.port, 22, 1, tokens, on_acked=acked.append)
        alive = []
        for block in blocks_of(SPEC, PLANES, tokens):
            alive.append(weakref.ref(block.values.base if block.values.base is not None else block.values))
            transfer.push(block)
            del block
        await eventually(lambda: target.num_placing == 2)  # all bytes have left; nothing is placed
        assert acked == []
        assert not transfer.ended
        assert all(source() is not None for source in alive)
        target.may_place.set()
        await transfer.done()
        assert sum(acked) == 4 * SPEC.bytes_per_token


async def test_case_17_what_expired_at_the_receiver_is_an_error_at_the_sender() -> None:
    async with receiving() as target, sending(ONE) as sender, between(target, Fault("stall", 10**9)) as (_, port):
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS)
        push_in_chunks(transfer, TokenRange(5, 21))
        await eventually(lambda: target.num_placed == 2)
        await target.server.fence(1)  # the lease ran out
        push_in_chunks(transfer, TokenRange(21, 100))
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "CANCELLED"
        assert target.completed == {}


# Sharing.


async def test_acknowledgements_are_gathered() -> None:
    """Fewer messages than frames, and none of them early."""
    async with receiving() as target:
        target.may_place.clear()
        target.server.expect(1, TokenRange(0, 64))
        sock = await raw_connection(target.port)
        for sequence in range(8):
            header, payload = frame(1, 22, TokenRange(sequence * 4, sequence * 4 + 4), sequence)
            await tcp_io.send(sock, encode_frame_header(header), memoryview(payload))
        await eventually(lambda: target.num_placing == 8)
        target.may_place.set()
        last, messages = -1, 0
        while last < 7:
            note = await next_note(sock, Kind.ACK, Kind.PONG)
            if note.kind is Kind.ACK:
                assert note.sequence > last
                last, messages = note.sequence, messages + 1
        assert messages < 8
        sock.close()


async def test_an_urgent_transfer_overtakes_a_huge_one_and_starves_nobody() -> None:
    async with receiving() as target, sending(ONE) as sender:
        target.may_place.clear()
        transfers = []
        for transfer_id, priority in ((1, Priority.BACKGROUND), (2, Priority.NORMAL), (3, Priority.URGENT)):
            target.server.expect(transfer_id, TokenRange(0, 40))
            transfers.append(sender.open("127.0.0.1", target.port, 22, transfer_id, TokenRange(0, 40), priority=priority))
        for transfer in transfers:
            push_in_chunks(transfer, TokenRange(0, 40), chunk=1)
        target.may_place.set()
        await asyncio.gather(*(transfer.done() for transfer in transfers))
        order = target.placed_ids
        last = {i: len(order) - 1 - order[::-1].index(i) for i in (1, 2, 3)}
        assert last[3] < last[2] < last[1]
        assert 2 in order[: last[3]], "one turn in eight is for whoever waits longest"
        assert 1 not in order[: last[2]], "but the background goes when nobody else wants the link"
        assert order[:80].count(3) >= 60


async def test_little_waits_in_the_kernel() -> None:
    """A receiver that does not read: what the sender's socket takes is what an urgent frame would wait for; little by default."""
    spec = KVSpec.gqa(2, 8, 64, "bfloat16")
    values = np.zeros((2, 64, 8, 64), spec.np_dtype)  # 128 KiB
    taken: list[int] = []
    for limit in (8 << 20, None, 32 << 10):
        async with receiving(replace(RECEIVER, kv_spec=spec), max_placing=1) as target:
            target.may_place.clear()
            async with sending(replace(ONE, max_unsent_bytes=limit), replace(SENDER, kv_spec=spec)) as sender:
                tokens = TokenRange(0, 64 * 64)
                target.server.expect(1, tokens)
                transfer = sender.open("127.0.0.1", target.port, 22, 1, tokens)
                for start in range(0, tokens.stop, 64):
                    transfer.push(KVBlock("k", LayerRange(0, 2), TokenRange(start, start + 64), HeadRange(0, 8), values))
                await eventually(lambda: target.num_placing == 1)
                before = -1
                while transfer.num_queued != before:
                    before = transfer.num_queued
                    await asyncio.sleep(0.1)
                taken.append(64 - before)
            target.place_error = RuntimeError("not now")
    assert max(taken[1:]) < taken[0] < 64


async def test_a_paced_link_keeps_to_its_rate() -> None:
    rate = 200_000.0
    async with receiving() as target, sending(replace(FAST, max_bytes_per_s=rate)) as sender:
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        started = time.monotonic()
        push_in_chunks(transfer, chunk=4)
        await transfer.done()
        took_s = time.monotonic() - started
        largest = 4 * 4 * 3 * 8 * 2
        assert took_s >= (TOTAL_BYTES - largest) / rate
        assert took_s < TOTAL_BYTES / rate + 1.0


async def test_the_link_measures_itself() -> None:
    rate = 400_000.0
    async with receiving() as target, sending(replace(ONE, max_bytes_per_s=rate)) as sender:
        target.server.expect(1, TOKENS)
        key = ("127.0.0.1", target.port)
        transfer = sender.open(*key, 22, 1, TOKENS)
        assert sender.stats()[key].goodput_bytes_per_s is None
        push_in_chunks(transfer, TokenRange(5, 53), chunk=4)
        assert sender.stats()[key].queued_bytes == 48 * SPEC.bytes_per_token
        await eventually(lambda: sender.stats()[key].queued_bytes == 0)
        stats = sender.stats()[key]
        assert stats.num_connections == 1
        assert stats.round_trip_s is not None
        assert 0 < stats.round_trip_s < 0.5
        assert stats.goodput_bytes_per_s is not None


async def test_coded_payloads_arrive_as_they_were() -> None:
    spec = KVSpec.gqa(2, 2, 64, "bfloat16")
    tokens = TokenRange(0, 200)
    rng = np.random.default_rng(0)
    planes = {name: rng.standard_normal((2, 200, 2, 64)).astype(spec.np_dtype) for name in "kv"}
    seen: list[KVBlock] = []

    async def place(_: int, block: KVBlock) -> None:
        seen.append(replace(block, values=block.values.copy()))

    done: list[int] = []
    server = KVServer(replace(RECEIVER, kv_spec=spec), place, lambda _, report: done.append(report.bytes), lambda *_: None)
    port = await server.start("127.0.0.1", 0)
    async with sending(replace(ONE, codec=CodecId.ZSTD_PLANES), replace(SENDER, kv_spec=spec)) as sender:
        server.expect(1, tokens)
        transfer = sender.open("127.0.0.1", port, 22, 1, tokens)
        for block in blocks_of(spec, planes, tokens):
            transfer.push(block)
        report = await transfer.done()
        assert report.bytes == done[0] == 200 * spec.bytes_per_token
        assert sender.counters.bytes_sent == server.counters.bytes_received == report.bytes
        assert sender.counters.wire_bytes_sent == server.counters.wire_bytes_received == report.wire_bytes < 0.9 * report.bytes
        server.expect(2, tokens)
        lossy = sender.open("127.0.0.1", port, 22, 2, tokens, codec=CodecId.FP8_BLOCKS)
        for block in blocks_of(spec, planes, tokens):
            lossy.push(block)
        with pytest.raises(TransferFailed, match=r"FP8_BLOCKS.*RAW.*ZSTD_PLANES") as caught:  # nobody allowed it here
            await lossy.done()
        assert caught.value.code == "INVALID_ARGUMENT"
    await server.close()
    for block in seen:
        sent = planes[block.plane][block.layers.start : block.layers.stop, block.tokens.start : block.tokens.stop]
        assert np.array_equal(bits(block.values), bits(sent))


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_bytes_per_s"):
        SenderSettings(max_bytes_per_s=0)
    assert KVSender(SENDER).stats() == {}
