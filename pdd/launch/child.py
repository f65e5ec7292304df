"""What a process started by the launcher owes its parent: report progress as JSON lines on stdout, end when the parent ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading


def report(event: str, **fields: str | int | float) -> None:
    """One line on stdout: ``{"event": …, …}``. Events: loading, warm_up (done, total, what), ready."""
    print(json.dumps({"event": event, **fields}), flush=True)


def when_parent_ends(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set ``stop`` on ``loop`` once stdin, a pipe whose other end only the parent holds, is closed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending anyway
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
