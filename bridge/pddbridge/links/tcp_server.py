"""The receiving end of the TCP link in one process: accepts connections, checks bytes, answers. What frames mean is ``incoming``'s."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

from crc32c import crc32c

from pddbridge.codecs import CODECS, CodecId
from pddbridge.kv_handshake import Handshake
from pddbridge.kv_spec import TokenRange
from pddbridge.kv_wire import LARGEST_PAYLOAD_BYTES
from pddbridge.links import tcp_io, tls_io
from pddbridge.links.acceptor import Acceptor, greet
from pddbridge.links.coding import CodingThreads
from pddbridge.links.frame_buffers import FrameBuffers
from pddbridge.links.incoming import Complete, Failed, IncomingTransfers, Place
from pddbridge.links.tcp_inbound import InboundConnection
from pddbridge.native.checksum import Checksum
from pddbridge.tls import LinkTls, check_peer

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

    At most ``max_placing`` MiB of frames per connection, each counted in whole ones, are in memory at once, or one that is larger; then the
    connection is not read until one is placed. ``max_payload_bytes``: the largest block that is taken in a frame.
    A connection on which nothing comes for ``idle_timeout_s`` is closed: senders keep theirs alive, so this one's is gone.
    ``codecs``: those of payloads that are taken, beside raw; a lossy one only if it is named here. ``peers``: names of the senders that are
    taken; None: anyone's. ``tls``: senders prove their names with certificates; None: plaintext. ``checksum``: of raw payloads, CRC32C.
    """

    def __init__(
        self,
        handshake: Handshake,
        place: Place,
        complete: Complete,
        failed: Failed,
        *,
        max_placing: int = 16,
        max_connections: int = 256,
        handshake_timeout_s: float = 10.0,
        idle_timeout_s: float = 60.0,
        codecs: Collection[CodecId] = LOSSLESS,
        peers: Collection[str] | None = None,
        tls: LinkTls | None = None,
        checksum: Checksum = crc32c,
        max_payload_bytes: int = LARGEST_PAYLOAD_BYTES,
    ) -> None:
        self._peers = peers
        self._tls = tls
        self._handshake = handshake
        self._incoming = IncomingTransfers(handshake.kv_spec, handshake.epoch, place, complete, failed)
        self._buffers = FrameBuffers()
        self._coding = CodingThreads()
        self._checksum = checksum
        self._max_payload_bytes = max_payload_bytes
        self._codecs = frozenset({CodecId.RAW, *codecs})
        self._max_placing = max_placing
        self._acceptor = Acceptor("kv server", self._serve, max_connections)
        self._handshake_timeout_s = handshake_timeout_s
        self._idle_timeout_s = idle_timeout_s

    @property
    def incoming(self) -> IncomingTransfers:
        """The process's incoming transfers, for its other links: a transfer may come over any of them."""
        return self._incoming

    @property
    def counters(self) -> ServerCounters:
        incoming = self._incoming
        refused = incoming.frames_refused + self._acceptor.frames_refused
        return ServerCounters(
            incoming.bytes_received,
            incoming.wire_bytes_received,
            refused,
            incoming.late_frames_dropped,
            self._acceptor.handshakes_refused,
            incoming.num_open,
            self._acceptor.num_connections,
        )

    async def start(self, host: str, port: int) -> int:
        """Listen on ``host`` alone and return the port (``port`` 0: a free one). Raises OSError."""
        listener = await tcp_io.listen(host, port)
        self._acceptor.listen(listener)
        return int(listener.getsockname()[1])

    def expect(self, transfer_id: int, tokens: TokenRange) -> None:
        """Take frames of ``tokens`` from now on. Raises ValueError for an id that is or was in use and for an empty range."""
        self._incoming.expect(transfer_id, tokens)

    async def fence(self, transfer_id: int) -> None:
        """Returns when no writer can touch the transfer's pages any more; later frames are dropped and counted. Idempotent."""
        await self._incoming.fence(transfer_id)

    async def close(self) -> None:
        """Stop listening, drop connections, fence all transfers."""
        await self._acceptor.close()
        await self._incoming.close()
        self._coding.close()

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, to its end."""
        try:
            tcp_io.prepare(sock)
            async with asyncio.timeout(self._handshake_timeout_s):
                if self._tls is not None:
                    sock = await self._secured(sock, self._tls)
                _, body = await tcp_io.receive_message(sock, ("hello",))
                terms = (self._peers, self._codecs, partial(self._check_name, sock), self._max_payload_bytes)
                await greet(sock, body, self._handshake, *terms)
            await self._inbound(sock).serve()
        finally:
            sock.close()

    async def _secured(self, sock: socket.socket, tls: LinkTls) -> ssl.SSLSocket:
        """``sock`` with a peer that our authorities vouch for; closed on failure. Raises HandshakeError or OSError."""
        address = str(sock.getpeername())
        try:
            return await tls_io.server_side(sock, tls.server)
        except ssl.SSLError as error:
            if tls_io.broke(error):
                raise
            raise tls_io.refusal(error, address, self._handshake.name, we_receive=True) from error

    def _check_name(self, sock: socket.socket, name: str) -> None:
        """Raises HandshakeError unless the sender proved that it is ``name``."""
        if self._tls is not None:
            assert isinstance(sock, ssl.SSLSocket)
            check_peer(self._tls, name, sock, self._handshake.name, we_receive=True)

    def _inbound(self, sock: socket.socket) -> InboundConnection:
        spec, limits = self._handshake.kv_spec, (self._max_placing, self._idle_timeout_s, self._max_payload_bytes)
        return InboundConnection(sock, spec, self._incoming, self._buffers, self._codecs, self._coding, self._checksum, *limits)
