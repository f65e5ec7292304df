"""A link that transfers share under the virtual clock, in the orders that the live senders know. A transfer's bytes come in pieces, as
prefill computes them; one that has sent all it was given waits for more and takes nothing of the link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import simpy

from pdd.policy.link_schedule import Priority
from pdd.sim.server import Piece, SharedServer, when
from pdd.sim.spec import LinkSpec


@dataclass(eq=False, slots=True)
class Transfer:
    """``left_bytes``: of the whole, still to be sent, those that are not computed included · ``ready_bytes``: of them, that may go now ·
    ``done``: is called when nothing is left · ``priority``: which a fair link here does not ask. A fair link counts both down when all that
    was ready has gone.
    """

    left_bytes: float
    number: int
    done: Callable[[], object]
    priority: Priority = Priority.NORMAL
    ready_bytes: float = 0.0
    active: bool = True
    piece: Piece | None = None

    @property
    def rank(self) -> tuple[int, float, int]:
        return self.priority, self.left_bytes, self.number


class Link(Protocol):
    """``queued_bytes``, ``num_transfers``: what is under way now · ``sent_bytes``: ever · ``on_busy``: is told when ``busy`` may have
    changed.
    """

    rate_bytes_s: float
    on_busy: Callable[[], None] | None

    @property
    def sent_bytes(self) -> float: ...

    @property
    def queued_bytes(self) -> float: ...

    @property
    def num_transfers(self) -> int: ...

    @property
    def busy(self) -> bool: ...

    def open(self, num_bytes: float, done: Callable[[], object], priority: Priority = Priority.NORMAL) -> Transfer: ...

    def feed(self, transfer: Transfer, num_bytes: float) -> None: ...

    def set_priority(self, transfer: Transfer, priority: Priority) -> None: ...

    def cancel(self, transfer: Transfer) -> None: ...


def make_link(env: simpy.Environment, spec: LinkSpec) -> Link:
    """In bytes of KV as stored: coded, the link moves that many more of them."""
    rate_bytes_s = spec.rate_bytes_s / spec.coded_share
    flow_bytes_s = None if spec.flow_bytes_s is None else spec.flow_bytes_s / spec.coded_share
    if spec.schedule == "fair":
        return FairLink(env, rate_bytes_s, flow_bytes_s)
    return ShortestLink(env, rate_bytes_s, flow_bytes_s)


class FairLink:
    """All transfers that have something to send get the same. ``flow_bytes_s``: what a single one gets at most, by loss and round trip;
    None: the whole link.
    """

    def __init__(self, env: simpy.Environment, rate_bytes_s: float, flow_bytes_s: float | None) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.num_transfers = 0
        self._owed_bytes = 0.0  # of all transfers, what has been sent included
        flow = flow_bytes_s or rate_bytes_s
        lanes = rate_bytes_s / flow
        self._server = SharedServer(env, lambda jobs, _: flow if jobs <= lanes else rate_bytes_s / jobs)

    @property
    def on_busy(self) -> Callable[[], None] | None:
        return self._server.on_change

    @on_busy.setter
    def on_busy(self, told: Callable[[], None] | None) -> None:
        self._server.on_change = told

    @property
    def busy(self) -> bool:
        return self._server.num_jobs > 0

    @property
    def sent_bytes(self) -> float:
        return self._server.served

    @property
    def queued_bytes(self) -> float:
        return max(0.0, self._owed_bytes - self._server.served) if self.num_transfers else 0.0

    def open(self, num_bytes: float, done: Callable[[], object], priority: Priority = Priority.NORMAL) -> Transfer:
        self._owed_bytes += num_bytes
        self.num_transfers += 1
        return Transfer(num_bytes, 0, done, priority)

    def feed(self, transfer: Transfer, num_bytes: float) -> None:
        if not transfer.active:
            return
        transfer.ready_bytes += num_bytes
        if transfer.piece is None:
            transfer.piece = self._server.run(num_bytes, lambda: self._sent(transfer))
        else:
            self._server.grow(transfer.piece, num_bytes)

    def set_priority(self, transfer: Transfer, priority: Priority) -> None:
        transfer.priority = priority

    def cancel(self, transfer: Transfer) -> None:
        if not transfer.active:
            return
        if transfer.piece is not None:
            transfer.left_bytes -= self._server.cancel(transfer.piece)
            transfer.piece = None
        self._owed_bytes -= transfer.left_bytes
        self._end(transfer)

    def _sent(self, transfer: Transfer) -> None:
        transfer.left_bytes -= transfer.ready_bytes
        transfer.ready_bytes, transfer.piece = 0.0, None
        if transfer.left_bytes <= _ROUNDING * self.rate_bytes_s:
            done = transfer.done
            self._end(transfer)
            done()

    def _end(self, transfer: Transfer) -> None:
        transfer.active, transfer.done = False, _over
        self.num_transfers -= 1
        if not self.num_transfers:
            self._owed_bytes = self._server.served  # what rounding left


def _over() -> None:
    """Of a transfer that has ended: it does not hold who asked for it, who holds it."""


# Seconds of the link that rounding may leave over.
_ROUNDING = 1e-12


class ShortestLink:
    """By class, and within one whoever has the least left goes first, of those that have something to send; what a single transfer cannot
    use, the next ones do.
    """

    def __init__(self, env: simpy.Environment, rate_bytes_s: float, flow_bytes_s: float | None) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.sent_bytes = 0.0
        self.on_busy: Callable[[], None] | None = None
        self._env = env
        flow = min(flow_bytes_s or rate_bytes_s, rate_bytes_s)
        self._flow = flow
        self._lanes = max(1, round(rate_bytes_s / flow))
        self._open: dict[int, Transfer] = {}
        self._running: list[Transfer] = []
        self._since = 0.0
        self._number = 0
        self._timer = 0

    @property
    def num_transfers(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def queued_bytes(self) -> float:
        self._advance()
        return sum(one.left_bytes for one in self._open.values())

    def open(self, num_bytes: float, done: Callable[[], object], priority: Priority = Priority.NORMAL) -> Transfer:
        one = Transfer(num_bytes, self._number, done, priority)
        self._open[one.number] = one
        self._number += 1
        return one

    def feed(self, transfer: Transfer, num_bytes: float) -> None:
        if not transfer.active:
            return
        self._advance()
        transfer.ready_bytes += num_bytes
        self._choose()

    def set_priority(self, transfer: Transfer, priority: Priority) -> None:
        if transfer.active:
            self._advance()
            transfer.priority = priority
            self._choose()

    def cancel(self, transfer: Transfer) -> None:
        if not transfer.active:
            return
        self._advance()
        self._end(transfer)
        self._choose()

    def _end(self, transfer: Transfer) -> None:
        transfer.active, transfer.done = False, _over
        del self._open[transfer.number]

    def _advance(self) -> None:
        passed = self._env.now - self._since
        self._since = self._env.now
        for one in self._running:
            sent = min(one.ready_bytes, passed * self._flow)
            one.ready_bytes -= sent
            one.left_bytes -= sent
            self.sent_bytes += sent

    def _choose(self) -> None:
        was_busy = self.busy
        for one in self._running:
            if one.ready_bytes <= _ROUNDING * self.rate_bytes_s:
                self._empty(one)
        ready = [one for one in self._open.values() if one.ready_bytes > 0]
        self._running = ready if len(ready) <= self._lanes else sorted(ready, key=lambda one: one.rank)[: self._lanes]
        self._timer += 1
        if self._running:
            timer = self._timer
            first = min(self._running, key=lambda one: one.ready_bytes)
            when(self._env.timeout(first.ready_bytes / self._flow), lambda: self._due(timer, first))
        if self.on_busy is not None and self.busy != was_busy:
            self.on_busy()

    def _due(self, timer: int, first: Transfer) -> None:
        if timer == self._timer:
            self._advance()
            self._empty(first)  # whatever rounding says
            self._choose()

    def _empty(self, one: Transfer) -> None:
        """It has sent what it was given."""
        self.sent_bytes += one.ready_bytes
        one.left_bytes -= one.ready_bytes
        one.ready_bytes = 0.0
        if one.active and one.left_bytes <= _ROUNDING * self.rate_bytes_s:
            done = one.done
            self._end(one)
            done()
