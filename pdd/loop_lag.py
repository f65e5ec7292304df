"""How late an event loop runs what is due: the one figure that tells that something on it blocks, whatever it is. Owns the watch."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 0.05
# Upper bounds of the histogram's buckets but for the last, which has none.
BOUNDS_S: Final = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)


async def watch_loop(observe: Callable[[float], None]) -> None:
    """Tell ``observe`` how late the running loop wakes us, in seconds, until cancelled.

    A loop that was blocked for several intervals missed as many wake-ups: each counts, as late as it would have been. Otherwise a long
    pause would be one sample among many good ones.
    """
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lag_s = max(0.0, loop.time() - due_s)
        observe(lag_s)
        while (lag_s := lag_s - INTERVAL_S) > 0:
            observe(lag_s)


class LagHistogram:
    """``counts``: samples per bucket of ``BOUNDS_S``, one more for what is later."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)

    def observe(self, lag_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, lag_s)] += 1
