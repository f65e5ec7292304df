"""One open connection of a sender: sends what its peer gives, matches answers, finds out when nobody is there any more, and in the end
hands back what was not acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from dataclasses import dataclass
from typing import Protocol

from pddbridge.kv_notes import NOTE_BYTES, Note, decode_have_body, decode_note, encode_note, have_body_bytes
from pddbridge.kv_sender import DueFrame, OutgoingFrame
from pddbridge.kv_spec import KVSpec
from pddbridge.kv_wire import Kind, NackReason, WireError, encode_frame_header
from pddbridge.links import tcp_io
from pddbridge.links.intake import Intake
from pddbridge.links.outgoing import OutgoingTransfer

log = logging.getLogger(__name__)

_Key = tuple[int, int]


@dataclass(frozen=True)
class Liveness:
    """``idle_after_s``: a connection on which nothing was heard for so long is pinged before it is used. ``keepalive_s``: an idle one is
    pinged so often. ``probe_timeout_s``: how long a ping may take, or three smoothed round trips if that is longer. ``silence_timeout_s``:
    a connection that owes answers and says nothing for so long is given up; a receiver that is slow or busy says something every second.
    """

    idle_after_s: float = 1.0
    keepalive_s: float = 3.0
    probe_timeout_s: float = 0.4
    silence_timeout_s: float = 5.0


class Source(Protocol):
    """What a connection needs of its peer."""

    def has_work(self) -> bool: ...

    async def wait_for_work(self) -> None: ...

    async def pace(self) -> None: ...

    def take(self) -> Note | tuple[OutgoingTransfer, Note | DueFrame] | None: ...

    async def encode(self, due: DueFrame) -> OutgoingFrame: ...

    def sending(self, frame: OutgoingFrame) -> None: ...

    def delivered(self, num_bytes: int, wire_bytes: int, just_now: bool) -> None: ...

    def round_trip(self, seconds: float | None) -> float | None: ...


class Connection:
    """``epoch``: the receiver's."""

    def __init__(self, source: Source, sock: socket.socket, spec: KVSpec, epoch: int, liveness: Liveness) -> None:
        self.progressed = False  # some frame was placed, or its transfer refused
        self.num_lost = 0
        self._source = source
        self._sock = sock
        self._spec = spec
        self._epoch = epoch
        self._liveness = liveness
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._busy_since = self._heard_at
        # With their payload bytes, in the order in which they were sent: an ACK answers for all before it.
        self._in_flight: dict[_Key, tuple[OutgoingTransfer, int]] = {}
        self._questions: dict[_Key, OutgoingTransfer] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._ping_numbers = itertools.count(1)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def hold_unsent(self, num_bytes: int) -> None:
        """What the socket may hold that has not left yet, from now on."""
        tcp_io.hold_unsent(self._sock, num_bytes)

    async def use(self) -> str:
        """Until it breaks; returns why. Frames in flight are then in doubt, their transfers told."""
        tasks = [asyncio.create_task(part) for part in (self._write(), self._read(), self._watch())]
        why = "cancelled"
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = next(iter(done)).exception()
            why = repr(error)
            if not isinstance(error, OSError | WireError):
                log.error("kv sender: a connection ended by a mistake of ours", exc_info=error)
        finally:
            # Nobody may wait on the descriptor when it is closed: its number is reused at once.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._sock.close()
            in_flight, self._in_flight = self._in_flight, {}
            questions, self._questions = self._questions, {}
            self.num_lost = len(in_flight) + len(questions)
            for (_, sequence), (transfer, _) in in_flight.items():
                transfer.doubt(sequence, why)
            for (_, sequence), transfer in questions.items():
                transfer.question_lost(sequence)
        return why

    async def _write(self) -> None:
        while True:
            if not self._source.has_work():
                await self._idle()
            await self._source.pace()
            if not self._owes_answers() and self._loop.time() - self._heard_at > self._liveness.idle_after_s:
                await self._probe()
                continue  # others may have taken the turn meanwhile
            if await self._send_next():
                # A send that the kernel takes at once does not yield; without this one connection would take every frame and hold up
                # the loop.
                await asyncio.sleep(0)

    async def _send_next(self) -> bool:
        """Whether something was to be sent. Returns holding on to nothing: a block's memory may be another link's, which waits for it."""
        taken = self._source.take()
        if taken is None:
            return False
        if not self._owes_answers():
            self._busy_since = self._loop.time()
        match taken:
            case Note():
                await tcp_io.send(self._sock, encode_note(taken), memoryview(b""))
            case (transfer, Note() as question):
                self._questions[(transfer.transfer_id, question.sequence)] = transfer
                await tcp_io.send(self._sock, encode_note(question), memoryview(b""))
            case (transfer, DueFrame() as due):
                await self._send_frame(transfer, due)
        return True

    async def _send_frame(self, transfer: OutgoingTransfer, due: DueFrame) -> None:
        """In flight here before it is encoded, so that it is in doubt, not forgotten, if the connection breaks meanwhile."""
        key = (transfer.transfer_id, due.sequence)
        self._in_flight[key] = transfer, 0
        frame = await self._source.encode(due)
        if transfer.ended:  # meanwhile: the receiver is told, or has said so
            self._in_flight.pop(key, None)
            return
        self._in_flight[key] = transfer, frame.header.payload_bytes
        transfer.encoded(due.sequence, frame.header.payload_bytes)
        self._source.sending(frame)
        await tcp_io.send(self._sock, encode_frame_header(frame.header), frame.payload)

    async def _idle(self) -> None:
        """Returns when there is work; meanwhile the connection is kept alive and known to be."""
        while True:
            try:
                async with asyncio.timeout(self._liveness.keepalive_s):
                    await self._source.wait_for_work()
                return
            except TimeoutError:
                if not self._owes_answers():
                    await self._probe()

    async def _probe(self) -> None:
        """A ping and its answer. Raises ConnectionError if there is none in time."""
        number, sent_at = next(self._ping_numbers), self._loop.time()
        timeout_s = max(self._liveness.probe_timeout_s, 3 * (self._source.round_trip(None) or 0))
        self._pings[number] = self._loop.create_future()
        try:
            await tcp_io.send(self._sock, encode_note(Note(Kind.PING, 0, self._epoch, number)), memoryview(b""))
            async with asyncio.timeout(timeout_s):
                await self._pings[number]
        except TimeoutError:
            raise ConnectionError(f"idle, and a ping was not answered in {timeout_s:.3f} s") from None
        finally:
            del self._pings[number]
        self._source.round_trip(self._loop.time() - sent_at)

    async def _watch(self) -> None:
        limit_s = self._liveness.silence_timeout_s
        while True:
            await asyncio.sleep(limit_s / 4)
            silent_s = self._loop.time() - max(self._heard_at, self._busy_since)
            if self._owes_answers() and silent_s > limit_s:
                raise ConnectionError(f"{len(self._in_flight)} frames in flight and nothing heard for {silent_s:.1f} s")

    async def _read(self) -> None:
        data = bytearray(NOTE_BYTES)
        intake = Intake(self._sock)
        while True:
            await intake.fill(memoryview(data))
            self._heard_at = self._loop.time()
            note = decode_note(data, (Kind.ACK, Kind.NACK, Kind.HAVE, Kind.PONG))
            key = (note.transfer_id, note.sequence)
            match note.kind:
                case Kind.ACK:
                    self._acknowledged(key)
                case Kind.NACK:
                    sent = self._in_flight.pop(key, None)
                    transfer = self._questions.pop(key, None) if sent is None else sent[0]
                    if transfer is not None:
                        self.progressed = True
                        transfer.nacked(NackReason(note.value))
                case Kind.HAVE:
                    body = bytearray(have_body_bytes(note))
                    await intake.fill(memoryview(body), inside=True)
                    rectangles = decode_have_body(body, self._spec)
                    transfer = self._questions.pop(key, None)
                    if transfer is not None:
                        before = transfer.report.wire_bytes
                        num_bytes = transfer.answered(note.sequence, rectangles)
                        self._delivered(num_bytes, transfer.report.wire_bytes - before, just_now=False)
                case _:
                    if (ping := self._pings.get(note.sequence)) is not None and not ping.done():
                        ping.set_result(None)

    def _acknowledged(self, last: _Key) -> None:
        """``last`` and every frame before it on this connection is placed, but for those that were refused one by one."""
        if last not in self._in_flight:
            return
        num_bytes = wire_bytes = 0
        while True:
            key = next(iter(self._in_flight))
            transfer, payload_bytes = self._in_flight.pop(key)
            if stored := transfer.acked(key[1]):
                num_bytes += stored
                wire_bytes += payload_bytes
            if key == last:
                break
        self._delivered(num_bytes, wire_bytes, just_now=True)

    def _delivered(self, num_bytes: int, wire_bytes: int, just_now: bool) -> None:
        self.progressed = self.progressed or num_bytes > 0
        self._source.delivered(num_bytes, wire_bytes, just_now)

    def _owes_answers(self) -> bool:
        """Whether the receiver does."""
        return bool(self._in_flight or self._questions)
