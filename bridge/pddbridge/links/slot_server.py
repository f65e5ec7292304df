"""The receiving end of a slot link in one process. What frames mean is ``incoming``'s, shared with the process's other links."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_handshake import Handshake
from pddbridge.kv_notes import NOTE_BYTES, StopReason, decode_note
from pddbridge.kv_wire import (
    FRAME_HEADER_BYTES,
    FrameHeader,
    Kind,
    Reply,
    WireError,
    WireFault,
    block_of,
    check_prefix,
    decode_frame_header,
    empty_values,
    encode_reply,
    sampled_crc32c,
)
from pddbridge.links import tcp_io
from pddbridge.links.acceptor import Acceptor, greet
from pddbridge.links.incoming import IncomingTransfers
from pddbridge.links.slots import SLOT_BYTES, announced_offset


@dataclass(frozen=True)
class SlotServerCounters:
    """Since the start. ``frames_refused``: bad checksum, format or place in the arena. ``num_connections``: now."""

    frames_refused: int
    handshakes_refused: int
    num_connections: int


class Landing(Protocol):
    """The receiver's end of a connection with the handshake done."""

    @property
    def memory(self) -> np.ndarray:
        """What the sender writes: uint8."""

    def messages(self) -> AsyncGenerator[list[bytes], None]:
        """MESSAGE_BYTES each: frames and STOP notes. Raises WireError or OSError. Closed before ``close``."""

    async def close(self) -> None: ...


class SlotServer(ABC):
    """Blocks are placed straight from the memory that the sender wrote: their values are good until ``place`` returns.
    At most ``max_placing`` frames per connection are answered at once. ``peers``: names of the senders that are taken; None: anyone's.
    """

    def __init__(
        self,
        handshake: Handshake,
        incoming: IncomingTransfers,
        *,
        max_placing: int = 16,
        max_connections: int = 64,
        handshake_timeout_s: float = 10.0,
        peers: Collection[str] | None = None,
    ) -> None:
        self._peers = peers
        self._handshake = handshake
        self._incoming = incoming
        self._max_placing = max_placing
        self._acceptor = Acceptor("kv slot server", self._serve, max_connections)
        self._handshake_timeout_s = handshake_timeout_s

    @property
    def counters(self) -> SlotServerCounters:
        return SlotServerCounters(self._acceptor.frames_refused, self._acceptor.handshakes_refused, self._acceptor.num_connections)

    def _listen(self, listener: socket.socket) -> None:
        """Take connections from ``listener``, which is ours from now on."""
        self._acceptor.listen(listener)

    @abstractmethod
    async def _admit(self, sock: socket.socket) -> Landing:
        """Do the handshake on a new connection. Raises HandshakeError, WireError or OSError."""

    async def _greet(self, sock: socket.socket, body: dict[str, str]) -> None:
        """Answer a hello."""
        await greet(sock, body, self._handshake, self._peers)

    async def close(self) -> None:
        """Stop listening, drop connections. The transfers are the owner's to fence."""
        await self._acceptor.close()

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, to its end."""
        replies = Replies(sock)
        landing: Landing | None = None
        try:
            sock.setblocking(False)
            async with asyncio.timeout(self._handshake_timeout_s):
                landing = await self._admit(sock)
            await self._receive_frames(landing, replies)
        finally:
            # A second cancellation must not stop this half way.
            await asyncio.shield(asyncio.create_task(_end(sock, replies, landing)))

    async def _receive_frames(self, landing: Landing, replies: Replies) -> None:
        async with contextlib.aclosing(landing.messages()) as batches:
            async for messages in batches:
                for message in messages:
                    await self._receive(message, landing.memory, replies)
                # What is there already is taken without yielding: let others have the loop.
                await asyncio.sleep(0)

    async def _receive(self, message: bytes, memory: np.ndarray, replies: Replies) -> None:
        if check_prefix(message, (Kind.FRAME, Kind.STOP)) is Kind.STOP:
            note = decode_note(message[:NOTE_BYTES], (Kind.STOP,))
            self._incoming.stopped(note.transfer_id, note.epoch, StopReason(note.value).name.lower())
            return
        await replies.room(self._max_placing)
        replies.num_owed += 1
        self._incoming.receive(*self._read(message, memory), replies.put)

    def _read(self, message: bytes, memory: np.ndarray) -> tuple[FrameHeader, KVBlock]:
        """A checked frame. Raises WireError."""
        spec = self._handshake.kv_spec
        header, offset = decode_frame_header(message[:FRAME_HEADER_BYTES], spec, max_bytes=SLOT_BYTES), announced_offset(message)
        if offset > len(memory) - header.payload_bytes:
            raise WireError(WireFault.SIZE, f"payload of {header.payload_bytes} bytes at {offset}, the memory has {len(memory)}")
        values = empty_values(header, spec, lambda num_bytes: memory[offset : offset + num_bytes])
        return header, block_of(header, spec, values, sampled_crc32c)


async def _end(sock: socket.socket, replies: Replies, landing: Landing | None) -> None:
    """End a connection. Writers that were started go on: they hold the memory, and a fence waits for them."""
    await replies.close()
    if landing is not None:
        await landing.close()
    # Last: nobody may wait on the descriptor when it is closed, its number is reused at once.
    sock.close()


class Replies:
    """Sends what was put since the last time at once: waking the sender costs more than a frame's bookkeeping."""

    def __init__(self, sock: socket.socket) -> None:
        self.num_owed = 0
        self._sock = sock
        self._pending: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self._over = False

    async def room(self, max_owed: int) -> None:
        """Returns when fewer than ``max_owed`` replies are owed."""
        while self.num_owed >= max_owed:
            self._answered.clear()
            await self._answered.wait()

    def put(self, reply: Reply) -> None:
        """One that was owed. Dropped once the connection is over."""
        self.num_owed -= 1
        self._answered.set()
        if self._over:
            return
        self._pending.append(encode_reply(reply))
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())

    async def close(self) -> None:
        """The connection is over."""
        self._over = True
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)

    async def _flush(self) -> None:
        with contextlib.suppress(OSError):  # broken: the reading side of the connection sees it too, and the sender will send again
            while self._pending:
                taken, self._pending = self._pending, []
                await tcp_io.send(self._sock, b"".join(taken), memoryview(b""))
