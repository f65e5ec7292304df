"""A link that transfers share under the virtual clock, in the orders that the live senders know."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, Protocol

import simpy

from pdd.sim.server import Job, SharedServer

Schedule = Literal["fair", "shortest"]


class Transfer(Protocol):
    @property
    def done(self) -> simpy.Event: ...


class Link(Protocol):
    """``queued_bytes``, ``num_transfers``: what is under way now · ``sent_bytes``: ever."""

    rate_bytes_s: float
    sent_bytes: float

    @property
    def queued_bytes(self) -> float: ...

    @property
    def num_transfers(self) -> int: ...

    def send(self, num_bytes: float) -> Transfer: ...

    def cancel(self, transfer: Transfer) -> None: ...


def make_link(env: simpy.Environment, rate_bytes_s: float, flow_bytes_s: float | None, schedule: Schedule) -> Link:
    """``flow_bytes_s``: what a single transfer gets at most, by loss and round trip; None: the whole link."""
    if schedule == "fair":
        return FairLink(env, rate_bytes_s, flow_bytes_s)
    return ShortestLink(env, rate_bytes_s, flow_bytes_s)


class FairLink:
    """All transfers get the same."""

    def __init__(self, env: simpy.Environment, rate_bytes_s: float, flow_bytes_s: float | None) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.sent_bytes = 0.0
        self.queued_bytes = 0.0
        flow = flow_bytes_s or rate_bytes_s
        self._server = SharedServer(env, lambda jobs, _: min(flow, rate_bytes_s / jobs))

    @property
    def num_transfers(self) -> int:
        return self._server.num_jobs

    @property
    def busy_s(self) -> float:
        return self._server.busy_s

    def send(self, num_bytes: float) -> Job:
        job = self._server.add(num_bytes)
        self.queued_bytes += num_bytes
        assert job.done.callbacks is not None
        job.done.callbacks.append(lambda _: self._sent(num_bytes, num_bytes))
        return job

    def cancel(self, transfer: Transfer) -> None:
        assert isinstance(transfer, Job)
        if transfer.active:
            self._sent(transfer.target - transfer.begun, self._server.cancel(transfer))

    def _sent(self, queued: float, sent: float) -> None:
        self.queued_bytes = max(0.0, self.queued_bytes - queued)
        self.sent_bytes += sent


@dataclass(eq=False)
class _Waiting:
    left_bytes: float
    number: int
    done: simpy.Event
    active: bool = True

    def __lt__(self, other: _Waiting) -> bool:
        return (self.left_bytes, self.number) < (other.left_bytes, other.number)


class ShortestLink:
    """Whoever has the least left goes first; what a single transfer cannot use, the next ones do."""

    def __init__(self, env: simpy.Environment, rate_bytes_s: float, flow_bytes_s: float | None) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.sent_bytes = 0.0
        self._env = env
        flow = min(flow_bytes_s or rate_bytes_s, rate_bytes_s)
        self._flow = flow
        self._lanes = max(1, round(rate_bytes_s / flow))
        self._running: list[_Waiting] = []
        self._waiting: list[_Waiting] = []
        self._since = 0.0
        self._number = 0
        self._timer = 0

    @property
    def num_transfers(self) -> int:
        return len(self._running) + sum(one.active for one in self._waiting)

    @property
    def queued_bytes(self) -> float:
        self._advance()
        return sum(one.left_bytes for one in self._running) + sum(one.left_bytes for one in self._waiting if one.active)

    def send(self, num_bytes: float) -> _Waiting:
        self._advance()
        one = _Waiting(num_bytes, self._number, self._env.event())
        self._number += 1
        heapq.heappush(self._waiting, one)
        self._choose()
        return one

    def cancel(self, transfer: Transfer) -> None:
        assert isinstance(transfer, _Waiting)
        self._advance()
        transfer.active = False
        if transfer in self._running:
            self._running.remove(transfer)
            self._choose()

    def _advance(self) -> None:
        passed = self._env.now - self._since
        self._since = self._env.now
        for one in self._running:
            sent = min(one.left_bytes, passed * self._flow)
            one.left_bytes -= sent
            self.sent_bytes += sent

    def _choose(self) -> None:
        for one in self._running:
            heapq.heappush(self._waiting, one)
        self._running = []
        while self._waiting and len(self._running) < self._lanes:
            one = heapq.heappop(self._waiting)
            if one.active:
                self._running.append(one)
        self._timer += 1
        if self._running:
            timer = self._timer
            event = self._env.timeout(self._running[0].left_bytes / self._flow)
            assert event.callbacks is not None
            event.callbacks.append(lambda _: self._due(timer))

    def _due(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance()
        first = self._running.pop(0)
        self.sent_bytes += first.left_bytes  # what rounding left
        first.left_bytes = 0.0
        first.active = False
        first.done.succeed()
        self._choose()
