"""Workers that join and leave while requests run: leases of those that register, draining, and what the operator's topology says now.

A worker is admitted by name. Where it is, what it is for and whom it may talk to stand in the topology, which only the operator writes;
what a worker says of itself is compared with that and never used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdd.errors import Code, PddError
from pdd.policy.leases import LeaseTable
from pdd.serving.worker_pool import WorkerPool
from pdd.topology import Topology, WorkerPlace

_log = logging.getLogger(__name__)
_POLL_S = 0.05


@dataclass(frozen=True)
class Registration:
    """What a worker says of itself."""

    name: str
    epoch: int
    role: str
    site: str
    control: str
    kv: str
    fingerprint: str


class Membership:
    """``read_topology`` reads the operator's file; it may raise OSError or ValueError, and then what was read before counts.
    ``num_by_verdict``: registrations, ever.
    """

    def __init__(self, pool: WorkerPool, read_topology: Callable[[], Topology], clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._read_topology = read_topology
        self._clock = clock
        self._leases = LeaseTable()
        self._lock = asyncio.Lock()
        self.num_by_verdict: Counter[str] = Counter()

    async def register(self, said: Registration) -> bool:
        """Give or renew a lease; returns whether the worker is wanted elsewhere (it drains).

        Raises PddError: NOT_FOUND for a name that the topology lacks, INVALID_ARGUMENT naming both values for one that differs from it
        or does not fit, UNAVAILABLE for a process that was replaced or has left.
        """
        try:
            await self._check(said)
        except PddError:
            self.num_by_verdict["refused"] += 1
            raise
        self._leases, verdict = self._leases.grant(said.name, said.epoch, self._clock(), self._pool.survival.lease_s)
        self.num_by_verdict[verdict] += 1
        if verdict == "stale":
            raise PddError(Code.UNAVAILABLE, f"worker {said.name}: epoch {said.epoch} has left or was replaced")
        known = next((worker for worker in self._pool.workers if worker.name == said.name), None)
        if known is None:
            self._pool.expect(self._pool.topology.worker(said.name))
            return False
        if known.info.epoch != said.epoch and known.ready:
            known.lose("replaced", f"its process was replaced, epoch {known.info.epoch} by {said.epoch}")
        return known.draining

    def leave(self, name: str, epoch: int) -> None:
        """The process says that it goes: nothing new for it. One that was replaced changes nothing."""
        before = self._leases
        self._leases = before.leave(name, epoch)
        if self._leases is not before:
            for worker in self._pool.workers:
                if worker.name == name and worker.info.epoch == epoch:
                    worker.draining = True
                    _log.info("worker %s leaves", name)

    def lease_left_s(self, name: str) -> float | None:
        """None for one that does not register here."""
        return self._leases.left_s(name, self._clock())

    def role_of(self, name: str) -> str:
        """As the topology says; empty for an unknown name."""
        return next((place.role for place in self._pool.topology.workers if place.name == name), "")

    def expire(self) -> None:
        """Give up the workers whose lease ran out, unless they answer over the connection that their requests use."""
        now = time.monotonic()
        for name in self._leases.expired(self._clock()):
            worker = next((w for w in self._pool.workers if w.name == name), None)
            if worker is not None and worker.ready and now - worker.told_at_s >= self._pool.survival.lease_s:
                self.num_by_verdict["expired"] += 1
                worker.lose("lease", "its lease ran out")

    async def watch(self) -> None:
        """``expire`` now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._pool.survival.watch_interval_s)
            self.expire()

    async def drain(self, name: str) -> None:
        """No new requests; returns when it holds none, which is after ``drain_timeout_s`` at the latest: then they are moved to others.
        Raises PddError NOT_FOUND.
        """
        try:
            worker = self._pool.worker(name)
        except KeyError:
            raise PddError(Code.NOT_FOUND, f"no worker {name!r}, there are {sorted(w.name for w in self._pool.workers)}") from None
        worker.draining = True
        _log.info("worker %s drains, %d streams are attached", name, worker.num_held)
        deadline = time.monotonic() + self._pool.survival.drain_timeout_s
        while worker.num_held:
            if time.monotonic() >= deadline:
                worker.move_all("is leaving, and its time to finish is over")
                deadline = time.monotonic() + self._pool.survival.drain_timeout_s
            await asyncio.sleep(_POLL_S)

    async def follow_topology(self, timeout_s: float) -> None:
        """Read the operator's file again: who is new there joins, who is gone is forgotten. Waits for those that join, at most
        ``timeout_s``. Raises PddError when one of them does not, OSError and ValueError for a file that cannot be read.
        """
        async with self._lock:
            topology = await asyncio.to_thread(self._read_topology)
            self._pool.topology = topology
            named = {place.name for place in topology.workers}
            for worker in self._pool.workers:
                if worker.name not in named:
                    await self._pool.forget(worker.name)
            known = {worker.name for worker in self._pool.workers}
            for place in topology.workers:
                if place.name not in known:
                    await self._pool.join(place, timeout_s)

    async def _check(self, said: Registration) -> None:
        try:
            place = self._pool.topology.worker(said.name)
        except KeyError:
            place = await self._read_again(said.name)
        for what, theirs, mine in (
            ("role", said.role, place.role),
            ("site", said.site, place.site),
            ("control address", said.control, str(place.control)),
            ("kv address", said.kv, str(place.kv)),
        ):
            if theirs != mine:
                raise PddError(Code.INVALID_ARGUMENT, f"worker {said.name}: {what} given {theirs}, the topology says {mine}")
        other = next((w for w in self._pool.workers if w.name != said.name), None)
        if other is not None and other.info.fingerprint != said.fingerprint:
            raise PddError(
                Code.INVALID_ARGUMENT,
                f"worker {said.name}: fingerprint given {said.fingerprint}, {other.name} has {other.info.fingerprint}",
            )

    async def _read_again(self, name: str) -> WorkerPlace:
        """The operator may have named it since. Raises PddError NOT_FOUND."""
        try:
            topology = await asyncio.to_thread(self._read_topology)
            place = topology.worker(name)
        except (KeyError, OSError, ValueError) as error:
            raise PddError(Code.NOT_FOUND, f"worker {name!r} is not in the topology") from error
        self._pool.topology = topology
        return place
