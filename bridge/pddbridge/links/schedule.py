"""Who sends next on a link that several transfers share, and how fast. No clock: the time is an argument."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Final, Generic, Protocol, TypeVar

# Every so many turns the lowest class that waits goes first, so that nothing starves.
_LOW_TURN: Final = 8


class Priority(IntEnum):
    """Class of a transfer. URGENT: someone waits for it now. BACKGROUND: nobody does."""

    URGENT = 0
    NORMAL = 1
    BACKGROUND = 2


class Prioritised(Protocol):
    """What takes turns."""

    priority: Priority


T = TypeVar("T", bound=Prioritised)


class Turns(Generic[T]):
    """Transfers that have frames to send: higher classes first, round robin within a class, one turn in eight for the lowest class."""

    def __init__(self) -> None:
        self._rings: dict[Priority, deque[T]] = {priority: deque() for priority in Priority}
        self._num_turns = 0

    def __bool__(self) -> bool:
        return any(self._rings.values())

    def add(self, transfer: T) -> None:
        """Behind the others of its class; no effect if it waits already."""
        ring = self._rings[transfer.priority]
        if transfer not in ring:
            ring.append(transfer)

    def take(self) -> T | None:
        """Whose turn it is; it does not wait any more until it is added again. None if nobody waits."""
        waiting = [ring for ring in self._rings.values() if ring]
        if not waiting:
            return None
        self._num_turns += 1
        return waiting[-1 if self._num_turns % _LOW_TURN == 0 else 0].popleft()

    def clear(self) -> None:
        for ring in self._rings.values():
            ring.clear()


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
