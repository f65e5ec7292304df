"""Carries faults out on a real deployment, and heals it: signals to processes, orders to the link, restarts on the same ports."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdd.chaos.plan import ChaosFault
from pdd.chaos.watch import wait_listening, wait_ready
from pdd.faults import Fault, LinkOrder
from pdd.launch.local import Deployment

_log = logging.getLogger(__name__)
COORDINATOR, LINK = "coordinator", "link"


@dataclass
class Strike:
    """A fault that happened. Monotonic times; ``over_s``: when the victim was whole again, None while it is not."""

    fault: ChaosFault
    at_s: float
    over_s: float | None = None

    def disturbs(self, from_s: float, to_s: float) -> bool:
        """Whether the span is touched by it or by its consequences."""
        return self.at_s <= to_s and (self.over_s is None or from_s <= self.over_s)


class Injector:
    """``strike`` may be called from any thread; every healing runs in one of its own, and ``heal`` waits for all of them.

    ``before``: called before a process is killed. ``restart_s``: how long a victim may take until it is ready again.
    """

    def __init__(self, deployment: Deployment, before: Callable[[], None], restart_s: float) -> None:
        self._deployment = deployment
        self._before = before
        self._restart_s = restart_s
        self._lock = threading.Lock()
        self._healers: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self._down: set[str] = set()
        self._epochs: dict[str, int] = {}
        self.strikes: list[Strike] = []

    def learn(self) -> None:
        """Who is alive now, by epoch, so that a restart can be told from what was before."""
        for place in self._deployment.topology.workers:
            self._epochs[place.name] = wait_ready(str(place.control), 0, time.monotonic() + self._restart_s)

    def strike(self, fault: ChaosFault, *, noted: bool = False) -> Strike | None:
        """Let it happen now; None when its victim is down already. Returns as soon as it has happened. ``noted``: ``before`` was called
        by whoever cannot wait for it now.
        """
        with self._lock:
            dead = {fault.victim, LINK} if fault.victim == LINK else {fault.victim}
            if dead & self._down:
                return None
            if fault.kind == "kill" and not noted:
                self._before()
            strike = Strike(fault, time.monotonic())
            match fault.kind:
                case "kill":
                    self._down.add(fault.victim)
                    self._deployment.processes[fault.victim].kill()
                    self._heal_later(strike, self._restart)
                case "pause":
                    self._down.add(fault.victim)
                    os.kill(self._deployment.processes[fault.victim].pid, signal.SIGSTOP)
                    self._heal_later(strike, self._resume)
                case "slow":
                    self._down.add(LINK)
                    self._order(LinkOrder(rate_mbit_s=fault.rate_mbit_s))
                    self._heal_later(strike, self._full_speed)
                case _:
                    self._order(LinkOrder(fault=_link_fault(fault)))
                    strike.over_s = strike.at_s + fault.lasts_s
            self.strikes.append(strike)
            return strike

    def heal(self) -> None:
        """Wait until everything is whole again. Raises what went wrong on the way."""
        while self._healers:
            self._healers.pop().join()
        if self._errors:
            raise self._errors[0]

    def raise_the_dead(self) -> list[str]:
        """Start again what ended without our doing. One line for each, with its last words."""
        found = []
        for name, child in list(self._deployment.processes.items()):
            if not child.running():
                found.append(f"{name}: {child.last_words(1)}")
                self._restart(name)
        return found

    def _heal_later(self, strike: Strike, how: Callable[[str], None]) -> None:
        def heal() -> None:
            try:
                time.sleep(strike.fault.lasts_s)
                how(strike.fault.victim)
            except BaseException as error:  # noqa: BLE001 - told to whoever waits for the healing
                self._errors.append(error)
            finally:
                strike.over_s = time.monotonic()
                with self._lock:
                    self._down.discard(strike.fault.victim)

        healer = threading.Thread(target=heal, name=f"heal-{strike.fault.victim}", daemon=True)
        self._healers.append(healer)
        healer.start()

    def _restart(self, victim: str) -> None:
        deployment, deadline_s = self._deployment, time.monotonic() + self._restart_s
        if victim == LINK:
            deployment.start_link()
            wait_listening(deployment.topology.workers[-1].route(deployment.config.serving.site).control, deadline_s)
        elif victim == COORDINATOR:
            deployment.start_coordinator(COORDINATOR, deployment.config, deployment.topology)
            wait_listening(deployment.topology.http, deadline_s)
        else:
            deployment.start_worker(victim)
            address = str(deployment.topology.worker(victim).control)
            self._epochs[victim] = wait_ready(address, self._epochs[victim], deadline_s)

    def _resume(self, victim: str) -> None:
        os.kill(self._deployment.processes[victim].pid, signal.SIGCONT)

    def _full_speed(self, _victim: str) -> None:
        self._order(LinkOrder())

    def _order(self, order: LinkOrder) -> None:
        self._deployment.processes[LINK].tell(order.model_dump_json())


def _link_fault(fault: ChaosFault) -> Fault:
    assert fault.kind != "kill" and fault.kind != "pause" and fault.kind != "slow"  # noqa: PT018 - narrows the type
    lasts_s = fault.lasts_s if fault.kind in ("stall", "black_hole") else None
    return Fault(kind=fault.kind, direction=fault.direction, at_s=0, duration_s=lasts_s, port=fault.port)
