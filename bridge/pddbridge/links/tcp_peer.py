"""One receiver as a sender sees it: warm connections, frames striped over them, turns between transfers, going on after a break."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from dataclasses import dataclass, field

from pddbridge.codecs import CODECS, CodecId
from pddbridge.kv_handshake import Handshake, HandshakeError, check_welcome, codecs_of, hello, parse_refuse, payload_bytes_of
from pddbridge.kv_notes import Note, StopReason
from pddbridge.kv_sender import DueFrame, OutgoingFrame
from pddbridge.kv_transfer import FailureCode, TransferFailed
from pddbridge.kv_wire import MAX_PAYLOAD_BYTES, Kind, WireError
from pddbridge.links import tcp_io, tls_io
from pddbridge.links.coding import CodingThreads
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.schedule import Pacer
from pddbridge.links.shared_link import SharedLink, unsent_bytes
from pddbridge.links.stats import GoodputMeter, LinkStats, RoundTrip, SenderCounters
from pddbridge.links.tcp_connection import Connection, Liveness
from pddbridge.tls import LinkTls, check_peer

log = logging.getLogger(__name__)

# A connection that lasted no longer than this and achieved nothing counts as a failure to connect.
_SHORT_LIFE_S = 0.2
# At the end of the process: how long it may take to tell receivers that transfers end.
_FAREWELL_S = 0.5
# How often a connection that waits for another receiver's looks whether that one has stalled.
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True)
class SenderSettings:
    """``num_connections`` per receiver. ``max_attempts``: times a frame is sent, and failures in a row without any progress, before
    transfers fail; ``backoff_s`` before the first repetition, doubled each time up to ``max_backoff_s``. ``stall_timeout_s`` as
    :class:`OutgoingTransfer` says. ``connect_timeout_s`` covers connecting and the handshake. ``max_bytes_per_s`` paces all connections to
    a receiver together; None: as fast as it goes. ``congestion_control``: the kernel's name ("bbr"); None: the system's default.
    ``codec``: of transfers that do not say otherwise. ``max_unsent_bytes``: what a connection's socket may hold that has not left,
    which an urgent frame waits for; None: by the link's measured rate.
    ``tls``: receivers prove their names with certificates, as we do ours; None: plaintext.
    """

    num_connections: int = 2
    stall_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    max_attempts: int = 8
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    max_bytes_per_s: float | None = None
    congestion_control: str | None = None
    codec: CodecId = CodecId.RAW
    max_unsent_bytes: int | None = None
    liveness: Liveness = field(default_factory=Liveness)
    tls: LinkTls | None = None

    def __post_init__(self) -> None:
        for name in ("num_connections", "stall_timeout_s", "connect_timeout_s", "max_attempts", "max_bytes_per_s", "max_unsent_bytes"):
            if (given := getattr(self, name)) is not None and given <= 0:
                raise ValueError(f"SenderSettings.{name}: given {given}, must be above 0")


class Peer:
    """Connections to the receiver with ``epoch`` at ``host:port``. They are opened when a transfer is, and then stay. ``link``: whose
    turn it is, of all transfers that share it. ``max_payload_bytes``: of a block that the receiver takes in one frame, as far as it said.
    """

    def __init__(
        self,
        handshake: Handshake,
        host: str,
        port: int,
        epoch: int,
        settings: SenderSettings,
        coding: CodingThreads,
        link: SharedLink | None = None,
    ) -> None:
        self.progressed_at_s = 0.0
        self.bytes_sent = 0
        self.wire_bytes_sent = 0
        self.frames_resent = 0
        self.codecs_declined = 0
        self.connections_opened = 0
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self._handshake = handshake
        self._host = host
        self._port = port
        self._epoch = epoch
        self._settings = settings
        self._coding = coding
        self._loop = asyncio.get_running_loop()
        self._transfers: dict[int, OutgoingTransfer] = {}
        self._connections: set[Connection] = set()
        self._num_connecting = 0
        # At most one of either per transfer, of those whose pages a worker pins; cleared when the receiver is given up.
        self._farewells: deque[Note] = deque()
        self._questions: deque[tuple[OutgoingTransfer, Note]] = deque()
        self._codecs: frozenset[CodecId] = frozenset({CodecId.RAW})
        self._link = link or SharedLink()
        self._max_unsent_bytes = settings.max_unsent_bytes or unsent_bytes(None)
        self._pacer = Pacer(settings.max_bytes_per_s)
        self._goodput = GoodputMeter()
        self._wire_rate = GoodputMeter()
        self._round_trip = RoundTrip()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._wanted_since_s = self._loop.time()

    @property
    def num_live(self) -> int:
        """Transfers that have not ended."""
        return sum(not transfer.ended for transfer in self._transfers.values())

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_in_flight(self) -> int:
        """Frames, on all connections."""
        return sum(connection.num_in_flight for connection in self._connections)

    @property
    def wire_bytes_s(self) -> float | None:
        """As measured; None before."""
        return self._wire_rate.bytes_per_s

    @property
    def counters(self) -> SenderCounters:
        opened = self.connections_opened
        return SenderCounters(self.bytes_sent, self.wire_bytes_sent, self.frames_resent, opened, self.codecs_declined, self.num_live)

    @property
    def stats(self) -> LinkStats:
        queued = sum(transfer.owed_bytes for transfer in self._transfers.values())
        rates = (self._goodput.bytes_per_s, self._wire_rate.bytes_per_s)
        load = (queued, self.num_live, len(self._connections))
        return LinkStats(*rates, self._round_trip.smoothed_s, *load, self.bytes_sent, self.wire_bytes_sent)

    def add(self, transfer: OutgoingTransfer) -> None:
        """Connects if nothing is connected. Raises ValueError for an id that is in use here."""
        self._transfers = {key: known for key, known in self._transfers.items() if not known.ended}
        if transfer.transfer_id in self._transfers:
            raise ValueError(f"transfer_id: {transfer.transfer_id} is in use")
        if not self._transfers:
            self._wanted_since_s = self._loop.time()
        self._transfers[transfer.transfer_id] = transfer
        if not self._tasks:
            names = (f"kv-to-{self._host}:{self._port}-{i}" for i in range(self._settings.num_connections))
            self._tasks = [asyncio.create_task(self._run(), name=name) for name in names]
        self.offer(transfer)

    def offer(self, transfer: OutgoingTransfer) -> None:
        """``transfer`` may have something to ask or to send."""
        if (sequence := transfer.next_question()) is not None:
            self._questions.append((transfer, Note(Kind.ASK, transfer.transfer_id, self._epoch, sequence)))
        if transfer.num_queued:
            self._link.offer(self, transfer, self._loop.time())
        self._work.set()

    def stopped(self, transfer: OutgoingTransfer, why: StopReason) -> None:
        """``transfer`` ended before it was done, and the receiver does not know."""
        self._farewells.append(Note(Kind.STOP, transfer.transfer_id, self._epoch, 0, why))
        self._work.set()
        self._link.wake()

    async def close(self) -> None:
        """Live transfers are cancelled, and the receiver told if a connection stands or is about to."""
        for transfer in self._transfers.values():
            transfer.cancel()
        give_up_at = self._loop.time() + _FAREWELL_S
        while self._farewells and (self._connections or self._num_connecting) and self._loop.time() < give_up_at:
            await asyncio.sleep(_FAREWELL_S / 100)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What follows is for connections.

    def has_work(self) -> bool:
        """False also clears what ``wait_for_work`` waits for."""
        if self._farewells or self._questions or self._link.waits(self):
            return True
        self._work.clear()
        return False

    async def wait_for_work(self) -> None:
        await self._work.wait()

    async def pace(self) -> None:
        """Returns when the next frame may start; at once when there is none, or something that goes before frames."""
        while self._link.waits(self) and not (self._farewells or self._questions):
            if (delay_s := self._pacer.delay_s(self._loop.time())) > 0:
                await asyncio.sleep(delay_s)
            elif self._link.may_send(self, self._loop.time()):
                return
            else:
                await self._link.changed(_LOOK_AGAIN_S)

    def take(self) -> Note | tuple[OutgoingTransfer, Note | DueFrame] | None:
        """What to send next: farewells, questions, then the next frame of the transfer whose turn it is."""
        if self._farewells:
            return self._farewells.popleft()
        if self._questions:
            return self._questions.popleft()
        while (transfer := self._link.take(self, self._loop.time())) is not None:
            if transfer.codec not in self._codecs:
                self._decline(transfer)
            due = transfer.next_due()
            if due is not None:
                if transfer.num_queued:
                    self._link.offer(self, transfer, self._loop.time())
                self.frames_resent += due.attempt > 1
                return transfer, due
        return None

    async def encode(self, due: DueFrame) -> OutgoingFrame:
        """What takes milliseconds is done by another thread."""
        return due.encode() if due.codec is CodecId.RAW else await self._coding.run(due.encode)

    def sending(self, frame: OutgoingFrame) -> None:
        """A connection starts to send ``frame``."""
        now_s = self._loop.time()
        if self.num_in_flight <= 1:
            self.progressed_at_s = now_s
        self._pacer.spent(frame.header.payload_bytes, now_s)
        self._goodput.started(now_s)
        self._wire_rate.started(now_s)

    def delivered(self, num_bytes: int, wire_bytes: int, just_now: bool) -> None:
        """KV that a connection learnt to be placed, and what carried it; ``just_now`` False: over an earlier connection."""
        self.bytes_sent += num_bytes
        self.wire_bytes_sent += wire_bytes
        if not just_now:
            return
        now_s, all_delivered = self._loop.time(), not any(c.num_in_flight for c in self._connections)
        self.progressed_at_s = now_s
        self._goodput.delivered(num_bytes, now_s, all_delivered)
        self._wire_rate.delivered(wire_bytes, now_s, all_delivered)
        wanted = self._settings.max_unsent_bytes or unsent_bytes(self._wire_rate.bytes_per_s)
        if wanted != self._max_unsent_bytes:
            self._max_unsent_bytes = wanted
            for connection in self._connections:
                connection.hold_unsent(wanted)

    def round_trip(self, seconds: float | None) -> float | None:
        """The smoothed round trip, after ``seconds`` were measured."""
        if seconds is not None:
            self._round_trip.measured(seconds)
        return self._round_trip.smoothed_s

    def _decline(self, transfer: OutgoingTransfer) -> None:
        """The receiver does not take the transfer's codec. A lossless one was only to save time; of a lossy one somebody counts on less."""
        self.codecs_declined += 1
        taken = sorted(codec.name for codec in self._codecs)
        if CODECS[transfer.codec].lossless:
            log.warning("kv sender: %s:%d takes %s, so %s goes raw", self._host, self._port, taken, transfer.codec.name)
            transfer.send_raw()
        else:
            transfer.fail(TransferFailed("INVALID_ARGUMENT", f"codec: given {transfer.codec.name}, the receiver takes {taken}"))

    async def _run(self) -> None:
        """One connection for ever: opened when it is wanted, used until it breaks, opened again."""
        failures, failed_at_s = 0, self._loop.time()
        while True:
            # A break is looked into at once while transfers live, also if nothing is to be sent: the receiver may have restarted.
            while not (self.has_work() or self.num_live):
                await self._work.wait()
            connection = None
            opened_at = self._loop.time()
            try:
                sock = await self._connect()
                connection = Connection(self, sock, self._handshake.kv_spec, self._epoch, self._settings.liveness)
                opened_at = self._loop.time()
                self.connections_opened += 1
                self._connections.add(connection)
                try:
                    why = await connection.use()
                finally:
                    self._connections.discard(connection)
                    self._link.wake()
            except HandshakeError as error:
                log.error("kv sender: %s:%d: handshake refused: %s", self._host, self._port, error)
                code: FailureCode = "UNAVAILABLE" if error.field == "receiver_epoch" else "INVALID_ARGUMENT"
                self._fail_all(TransferFailed(code, f"{self._host}:{self._port}: handshake refused: {error}"))
                continue
            except (OSError, TimeoutError, WireError) as error:
                why = f"cannot connect: {error!r}"
            # What failed for earlier transfers, while the link was down, is not held against those that began since.
            if failed_at_s < self._wanted_since_s or (connection is not None and connection.progressed):
                failures = 0
            if connection is None or connection.num_lost or self._loop.time() - opened_at < _SHORT_LIFE_S:
                failures, failed_at_s = failures + 1, self._loop.time()
                failures = await self._after_failure(failures, why)

    async def _after_failure(self, failures: int, why: str) -> int:
        """Back off, or give up if no other connection stands. Returns the failures to count from."""
        log.warning("kv sender: %s:%d: failure %d: %s", self._host, self._port, failures, why)
        if failures >= self._settings.max_attempts and not self._connections:
            self._fail_all(TransferFailed("UNAVAILABLE", f"{self._host}:{self._port}: failed {failures} times in a row, last: {why}"))
            return 0
        await asyncio.sleep(min(self._settings.max_backoff_s, self._settings.backoff_s * 2 ** (failures - 1)))
        return failures

    def _fail_all(self, failure: TransferFailed) -> None:
        """Every live transfer to this receiver, also one that has nothing to send yet."""
        for transfer in self._transfers.values():
            transfer.fail(failure)
        self._link.forget(self)
        self._questions.clear()
        self._farewells.clear()

    async def _connect(self) -> socket.socket:
        """A connection with the handshake done. Raises HandshakeError, WireError, OSError or TimeoutError."""
        self._num_connecting += 1
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                return await self._shake_hands()
        finally:
            self._num_connecting -= 1

    async def _shake_hands(self) -> socket.socket:
        settings = self._settings
        sock = await tcp_io.connect(self._host, self._port, settings.congestion_control, self._max_unsent_bytes)
        try:
            if settings.tls is not None:
                sock = await tls_io.client_side(sock, settings.tls.client)
            sent_at = self._loop.time()
            await tcp_io.send(sock, hello(self._handshake, self._epoch), memoryview(b""))
            kind, body = await tcp_io.receive_message(sock, ("welcome", "refuse"))
            self._round_trip.measured(self._loop.time() - sent_at)
            if kind is Kind.REFUSE:
                raise parse_refuse(body)
            terms = check_welcome(body, self._handshake, self._epoch)
            if settings.tls is not None:
                assert isinstance(sock, ssl.SSLSocket)
                check_peer(settings.tls, terms.name, sock, self._handshake.name, we_receive=False)
            self._codecs, self.max_payload_bytes = codecs_of(body), payload_bytes_of(body)
        except BaseException as error:  # cancellation as well: the socket has no owner yet
            sock.close()
            if isinstance(error, ssl.SSLError) and tls_io.is_final(error):
                raise tls_io.refusal(error, self._handshake.name, f"{self._host}:{self._port}", we_receive=False) from error
            raise
        return sock
