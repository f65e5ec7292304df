"""What a process started by the launcher owes its parent: report progress as JSON lines on stdout, end when the parent ends."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable


def report(event: str, **fields: str | int | float) -> None:
    """One line on stdout: ``{"event": …, …}``. Events: loading, warm_up (done, total, what), ready."""
    print(json.dumps({"event": event, **fields}), flush=True)


def when_parent_ends(action: Callable[[], None]) -> None:
    """Call ``action`` in a thread of its own once stdin, a pipe whose other end only the parent holds, is closed."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        action()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
