"""One receiver as the sender of a slot link sees it: one connection, turns between transfers, sending again after a break.

A slot link (shared memory, NIXL) carries payloads through memory that is cut into slots of one frame, and headers, notes and replies as
messages. What differs between such links is a :class:`Carrier`. A slot is free again once its frame was answered, never earlier; one that
was lent to whoever made the block, when nobody refers to the block any more either.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from pddbridge.engine import KVBlock
from pddbridge.kv_handshake import HandshakeError
from pddbridge.kv_notes import Note, StopReason
from pddbridge.kv_sender import OutgoingFrame
from pddbridge.kv_transfer import FailureCode, TransferFailed
from pddbridge.kv_wire import Kind, Reply, WireError, decode_reply, encode_frame_header, payload_view
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.schedule import Turns
from pddbridge.links.slot_loans import Lender, SlotLoans
from pddbridge.links.slots import MAX_SLOTS, SLOTS_OF_A_LOAN
from pddbridge.links.stats import GoodputMeter, LinkStats, RoundTrip, SenderCounters

log = logging.getLogger(__name__)

# Copied before the receiver is told, or about so much: the loop is held up for a millisecond or so.
_COPIED_AT_ONCE_BYTES: Final = 16 << 20
# A connection that lasted no longer counts as a failure to connect.
_SHORT_LIFE_S: Final = 0.2
# At the end of the process: how long it may take to tell receivers that transfers end.
_FAREWELL_S: Final = 0.5


@dataclass(frozen=True)
class SlotSettings:
    """``num_slots``: frames under way to one receiver that were copied, up to 8 MiB of memory each: the sender's credit. ``num_loans``: of
    two more slots each, in which blocks may be made, where the link has shared memory; like the others they take memory once they are used.
    ``max_attempts``: times a frame is sent, and failures in a row without progress, before transfers fail. A connection within a site
    breaks when a process ends, hardly otherwise, so few and quick ones do. ``stall_timeout_s`` as :class:`OutgoingTransfer` says.
    ``connect_timeout_s`` covers the handshake.
    """

    num_slots: int = 8
    num_loans: int = 12
    stall_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    max_attempts: int = 3
    backoff_s: float = 0.05

    def __post_init__(self) -> None:
        for field in ("num_slots", "stall_timeout_s", "connect_timeout_s", "max_attempts"):
            if getattr(self, field) <= 0:
                raise ValueError(f"SlotSettings.{field}: given {getattr(self, field)}, must be above 0")
        if self.num_loans < 0 or self.num_slots + self.num_loans * SLOTS_OF_A_LOAN > MAX_SLOTS:
            given = f"num_slots {self.num_slots}, num_loans {self.num_loans}"
            raise ValueError(f"SlotSettings: given {given}, allowed {MAX_SLOTS} slots in all, {SLOTS_OF_A_LOAN} per loan")


@dataclass(frozen=True)
class SlottedFrame:
    """A frame and the slot that it is to be copied into; None: it lies in the carrier's memory already."""

    slot: int | None
    header: bytes
    payload: memoryview


class Carrier(Protocol):
    """An open connection with the handshake done. Its memory ends with it: a receiver that still reads a slot keeps the memory, and
    nobody writes there any more.
    """

    frames_at_once: int
    """So many before the receiver is told: the fewer wake-ups, and the longer it waits for the first."""

    @property
    def num_free(self) -> int:
        """Slots that frames may be copied into, now."""

    @property
    def loans(self) -> SlotLoans | None:
        """None: it lends nothing."""

    def holds(self, payload: memoryview) -> bool:
        """Whether ``payload`` lies in this memory, so that it need not be copied."""

    def take(self) -> int:
        """A free slot; there is one."""

    def give_back(self, slot: int) -> None:
        """Nobody reads ``slot`` any more."""

    async def send(self, notes: list[Note], frames: list[SlottedFrame]) -> None:
        """Raises OSError when the connection is broken."""

    def replies(self) -> AsyncGenerator[list[bytes], None]:
        """REPLY_BYTES each. Raises OSError when the connection is broken. Closed before ``close``."""

    async def close(self) -> None: ...


# Raises HandshakeError, WireError or OSError.
Connect = Callable[[], Awaitable[Carrier]]


