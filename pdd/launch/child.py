"""What a process started by the launcher owes its parent: report progress as JSON lines on stdout, end when the parent ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable

# A process that is ready says so this often: silence is how its parent notices that it hangs or was stopped.
ALIVE_EVERY_S = 2.0


async def stay_alive() -> None:
    """Tell the parent, from the event loop, that it still turns; until cancelled. Start it with the report of readiness."""
    while True:
        report("alive")
        await asyncio.sleep(ALIVE_EVERY_S)


def report(event: str, **fields: str | int | float) -> None:
    """One line on stdout: ``{"event": …, …}``. Events: loading, warm_up (done, total, what), ready, alive."""
    print(json.dumps({"event": event, **fields}), flush=True)


def when_parent_ends(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, on_line: Callable[[bytes], None] | None = None) -> None:
    """Set ``stop`` on ``loop`` once stdin, a pipe whose other end only the parent holds, is closed. Lines that the parent writes until then
    go to ``on_line``, on the loop.
    """

    def watch() -> None:
        rest = b""
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending anyway
            while data := os.read(sys.stdin.fileno(), 4096):
                *lines, rest = (rest + data).split(b"\n")
                if on_line is not None:
                    for line in lines:
                        loop.call_soon_threadsafe(on_line, line)
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
