"""Slots that the shared-memory link lends: what is made in them is copied by nobody, and each comes back when nobody can reach it."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pddbridge.kv_block import arrays_in, check_out, room_for
from pddbridge.kv_spec import KVGroup, KVPlane, KVSpec, TokenRange
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.shm import ShmSender, SlotSettings
from pddbridge.links.slot_loans import KEPT, NONE_FREE, NOT_CONNECTED, TOO_LARGE, Lender, SlotLoans
from pddbridge.links.tcp import KVSender, TransferFailed
from tests.support.kv import blocks_of
from tests.support.shm_link import (
    Target,
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
from tests.support.slot_link_child import PLANES, SPEC, TOKENS, TRANSFER_ID, lent_blocks

LENT = SlotSettings(num_slots=3, num_loans=6, backoff_s=0.01)


def chunks(tokens: TokenRange = TOKENS, size: int = 17) -> Iterator[TokenRange]:
    for start in range(tokens.start, tokens.stop, size):
        yield TokenRange(start, min(start + size, tokens.stop))


def push_lent(transfer: OutgoingTransfer, tokens: TokenRange = TOKENS) -> None:
    for chunk in chunks(tokens):
        for block in lent_blocks(transfer, chunk):
            transfer.push(block)


def num_free(sender: ShmSender, target: Target) -> int:
    loans = sender._peers[target.epoch].lender.loans
    assert loans is not None
    return loans.num_free


async def test_what_is_made_in_slots_is_exact_and_copied_by_nobody() -> None:
    before = num_arenas()
    async with receiving() as target, sending(LENT) as sender:
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_lent(transfer)  # some of it before the connection stands
        report = await transfer.done()
        assert_exact(target)
        assert (sender.counters.frames_in_place, sender.counters.frames_copied) == (report.num_frames, 0)
        assert sender.counters.connections_opened == 1
        assert sender.loans_refused == {}
        await eventually(lambda: num_free(sender, target) == 6)
        await target.server.fence(1)
    del transfer
    await eventually(lambda: num_arenas() == before)


async def test_the_same_slots_serve_many_transfers_one_after_another() -> None:
    async with receiving() as target, sending(LENT) as sender:
        for transfer_id in range(1, 6):
            target.server.expect(transfer_id, TOKENS)
            transfer = open_to(sender, target, transfer_id)
            push_lent(transfer)
            await transfer.done()
            assert_exact(target)
            await target.server.fence(transfer_id)
        assert sender.counters.frames_copied == 0


async def test_a_cancelled_transfer_s_slots_come_back_when_the_receiver_has_answered() -> None:
    async with receiving() as target, sending(LENT) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_lent(transfer)
        await eventually(lambda: target.num_placing == 12)
        transfer.cancel()
        await asyncio.sleep(0.05)
        assert num_free(sender, target) == 0  # the receiver still reads them
        target.may_place.set()
        await eventually(lambda: num_free(sender, target) == 6)


@pytest.mark.parametrize("cancelled", [False, True], ids=["gone", "cancelled"])
async def test_slots_made_for_a_connection_that_never_stands_are_let_go(cancelled: bool) -> None:
    before = num_arenas()
    async with sending(LENT) as sender:
        async with receiving() as target:
            pass
        transfer = open_to(sender, target)
        assert num_arenas() > before
        if cancelled:
            transfer.cancel()
        else:
            with pytest.raises(TransferFailed, match="cannot connect"):
                await asyncio.wait_for(transfer.done(), 5)
        await eventually(lambda: num_arenas() == before)
        assert transfer.lend is not None
        assert transfer.lend(100, False) is None


async def test_a_slot_that_is_never_written_comes_back() -> None:
    async with receiving() as target, sending(LENT) as sender:
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        assert transfer.lend is not None
        memory = transfer.lend(1000, False)
        assert memory is not None
        assert num_free(sender, target) == 5
        transfer.cancel()
        assert num_free(sender, target) == 5  # it is being written
        memory[:] = 1
        del memory
        assert num_free(sender, target) == 6
        block = lent_blocks(transfer, TokenRange(5, 9))
        transfer.push(block[0])  # ignored
        del block
        assert num_free(sender, target) == 6


async def test_a_transfer_that_is_fenced_while_a_slot_is_written_touches_no_page() -> None:
    async with receiving() as target, sending(LENT) as sender:
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer, TokenRange(5, 9))
        await eventually(lambda: target.num_placed == 2)
        late = lent_blocks(transfer, TokenRange(9, 20))
        await target.server.fence(1)
        before = [array.tobytes() for arrays in target.pool.arrays for array in arrays]
        for block in late:
            block.values.view(np.uint16)[...] ^= 1
            transfer.push(block)
        del late, block
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "CANCELLED"
        await eventually(lambda: num_free(sender, target) == 6)
        assert [array.tobytes() for arrays in target.pool.arrays for array in arrays] == before


async def test_after_a_break_what_was_made_in_the_old_slots_is_copied_and_exact() -> None:
    async with receiving() as target, sending(LENT) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_lent(transfer, TokenRange(5, 70))
        await eventually(lambda: target.num_placing > 1)
        drop_connections()
        await eventually(lambda: sender.counters.connections_opened == 2)
        target.may_place.set()
        push_lent(transfer, TokenRange(70, TOKENS.stop))
        report = await transfer.done()
        assert report.num_repeated == sender.counters.frames_resent > 0
        assert sender.counters.frames_copied > 0
        assert_exact(target)
        await eventually(lambda: num_free(sender, target) == 6)


async def test_a_sender_killed_while_slots_are_lent_leaves_nothing() -> None:
    before = num_arenas()
    async with receiving() as target:
        target.may_place.clear()
        target.server.expect(TRANSFER_ID, TOKENS)
        async with child("lent", target.epoch) as process:
            await eventually(lambda: target.num_placing > 1, 30)
            target.may_place.set()
            await says(process, "sending")
            target.may_place.clear()
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await eventually(lambda: target.shm.counters.num_connections == 0)
            fence = asyncio.create_task(target.server.fence(TRANSFER_ID))
            target.may_place.set()
            await fence
        if target.completed:
            assert_exact(target)
        assert target.num_placing == target.server.counters.num_open == 0
        await eventually(lambda: num_arenas() == before)


async def test_a_slow_link_reads_from_the_slot_and_holds_it_until_it_is_done() -> None:
    """The relay over shared memory, main over TCP: converted once."""
    async with receiving() as relay, receiving() as main, sending(LENT) as shm:
        tcp = KVSender(replace(shm._handshake, epoch=12))
        main.may_place.clear()
        for target in (relay, main):
            target.server.expect(1, TOKENS)
        over_shm = open_to(shm, relay)
        over_tcp = tcp.open("127.0.0.1", main.port, main.epoch, 1, TOKENS)
        slow = [TokenRange(5, 20), TokenRange(20, 40)]
        for tokens in slow:
            for block in lent_blocks(over_shm, tokens, shared=True):
                over_shm.push(block)
                over_tcp.push(block)
        del block
        await eventually(lambda: relay.num_placed == 4)
        assert num_free(shm, relay) == 4  # main owes its acknowledgements
        push_lent(over_shm, TokenRange(40, TOKENS.stop))  # goes on: four slots are the relay's alone
        await over_shm.done()
        assert_exact(relay)
        assert num_free(shm, relay) == 4
        main.may_place.set()
        for block in blocks_of(SPEC, PLANES, TokenRange(40, TOKENS.stop)):
            over_tcp.push(block)
        await over_tcp.done()
        assert_exact(main)
        await eventually(lambda: num_free(shm, relay) == 6)
        assert shm.counters.frames_copied == 0
        await tcp.close()


async def test_slots_that_are_lent_hold_up_nobody_who_copies() -> None:
    async with receiving() as target, sending(LENT) as sender:
        for transfer_id in (1, 2):
            target.server.expect(transfer_id, TOKENS)
        idle, busy = open_to(sender, target, 1), open_to(sender, target, 2)
        held = [lent_blocks(idle, chunk) for chunk in chunks()]
        assert num_free(sender, target) == 0
        push_in_chunks(busy)
        await busy.done()
        assert_exact(target)
        del held


def loans_of(num_slots: int) -> SlotLoans:
    memory = memoryview(bytearray(num_slots * 64))
    return SlotLoans([memory[slot * 64 : (slot + 1) * 64] for slot in range(num_slots)])


def test_what_cannot_be_lent_is_refused_with_its_reason_and_counted() -> None:
    lender = Lender()
    assert lender.lend(1, False) is None
    lender.loans = loans_of(6)
    assert lender.lend(65, False) is None
    kept = [lender.lend(64, True) for _ in range(5)]
    assert [memory is None for memory in kept] == [False] * 4 + [True]  # a third is kept for reads of this link alone
    kept += [lender.lend(64, False) for _ in range(3)]
    assert lender.lend(64, True) is None
    assert +lender.refused == {NOT_CONNECTED: 1, TOO_LARGE: 1, KEPT: 1, NONE_FREE: 2}
    assert lender.loans.num_free == 0
    part = kept[0]
    assert part is not None
    part = part[3:9].view(np.uint16).reshape(3, 1)
    kept.clear()
    assert lender.loans.num_free == 5  # any view of it holds a slot
    del part
    assert lender.loans.num_free == 6


def test_no_slot_is_lent_twice_at_once_whatever_threads_give_back() -> None:
    loans, passed = loans_of(8), queue.SimpleQueue[tuple[np.ndarray, int] | None]()
    wrong: list[int] = []

    def check_and_drop() -> None:
        while (found := passed.get()) is not None:
            memory, mark = found
            if not (memory == mark).all():
                wrong.append(mark)
            del found, memory

    threads = [threading.Thread(target=check_and_drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for mark in range(3000):
        while isinstance(memory := loans.take(64, False), str):
            os.sched_yield()
        memory[:] = mark % 251
        passed.put((memory, mark % 251))
        del memory
    for _ in threads:
        passed.put(None)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert loans.num_free == 8


def test_arrays_lie_one_after_the_other_on_cache_lines() -> None:
    spec = KVSpec((KVGroup(0, 2, (KVPlane("k", 3, 5), KVPlane("v", 3, 5))), KVGroup(2, 1, (KVPlane("latent", 1, 7),))), "bfloat16")
    memory = np.zeros(room_for(spec, 11), np.uint8)
    arrays = arrays_in(memory, spec, 11)
    assert [array.shape for array in arrays] == [(2, 11, 3, 5), (2, 11, 3, 5), (1, 11, 1, 7)]
    starts = [array.ctypes.data - memory.ctypes.data for array in arrays]
    assert [start % 64 for start in starts] == [0, 0, 0]
    assert all(at + array.nbytes <= after for at, array, after in zip(starts, arrays, [*starts[1:], len(memory)], strict=True))
    check_out(spec, 11, arrays)
    short, other = [*arrays[:2], arrays[2][:, 1:]], [*arrays[:2], arrays[2].view(np.uint16)]
    for wrong in (arrays[:2], short, other, [*arrays[:2], read_only(arrays[2])]):
        with pytest.raises(ValueError, match="out"):
            check_out(spec, 11, wrong)


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.flags.writeable = False
    return array
