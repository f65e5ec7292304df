"""What serves several jobs at once under the virtual clock: a decode engine, a prefill engine, a link.

Progress is kept by virtual time: while n jobs are served alike, each gains the same, so one number says how far all of them are, and only
arrivals and ends are events. A run costs the same whether an answer has ten tokens or ten thousand.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator

import simpy

from pdd.sim.spec import HostSpec


class Piece:
    """``target``: of virtual time, at which it is done; grows with :meth:`SharedServer.grow` · ``weight``: what it adds to the server's
    load (tokens of context, say) · ``call``: when it is done.
    """

    __slots__ = ("active", "begun", "call", "target", "weight")

    def __init__(self, begun: float, work: float, weight: float, call: Callable[[], object]) -> None:
        self.target = begun + work
        self.begun = begun
        self.weight = weight
        self.call = call
        self.active = True


class Job(Piece):
    """``done``: an event for who waits."""

    __slots__ = ("done",)

    def __init__(self, begun: float, work: float, weight: float, done: simpy.Event) -> None:
        super().__init__(begun, work, weight, done.succeed)
        self.done = done


class SharedServer:
    """Serves all jobs at the same pace, ``pace(num jobs, sum of weights)`` units of work per second and job. ``served``: units that all of
    them together have had.
    """

    def __init__(self, env: simpy.Environment, pace: Callable[[int, float], float]) -> None:
        self._env = env
        self._pace = pace
        self._virtual = 0.0
        self._since = 0.0
        self._rate = 0.0
        self._jobs: list[tuple[float, int, Piece]] = []  # by target; one whose piece has another target by now is void
        self._number = 0
        self._due_s = math.inf
        self._timer: simpy.Event | None = None
        self._timer_s = math.inf
        self._served = 0.0
        self.num_jobs = 0
        self.weight = 0.0
        self.busy_s = 0.0
        self.on_change: Callable[[], None] | None = None

    @property
    def served(self) -> float:
        self._advance()
        return self._served

    def add(self, work: float, weight: float = 0.0, lead: float = 0.0) -> Job:
        """Its ``done`` succeeds when ``work`` units are through, after the ``lead`` that others get first."""
        self._advance()
        job = Job(self._virtual + lead, work, weight, self._env.event())
        self._enter(job)
        return job

    def run(self, work: float, call: Callable[[], object]) -> Piece:
        """``call`` when ``work`` units are through: without an event, for pieces that are many."""
        self._advance()
        piece = Piece(self._virtual, work, 0.0, call)
        self._enter(piece)
        return piece

    def grow(self, piece: Piece, work: float) -> None:
        """It has so much more to do. Only while it is active."""
        self._advance()
        piece.target += work
        self._queue(piece)
        self._arm()

    def cancel(self, piece: Piece) -> float:
        """Take it out; the work it got. A job that is done got all of it."""
        got = self.got(piece)
        if piece.active:
            piece.active = False
            self.num_jobs -= 1
            self.weight -= piece.weight
            self._changed()
        return got

    def got(self, piece: Piece) -> float:
        """Work that it has had so far."""
        self._advance()
        return max(0.0, min(piece.target, self._virtual) - piece.begun)

    def until(self, piece: Piece, work: float) -> float:
        """Seconds until ``piece`` has had ``work``, if the pace stays."""
        self._advance()
        return max(0.0, piece.begun + work - self._virtual) / self._rate if self._rate > 0 else 0.0

    def resync(self) -> None:
        """The pace has changed for a reason of its own."""
        self._advance()
        self._arm()

    def _enter(self, piece: Piece) -> None:
        self._queue(piece)
        self.num_jobs += 1
        self.weight += piece.weight
        self._changed()

    def _queue(self, piece: Piece) -> None:
        heapq.heappush(self._jobs, (piece.target, self._number, piece))
        self._number += 1

    def _changed(self) -> None:
        self._arm()
        if self.on_change is not None:
            self.on_change()

    def _advance(self) -> None:
        now_s = self._env.now
        if now_s > self._since:
            if self.num_jobs:
                passed_s = now_s - self._since
                self._virtual += passed_s * self._rate
                self._served += passed_s * self._rate * self.num_jobs
                self.busy_s += passed_s
            self._since = now_s

    def _arm(self) -> None:
        jobs = self._jobs
        while jobs and not (jobs[0][2].active and jobs[0][2].target == jobs[0][0]):
            heapq.heappop(jobs)
        self._rate = self._pace(self.num_jobs, self.weight) if jobs else 0.0
        if self._rate <= 0:
            self._due_s = math.inf
            return
        wait_s = (jobs[0][0] - self._virtual) / self._rate
        self._due_s = self._since + wait_s if wait_s > 0 else self._since
        if self._due_s < self._timer_s:  # one that rings sooner looks again: most arrivals put ends off
            self._set_timer()

    def _set_timer(self) -> None:
        wait_s = self._due_s - self._since
        self._timer = timer = self._env.timeout(wait_s)
        assert timer.callbacks is not None
        timer.callbacks.append(self._rings)
        self._due_s = self._timer_s = self._since + wait_s  # as the clock will say it

    def _rings(self, timer: simpy.Event) -> None:
        if timer is not self._timer:
            return  # another is set for sooner
        self._timer, self._timer_s = None, math.inf
        if self._due_s == math.inf:
            return
        self._advance()
        if self._due_s > self._since:
            self._set_timer()
        else:
            self._due()

    def _due(self) -> None:
        jobs = self._jobs
        # What the timer was for is done, whatever rounding says.
        self._virtual = max(self._virtual, jobs[0][0])
        ended: list[Piece] = []
        while jobs and jobs[0][0] <= self._virtual:
            target, _, piece = heapq.heappop(jobs)
            if piece.active and piece.target == target:
                piece.active = False
                self.num_jobs -= 1
                self.weight -= piece.weight
                ended.append(piece)
        self._changed()
        for piece in ended:
            piece.call()


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

    def take_free(self) -> bool:
        """Whether there was one to take; nobody waits for it."""
        if not self._free:
            return False
        self._free -= 1
        return True

    def leave(self) -> None:
        if self._waiting:
            self._waiting.popleft().succeed()
        else:
            self._free += 1


class Later(simpy.Event):
    """An event that is known to come, without another for the time until then."""

    def succeed_in(self, delay_s: float) -> None:
        """Once."""
        assert not self.triggered
        self._ok, self._value = True, None
        self.env.schedule(self, delay=delay_s)


Steps = Generator[simpy.Event, object, None]


def begin(steps: Steps) -> None:
    """Run ``steps`` from now on, as a simpy process that nobody waits for or interrupts, without the events that one costs."""
    _Going(steps).go()


class _Going:
    """Known to the event that it waits for alone: it goes when that has, and is no work for a collector."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def go(self, _: simpy.Event | None = None) -> None:
        for event in self._steps:
            if event.callbacks is not None:
                event.callbacks.append(self.go)
                return


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
            # What each takes of the cores is lost beside what the others take: it adds up, it does not multiply.
            times += sum(self._spec.beside.get(name, {}).get(role, 1.0) - 1.0 for name in self._beside)
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
