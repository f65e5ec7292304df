"""One open connection of a receiver: reads frames and notes, answers. Gathers acknowledgements, and fills silence while work goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

from pddbridge.codecs import CodecId
from pddbridge.kv_notes import NOTE_BYTES, Note, StopReason, decode_note, encode_have, encode_note
from pddbridge.kv_spec import KVSpec
from pddbridge.kv_wire import (
    FRAME_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameHeader,
    Kind,
    NackReason,
    Reply,
    block_of,
    check_prefix,
    decode_frame_header,
    decoded_block_of,
    empty_values,
    payload_view,
)
from pddbridge.links import tcp_io
from pddbridge.links.coding import CodingThreads
from pddbridge.links.frame_buffers import FrameBuffers
from pddbridge.links.incoming import IncomingTransfers
from pddbridge.links.intake import Intake
from pddbridge.native.checksum import Checksum

# An acknowledgement waits for more of its kind until so many frames wait for it, for so long, or until no frame comes or is being placed.
_GATHER_FRAMES: Final = 4
_GATHER_S: Final = 0.005
_HEARTBEAT_S: Final = 1.0
_STOP_WORDS: Final = {StopReason.CANCELLED: "cancelled by its owner", StopReason.FAILED: "gave up"}


@dataclass
class _Arrival:
    """A frame in the order in which frames came. ``placed``: None while it is being placed."""

    header: FrameHeader
    placed: bool | None = None


class Arrivals:
    """Which frames of a connection are answered, so that one acknowledgement speaks for all up to it."""

    def __init__(self) -> None:
        self._waiting: deque[_Arrival] = deque()
        self._to_acknowledge: FrameHeader | None = None
        self.num_gathered = 0

    @property
    def num_unanswered(self) -> int:
        """Frames that are being placed, or are placed behind one that is."""
        return len(self._waiting)

    def add(self, header: FrameHeader) -> _Arrival:
        arrival = _Arrival(header)
        self._waiting.append(arrival)
        return arrival

    def settle(self, arrival: _Arrival, placed: bool) -> None:
        """``placed`` False: it was refused on its own, so an acknowledgement may pass over it."""
        arrival.placed = placed
        while self._waiting and (first := self._waiting[0]).placed is not None:
            self._waiting.popleft()
            if first.placed:
                self._to_acknowledge = first.header
                self.num_gathered += 1

    def take(self) -> FrameHeader | None:
        """The frame to acknowledge with all before it; None if that says nothing new."""
        header, self._to_acknowledge, self.num_gathered = self._to_acknowledge, None, 0
        return header


class Room:
    """``capacity`` for what is in memory at once, taken by one task and given back by anybody."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = capacity
        self._given_back = asyncio.Event()

    async def take(self, size: int) -> int:
        """Returns when there is room for ``size``, or for nothing else where that is too large: what was taken."""
        size = min(size, self._capacity)
        while self._free < size:
            self._given_back.clear()
            await self._given_back.wait()
        self._free -= size
        return size

    def give_back(self, size: int) -> None:
        self._free += size
        self._given_back.set()


