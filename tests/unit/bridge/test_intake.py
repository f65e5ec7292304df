"""Reading a TCP socket: bytes and their checksum however they come, no early awakenings, nothing held back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import numpy as np
import pytest
from crc32c import crc32c

from pddbridge.links.intake import ConnectionClosedError, Intake
from tests.support.tcp_link import eventually

AHEAD_BYTES = 80


@pytest.fixture
async def pair() -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        with theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            yield ours, theirs


@pytest.mark.parametrize("ahead_bytes", [0, AHEAD_BYTES])
async def test_bytes_and_checksums_are_right_however_they_are_cut(pair: tuple[socket.socket, socket.socket], ahead_bytes: int) -> None:
    ours, theirs = pair
    rng = np.random.default_rng(ahead_bytes)
    sent = rng.integers(0, 256, 3_000_000, np.uint8)
    buffer_sizes = [int(size) for size in rng.choice([1, 39, 40, 41, 79, 80, 81, 5000, 400_000], 60)]

    async def send() -> None:
        start = 0
        while start < len(sent):
            size = int(rng.choice([1, 40, 80, 81, 3000, 250_000]))
            await asyncio.get_running_loop().sock_sendall(theirs, sent[start : start + size].data)
            start += size
            if rng.random() < 0.2:
                await asyncio.sleep(0)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send())
        intake, start = Intake(ours, ahead_bytes), 0
        for size in buffer_sizes:
            if start + size > len(sent):
                break
            got = np.empty(size, np.uint8)
            assert await intake.fill(got.data, checksum=crc32c) == crc32c(sent[start : start + size].data)
            assert got.tobytes() == sent[start : start + size].tobytes()
            start += size
        assert start <= intake.num_bytes <= start + ahead_bytes
        sending.cancel()


async def test_a_reader_of_much_is_not_awakened_for_little(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    intake, buffer = Intake(ours, AHEAD_BYTES), bytearray(100_000)
    reading = asyncio.create_task(intake.fill(memoryview(buffer)))
    await eventually(lambda: intake.num_waits == 1)
    for part in range(10):
        assert intake.num_bytes == 0, "nothing was read before all was there"
        theirs.sendall(bytes([part]) * 10_000)
        await eventually(lambda part=part: intake.num_arrived == (part + 1) * 10_000)
    await asyncio.wait_for(reading, 5)
    assert buffer == b"".join(bytes([part]) * 10_000 for part in range(10))
    assert intake.num_waits == 1
    # What is waited for next may be less, and comes at once.
    reading = asyncio.create_task(intake.fill(memoryview(buffer)[:40]))
    await eventually(lambda: intake.num_waits == 2)
    theirs.sendall(b"n" * 40)
    await asyncio.wait_for(reading, 5)


async def test_what_ends_or_breaks_awakens_a_reader_of_much(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    intake = Intake(ours, AHEAD_BYTES)
    reading = asyncio.create_task(intake.fill(memoryview(bytearray(100_000)), inside=True))
    await eventually(lambda: intake.num_waits == 1)
    theirs.sendall(b"cut")
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionClosedError) as caught:
        await asyncio.wait_for(reading, 5)
    assert not caught.value.clean
    assert intake.num_bytes == 3


async def test_a_reader_that_shares_its_socket_takes_nothing_ahead(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"0123456789")
    await Intake(ours).fill(memoryview(bytearray(4)))
    rest = bytearray(6)
    await asyncio.wait_for(Intake(ours).fill(memoryview(rest)), 5)
    assert rest == b"456789"
