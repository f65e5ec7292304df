"""The sending end of the NIXL link in one process: frames are written into slots of the receiver's memory, RDMA where there is any."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final

import numpy as np

from pddbridge.kv_handshake import Handshake, check_welcome, hello, parse_refuse
from pddbridge.kv_notes import Note
from pddbridge.kv_wire import REPLY_BYTES, Kind
from pddbridge.links import shm_io, tcp_io
from pddbridge.links.nixl_agent import NixlAgent, NixlError, WriteEnd
from pddbridge.links.nixl_grant import Grant, receive_grant
from pddbridge.links.slot_loans import SlotLoans
from pddbridge.links.slot_peer import Carrier, SlotSettings, SlottedFrame
from pddbridge.links.slot_sender import SlotSender
from pddbridge.links.slots import SLOT_BYTES, FreeSlots, announce, note_message

# How long the end of a connection waits for writes under way, before their memory is given up.
_LAST_WRITES_S: Final = 1.0


class NixlSender(SlotSender):
    """``agent`` is started and closed by its owner. A receiver's ``port`` is that of its :class:`NixlServer`."""

    def __init__(self, handshake: Handshake, agent: NixlAgent, settings: SlotSettings | None = None) -> None:
        super().__init__(handshake, settings)
        self._agent = agent
        self._failed: set[int] = set()

    def works(self, epoch: int) -> bool:
        """Whether no write to the receiver with ``epoch`` has failed so far."""
        return epoch not in self._failed

    async def _connect(self, host: str, port: int, epoch: int) -> Carrier:
        sock = await tcp_io.connect(host, port)
        try:
            await tcp_io.send(sock, hello(self._handshake, epoch), memoryview(b""))
            kind, body = await tcp_io.receive_message(sock, ("welcome", "refuse"))
            if kind is Kind.REFUSE:
                raise parse_refuse(body)
            check_welcome(body, self._handshake, epoch)
            grant = await receive_grant(sock)
            peer = await self._agent.call(lambda agent: agent.add_remote_agent(grant.metadata))
            staging, registration = await self._agent.register(min(grant.num_slots, self._settings.num_slots) * SLOT_BYTES)
        except BaseException:  # cancellation as well: the socket has no owner yet
            sock.close()
            raise
        peer_name = peer.decode() if isinstance(peer, bytes) else peer
        return _NixlCarrier(sock, epoch, self._agent, peer_name, grant, staging, registration, partial(self._failed.add, epoch))


class _NixlCarrier:
    """See :class:`Carrier`. A frame is copied into registered memory here and written from there; the receiver learns of it by a message
    that NIXL delivers behind the payload.
    """

    frames_at_once = 2  # half of a receiver's slots: it places some while others are written

    def __init__(
        self,
        sock: socket.socket,
        epoch: int,
        agent: NixlAgent,
        peer: str,
        grant: Grant,
        staging: np.ndarray,
        registration: object,
        write_failed: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._epoch = epoch
        self._agent = agent
        self._peer = peer
        self._grant = grant
        self._staging = staging
        self._registration = registration
        self._write_failed = write_failed
        self._free = FreeSlots(len(staging) // SLOT_BYTES)
        self._num_writing = 0
        self._stuck = False
        self._all_written = asyncio.Event()
        self._all_written.set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def loans(self) -> SlotLoans | None:
        return None

    def holds(self, payload: memoryview) -> bool:
        return False

    def take(self) -> int:
        return self._free.take()

    def give_back(self, slot: int) -> None:
        self._free.give_back(slot)

    async def send(self, notes: list[Note], frames: list[SlottedFrame]) -> None:
        messages = [note_message(note) for note in notes]
        if frames:  # the receiver has to poll until they are there
            messages.append(note_message(Note(Kind.PING, 0, self._epoch, len(frames))))
        await tcp_io.send(self._sock, b"".join(messages), memoryview(b""))
        for frame in frames:
            assert frame.slot is not None, "nothing is lent here"
            offset, num_bytes = frame.slot * SLOT_BYTES, len(frame.payload)
            self._staging[offset : offset + num_bytes] = np.frombuffer(frame.payload, np.uint8)
            self._num_writing += 1
            self._all_written.clear()
            message = self._grant.tag + announce(frame.header, offset)
            source, destination = self._staging.ctypes.data + offset, self._grant.address + offset
            self._agent.write(source, destination, num_bytes, self._peer, message, self._written)

    def replies(self) -> AsyncGenerator[list[bytes], None]:
        return shm_io.records(self._sock, REPLY_BYTES)

    async def close(self) -> None:
        self._sock.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITES_S):
                await self._all_written.wait()
        may_be_read = self._stuck or self._num_writing > 0
        with contextlib.suppress(NixlError):
            await self._agent.give_back(self._staging, self._registration, may_be_read)
            if not may_be_read:
                await self._agent.call(lambda agent: agent.remove_remote_agent(self._peer))

    def _written(self, end: WriteEnd) -> None:
        self._num_writing -= 1
        if not self._num_writing:
            self._all_written.set()
        if end is not WriteEnd.DONE:
            self._write_failed()
            self._stuck = self._stuck or end is WriteEnd.STUCK
            with contextlib.suppress(OSError):  # closed already
                self._sock.shutdown(socket.SHUT_RDWR)
