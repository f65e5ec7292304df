"""What is under way on a link between two sites, as whoever ordered it can tell without asking: a model that drains by the link's schedule.

What workers tell of their links is up to a second old, and lacks what has not been computed yet. No clock: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from pdd.policy.line_rate import LineRate
from pdd.policy.link_schedule import Priority, Schedule


@dataclass(slots=True)
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
        self._of_sender: dict[str, dict[Hashable, _Transfer]] = {}  # the same
        self._at_s: float | None = None
        self._line = LineRate()

    def __len__(self) -> int:
        return len(self._transfers)

    def remaining_bytes(self, *, background: bool, besides: Hashable = None) -> float:
        """Of all that are in the lowest class, or of all that are not; ``besides``: not counted."""
        counted = (t for key, t in self._transfers.items() if key != besides)
        return sum(t.remaining_bytes for t in counted if (t.priority is Priority.BACKGROUND) == background)

    def add(self, key: Hashable, num_bytes: float, priority: Priority, sender: str) -> None:
        """``num_bytes`` of KV are to go. One that was there under this key is no more."""
        self.remove(key)
        self._transfers[key] = _Transfer(num_bytes, priority, sender)
        self._of_sender.setdefault(sender, {})[key] = self._transfers[key]

    def set_priority(self, key: Hashable, priority: Priority) -> None:
        """No effect on one that is gone."""
        if key in self._transfers:
            self._transfers[key].priority = priority

    def remove(self, key: Hashable) -> None:
        """It arrived, or was given up. No effect on one that is gone."""
        transfer = self._transfers.pop(key, None)
        if transfer is not None:
            own = self._of_sender[transfer.sender]
            del own[key]
            if not own:
                del self._of_sender[transfer.sender]

    def advance(self, now_s: float, told: Mapping[str, float]) -> None:
        """Let go of what has left since the last call. ``told``: by each sender, bytes per second; of one that is not there nothing is
        known to have left. Time never goes back.
        """
        since_s, self._at_s = self._at_s, now_s
        waiting = {sender: left for sender, own in self._of_sender.items() if (left := [t for t in own.values() if t.remaining_bytes > 0])}
        rates = self._line.shares(now_s, {sender: told.get(sender) for sender in waiting})
        if since_s is None or now_s == since_s:
            return
        for sender, rate in rates.items():
            self._drain(waiting[sender], (now_s - since_s) * rate)

    def ahead_bytes(self, num_bytes: float, priority: Priority, sender: str, goodput_bytes_s: float) -> float:
        """Of others that leave before the last of ``num_bytes`` more of class ``priority`` of ``sender``: of its own, all of higher classes
        and in that class what is shorter, or where they take turns as much of each at most. Other senders take turns with this one, as far
        as ``goodput_bytes_s``, by which the time will be told, is more than its share of the line. More to send never has less ahead.
        """
        ahead = 0.0
        for transfer in self._of_sender.get(sender, {}).values():
            if transfer.priority > priority:
                continue
            if transfer.priority < priority:
                ahead += transfer.remaining_bytes
            elif self._shares:
                ahead += min(transfer.remaining_bytes, num_bytes)
            elif transfer.remaining_bytes <= num_bytes:
                ahead += transfer.remaining_bytes
        if len(self._of_sender) <= (sender in self._of_sender):
            return ahead
        own = ahead + num_bytes
        others = sum(min(sum(t.remaining_bytes for t in ts.values()), own) for one, ts in self._of_sender.items() if one != sender)
        share_bytes_s = self._line.share_bytes_s(sender)
        if share_bytes_s is None:
            return ahead if self._sends(sender) else ahead + others
        return ahead + min(others, own * max(0.0, goodput_bytes_s / share_bytes_s - 1.0))

    def _sends(self, sender: str) -> bool:
        return any(transfer.remaining_bytes > 0 for transfer in self._of_sender.get(sender, {}).values())

    def _drain(self, waiting: list[_Transfer], left: float) -> None:
        """Take ``left`` bytes off them, by class, shortest first or all alike."""
        if len(waiting) > 1:
            waiting.sort(key=lambda t: (t.priority, t.remaining_bytes))
        for index, transfer in enumerate(waiting):
            alike = sum(t.priority is transfer.priority for t in waiting[index:]) if self._shares and len(waiting) > 1 else 1
            taken = min(transfer.remaining_bytes, left / alike)
            transfer.remaining_bytes -= taken
            left -= taken
