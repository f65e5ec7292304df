"""A worker that hangs ends itself, so that whoever watches its process starts it again: nobody else on its machine may be there to do it.

A thread of its own looks at the step thread and at the event loop; neither can be asked to report its own end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
_BEAT_S = 0.5


class Stillness:
    """For how long something has stood still, in looks: a process that was stopped and goes on has looked at nothing meanwhile, so the
    time it was stopped for does not count, and no clock is involved.
    """

    def __init__(self) -> None:
        self._mark: object = None
        self._looks = 0

    def look(self, mark: object) -> int:
        """Looks in a row, before this one, at which ``mark`` was the same; None marks rest, which is never too long."""
        self._looks = self._looks + 1 if mark is not None and mark == self._mark else 0
        self._mark = mark
        return self._looks


class SelfWatch:
    """``turn``: what the step thread's turn is known by, None while it rests. ``end(message)`` is called from the watching thread once that
    or the event loop has stood still for ``after_s``.
    """

    def __init__(self, turn: Callable[[], object], after_s: float, end: Callable[[str], None] | None = None) -> None:
        self._turn = turn
        self._after_s = after_s
        self._end = end or _end
        self._beats = 0
        self._stopping = threading.Event()
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """On the running loop, which is watched from now on."""
        self._beating = asyncio.create_task(self._beat(), name="self-watch-beat")
        threading.Thread(target=self._watch, name="self-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._beats += 1
            await asyncio.sleep(_BEAT_S)

    def _watch(self) -> None:
        period_s = min(1.0, self._after_s / 4)
        step, loop = Stillness(), Stillness()
        while not self._stopping.wait(period_s):
            for what, looks in (("step thread", step.look(self._turn())), ("event loop", loop.look(self._beats))):
                if looks * period_s >= self._after_s:
                    self._stopping.set()
                    self._end(f"the {what} has stood still for {looks * period_s:.0f} s")
                    return


def _end(message: str) -> None:
    logger.critical("%s: this worker ends itself", message)
    for handler in logging.getLogger().handlers:
        handler.flush()
    # Neither the loop nor the step thread can be waited for; the kernel closes every connection, which is how peers learn.
    os._exit(EXIT_STATUS)
