"""Who of those that wait sends next on one link, and how fast; the choice itself is :mod:`pddbridge.link_schedule`. No clock: the time is
an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pddbridge.link_schedule import LinkRules, Priority, TurnReason, WaitingTransfer, choose_transfer

__all__ = ["LinkRules", "Pacer", "Prioritised", "Priority", "Turns"]


class Prioritised(Protocol):
    """What takes turns; hashed by identity. See :class:`WaitingTransfer`."""

    priority: Priority
    deadline_s: float | None

    @property
    def remaining_bytes(self) -> int: ...


T = TypeVar("T", bound=Prioritised)


class Turns(Generic[T]):
    """Transfers that have frames to send. ``num_taken``: turns by the reason for which they were given, ever."""

    def __init__(self, rules: LinkRules | None = None) -> None:
        self.num_taken: Counter[TurnReason] = Counter()
        self._rules = rules or LinkRules()
        self._since: dict[T, tuple[float, int]] = {}  # when, and in which turn, it began to wait
        self._num_turns = 0

    def __bool__(self) -> bool:
        return bool(self._since)

    def add(self, transfer: T, now_s: float) -> None:
        """It waits from now on; no effect if it does already."""
        self._since.setdefault(transfer, (now_s, self._num_turns))

    def next(self, now_s: float, may: Callable[[T], bool] | None = None) -> T | None:
        """Whose turn it is, of those that ``may``. It keeps waiting. None if nobody waits."""
        chosen = self._choose(now_s, may)
        return None if chosen is None else chosen[0]

    def take(self, now_s: float, may: Callable[[T], bool] | None = None) -> T | None:
        """As ``next``; it does not wait any more until it is added again."""
        chosen = self._choose(now_s, may)
        if chosen is None:
            return None
        self._num_turns += 1
        self.num_taken[chosen[1]] += 1
        del self._since[chosen[0]]
        return chosen[0]

    def remove(self, may: Callable[[T], bool]) -> None:
        """Those wait no longer."""
        self._since = {one: since for one, since in self._since.items() if not may(one)}

    def clear(self) -> None:
        self._since.clear()

    def _choose(self, now_s: float, may: Callable[[T], bool] | None) -> tuple[T, TurnReason] | None:
        those = [one for one in self._since if may is None or may(one)]
        if not those:
            return None
        if len(those) == 1:
            return those[0], "alone"
        waiting = [WaitingTransfer(one.priority, one.remaining_bytes, one.deadline_s, *self._since[one]) for one in those]
        turn = choose_transfer(waiting, self._rules, self._num_turns + 1, now_s)
        return those[turn.index], turn.reason


class Pacer:
    """Holds a link to ``bytes_per_s`` (None: no bound): a frame may start when the time that the frames before it are worth has passed.

    What was not used is not saved up, so the rate holds over any interval but for one frame.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._ready_at = 0.0

    def delay_s(self, now_s: float) -> float:
        """Seconds until the next frame may start."""
        return max(0.0, self._ready_at - now_s)

    def spent(self, num_bytes: int, now_s: float) -> None:
        """A frame of ``num_bytes`` starts."""
        if self._bytes_per_s is not None:
            self._ready_at = max(self._ready_at, now_s) + num_bytes / self._bytes_per_s
