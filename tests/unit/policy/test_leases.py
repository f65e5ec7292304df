"""Leases: one process per name, none outlives its time, and a process that was replaced never comes back."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdd.policy.leases import LeaseTable

NAMES = st.sampled_from(["main-0", "main-1"])
EPOCHS = st.integers(1, 4)
LEASE_S = 10.0


class Leases(RuleBasedStateMachine):
    """Against the plainest model: who registered last, when, and who is past."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 100.0
        self.holder: dict[str, tuple[int, float]] = {}
        self.latest: dict[str, int] = {}
        self.past: set[tuple[str, int]] = set()

    @rule(seconds=st.sampled_from([0.0, 4.0, 9.99, 10.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=NAMES, epoch=EPOCHS)
    def register(self, name: str, epoch: int) -> None:
        before = self.table
        self.table, verdict = self.table.grant(name, epoch, self.now, LEASE_S)
        if (name, epoch) in self.past:
            assert verdict == "stale"
            assert self.table is before
            return
        held = self.holder.get(name)
        if held is None:
            assert verdict == "joined"
        elif held[0] == epoch:
            assert verdict == ("renewed" if self.now < held[1] else "joined")
        else:
            assert verdict == "replaced"
        if self.latest.get(name, epoch) != epoch:
            self.past.add((name, self.latest[name]))
        self.latest[name] = epoch
        self.holder[name] = (epoch, self.now + LEASE_S)

    @rule(name=NAMES, epoch=EPOCHS)
    def leave(self, name: str, epoch: int) -> None:
        self.table = self.table.leave(name, epoch)
        if self.latest.get(name) == epoch:
            self.past.add((name, epoch))
            self.holder.pop(name, None)

    @invariant()
    def tells_who_holds_what(self) -> None:
        expired = tuple(sorted(name for name, (_, until) in self.holder.items() if self.now >= until))
        assert self.table.expired(self.now) == expired
        for name in ("main-0", "main-1"):
            left = None if name not in self.holder else max(0.0, self.holder[name][1] - self.now)
            assert self.table.left_s(name, self.now) == left


TestLeases = Leases.TestCase
