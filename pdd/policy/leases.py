"""Leases of workers that register: who holds one, until when, and which process of a name it is. Pure; times are the caller's monotonic
clock's.

An epoch names one process. A name has one lease: a new epoch takes it over, and the epoch it took it from never gets it back, however
late its messages come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

Verdict = Literal["joined", "renewed", "replaced", "stale"]
# Epochs of earlier processes that are remembered per name.
MAX_PAST = 16


@dataclass(frozen=True)
class Lease:
    """``past``: epochs that held it before or left, newest last. ``until`` None: nobody holds it now."""

    epoch: int
    until: float | None
    past: tuple[int, ...] = ()


@dataclass(frozen=True)
class LeaseTable:
    """By worker name."""

    leases: Mapping[str, Lease] = field(default_factory=lambda: MappingProxyType({}))

    def grant(self, name: str, epoch: int, now: float, lease_s: float) -> tuple[LeaseTable, Verdict]:
        """Give or renew. "stale": that process was replaced or has left; nothing changes."""
        held = self.leases.get(name)
        if held is None:
            return self._with(name, Lease(epoch, now + lease_s)), "joined"
        if epoch in held.past:
            return self, "stale"
        if held.epoch == epoch:
            was_held = held.until is not None and now < held.until
            return self._with(name, replace(held, until=now + lease_s)), "renewed" if was_held else "joined"
        past = (*held.past, held.epoch)[-MAX_PAST:]
        return self._with(name, Lease(epoch, now + lease_s, past)), "replaced" if held.until is not None else "joined"

    def leave(self, name: str, epoch: int) -> LeaseTable:
        """The process goes. One that does not hold the lease changes nothing."""
        held = self.leases.get(name)
        if held is None or held.epoch != epoch:
            return self
        return self._with(name, Lease(epoch, None, (*held.past, epoch)[-MAX_PAST:]))

    def left_s(self, name: str, now: float) -> float | None:
        """Until the lease of ``name`` runs out, 0 when it has; None when it never registered, or has left."""
        held = self.leases.get(name)
        return None if held is None or held.until is None else max(0.0, held.until - now)

    def expired(self, now: float) -> tuple[str, ...]:
        """Names whose lease ran out and who have not left."""
        return tuple(sorted(name for name, lease in self.leases.items() if lease.until is not None and now >= lease.until))

    def _with(self, name: str, lease: Lease) -> LeaseTable:
        return LeaseTable(MappingProxyType({**self.leases, name: lease}))
