"""One connection through the emulated link: two sockets, two directions of bytes, and what the script lets go wrong with them.

Bytes are counted, held, flipped and swallowed where they are read, before the line; an end of stream travels behind the bytes before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Sequence
from functools import partial

from pdd.faults import Fault, Way
from pdd.launch.shaper import READ_BYTES, Direction, Flow

_POLL_S = 0.001


class _Writer:
    """Delivers a flow's bytes to a socket in order, without blocking the line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def put(self, data: bytes) -> None:
        self._queue.append(data)
        self._wake.set()

    @property
    def queued_bytes(self) -> int:
        return sum(map(len, self._queue))

    async def run(self) -> None:
        """Until the end of the stream, which is passed on as a half-close."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            data = self._queue[0]
            if not data:
                self._sock.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._sock, data)
            self._queue.popleft()


class _Pipe:
    """One direction. ``faults``: those triggered by its bytes."""

    def __init__(
        self, connection: Connection, source: socket.socket, sink: socket.socket, direction: Direction, faults: Sequence[Fault]
    ) -> None:
        self.flip_next = False
        self.swallowing = False
        self._connection = connection
        self._source = source
        self._direction = direction
        self._faults = deque(sorted(faults, key=lambda fault: fault.after_bytes or 0))
        self._num_read = 0
        self._num_stalls = 0
        self._may_pass = asyncio.Event()
        self._may_pass.set()
        self._writer = _Writer(sink)
        self._flow = Flow(direction, self._writer.put)
        # One for all reads: an object for each, kept as long as its last piece, leaves holes in the heap, which then grows by megabytes.
        self._read_into = memoryview(bytearray(READ_BYTES))
        self._ended = False
        self._delivery: asyncio.Future[None] = asyncio.ensure_future(self._writer.run())

    def stall(self, duration_s: float | None) -> None:
        """Hold bytes for ``duration_s``; None for ever. Stalls that overlap last until the last ends."""
        self._num_stalls += 1
        self._may_pass.clear()
        if duration_s is not None:
            asyncio.get_running_loop().call_later(duration_s, self._stall_ends)

    def _stall_ends(self) -> None:
        self._num_stalls -= 1
        if not self._num_stalls:
            self._may_pass.set()

    def end(self) -> None:
        """The sink sees the end of the stream after what is under way; whatever else comes is swallowed."""
        if not self._ended:
            self._ended = True
            self._flow.offer(b"")

    async def run(self) -> None:
        """Until the end of the stream was delivered, or for ever in a black hole whose source stays. Raises OSError for a broken socket."""
        loop = asyncio.get_running_loop()
        try:
            self._strike_at_byte()
            while not self._delivery.done() or self._ended:
                if self._buffered_bytes >= self._direction.buffer_limit_bytes:
                    await asyncio.sleep(_POLL_S)
                    continue
                await self._may_pass.wait()
                try:
                    num_read = await loop.sock_recv_into(self._source, self._read_into)
                except OSError:
                    if not self.swallowing:
                        raise
                    num_read = 0
                if not num_read:
                    break
                self._connection.active()
                await self._take(self._read_into[:num_read])
            if self.swallowing:
                while self._buffered_bytes and not self._delivery.done():
                    await asyncio.sleep(_POLL_S)
                return
            await self._may_pass.wait()
            self.end()
            await self._delivery
        finally:
            self._flow.close()
            self._delivery.cancel()

    @property
    def _buffered_bytes(self) -> int:
        return self._flow.buffered_bytes + self._writer.queued_bytes

    async def delivered(self) -> None:
        """Wait until the sink has seen the end of the stream, or is gone."""
        await asyncio.wait([self._delivery])

    async def _take(self, rest: memoryview) -> None:
        """Pass it on, in pieces that end where the next fault begins."""
        while rest:
            await self._may_pass.wait()
            size = len(rest)
            if self._faults:
                size = min(size, max(0, (self._faults[0].after_bytes or 0) - self._num_read))
            piece, rest = rest[:size], rest[size:]
            self._num_read += size
            if self.flip_next and piece:
                piece[0] ^= 1
                self.flip_next = False
            if piece and not self.swallowing and not self._ended:
                self._flow.offer(piece)
            self._strike_at_byte()

    def _strike_at_byte(self) -> None:
        while self._faults and (self._faults[0].after_bytes or 0) <= self._num_read:
            self._connection.strike(self._faults.popleft())


class Connection:
    """Carries bytes between ``near`` (who connected) and ``far``; owns both sockets from here on. ``faults``: those that concern it."""

    def __init__(self, near: socket.socket, far: socket.socket, there: Direction, back: Direction, faults: Sequence[Fault]) -> None:
        self._near = near
        self._far = far
        self._loop = asyncio.get_running_loop()
        by_bytes = [fault for fault in faults if fault.after_bytes is not None]
        self._pipes: dict[Way, _Pipe] = {
            "there": _Pipe(self, near, far, there, [f for f in by_bytes if f.counting == "there"]),
            "back": _Pipe(self, far, near, back, [f for f in by_bytes if f.counting == "back"]),
        }
        self._timed = [fault for fault in faults if fault.after_s is not None]
        self._idle = [fault for fault in faults if fault.after_idle_s is not None]
        self._active_at_s = self._loop.time()
        self._timers: list[asyncio.TimerHandle] = []
        self._broken = asyncio.Event()
        self._by_reset = False

    def active(self) -> None:
        """Bytes came, in either direction."""
        self._active_at_s = self._loop.time()

    def strike(self, fault: Fault) -> None:
        """Let it happen now, whatever its trigger says."""
        pipes = [self._pipes[way] for way in fault.ways]
        match fault.kind:
            case "stall":
                for pipe in pipes:
                    pipe.stall(fault.duration_s)
            case "flip":
                for pipe in pipes:
                    pipe.flip_next = True
            case "half_close":
                for pipe in pipes:
                    pipe.end()
            case "black_hole":
                for pipe in pipes:
                    pipe.swallowing = True
                if fault.duration_s is not None:
                    self._timers.append(self._loop.call_later(fault.duration_s, partial(self._break, by_reset=True)))
            case "cut":
                for pipe in self._pipes.values():
                    pipe.end()
                self._break(by_reset=False)
            case "reset":
                for pipe in self._pipes.values():
                    pipe.swallowing = True
                self._break(by_reset=True)

    async def run(self) -> None:
        """Until both streams ended or the connection broke; closes both sockets. An error of one socket is a reset of both."""
        for fault in self._timed:
            self._timers.append(self._loop.call_later(fault.after_s or 0.0, self.strike, fault))
        for fault in self._idle:
            self._watch_idle(fault)
        both, broken = asyncio.create_task(self._carry_both()), asyncio.create_task(self._until_broken())
        try:
            await asyncio.wait([both, broken], return_when=asyncio.FIRST_COMPLETED)
            if both.done():
                await both
            elif not self._by_reset:
                await asyncio.gather(*(pipe.delivered() for pipe in self._pipes.values()))
        except OSError:
            self._by_reset = True
        finally:
            for timer in self._timers:
                timer.cancel()
            both.cancel()
            broken.cancel()
            # Nobody may wait on a descriptor when it is closed: its number is reused at once.
            await asyncio.gather(both, broken, return_exceptions=True)
            for sock in (self._near, self._far):
                if self._by_reset:
                    reset_on_close(sock)
                sock.close()

    async def _carry_both(self) -> None:
        """Raises OSError when either direction does; the other one is then cancelled."""
        jobs = [asyncio.create_task(pipe.run()) for pipe in self._pipes.values()]
        try:
            await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _until_broken(self) -> None:
        await self._broken.wait()

    def _break(self, *, by_reset: bool) -> None:
        self._by_reset = self._by_reset or by_reset
        self._broken.set()

    def _watch_idle(self, fault: Fault) -> None:
        assert fault.after_idle_s is not None
        left_s = self._active_at_s + fault.after_idle_s - self._loop.time()
        if left_s <= 0:
            self.strike(fault)
        else:
            self._timers.append(self._loop.call_later(left_s, self._watch_idle, fault))


def reset_on_close(sock: socket.socket) -> None:
    """Closing ``sock`` then sends a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
