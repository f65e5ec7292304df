"""Over shared memory: whom the link refuses, and what it notices of memory and messages that are not what they should be."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import socket

import numpy as np
import pytest

from pddbridge.kv_handshake import HandshakeError, hello, parse_refuse
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.kv_wire import Kind, encode_frame_header, frame_of, payload_view, sampled_crc32c
from pddbridge.links import shm_io, tcp_io
from pddbridge.links.shm import reachable
from pddbridge.links.shm_arena import Arena, map_arena
from pddbridge.links.slots import SLOT_BYTES, announce
from pddbridge.links.tcp import TransferFailed
from tests.support.kv import blocks_of
from tests.support.shm_link import (
    FEW,
    Target,
    assert_exact,
    eventually,
    open_to,
    push_in_chunks,
    receiving,
    sending,
)
from tests.support.slot_link_child import PLANES, SENDER, SPEC, TOKENS


@pytest.mark.parametrize("field", ["fingerprint", "kv_spec"])
async def test_a_mismatch_is_refused_with_both_values(field: str) -> None:
    other = {"fingerprint": "f2", "kv_spec": KVSpec.gqa(4, 3, 8, "float16")}[field]
    async with receiving(**{field: other}) as target, sending(FEW) as sender:
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer)
        with pytest.raises(TransferFailed, match=f"{field} differs.*'prefill-1'.*'main-1'") as caught:
            await transfer.done()
        assert caught.value.code == "INVALID_ARGUMENT"
        assert target.shm.counters.handshakes_refused == 1
        assert target.num_placed == 0


async def test_another_life_of_the_receiver_is_not_reached() -> None:
    async with receiving() as target, sending(FEW) as sender:
        assert reachable(target.epoch)
        assert not reachable(target.epoch ^ 1)
        transfer = sender.open("127.0.0.1", target.port, target.epoch ^ 1, 1, TOKENS)
        push_in_chunks(transfer)
        with pytest.raises(TransferFailed, match="3 times in a row") as caught:
            await transfer.done()
        assert caught.value.code == "UNAVAILABLE"
        # Someone who found the door all the same, with another epoch in its hello:
        sock = await shm_io.connect(target.epoch)
        arena = Arena(1)
        await shm_io.send_hello(sock, hello(SENDER, 22), arena.fd)
        arena.close_fd()
        kind, body = await tcp_io.receive_message(sock, ("welcome", "refuse"))
        assert kind is Kind.REFUSE
        assert isinstance(refused := parse_refuse(body), HandshakeError)
        assert refused.field == "receiver_epoch"
        sock.close()
    assert not reachable(target.epoch)


async def raw_connection(target: Target, arena: Arena) -> socket.socket:
    """A connection with the handshake done, for announcements of our own making."""
    sock = await shm_io.connect(target.epoch)
    await shm_io.send_hello(sock, hello(SENDER, target.epoch), arena.fd)
    arena.close_fd()
    await tcp_io.receive_message(sock, ("welcome",))
    return sock


def announcement(target: Target, arena: Arena, offset: int | None = None) -> bytes:
    block = next(blocks_of(SPEC, PLANES, TokenRange(5, 9)))
    placed_at = arena.write(arena.free.take(), payload_view(block.values))
    header = frame_of(SPEC, 1, target.epoch, 0, block, sampled_crc32c)
    return announce(encode_frame_header(header), placed_at if offset is None else offset)


async def closed(sock: socket.socket) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        await asyncio.wait_for(tcp_io.receive(sock, 1), 5)
    sock.close()


@pytest.mark.parametrize("offset", [SLOT_BYTES - 100, SLOT_BYTES, (1 << 64) - 1, (1 << 63)])
async def test_an_announcement_outside_the_arena_ends_the_connection(offset: int) -> None:
    async with receiving() as target:
        target.server.expect(1, TOKENS)
        arena = Arena(1)
        sock = await raw_connection(target, arena)
        await tcp_io.send(sock, announcement(target, arena, offset), memoryview(b""))
        await closed(sock)
        assert (target.shm.counters.frames_refused, target.num_placed) == (1, 0)


async def test_a_slot_that_holds_another_frame_is_noticed() -> None:
    async with receiving() as target:
        target.server.expect(1, TOKENS)
        arena = Arena(2)
        sock = await raw_connection(target, arena)
        message = announcement(target, arena)
        await tcp_io.send(sock, announce(message[:-8], SLOT_BYTES), memoryview(b""))
        await closed(sock)
        assert (target.shm.counters.frames_refused, target.num_placed) == (1, 0)
        sock = await raw_connection(target, arena := Arena(2))
        message = announcement(target, arena)
        await tcp_io.send(sock, message[:50], memoryview(b""))
        await asyncio.sleep(0.01)
        await tcp_io.send(sock, message[50:], memoryview(b""))  # in two pieces, and right
        await eventually(lambda: target.num_placed == 1)
        sock.close()


@pytest.mark.parametrize("num_bytes", [1, 4096, 1 << 16, (1 << 16) + 1, 1 << 20])
def test_the_sampled_checksum_tells_frames_apart(num_bytes: int) -> None:
    rng = np.random.default_rng(num_bytes)
    frame, other = rng.integers(0, 256, (2, num_bytes), np.uint8)
    kept = sampled_crc32c(frame.data)
    assert kept == sampled_crc32c(memoryview(frame.tobytes()))
    assert kept != sampled_crc32c(other.data)
    half = np.concatenate((frame[: num_bytes // 2], other[num_bytes // 2 :]))
    assert kept != sampled_crc32c(half.data)


def memory(size: int, seals: int | None) -> int:
    fd = os.memfd_create("pdd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("size", "seals"),
    [
        (SLOT_BYTES, None),
        (SLOT_BYTES, fcntl.F_SEAL_GROW),
        (SLOT_BYTES + 1, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
        (0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
        (65 * SLOT_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
    ],
)
def test_memory_that_could_shrink_or_is_too_large_is_not_mapped(size: int, seals: int | None) -> None:
    fd = memory(size, seals)
    with pytest.raises(ValueError, match="arena"):
        map_arena(fd)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="arena"):
        map_arena(os.open("/dev/null", os.O_RDWR))


@pytest.mark.parametrize(
    "opening", [pickle.dumps({"exec": "x" * 100}), bytes(200), b"", hello(SENDER, 1)], ids=["pickle", "zeros", "", "no fd"]
)
async def test_strangers_are_cut_off_and_friends_still_served(opening: bytes) -> None:
    async with receiving() as target, sending() as sender:
        sock = await shm_io.connect(target.epoch)
        await tcp_io.send(sock, opening, memoryview(b""))
        await closed(sock)
        target.server.expect(1, TOKENS)
        transfer = open_to(sender, target)
        push_in_chunks(transfer)
        await transfer.done()
        assert_exact(target)
