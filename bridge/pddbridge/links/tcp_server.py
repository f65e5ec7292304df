"""The receiving end of the TCP link in one process: accepts connections, checks bytes, answers. What frames mean is ``incoming``'s."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from pddbridge.codecs import CODECS, CodecId
from pddbridge.kv_handshake import Handshake, HandshakeError, check_hello, refuse, welcome
from pddbridge.kv_spec import TokenRange
from pddbridge.kv_wire import WireError
from pddbridge.links import tcp_io
from pddbridge.links.coding import CodingThreads
from pddbridge.links.frame_buffers import FrameBuffers
from pddbridge.links.incoming import Complete, Failed, IncomingTransfers, Place
from pddbridge.links.tcp_inbound import InboundConnection

log = logging.getLogger(__name__)

LOSSLESS: Final = frozenset(codec_id for codec_id, codec in CODECS.items() if codec.lossless)


@dataclass(frozen=True)
class ServerCounters:
    """Since the start. ``bytes_received``: KV as stored, placed and checked. ``wire_bytes_received``: the payloads that carried it.
    ``frames_refused``: bad checksum, format, range or order.
    ``late_frames_dropped``: of fenced or unknown transfers or another epoch. ``num_open``: transfers not yet fenced to the end, now.
    ``num_connections``: now.
    """

    bytes_received: int
    wire_bytes_received: int
    frames_refused: int
    late_frames_dropped: int
    handshakes_refused: int
    num_open: int
    num_connections: int


class KVServer:
    """Receives KV for one process. ``place``, ``complete``, ``failed`` as :class:`IncomingTransfers` says.

    At most ``max_placing`` frames (1 MiB each) per connection are in memory at once; then the connection is not read until one is placed.
    A connection on which nothing comes for ``idle_timeout_s`` is closed: senders keep theirs alive, so this one's is gone.
    ``codecs``: those of payloads that are taken, beside raw; a lossy one only if it is named here. ``peers``: names of the senders that are
    taken; None: anyone's.
    """

    def __init__(
        self,
        handshake: Handshake,
        place: Place,
        complete: Complete,
        failed: Failed,
        *,
        max_placing: int = 8,
        max_connections: int = 256,
        handshake_timeout_s: float = 10.0,
        idle_timeout_s: float = 60.0,
        codecs: Collection[CodecId] = LOSSLESS,
        peers: Collection[str] | None = None,
    ) -> None:
        self._peers = peers
        self._handshake = handshake
        self._incoming = IncomingTransfers(handshake.kv_spec, handshake.epoch, place, complete, failed)
        self._buffers = FrameBuffers()
        self._coding = CodingThreads()
        self._codecs = frozenset({CodecId.RAW, *codecs})
        self._max_placing = max_placing
        self._max_connections = max_connections
        self._handshake_timeout_s = handshake_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._frames_refused = 0
        self._handshakes_refused = 0

    @property
    def incoming(self) -> IncomingTransfers:
        """The process's incoming transfers, for its other links: a transfer may come over any of them."""
        return self._incoming

    @property
    def counters(self) -> ServerCounters:
        incoming = self._incoming
        refused = incoming.frames_refused + self._frames_refused
        return ServerCounters(
            incoming.bytes_received,
            incoming.wire_bytes_received,
            refused,
            incoming.late_frames_dropped,
            self._handshakes_refused,
            incoming.num_open,
            len(self._connections),
        )

    async def start(self, host: str, port: int) -> int:
        """Listen on ``host`` alone and return the port (``port`` 0: a free one). Raises OSError."""
        self._listener = await tcp_io.listen(host, port)
        self._accepting = asyncio.create_task(self._accept(self._listener), name="kv-accept")
        return int(self._listener.getsockname()[1])

    def expect(self, transfer_id: int, tokens: TokenRange) -> None:
        """Take frames of ``tokens`` from now on. Raises ValueError for an id that is or was in use and for an empty range."""
        self._incoming.expect(transfer_id, tokens)

    async def fence(self, transfer_id: int) -> None:
        """Returns when no writer can touch the transfer's pages any more; later frames are dropped and counted. Idempotent."""
        await self._incoming.fence(transfer_id)

    async def close(self) -> None:
        """Stop listening, drop connections, fence all transfers."""
        tasks = [*self._connections, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        await self._incoming.close()
        self._coding.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: those in use will end, the listener must not
                log.error("kv server: cannot accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= self._max_connections:
                log.error("kv server: connection from %s refused, %d are open", address, len(self._connections))
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock, str(address)), name=f"kv-from-{address}")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket, address: str) -> None:
        """One connection, to its end."""
        try:
            tcp_io.prepare(sock)
            async with asyncio.timeout(self._handshake_timeout_s):
                await self._greet(sock)
            await self._inbound(sock).serve()
        except HandshakeError as error:
            self._handshakes_refused += 1
            log.error("kv server: handshake from %s refused: %s", address, error)
        except WireError as error:
            self._frames_refused += 1
            log.error("kv server: connection from %s dropped: %s", address, error)
        except (OSError, TimeoutError) as error:
            if not (isinstance(error, tcp_io.ConnectionClosedError) and error.clean):
                log.warning("kv server: connection from %s broken: %r", address, error)
        finally:
            sock.close()

    def _inbound(self, sock: socket.socket) -> InboundConnection:
        spec, limits = self._handshake.kv_spec, (self._max_placing, self._idle_timeout_s)
        return InboundConnection(sock, spec, self._incoming, self._buffers, self._codecs, self._coding, *limits)

    async def _greet(self, sock: socket.socket) -> None:
        _, body = await tcp_io.receive_message(sock, ("hello",))
        try:
            check_hello(body, self._handshake, self._peers)
        except HandshakeError as error:
            await tcp_io.send(sock, refuse(error), memoryview(b""))
            raise
        await tcp_io.send(sock, welcome(self._handshake, self._codecs), memoryview(b""))
