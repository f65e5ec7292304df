"""What the receiving ends of all links do alike: take connections, do the handshake, count what was refused, end in order."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from pddbridge.codecs import CodecId
from pddbridge.kv_handshake import Handshake, HandshakeError, check_hello, parse_terms, refuse, welcome
from pddbridge.kv_wire import WireError
from pddbridge.links import tcp_io
from pddbridge.links.intake import ConnectionClosedError

log = logging.getLogger(__name__)

_RAW_ONLY: Final = (CodecId.RAW,)


class Acceptor:
    """``serve(sock)`` uses a connection to its end and closes it; it may raise what connections end by. ``what``: for logs."""

    def __init__(self, what: str, serve: Callable[[socket.socket], Awaitable[None]], max_connections: int) -> None:
        self.frames_refused = 0
        self.handshakes_refused = 0
        self._what = what
        self._serve = serve
        self._max_connections = max_connections
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        """Now."""
        return len(self._connections)

    def listen(self, listener: socket.socket) -> None:
        """Take connections from ``listener``, which is ours from now on."""
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener), name=f"{self._what}-accept")

    async def close(self) -> None:
        """Stop listening, drop connections."""
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: those in use will end, the listener must not
                log.error("%s: cannot accept: %s", self._what, error)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= self._max_connections:
                log.error("%s: connection from %s refused, %d are open", self._what, address or "here", len(self._connections))
                sock.close()
                continue
            self._begin(sock, str(address or "here"))

    def _begin(self, sock: socket.socket, address: str) -> None:
        # Not in the loop of `_accept`: its frame would keep the last connection, and through it its memory.
        task = asyncio.create_task(self._use(sock, address), name=f"{self._what}-from-{address}")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _use(self, sock: socket.socket, address: str) -> None:
        try:
            await self._serve(sock)
        except HandshakeError as error:
            self.handshakes_refused += 1
            log.error("%s: handshake from %s refused: %s", self._what, address, error)
        except WireError as error:
            self.frames_refused += 1
            log.error("%s: connection from %s dropped: %s", self._what, address, error)
        except (OSError, TimeoutError) as error:
            if not (isinstance(error, ConnectionClosedError) and error.clean):
                log.warning("%s: connection from %s broken: %r", self._what, address, error)


async def greet(
    sock: socket.socket,
    body: dict[str, str],
    mine: Handshake,
    peers: Collection[str] | None,
    codecs: Collection[CodecId] = _RAW_ONLY,
    check_name: Callable[[str], None] | None = None,
    max_payload_bytes: int | None = None,
) -> None:
    """Answer a hello's ``body``: welcome, or refuse and raise HandshakeError. Raises WireError if it is none, OSError. ``check_name``
    raises HandshakeError unless the sender is whom it says; nothing of ours is compared, and so told, before.
    """
    try:
        if check_name is not None:
            check_name(parse_terms(body).name)
        check_hello(body, mine, peers)
    except HandshakeError as error:
        await tcp_io.send(sock, refuse(error), memoryview(b""))
        raise
    await tcp_io.send(sock, welcome(mine, codecs, max_payload_bytes), memoryview(b""))
