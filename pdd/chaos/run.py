"""Runs plans on real deployments: traffic in threads, faults at their moments, checks when it is over."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pdd.chaos.client import Client
from pdd.chaos.expected import Expected, ExpectedAnswers
from pdd.chaos.injector import Injector, Strike
from pdd.chaos.judge import Verdict, judge
from pdd.chaos.leftovers import MARK, Leftovers
from pdd.chaos.outcome import Outcome
from pdd.chaos.plan import ChaosFault, ChaosPlan
from pdd.chaos.shapes import SHAPES, Engines, ShapeName, launch_config
from pdd.chaos.traffic import Ask
from pdd.chaos.watch import Idle, wait_healthy, wait_idle
from pdd.launch.local import Deployment

# Longer than any timeout of the system itself: a request that has not ended by then never would.
REQUEST_LIMIT_S = 120.0
RESTART_S = 400.0
# How long after the last end pages may still be held. A worker learns of a dead peer by silence within five seconds.
IDLE_WITHIN_S = 10.0
_ORPHANS_WITHIN_S = 5.0
_POLL_S = 0.005


@dataclass(frozen=True)
class Judged:
    ask: Ask
    outcome: Outcome
    expected: Expected
    verdict: Verdict
    tie: bool


@dataclass(frozen=True)
class SeedResult:
    """One run. ``missed``: faults whose moment never came, or whose victim was down · ``died``: processes that ended by themselves."""

    plan: ChaosPlan
    judged: tuple[Judged, ...]
    strikes: tuple[Strike, ...]
    missed: tuple[ChaosFault, ...]
    idle: Idle
    orphans: tuple[str, ...]
    died: tuple[str, ...]
    seconds: float


class Rig:
    """One deployment of a shape, with what breaks and heals it. Use as a context manager; ``orphans`` is what was left after its end."""

    def __init__(
        self, shape: ShapeName, model_dir: Path, cache_dir: Path, engines: Engines, logs: Path | None = None, **policy: object
    ) -> None:
        self.shape = shape
        mark = secrets.token_hex(8)
        os.environ[MARK] = mark  # inherited by every process that is started from here on
        self.leftovers = Leftovers(mark)
        self.deployment = Deployment(launch_config(SHAPES[shape], str(model_dir), engines, **policy), cache_dir, logs)
        self.injector = Injector(self.deployment, self.leftovers.note, RESTART_S)
        self.orphans: list[str] = []

    def __enter__(self) -> Rig:
        self.deployment.start()
        try:
            self.injector.learn()
        except BaseException:
            self.deployment.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leftovers.note()
        self.deployment.stop()
        self.orphans = self.settled_orphans()

    def client(self, ask: Ask, on_tokens: Callable[[Outcome], None]) -> Client:
        topology = self.deployment.topology
        return Client(ask, topology.http, topology.grpc, on_tokens, REQUEST_LIMIT_S)

    def settled_orphans(self) -> list[str]:
        """Of now, once it no longer changes for the better."""
        deadline_s = time.monotonic() + _ORPHANS_WITHIN_S
        while True:
            pids = {child.pid for child in self.deployment.processes.values()}
            found = self.leftovers.orphans(pids)
            if not found or time.monotonic() > deadline_s:
                return found
            time.sleep(_POLL_S * 20)

    def settle(self) -> tuple[Idle, list[str]]:
        """Whole again, then nobody holds anything. Also who had died by itself, and was started again."""
        self.injector.heal()
        died = self.injector.raise_the_dead()
        wait_healthy(self.deployment.topology.http, time.monotonic() + RESTART_S)
        return wait_idle(self.deployment, IDLE_WITHIN_S), died


class Traffic:
    """The requests of one run, each in a thread, and the moments that faults wait for."""

    def __init__(self, rig: Rig, plan: ChaosPlan) -> None:
        self._rig = rig
        self._plan = plan
        self._changed = threading.Condition()
        self._counts: dict[int, int] = {}
        self._begun_s = 0.0
        self._clients = [rig.client(ask, self._came) for ask in plan.asks]
        self.missed: list[ChaosFault] = []

    def run(self) -> list[Outcome]:
        """Ask everything, let everything happen, return when every request has ended."""
        self._begun_s = time.monotonic()
        threads = [threading.Thread(target=self._ask, args=pair, daemon=True) for pair in zip(self._clients, self._plan.asks, strict=True)]
        faults = [threading.Thread(target=self._happen, args=(fault,), daemon=True) for fault in self._plan.faults]
        for thread in (*threads, *faults):
            thread.start()
        for thread in threads:
            thread.join()
        with self._changed:
            self._counts = {ask.number: -1 for ask in self._plan.asks}
            self._changed.notify_all()
        for thread in faults:
            thread.join()
        return [client.outcome for client in self._clients]

    def _ask(self, client: Client, ask: Ask) -> None:
        time.sleep(max(0.0, self._begun_s + ask.at_s - time.monotonic()))
        client.run()

    def _came(self, outcome: Outcome) -> None:
        with self._changed:
            self._counts[outcome.number] = len(outcome.ids)
            self._changed.notify_all()

    def _happen(self, fault: ChaosFault) -> None:
        moment = fault.moment
        if moment.at_s is not None:
            time.sleep(max(0.0, self._begun_s + moment.at_s - time.monotonic()))
        elif moment.request is not None and not self._awaited(moment.request, moment.tokens):
            self.missed.append(fault)
            return
        if self._rig.injector.strike(fault) is None:
            self.missed.append(fault)

    def _awaited(self, request: int, tokens: int) -> bool:
        """Whether the request got so far; False when everything has ended first."""
        with self._changed:
            self._changed.wait_for(lambda: self._counts.get(request, 0) >= max(1, tokens) or -1 in self._counts.values())
            return -1 not in self._counts.values()


def run_plan(rig: Rig, plan: ChaosPlan, answers: ExpectedAnswers) -> SeedResult:
    """One seed. The deployment is whole again afterwards."""
    begun_s = time.monotonic()
    already = len(rig.injector.strikes)
    traffic = Traffic(rig, plan)
    outcomes = traffic.run()
    idle, died = rig.settle()
    strikes = tuple(rig.injector.strikes[already:])
    orphans = tuple(rig.settled_orphans())
    expected = answers.of(plan.asks)
    judged = tuple(_judged(*found, strikes, plan.shape, answers) for found in zip(plan.asks, outcomes, expected, strict=True))
    return SeedResult(plan, judged, strikes, tuple(traffic.missed), idle, orphans, tuple(died), time.monotonic() - begun_s)


def _judged(
    ask: Ask, outcome: Outcome, expected: Expected, strikes: Sequence[Strike], shape: ShapeName, answers: ExpectedAnswers
) -> Judged:
    verdict = judge(outcome, expected, answers.text_of(ask, outcome.ids), strikes, shape)
    tie = verdict.fault == "wrong_tokens" and bool(outcome.ids) and answers.is_tie(ask, outcome.ids)
    return Judged(ask, outcome, expected, Verdict() if tie else verdict, tie)
