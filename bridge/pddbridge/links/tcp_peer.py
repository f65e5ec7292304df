"""One receiver as a sender sees it: warm connections, frames striped over them, round robin between transfers, resending after a break."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from dataclasses import dataclass

from pddbridge.kv_handshake import Handshake, HandshakeError, check_welcome, hello, parse_refuse
from pddbridge.kv_transfer import FailureCode, OutgoingFrame, TransferFailed
from pddbridge.kv_wire import REPLY_BYTES, Kind, WireError, decode_reply, encode_frame_header, payload_view
from pddbridge.links import tcp_io
from pddbridge.links.outgoing import OutgoingTransfer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SenderSettings:
    """``num_connections`` per receiver. ``max_attempts``: times a frame is sent, and failures in a row without any progress, before
    transfers fail; ``backoff_s`` before the first repetition, doubled each time up to ``max_backoff_s``. ``stall_timeout_s`` as
    :class:`OutgoingTransfer` says. ``connect_timeout_s`` covers connecting and the handshake.
    """

    num_connections: int = 2
    stall_timeout_s: float = 30.0
    connect_timeout_s: float = 10.0
    max_attempts: int = 5
    backoff_s: float = 0.05
    max_backoff_s: float = 2.0

    def __post_init__(self) -> None:
        for field in ("num_connections", "stall_timeout_s", "connect_timeout_s", "max_attempts"):
            if getattr(self, field) <= 0:
                raise ValueError(f"SenderSettings.{field}: given {getattr(self, field)}, must be above 0")


class Peer:
    """Connections to the receiver with ``epoch`` at ``host:port``. They are opened when there is something to send and then stay."""

    def __init__(self, handshake: Handshake, host: str, port: int, epoch: int, settings: SenderSettings) -> None:
        self.bytes_sent = 0
        self.frames_resent = 0
        self.connections_opened = 0
        self.num_connections = 0
        self._handshake = handshake
        self._host = host
        self._port = port
        self._epoch = epoch
        self._settings = settings
        self._transfers: dict[int, OutgoingTransfer] = {}
        self._ring: deque[OutgoingTransfer] = deque()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_live(self) -> int:
        """Transfers that have not ended."""
        return sum(not transfer.ended for transfer in self._transfers.values())

    def add(self, transfer: OutgoingTransfer) -> None:
        """Raises ValueError for an id that is in use here."""
        self._transfers = {key: known for key, known in self._transfers.items() if not known.ended}
        if transfer.transfer_id in self._transfers:
            raise ValueError(f"transfer_id: {transfer.transfer_id} is in use")
        self._transfers[transfer.transfer_id] = transfer

    def offer(self, transfer: OutgoingTransfer) -> None:
        """``transfer`` has frames to send."""
        if transfer not in self._ring:
            self._ring.append(transfer)
        self._work.set()
        if not self._tasks:
            names = (f"kv-to-{self._host}:{self._port}-{i}" for i in range(self._settings.num_connections))
            self._tasks = [asyncio.create_task(self._run(), name=name) for name in names]

    async def close(self) -> None:
        """Live transfers are cancelled."""
        for transfer in self._transfers.values():
            transfer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def next_frame(self) -> tuple[OutgoingTransfer, OutgoingFrame] | None:
        """For a connection: the next frame of the transfer whose turn it is, None if nothing waits."""
        while self._ring:
            transfer = self._ring.popleft()
            frame = transfer.next_frame()
            if frame is not None:
                if transfer.num_queued:
                    self._ring.append(transfer)
                return transfer, frame
        self._work.clear()
        return None

    async def _run(self) -> None:
        """One connection for ever: opened when there is work, used until it breaks, opened again."""
        failures = 0
        while True:
            await self._work.wait()
            connection = None
            try:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    connection = _Connection(self, await self._connect())
                self.connections_opened += 1
                self.num_connections += 1
                try:
                    why = await connection.use()
                finally:
                    self.num_connections -= 1
            except HandshakeError as error:
                log.error("kv sender: %s:%d: handshake refused: %s", self._host, self._port, error)
                code: FailureCode = "UNAVAILABLE" if error.field == "receiver_epoch" else "INVALID_ARGUMENT"
                self._fail_all(TransferFailed(code, f"{self._host}:{self._port}: handshake refused: {error}"))
                continue
            except (OSError, TimeoutError, WireError) as error:
                why = f"cannot connect: {error!r}"
            if connection is not None and connection.progressed:
                failures = 0
            if connection is None or connection.num_lost:
                failures += 1
                failures = await self._after_failure(failures, why)

    async def _after_failure(self, failures: int, why: str) -> int:
        """Back off, or give up if no other connection stands. Returns the failures to count from."""
        log.warning("kv sender: %s:%d: failure %d: %s", self._host, self._port, failures, why)
        if failures >= self._settings.max_attempts and not self.num_connections:
            self._fail_all(TransferFailed("UNAVAILABLE", f"{self._host}:{self._port}: failed {failures} times in a row, last: {why}"))
            return 0
        await asyncio.sleep(min(self._settings.max_backoff_s, self._settings.backoff_s * 2 ** (failures - 1)))
        return failures

    def _fail_all(self, failure: TransferFailed) -> None:
        """Every live transfer to this receiver, also one that has nothing to send yet."""
        for transfer in self._transfers.values():
            transfer.fail(failure)
        self._ring.clear()
        self._work.clear()

    async def _connect(self) -> socket.socket:
        """A connection with the handshake done. Raises HandshakeError, WireError or OSError."""
        sock = await tcp_io.connect(self._host, self._port)
        try:
            await tcp_io.send(sock, hello(self._handshake, self._epoch), memoryview(b""))
            kind, body = await tcp_io.receive_message(sock, ("welcome", "refuse"))
            if kind is Kind.REFUSE:
                raise parse_refuse(body)
            check_welcome(body, self._handshake, self._epoch)
        except BaseException:  # cancellation as well: the socket has no owner yet
            sock.close()
            raise
        return sock

    async def wait_for_work(self) -> None:
        """For a connection."""
        await self._work.wait()


class _Connection:
    """One open connection: sends what the peer gives, matches replies, and in the end hands back what was not acknowledged."""

    def __init__(self, peer: Peer, sock: socket.socket) -> None:
        self.progressed = False
        self.num_lost = 0
        self._peer = peer
        self._sock = sock
        self._in_flight: dict[tuple[int, int], OutgoingTransfer] = {}

    async def use(self) -> str:
        """Until it breaks; returns why. Frames in flight are then lost, their transfers told."""
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
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
            lost, self._in_flight = self._in_flight, {}
            self.num_lost = len(lost)
            self._peer.frames_resent += len(lost)
            for (_, sequence), transfer in lost.items():
                transfer.lost(sequence, why)
        return why

    async def _write(self) -> None:
        while True:
            taken = self._peer.next_frame()
            if taken is None:
                await self._peer.wait_for_work()
                continue
            transfer, frame = taken
            self._in_flight[(transfer.transfer_id, frame.header.sequence)] = transfer
            await tcp_io.send(self._sock, encode_frame_header(frame.header), payload_view(frame.block.values))
            # A send that the kernel takes at once does not yield; without this one connection would take every frame and hold up the loop.
            await asyncio.sleep(0)

    async def _read(self) -> None:
        data = bytearray(REPLY_BYTES)
        while True:
            await tcp_io.receive_into(self._sock, memoryview(data))
            reply = decode_reply(data)
            transfer = self._in_flight.pop((reply.transfer_id, reply.sequence), None)
            self.progressed = True
            if transfer is None:
                continue
            if reply.reason is None:
                self._peer.bytes_sent += transfer.acked(reply.sequence)
            else:
                transfer.nacked(reply.reason)
