"""What serves several jobs at once under the virtual clock: a decode engine, a prefill engine, a link.

Progress is kept by virtual time: while n jobs are served alike, each gains the same, so one number says how far all of them are, and only
arrivals and ends are events. A run costs the same whether an answer has ten tokens or ten thousand.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import simpy

from pdd.sim.spec import HostSpec


@dataclass(eq=False)
class Job:
    """``target``: of virtual time, at which it is done · ``weight``: what it adds to the server's load (tokens of context, say)."""

    target: float
    number: int
    begun: float
    weight: float
    done: simpy.Event
    active: bool = True

    def __lt__(self, other: Job) -> bool:
        return (self.target, self.number) < (other.target, other.number)


class SharedServer:
    """Serves all jobs at the same pace, ``pace(num jobs, sum of weights)`` units of work per second and job."""

    def __init__(self, env: simpy.Environment, pace: Callable[[int, float], float]) -> None:
        self._env = env
        self._pace = pace
        self._virtual = 0.0
        self._since = 0.0
        self._rate = 0.0
        self._jobs: list[Job] = []
        self._number = 0
        self._timer = 0
        self.num_jobs = 0
        self.weight = 0.0
        self.busy_s = 0.0
        self.on_change: Callable[[], None] = lambda: None

    def add(self, work: float, weight: float = 0.0, lead: float = 0.0) -> Job:
        """Its ``done`` succeeds when ``work`` units are through, after the ``lead`` that others get first."""
        self._advance()
        begin = self._virtual + lead
        job = Job(begin + work, self._number, begin, weight, self._env.event())
        self._number += 1
        heapq.heappush(self._jobs, job)
        self.num_jobs += 1
        self.weight += weight
        self._changed()
        return job

    def cancel(self, job: Job) -> float:
        """Take it out; the work it got. A job that is done got all of it."""
        self._advance()
        got = max(0.0, min(job.target, self._virtual) - job.begun)
        if job.active:
            job.active = False
            self.num_jobs -= 1
            self.weight -= job.weight
            self._changed()
        return got

    def got(self, job: Job) -> float:
        """Work that it has had so far."""
        self._advance()
        return max(0.0, min(job.target, self._virtual) - job.begun)

    def until(self, job: Job, work: float) -> float:
        """Seconds until ``job`` has had ``work``, if the pace stays."""
        self._advance()
        return max(0.0, job.begun + work - self._virtual) / self._rate if self._rate > 0 else 0.0

    def resync(self) -> None:
        """The pace has changed for a reason of its own."""
        self._advance()
        self._arm()

    def _changed(self) -> None:
        self._arm()
        self.on_change()

    def _advance(self) -> None:
        passed = self._env.now - self._since
        if passed > 0:
            self._virtual += passed * self._rate
            if self.num_jobs:
                self.busy_s += passed
        self._since = self._env.now

    def _arm(self) -> None:
        while self._jobs and not self._jobs[0].active:
            heapq.heappop(self._jobs)
        self._rate = self._pace(self.num_jobs, self.weight) if self.num_jobs else 0.0
        self._timer += 1
        if not self._jobs or self._rate <= 0:
            return
        timer = self._timer
        wait_s = max(0.0, (self._jobs[0].target - self._virtual) / self._rate)
        when(self._env.timeout(wait_s), lambda: self._due(timer))

    def _due(self, timer: int) -> None:
        if timer != self._timer:
            return  # somebody came or went meanwhile; another timer runs
        self._advance()
        # What the timer was for is done, whatever rounding says.
        self._virtual = max(self._virtual, self._jobs[0].target)
        while self._jobs and (not self._jobs[0].active or self._jobs[0].target <= self._virtual):
            job = heapq.heappop(self._jobs)
            if job.active:
                job.active = False
                self.num_jobs -= 1
                self.weight -= job.weight
                job.done.succeed()
        self._changed()


class Places:
    """What requests hold, first come first served: rows of a worker."""

    def __init__(self, env: simpy.Environment, places: int) -> None:
        self._env = env
        self._free = places
        self._waiting: deque[simpy.Event] = deque()

    def take(self) -> simpy.Event | None:
        """None: it has one; else what to wait for."""
        if self._free:
            self._free -= 1
            return None
        self._waiting.append(self._env.event())
        return self._waiting[-1]

    def leave(self) -> None:
        if self._waiting:
            self._waiting.popleft().succeed()
        else:
            self._free += 1


def when(event: simpy.Event, call: Callable[[], object]) -> None:
    """``call`` when ``event`` succeeds, now if it has."""
    if event.callbacks is None:
        call()
    else:

        def called(_: simpy.Event) -> None:
            call()

        event.callbacks.append(called)


def either(env: simpy.Environment, *events: simpy.Event) -> simpy.Event:
    """Succeeds with the first of ``events``, at once when one was before."""
    first = env.event()

    def happened() -> None:
        if not first.triggered:
            first.succeed()

    for event in events:
        when(event, happened)
    return first


class Host:
    """Engines of one machine that slow each other down, by what was measured of them (:class:`pdd.sim.spec.HostSpec`). A set of busy roles
    that was not measured goes like the largest measured one in it.
    """

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec
        self._engines: list[tuple[str, SharedServer]] = []
        self._watched: dict[str, Callable[[], bool]] = {}
        self._busy: frozenset[str] = frozenset()
        self._beside: tuple[str, ...] = ()
        self._times: dict[tuple[str, frozenset[str], tuple[str, ...]], float] = {}

    def add(self, role: str, server: SharedServer) -> None:
        self._engines.append((role, server))
        server.on_change = self.look

    def watch(self, name: str, busy: Callable[[], bool]) -> None:
        """``name``: of the spec's ``beside``. Say :meth:`look` when it may have changed."""
        self._watched[name] = busy

    def speed(self, role: str) -> float:
        """Of an engine that runs, 1 when it has the machine to itself."""
        key = role, self._busy | {role}, self._beside
        if key not in self._times:
            measured = [busy for busy, times in self._spec.slowdown.items() if role in times and busy <= key[1]]
            times = self._spec.slowdown[max(measured, key=lambda busy: (len(busy), sorted(busy)))][role] if measured else 1.0
            for name in self._beside:
                times *= self._spec.beside.get(name, {}).get(role, 1.0)
            self._times[key] = times
        return 1.0 / self._times[key]

    def look(self) -> None:
        """Somebody may have begun or stopped."""
        busy = frozenset(role for role, server in self._engines if server.num_jobs)
        beside = tuple(name for name, runs in self._watched.items() if runs())
        if (busy, beside) != (self._busy, self._beside):
            self._busy, self._beside = busy, beside
            for _, server in self._engines:
                server.resync()
