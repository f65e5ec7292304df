"""When accepted tokens go to the reader: at once, or at most so fast while a handoff is under way, so that main's delay does not show.

Acceptance never waits. What is held back goes out in order, and all of it at the latest with the token that ends the request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from pdd.serving.request import Delta

# After the handoff each token follows a tenth sooner than the one before, until nothing is held back any more.
_CATCHING_UP = 0.9


class Timer(Protocol):
    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]


def _call_later(delay_s: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, callback)


class PacedDelivery:
    """``release`` is called for every delta, in order, from ``push`` or from a timer. ``close`` it whatever happens."""

    def __init__(self, release: Callable[[Delta], None], clock: Callable[[], float] = time.monotonic, later: Later = _call_later) -> None:
        self._release = release
        self._clock = clock
        self._later = later
        self._held: deque[Delta] = deque()
        self._interval_s = 0.0
        self._factor = 1.0
        self._max_cover_s = 0.0
        self._last_s: float | None = None
        self._timer: Timer | None = None

    @property
    def cover_s(self) -> float:
        """How long what is held back lasts."""
        if not self._held or self._last_s is None:
            return 0.0
        return max(0.0, self._last_s + self._interval_s * len(self._held) - self._clock())

    def push(self, delta: Delta) -> None:
        self._held.append(delta)
        if delta.finish_reason is not None:
            self.close()
        else:
            self._pump()

    def slow_to(self, interval_s: float, max_cover_s: float) -> None:
        """From now on tokens go out at least ``interval_s`` apart, until those that are held back last for ``max_cover_s``; then one goes
        for each that comes.
        """
        self._interval_s, self._max_cover_s, self._factor = interval_s, max_cover_s, 1.0
        self._pump()

    def catch_up(self) -> None:
        """Get rid of what is held back, by and by."""
        self._factor = _CATCHING_UP
        self._pump()

    def close(self) -> None:
        """Everything goes out now."""
        self._stop_timer()
        self._interval_s = 0.0
        while self._held:
            self._let_go()

    def _pump(self) -> None:
        self._stop_timer()
        while self._held and self._may_go():
            self._let_go()
        if not self._held:
            if self._factor < 1:
                self._interval_s = 0.0
            return
        assert self._last_s is not None, "the first token is never held back"
        self._timer = self._later(max(0.0, self._last_s + self._interval_s - self._clock()), self._pump)

    def _may_go(self) -> bool:
        if self._last_s is None or self._clock() >= self._last_s + self._interval_s:
            return True
        return self._factor == 1 and (len(self._held) - 1) * self._interval_s > self._max_cover_s

    def _let_go(self) -> None:
        self._last_s = self._clock()
        self._interval_s *= self._factor
        self._release(self._held.popleft())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
