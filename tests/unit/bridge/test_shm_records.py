"""Messages of one size from a socket: whole ones however they come, as far ahead as allowed, and the end of it told apart."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from pddbridge.links.intake import ConnectionClosedError
from pddbridge.links.shm_io import records

SIZE = 10


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def numbered(start: int, stop: int) -> bytes:
    return b"".join(b"%010d" % number for number in range(start, stop))


async def test_messages_are_whole_and_in_order_however_they_are_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    loop, sent = asyncio.get_running_loop(), numbered(0, 500)

    async def send() -> None:
        at = 0
        for size in [1, 9, 10, 11, 3, 27, 640, 641, 650] + [77] * 60:
            await loop.sock_sendall(theirs, sent[at : at + size])
            at += size
            if size % 2:
                await asyncio.sleep(0)
        assert at >= len(sent)

    sending = asyncio.create_task(send())
    got: list[bytes] = []
    async with contextlib.aclosing(records(ours, SIZE)) as batches:
        async for messages in batches:
            assert 0 < len(messages) <= 64
            got += messages
            await asyncio.sleep(0.001)  # more comes than is taken at once
            if len(got) == 500:
                break
    await sending
    assert b"".join(got) == sent


@pytest.mark.parametrize("left_over", [0, 1, 9])
async def test_the_end_comes_after_the_last_whole_message(ends: tuple[socket.socket, socket.socket], left_over: int) -> None:
    ours, theirs = ends
    theirs.send(numbered(0, 3) + b"x" * left_over)
    theirs.close()
    got: list[bytes] = []

    async def read() -> None:
        async for messages in records(ours, SIZE):
            got.extend(messages)

    with pytest.raises(ConnectionClosedError) as caught:
        await read()
    assert got == [b"%010d" % number for number in range(3)]
    assert caught.value.clean is (left_over == 0)


@pytest.mark.parametrize("how", ["left", "cancelled", "ended"])
async def test_nobody_watches_the_socket_any_more(ends: tuple[socket.socket, socket.socket], how: str) -> None:
    ours, theirs = ends
    theirs.send(numbered(0, 1))

    async def read() -> None:
        async with contextlib.aclosing(records(ours, SIZE)) as batches:
            async for _ in batches:
                if how == "left":
                    return
                if how == "ended":
                    theirs.shutdown(socket.SHUT_WR)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert not asyncio.get_running_loop().remove_reader(ours)
