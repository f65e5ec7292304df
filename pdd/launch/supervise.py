"""What the launcher does when one of its processes ends by itself or hangs: it is started again, on its ports, with a new epoch.

The service goes on without a worker meanwhile; without its coordinator or the emulated link it is away until they are back, and what was
in flight ends with an error. Waits grow, and a process that cannot stay up is given up: a worker alone, or the service.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from pdd.launch.local import Deployment
from pdd.launch.process import ChildEvent
from pdd.policy.restarts import RestartLimits, restart_wait_s

_TICK_S = 0.5
# Looks in a row at which a process must have been silent for too long: after a pause of this process all of them seem so, once.
_LOOKS = 2


class Supervisor:
    """``say`` gets one line per event. ``react`` and ``tick`` may be called by hand, ``run`` does both until the end."""

    def __init__(self, deployment: Deployment, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        settings = deployment.config.survival.restarts
        self._deployment = deployment
        self._say = say
        self._clock = clock
        self._limits = RestartLimits(settings.most, settings.window_s, settings.first_s, settings.longest_s)
        self._unresponsive_s = settings.unresponsive_s
        self._restarts: dict[str, list[float]] = {}
        self._due: dict[str, float] = {}
        self._silent_looks: dict[str, int] = {}

    def react(self, ended: ChildEvent) -> bool:
        """Start it again, now or at a later ``tick``. Returns whether the service goes on."""
        name, now = ended.name, self._clock()
        what = f"{name} {_how(int(ended.fields['status']))}"
        if not self._deployment.wanted(name):
            return True  # it was asked to leave
        made = self._restarts.setdefault(name, [])
        wait_s = restart_wait_s(made, self._limits, now)
        is_worker = self._deployment.is_worker(name)
        if wait_s is None:
            often = f"after {len(made)} restarts"
            self._say(f"{what} {often}; the service {'goes on without it' if is_worker else 'ends'}")
            return is_worker
        meanwhile = "the service goes on without it meanwhile" if is_worker else "the service is away meanwhile"
        self._say(f"{what}; it is started again{f' in {wait_s:g} s' if wait_s else ''}, {meanwhile}")
        self._due[name] = now + wait_s
        self.tick()
        return True

    def tick(self) -> None:
        """Start what is due, and kill what hangs: its end is then reacted to as any other."""
        now = self._clock()
        for name in [name for name, at in self._due.items() if now >= at]:
            del self._due[name]
            self._restarts.setdefault(name, []).append(now)
            self._deployment.restart(name)
        for name, silent_s in self._deployment.silences().items():
            looks = self._silent_looks.get(name, 0) + 1 if silent_s >= self._unresponsive_s else 0
            self._silent_looks[name] = looks
            if looks >= _LOOKS:
                self._say(f"{name} has not been heard of for {silent_s:.0f} s; it is killed")
                self._silent_looks[name] = 0
                self._deployment.processes[name].kill()

    def run(self) -> int:
        """Until Ctrl-C, or until the service cannot go on (status 1)."""
        while True:
            ended = self._deployment.first_exit(_TICK_S)
            if ended is not None and not self.react(ended):
                return 1
            self.tick()


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
