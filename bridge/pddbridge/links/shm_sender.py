"""The sending end of the shared-memory link in one process: transfers to any number of receivers of this host."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator

from pddbridge.kv_handshake import Handshake, check_welcome, hello, parse_refuse
from pddbridge.kv_notes import Note
from pddbridge.kv_wire import REPLY_BYTES, Kind
from pddbridge.links import shm_io, tcp_io
from pddbridge.links.shm_arena import Arena
from pddbridge.links.slot_loans import SlotLoans
from pddbridge.links.slot_peer import Carrier, SlotSettings, SlottedFrame
from pddbridge.links.slot_sender import SlotSender
from pddbridge.links.slots import announce, note_message
from pddbridge.native.copy import Copy, plain_copy


class ShmSender(SlotSender):
    """To receivers that :func:`pddbridge.links.shm_io.reachable` finds. A receiver's epoch is all its address here. ``copy``: of
    frames into slots.
    """

    lends = True

    def __init__(self, handshake: Handshake, settings: SlotSettings | None = None, copy: Copy = plain_copy) -> None:
        super().__init__(handshake, settings)
        self._copy = copy
        self._prepared: dict[int, Arena] = {}

    def reaches(self, epoch: int) -> bool:
        """Whether the receiver with ``epoch`` is on this host, as far as can be told without waiting."""
        return self.connected(epoch) or shm_io.reachable(epoch)

    async def _connect(self, host: str, port: int, epoch: int) -> Carrier:
        sock = await shm_io.connect(epoch)
        try:
            arena = self._prepared.pop(epoch, None) or Arena(self._settings.num_slots, self._settings.num_loans, self._copy)
            try:
                await shm_io.send_hello(sock, hello(self._handshake, epoch), arena.fd)
            finally:
                arena.close_fd()
            kind, body = await tcp_io.receive_message(sock, ("welcome", "refuse"))
            if kind is Kind.REFUSE:
                raise parse_refuse(body)
            check_welcome(body, self._handshake, epoch)
        except BaseException:  # cancellation as well: the socket has no owner yet
            sock.close()
            raise
        return _ShmCarrier(sock, arena)

    def _lends_at_once(self, epoch: int) -> SlotLoans | None:
        """The first connection's arena, so that blocks that are made before it stands lie there."""
        try:
            arena = Arena(self._settings.num_slots, self._settings.num_loans, self._copy)
        except OSError:  # connecting will say so
            return None
        self._prepared[epoch] = arena
        return arena.loans

    def _unprepare(self, epoch: int) -> None:
        self._prepared.pop(epoch, None)


class _ShmCarrier:
    """See :class:`Carrier`."""

    frames_at_once = 4

    def __init__(self, sock: socket.socket, arena: Arena) -> None:
        self._sock = sock
        self._arena = arena

    @property
    def num_free(self) -> int:
        return len(self._arena.free)

    @property
    def loans(self) -> SlotLoans | None:
        return self._arena.loans

    def holds(self, payload: memoryview) -> bool:
        return self._arena.loans.any_out and self._arena.offset_of(payload) is not None

    def take(self) -> int:
        return self._arena.free.take()

    def give_back(self, slot: int) -> None:
        self._arena.free.give_back(slot)

    async def send(self, notes: list[Note], frames: list[SlottedFrame]) -> None:
        messages = [note_message(note) for note in notes]
        messages += [announce(frame.header, self._offset(frame)) for frame in frames]
        await tcp_io.send(self._sock, b"".join(messages), memoryview(b""))

    def replies(self) -> AsyncGenerator[list[bytes], None]:
        return shm_io.records(self._sock, REPLY_BYTES)

    async def close(self) -> None:
        self._sock.close()

    def _offset(self, frame: SlottedFrame) -> int:
        if frame.slot is not None:
            return self._arena.write(frame.slot, frame.payload)
        offset = self._arena.offset_of(frame.payload)
        assert offset is not None, "a frame without a slot of its own lies in one that was lent"
        return offset
