"""What the launcher does when one of its processes ends by itself: a worker is started again, the service goes on without it meanwhile."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable

from pdd.launch.local import Deployment
from pdd.launch.process import ChildEvent

# A worker that cannot stay up would otherwise load its model for ever.
MAX_RESTARTS = 3


class Supervisor:
    """``say`` gets one line per event. Workers are restarted on their ports, with a new epoch, at most MAX_RESTARTS times each."""

    def __init__(self, deployment: Deployment, say: Callable[[str], None]) -> None:
        self._deployment = deployment
        self._say = say
        self._workers = frozenset(worker.name for worker in deployment.config.workers)
        self._restarts: Counter[str] = Counter()

    def react(self, ended: ChildEvent) -> bool:
        """Returns whether the service can go on: not without its coordinator or the emulated link."""
        what = f"{ended.name} {_how(int(ended.fields['status']))}"
        if ended.name not in self._workers:
            self._say(f"{what}; the service ends")
            return False
        if self._restarts[ended.name] >= MAX_RESTARTS:
            self._say(f"{what} after {MAX_RESTARTS} restarts; the service goes on without it")
            return True
        self._restarts[ended.name] += 1
        self._say(f"{what}; it is started again, the service goes on without it meanwhile")
        self._deployment.start_worker(ended.name)
        return True

    def run(self) -> int:
        """Until Ctrl-C, or until the service cannot go on (status 1)."""
        while True:
            ended = self._deployment.first_exit(timeout_s=3600.0)
            if ended is not None and not self.react(ended):
                return 1


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
