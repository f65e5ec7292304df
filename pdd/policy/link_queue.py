"""What is under way on a link between two sites, as whoever ordered it can tell without asking: a model that drains by the link's schedule.

What workers tell of their links is up to a second old, and lacks what has not been computed yet. No clock: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from pdd.policy.line_rate import LineRate
from pdd.policy.link_schedule import Priority, Schedule


@dataclass
class _Transfer:
    remaining_bytes: float
    priority: Priority
    sender: str


class LinkQueue:
    """Transfers by any key, each of a sender. A sender's own go by the schedule; senders know nothing of one another and share the line.
    Sooner done than the model says is told by ``remove``; later is not known, so one that should have left stays with nothing.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._shares = schedule == "fair"
        self._transfers: dict[Hashable, _Transfer] = {}
        self._at_s: float | None = None
        self._line = LineRate()

    def __len__(self) -> int:
        return len(self._transfers)

    def remaining_bytes(self, *, background: bool, besides: Hashable = None) -> float:
        """Of all that are in the lowest class, or of all that are not; ``besides``: not counted."""
        counted = (t for key, t in self._transfers.items() if key != besides)
        return sum(t.remaining_bytes for t in counted if (t.priority is Priority.BACKGROUND) == background)

    def add(self, key: Hashable, num_bytes: float, priority: Priority, sender: str) -> None:
        """``num_bytes`` of KV are to go."""
        self._transfers[key] = _Transfer(num_bytes, priority, sender)

    def set_priority(self, key: Hashable, priority: Priority) -> None:
        """No effect on one that is gone."""
        if key in self._transfers:
            self._transfers[key].priority = priority

    def remove(self, key: Hashable) -> None:
        """It arrived, or was given up. No effect on one that is gone."""
        self._transfers.pop(key, None)

    def advance(self, now_s: float, told: Mapping[str, float]) -> None:
        """Let go of what has left since the last call. ``told``: by each sender, bytes per second; of one that is not there nothing is
        known to have left. Time never goes back.
        """
        since_s, self._at_s = self._at_s, now_s
        senders = {t.sender for t in self._transfers.values() if t.remaining_bytes > 0}
        rates = self._line.shares(now_s, {one: told.get(one) for one in senders})
        if since_s is None:
            return
        for sender, rate in rates.items():
            left = (now_s - since_s) * rate
            own = [t for t in self._transfers.values() if t.sender == sender]
            for priority in sorted({t.priority for t in own}):
                left = self._drain([t for t in own if t.priority is priority], left)

    def ahead_bytes(self, num_bytes: float, priority: Priority, sender: str) -> float:
        """Of others that leave before the last of ``num_bytes`` more of class ``priority`` of ``sender``: all of its own in higher classes;
        in that class what is shorter, or where they take turns as much of each at most. Other senders take turns with one that begins now;
        what one that sends gets has them in it. More to send never has less ahead.
        """
        own = [t for t in self._transfers.values() if t.sender == sender]
        if not any(t.remaining_bytes > 0 for t in own):
            others: dict[str, float] = {}
            for transfer in self._transfers.values():
                others[transfer.sender] = others.get(transfer.sender, 0.0) + transfer.remaining_bytes
            return sum(min(left, num_bytes) for left in others.values())
        ahead = 0.0
        for transfer in own:
            if transfer.priority > priority:
                continue
            if transfer.priority < priority:
                ahead += transfer.remaining_bytes
            elif self._shares:
                ahead += min(transfer.remaining_bytes, num_bytes)
            elif transfer.remaining_bytes <= num_bytes:
                ahead += transfer.remaining_bytes
        return ahead

    def _drain(self, transfers: list[_Transfer], left: float) -> float:
        """Take ``left`` bytes off them, shortest first or all alike. Returns what is over."""
        waiting = sorted((t for t in transfers if t.remaining_bytes > 0), key=lambda t: t.remaining_bytes)
        for index, transfer in enumerate(waiting):
            share = left / (len(waiting) - index) if self._shares else left
            taken = min(transfer.remaining_bytes, share)
            transfer.remaining_bytes -= taken
            left -= taken
        return left
