"""What serves several jobs at once under the virtual clock: a decode engine, a prefill engine, a link.

Progress is kept by virtual time: while n jobs are served alike, each gains the same, so one number says how far all of them are, and only
arrivals and ends are events. A run costs the same whether an answer has ten tokens or ten thousand.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import simpy


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

    def add(self, work: float, weight: float = 0.0) -> Job:
        """Its ``done`` succeeds when ``work`` units are through."""
        self._advance()
        job = Job(self._virtual + work, self._number, self._virtual, weight, self._env.event())
        self._number += 1
        heapq.heappush(self._jobs, job)
        self.num_jobs += 1
        self.weight += weight
        self._changed()
        return job

    def cancel(self, job: Job) -> float:
        """Take it out; the work it got. A job that is done got all of it."""
        self._advance()
        got = min(job.target, self._virtual) - job.begun
        if job.active:
            job.active = False
            self.num_jobs -= 1
            self.weight -= job.weight
            self._changed()
        return got

    def got(self, job: Job) -> float:
        """Work that it has had so far."""
        self._advance()
        return min(job.target, self._virtual) - job.begun

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
        event = self._env.timeout(wait_s)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: self._due(timer))

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


class Queue:
    """Places that requests hold, first come first served: rows of a worker, the one place of a prefill engine."""

    def __init__(self, env: simpy.Environment, places: int) -> None:
        self._resource = simpy.Resource(env, capacity=places)
        self.places = places

    @property
    def num_held(self) -> int:
        return self._resource.count

    @property
    def num_waiting(self) -> int:
        return len(self._resource.queue)

    def take(self) -> simpy.resources.resource.Request:
        return self._resource.request()

    def leave(self, place: simpy.resources.resource.Request) -> None:
        self._resource.release(place)


class Host:
    """Cores that engines of one machine share: an engine that runs uses its threads; where all together want more than there is, each gets
    its part.
    """

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._engines: list[tuple[SharedServer, int]] = []
        self._wanted = 0

    def add(self, server: SharedServer, threads: int) -> None:
        self._engines.append((server, threads))
        server.on_change = self._look

    @property
    def speed(self) -> float:
        """Of each engine, 1 when it has its threads to itself."""
        return 1.0 if self._wanted <= self._cores else self._cores / self._wanted

    def _look(self) -> None:
        wanted = sum(threads for server, threads in self._engines if server.num_jobs)
        if wanted != self._wanted:
            self._wanted = wanted
            for server, _ in self._engines:
                server.resync()