class SlotPeer:
    """The receiver with ``epoch``. The connection is opened when a transfer is, and then stays. ``unprepare``: lets go of what was prepared
    for a connection that nobody wants any more.
    """

    def __init__(self, epoch: int, connect: Connect, settings: SlotSettings, unprepare: Callable[[], None]) -> None:
        self.bytes_sent = 0
        self.frames_resent = 0
        self.connections_opened = 0
        self.connected = False
        self.frames_in_place = 0
        self.frames_copied = 0
        self.lender = Lender()
        self._connect = connect
        self._unprepare = unprepare
        self._epoch = epoch
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._transfers: dict[int, OutgoingTransfer] = {}
        self._turns: Turns[OutgoingTransfer] = Turns()
        self._farewells: deque[Note] = deque()
        self._goodput = GoodputMeter()
        self._round_trip = RoundTrip()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._wanted_since_s = self._loop.time()

    @property
    def num_live(self) -> int:
        """Transfers that have not ended."""
        return sum(not transfer.ended for transfer in self._transfers.values())

    @property
    def counters(self) -> SenderCounters:
        """Payloads are never coded here."""
        sent = (self.bytes_sent, self.bytes_sent, self.frames_resent, self.connections_opened, 0, self.num_live)
        return SenderCounters(*sent, self.frames_in_place, self.frames_copied)

    @property
    def stats(self) -> LinkStats:
        queued = sum(transfer.owed_bytes for transfer in self._transfers.values())
        rate = self._goodput.bytes_per_s
        load = (queued, self.num_live, int(self.connected))
        return LinkStats(rate, rate, self._round_trip.smoothed_s, *load, self.bytes_sent, self.bytes_sent)

    def add(self, transfer: OutgoingTransfer) -> None:
        """Connects if nothing is connected. Raises ValueError for an id that is in use here."""
        self._transfers = {key: known for key, known in self._transfers.items() if not known.ended}
        if transfer.transfer_id in self._transfers:
            raise ValueError(f"transfer_id: {transfer.transfer_id} is in use")
        if not self._transfers:
            self._wanted_since_s = self._loop.time()
        self._transfers[transfer.transfer_id] = transfer
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"kv-slots-to-{self._epoch:x}")
        self._work.set()

    def offer(self, transfer: OutgoingTransfer) -> None:
        """``transfer`` may have frames to send."""
        if transfer.num_queued:
            self._turns.add(transfer, self._loop.time())
            self._work.set()

    def stopped(self, transfer: OutgoingTransfer, why: StopReason) -> None:
        """``transfer`` ended before it was done, and the receiver does not know."""
        self._farewells.append(Note(Kind.STOP, transfer.transfer_id, self._epoch, 0, why))
        self._work.set()

    async def close(self) -> None:
        """Live transfers are cancelled, and the receiver told if the connection stands."""
        for transfer in self._transfers.values():
            transfer.cancel()
        give_up_at = self._loop.time() + _FAREWELL_S
        while self._farewells and self.connected and self._loop.time() < give_up_at:
            await asyncio.sleep(_FAREWELL_S / 100)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None  # its exception holds on to the arena
        self._lend_nothing()

    # What follows is for the connection.

    def take_farewells(self) -> list[Note]:
        taken, self._farewells = list(self._farewells), deque()
        return taken

    def next_frame(self) -> tuple[OutgoingTransfer, OutgoingFrame] | None:
        """The next frame of the transfer whose turn it is, None if nothing waits."""
        while (transfer := self._turns.take(self._loop.time())) is not None:
            frame = transfer.next_frame()
            if frame is not None:
                if transfer.num_queued:
                    self._turns.add(transfer, self._loop.time())
                self.frames_resent += frame.attempt > 1
                self._goodput.started(self._loop.time())
                return transfer, frame
        return None

    async def wait_for_work(self) -> None:
        """Returns when there may be something to send."""
        await self._work.wait()
        self._work.clear()

    def delivered(self, num_bytes: int, all_delivered: bool) -> None:
        """Payload that is placed; ``all_delivered``: nothing is in flight any more."""
        self.bytes_sent += num_bytes
        self._goodput.delivered(num_bytes, self._loop.time(), all_delivered)

    async def _run(self) -> None:
        """One connection for ever: opened when there is work, used until it breaks, opened again."""
        failures, failed_at_s = 0, self._loop.time()
        while True:
            # A break is looked into at once while transfers live, also if nothing is to be sent: the receiver may be gone.
            while not (self._turns or self.num_live):
                self._farewells.clear()
                self._lend_nothing()
                await self.wait_for_work()
            try:
                end = await self._use_one_connection()
            except HandshakeError as error:
                log.error("kv slot sender: epoch %x: handshake refused: %s", self._epoch, error)
                code: FailureCode = "UNAVAILABLE" if error.field == "receiver_epoch" else "INVALID_ARGUMENT"
                self._fail_all(TransferFailed(code, f"handshake refused: {error}"))
                continue
            except (OSError, TimeoutError, WireError) as error:
                end = ConnectionEnd(f"cannot connect: {error!r}", progressed=False, failed=True)
            # What failed for earlier transfers is not held against those that began since.
            if end.progressed or failed_at_s < self._wanted_since_s:
                failures = 0
            if end.failed:
                failures, failed_at_s = failures + 1, self._loop.time()
                log.warning("kv slot sender: epoch %x: failure %d: %s", self._epoch, failures, end.why)
                if failures >= self._settings.max_attempts:
                    self._fail_all(TransferFailed("UNAVAILABLE", f"failed {failures} times in a row, last: {end.why}"))
                    failures = 0
                else:
                    await asyncio.sleep(self._settings.backoff_s * 2 ** (failures - 1))

    async def _use_one_connection(self) -> ConnectionEnd:
        """Open one and use it until it breaks: its arena is not kept longer. Raises HandshakeError, WireError, OSError."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                asked_at = self._loop.time()
                carrier = await self._connect()
                connection = _Connection(self, carrier)
                self._round_trip.measured(self._loop.time() - asked_at)
            self.connections_opened += 1
            self.connected = True
            self.lender.loans = carrier.loans
            return await connection.use()
        finally:
            self.lender.loans = None
            self.connected = False

    def _lend_nothing(self) -> None:
        """Nothing is connected, and nothing wants to be: as when the receiver was gone, or the transfer, before it came to that."""
        self.lender.loans = None
        self._unprepare()

    def _fail_all(self, failure: TransferFailed) -> None:
        """Every live transfer to this receiver, also one that has nothing to send yet."""
        for transfer in self._transfers.values():
            transfer.fail(failure)
        self._turns.clear()
        self._farewells.clear()


@dataclass(frozen=True)
class _Announced:
    """A frame in flight. ``slot``: what it was copied into. ``block``: kept until it is answered, so that a lent slot is."""

    transfer: OutgoingTransfer
    slot: int | None
    block: KVBlock


@dataclass(frozen=True)
class ConnectionEnd:
    """``progressed``: something was answered. ``failed``: frames were lost, or it hardly came to stand."""

    why: str
    progressed: bool
    failed: bool


class _Connection:
    """One open connection: gives frames slots, sends them, matches replies; in the end hands back what was not acknowledged."""

    def __init__(self, peer: SlotPeer, carrier: Carrier) -> None:
        self._progressed = False
        self._opened_at = asyncio.get_running_loop().time()
        self._peer = peer
        self._carrier = carrier
        self._slot_free = asyncio.Event()
        self._in_flight: dict[tuple[int, int], _Announced] = {}

    async def use(self) -> ConnectionEnd:
        """Until it breaks. Frames in flight are then lost, their transfers told."""
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        why = "cancelled"
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = next(iter(done)).exception()
            why = repr(error)
            if not isinstance(error, OSError | WireError):
                log.error("kv slot sender: a connection ended by a mistake of ours", exc_info=error)
        finally:
            # Nobody may wait on the descriptor when it is closed: its number is reused at once.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._carrier.close()
            lost, self._in_flight = self._in_flight, {}
            for (_, sequence), announced in lost.items():
                announced.transfer.lost(sequence, why)
        lived_s = asyncio.get_running_loop().time() - self._opened_at
        return ConnectionEnd(why, self._progressed, failed=bool(lost) or lived_s < _SHORT_LIFE_S)

    async def _write(self) -> None:
        while True:
            notes, frames = self._peer.take_farewells(), list(self._take_frames())
            if not (notes or frames):
                await (self._peer.wait_for_work() if self._carrier.num_free else self._slot_free.wait())
                continue
            await self._carrier.send(notes, frames)
            if self._carrier.num_free:
                # A send that is taken at once does not yield; without this a long transfer would hold up the loop. With no slot free the
                # next turn waits.
                await asyncio.sleep(0)

    def _take_frames(self) -> Iterator[SlottedFrame]:
        """Some frames, as long as there are slots and frames. Those that need none wait as well while there is none: it is their turn that
        another frame has, and its slot comes back.
        """
        copied_bytes = 0
        for _ in range(min(self._carrier.frames_at_once, self._carrier.num_free)):
            if copied_bytes >= _COPIED_AT_ONCE_BYTES or (taken := self._peer.next_frame()) is None:
                return
            transfer, frame = taken
            payload = payload_view(frame.block.values)
            in_place = self._carrier.holds(payload)
            slot = None if in_place else self._carrier.take()
            self._peer.frames_in_place += in_place
            self._peer.frames_copied += not in_place
            copied_bytes += 0 if in_place else len(payload)
            if not self._carrier.num_free:
                self._slot_free.clear()
            # A cancelled transfer's frames stay here too: their slots are read until they are answered.
            self._in_flight[(transfer.transfer_id, frame.header.sequence)] = _Announced(transfer, slot, frame.block)
            yield SlottedFrame(slot, encode_frame_header(frame.header), payload)

    async def _read(self) -> None:
        async with contextlib.aclosing(self._carrier.replies()) as batches:
            async for replies in batches:
                self._progressed = True
                for reply in replies:
                    self._answered(decode_reply(reply))

    def _answered(self, reply: Reply) -> None:
        found = self._in_flight.pop((reply.transfer_id, reply.sequence), None)
        if found is None:
            return
        if found.slot is not None:
            self._carrier.give_back(found.slot)
            self._slot_free.set()
        if reply.reason is None:
            self._peer.delivered(found.transfer.acked(reply.sequence), all_delivered=not self._in_flight)
        else:
            found.transfer.nacked(reply.reason)
