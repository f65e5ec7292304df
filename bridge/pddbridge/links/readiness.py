"""Waiting for a socket without asyncio's socket functions, which take neither TLS sockets nor several buffers at once."""

from __future__ import annotations

import asyncio
import socket
from typing import Literal

Direction = Literal["in", "out"]


async def ready(sock: socket.socket, direction: Direction) -> None:
    """Returns when ``sock`` can be read, or written. One task may wait for each."""
    loop, descriptor = asyncio.get_running_loop(), sock.fileno()
    found: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not found.done():
            found.set_result(None)

    add, remove = (loop.add_reader, loop.remove_reader) if direction == "in" else (loop.add_writer, loop.remove_writer)
    add(descriptor, wake)
    try:
        await found
    finally:
        remove(descriptor)
