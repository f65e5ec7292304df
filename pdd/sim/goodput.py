"""What the sending end of a link sees of its rate: bytes count as in flight until they are acknowledged, so of short transfers the way
there and back takes a good part. Policies go by what is measured so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pdd.policy.estimates import Ratio
from pddbridge.links.stats import MEMORY_S


class SeenRate:
    """``now``: the clock · ``busy``: whether the link moves something; say :meth:`look` when that may have changed · ``back_s``: from when
    the last byte of a transfer has left until it is known to have been placed.
    """

    def __init__(self, now: Callable[[], float], busy: Callable[[], bool], back_s: float) -> None:
        self._now = now
        self._busy = busy
        self._back_s = back_s
        self._moved = Ratio(MEMORY_S * math.log(2))  # seconds that it moved something, per second in flight
        self._since_s: float | None = None
        self._flight_ends_s = 0.0

    @property
    def share(self) -> float:
        """Of the link's rate; 1 before anything went."""
        return self._moved.value or 1.0

    def look(self) -> None:
        busy, now_s = self._busy(), self._now()
        if busy and self._since_s is None:
            self._since_s = now_s
        elif not busy and self._since_s is not None:
            in_flight_s = now_s + self._back_s - max(self._since_s, self._flight_ends_s)
            self._moved.observe(min(in_flight_s, now_s - self._since_s), in_flight_s)
            self._since_s, self._flight_ends_s = None, now_s + self._back_s