class InboundConnection:
    """At most ``max_placing`` MiB of frames, each counted in whole ones, or one that is larger are in memory at once; then the connection
    is not read until one is placed. ``max_payload_bytes``: of a block in a frame.
    """

    def __init__(
        self,
        sock: socket.socket,
        spec: KVSpec,
        incoming: IncomingTransfers,
        buffers: FrameBuffers,
        codecs: frozenset[CodecId],
        coding: CodingThreads,
        checksum: Checksum,
        max_placing: int,
        idle_timeout_s: float,
        max_payload_bytes: int,
    ) -> None:
        self._sock = sock
        self._spec = spec
        self._incoming = incoming
        self._buffers = buffers
        self._codecs = codecs
        self._coding = coding
        self._checksum = checksum
        self._idle_timeout_s = idle_timeout_s
        self._intake = Intake(sock, ahead_bytes=FRAME_HEADER_BYTES)
        self._max_payload_bytes = max_payload_bytes
        self._room = Room(max_placing)
        self._sending = asyncio.Lock()
        self._arrivals = Arrivals()
        self._more_comes = False
        self._news = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._refusals: deque[Note] = deque()
        self._discarded: bytearray | None = None

    async def serve(self) -> None:
        """To its end. Raises WireError, ConnectionClosedError, OSError, TimeoutError."""
        parts = [asyncio.create_task(part) for part in (self._receive(), self._acknowledge(), self._beat())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            await next(iter(done))
        finally:
            # Nobody may wait on the descriptor when it is closed: its number is reused at once.
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _receive(self) -> None:
        head = bytearray(FRAME_HEADER_BYTES)
        note, rest = memoryview(head)[:NOTE_BYTES], memoryview(head)[NOTE_BYTES:]
        while True:
            num_waits = self._intake.num_waits
            await self._intake.fill(note)
            kind = check_prefix(note, (Kind.FRAME, Kind.ASK, Kind.STOP, Kind.PING))
            if kind is Kind.FRAME:
                await self._intake.fill(rest, inside=True)
                await self._take_frame(decode_frame_header(head, self._spec, self._codecs, self._max_payload_bytes))
            else:
                await self._take_note(decode_note(note, (kind,)))
            # Bytes that are there already are read without yielding: let others have the loop between two messages.
            if self._intake.num_waits == num_waits:
                await asyncio.sleep(0)

    async def _take_frame(self, header: FrameHeader) -> None:
        self._more_comes = True
        size = await self._room.take(-(-header.payload_bytes // MAX_PAYLOAD_BYTES))
        block = None
        if self._incoming.wants(header):
            values = empty_values(header, self._spec, self._buffers.take)
            if header.codec is CodecId.RAW:
                crc = await self._intake.fill(payload_view(values), inside=True, checksum=self._checksum)
                block = block_of(header, self._spec, values, lambda _: crc)
            else:
                payload = memoryview(bytearray(header.payload_bytes))
                await self._intake.fill(payload, inside=True)
                # Nobody is a writer yet: whether the frame is still wanted is asked again when it is decoded.
                block = await self._coding.run(partial(decoded_block_of, header, self._spec, payload, values))
        else:
            self._discarded = self._discarded or bytearray(self._max_payload_bytes)
            await self._intake.fill(memoryview(self._discarded)[: header.payload_bytes], inside=True)
        self._more_comes = False
        self._incoming.receive(header, block, partial(self._answered, self._arrivals.add(header), size))

    def _answered(self, arrival: _Arrival, size: int, reply: Reply) -> None:
        """Not before the frame is placed, or is known never to be."""
        self._room.give_back(size)
        self._arrivals.settle(arrival, placed=reply.reason is None)
        if reply.reason is not None:
            self._refusals.append(Note(Kind.NACK, reply.transfer_id, reply.epoch, reply.sequence, reply.reason))
        more_to_gather = (self._arrivals.num_unanswered or self._more_comes) and self._arrivals.num_gathered < _GATHER_FRAMES
        if self._refusals or not more_to_gather:
            self._news.set()
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(_GATHER_S, self._news.set)

    async def _take_note(self, note: Note) -> None:
        match note.kind:
            case Kind.PING:
                await self._send(encode_note(Note(Kind.PONG, 0, note.epoch, note.sequence)))
            case Kind.STOP:
                self._incoming.stopped(note.transfer_id, note.epoch, _STOP_WORDS[StopReason(note.value)])
            case _:
                placed = self._incoming.placed(note.transfer_id, note.epoch)
                if isinstance(placed, NackReason):
                    await self._send(encode_note(Note(Kind.NACK, note.transfer_id, note.epoch, note.sequence, placed)))
                else:
                    await self._send(encode_have(note.transfer_id, note.epoch, note.sequence, placed))

    async def _acknowledge(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._gathering is not None:
                self._gathering.cancel()
                self._gathering = None
            while self._refusals:
                await self._send(encode_note(self._refusals.popleft()))
            if (last := self._arrivals.take()) is not None:
                await self._send(encode_note(Note(Kind.ACK, last.transfer_id, last.epoch, last.sequence)))

    async def _beat(self) -> None:
        """Says something every second while frames come or are being placed. Raises TimeoutError when nothing came for very long."""
        seen, idle_s = self._intake.num_arrived, 0.0
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            seen, before = self._intake.num_arrived, seen
            moved = seen != before
            if moved or self._arrivals.num_unanswered:
                idle_s = 0.0
                await self._send(encode_note(Note(Kind.PONG, 0, 0, 0)))
            elif (idle_s := idle_s + _HEARTBEAT_S) >= self._idle_timeout_s:
                raise TimeoutError(f"nothing came for {idle_s:.0f} s")

    async def _send(self, note: bytes) -> None:
        with contextlib.suppress(OSError):  # broken: the reading part sees it too, and the sender will ask again
            async with self._sending:
                await tcp_io.send(self._sock, note, memoryview(b""))
