"""One direction of an emulated link: a rate shared fairly by flows, a delay line and jitter. Owns timing; knows no sockets.

A flow's bytes leave in order. Flows with data take turns, one quantum each, so a small message waits for at most one quantum of every
other flow and never for a whole transfer. Serialisation: a quantum of n bytes occupies the line for n / rate. Propagation: each quantum
is delivered ``delay`` plus a uniform draw from [0, jitter] after it left, never before an earlier one of its flow.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdd.config import EmulatedLink

QUANTUM_BYTES = 8 * 1024
READ_BYTES = 64 * 1024
# Finer sleeps than this are not worth their wake-up; the line is then simply ahead of the clock by less than this.
_SLEEP_GRAIN_S = 0.001
# A timer wakes late, by a millisecond or more; a line that has data sends back to back all the same, but makes up for no more than this.
_CATCH_UP_S = 0.02


@dataclass(frozen=True)
class DirectionStats:
    bytes_carried: int
    queued_bytes: int
    num_flows: int


class Flow:
    """The bytes of one connection in one direction. ``deliver`` takes them (b"" for end of stream) when they come out of the delay line."""

    def __init__(self, direction: Direction, deliver: Callable[[bytes], None]) -> None:
        self._direction = direction
        self.deliver = deliver
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.in_flight: deque[bytes] = deque()
        self.in_flight_bytes = 0
        self.last_due_s = 0.0
        self.closed = False

    def offer(self, data: bytes | memoryview) -> None:
        """Queue bytes as they were read from the near socket, copied; b"" marks the end of the stream."""
        view = memoryview(data)
        pieces = [bytes(view[i : i + QUANTUM_BYTES]) for i in range(0, len(data), QUANTUM_BYTES)] or [b""]
        self.waiting.extend(pieces)
        self.waiting_bytes += len(data)
        self._direction.wake(self)

    @property
    def buffered_bytes(self) -> int:
        """Bytes accepted and not yet delivered: what a reader bounds itself by."""
        return self.waiting_bytes + self.in_flight_bytes

    def close(self) -> None:
        """Drop whatever has not been delivered."""
        self.closed = True
        self.waiting.clear()
        self.waiting_bytes = 0


class Direction:
    """A shared line. ``run`` is its pump; one per direction and event loop."""

    def __init__(self, link: EmulatedLink, seed: int) -> None:
        self._link = link
        self.set_rate(None)
        self.delay_s = link.rtt_ms / 2000.0
        self._jitter_s = link.jitter_ms / 1000.0
        self._random = random.Random(seed)
        self._ready: deque[Flow] = deque()
        self._wake = asyncio.Event()
        self._bytes_carried = 0

    @property
    def buffer_limit_bytes(self) -> int:
        """What one flow may have under way: twice the bandwidth-delay product, as a tuned TCP sender would, at least one read of a socket.
        More would be a queue that no schedule can reorder: 256 KiB per flow were a third of a second on a line of 6 Mbit/s.
        """
        return max(READ_BYTES, int(2 * self._bytes_per_s * (2 * self.delay_s + self._jitter_s)))

    def set_rate(self, rate_mbit_s: float | None) -> None:
        """From the next quantum on; None for the config's rate."""
        self._bytes_per_s = (self._link.rate_mbit_s if rate_mbit_s is None else rate_mbit_s) * 1e6 / 8

    def wake(self, flow: Flow) -> None:
        """A flow has data: give it a turn unless it has one already."""
        if flow not in self._ready:
            self._ready.append(flow)
            self._wake.set()

    def stats(self) -> DirectionStats:
        return DirectionStats(self._bytes_carried, sum(flow.waiting_bytes for flow in self._ready), len(self._ready))

    async def run(self) -> None:
        """Send quanta in turn for ever; cancelled by the owner."""
        loop = asyncio.get_running_loop()
        line_free_s = loop.time()
        while True:
            while not self._ready:
                self._wake.clear()
                await self._wake.wait()
                line_free_s = max(line_free_s, loop.time())
            flow = self._ready.popleft()
            if flow.closed or not flow.waiting:
                continue
            piece = flow.waiting.popleft()
            flow.waiting_bytes -= len(piece)
            flow.in_flight.append(piece)
            flow.in_flight_bytes += len(piece)
            if flow.waiting:
                self._ready.append(flow)
            line_free_s = max(line_free_s, loop.time() - _CATCH_UP_S) + len(piece) / self._bytes_per_s
            self._bytes_carried += len(piece)
            due_s = max(line_free_s + self.delay_s + self._random.uniform(0.0, self._jitter_s), flow.last_due_s)
            flow.last_due_s = due_s
            loop.call_at(due_s, self._deliver_next, flow)
            if line_free_s - loop.time() > _SLEEP_GRAIN_S:
                await asyncio.sleep(line_free_s - loop.time())

    @staticmethod
    def _deliver_next(flow: Flow) -> None:
        # The oldest piece, not the one this timer was set for: the event loop does not keep the order of timers that are due together.
        piece = flow.in_flight.popleft()
        flow.in_flight_bytes -= len(piece)
        if not flow.closed:
            flow.deliver(piece)
