"""`pdd chaos --table`: every victim killed in every state of a request's life, on one real deployment, against what was designed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Final

from rich.console import Console
from rich.table import Table

from pdd.chaos.client import Client
from pdd.chaos.designed import VICTIMS, Victim, designed
from pdd.chaos.expected import Expected, ExpectedAnswers
from pdd.chaos.judge import judge
from pdd.chaos.outcome import Outcome
from pdd.chaos.plan import ChaosFault, Moment
from pdd.chaos.run import REQUEST_LIMIT_S, Rig
from pdd.chaos.states import STATES, NotReachedError, State, StateDriver
from pdd.chaos.traffic import Ask
from pdd.chaos.watch import kv_bytes_per_token, ledger
from pdd.faults import LinkOrder
from pddbridge.rpc.gen import worker_pb2

_TRIES: Final = 4
_MOMENT: Final = Moment(at_s=0.0)
_salts = count()


@dataclass(frozen=True)
class Cell:
    """``stall_s``: from the death to the next token, None where none came · ``why``: what is not as designed, None if all is."""

    state: State
    victim: Victim
    design: str
    end: str
    relay_tokens: int
    main_tokens: int
    fallbacks: int
    stall_s: float | None
    why: str | None


class CellBench:
    """One request and what is done to the deployment for its sake."""

    def __init__(self, rig: Rig, ask: Ask) -> None:
        self._rig = rig
        topology = rig.deployment.topology
        self._addresses = {place.name: str(place.control) for place in topology.workers}
        self._client = Client(ask, topology.http, topology.grpc, lambda _: None, REQUEST_LIMIT_S)
        self._thread = threading.Thread(target=self._client.run, daemon=True)
        self._frozen: list[int] = []
        self._slow = False
        self.outcome: Outcome = self._client.outcome
        self.kv_bytes_per_token = kv_bytes_per_token(self._addresses["main-0"])

    def freeze(self, worker: str) -> None:
        pid = self._rig.deployment.processes[worker].pid
        os.kill(pid, signal.SIGSTOP)
        self._frozen.append(pid)

    def slow_down(self, rate_mbit_s: float) -> None:
        self._slow = True
        self._rig.deployment.processes["link"].tell(LinkOrder(rate_mbit_s=rate_mbit_s).model_dump_json())

    def ledger(self, worker: str) -> worker_pb2.LedgerReply:
        return ledger(self._addresses[worker])

    def ask(self) -> None:
        self._thread.start()

    def let_go(self) -> None:
        """Whatever was held goes on, if it is alive."""
        for pid in self._frozen:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # it was the victim
        self._frozen.clear()
        link = self._rig.deployment.processes["link"]
        if self._slow and link.running():
            link.tell(LinkOrder().model_dump_json())
        self._slow = False

    def end(self) -> None:
        if self._thread.is_alive():
            self._thread.join()


def run_cell(rig: Rig, driver: StateDriver, victim: Victim, ask: Ask, expected: Expected) -> Cell:
    """The deployment is whole and idle again afterwards. Raises NotReachedError when the state was not reached."""
    bench = CellBench(rig, ask)
    rig.leftovers.note()
    try:
        driver.reach(bench)
        had_tokens = len(bench.outcome.ids)
        strike = rig.injector.strike(_fault(victim), noted=True)
        assert strike is not None, "its victim is alive"
    finally:
        bench.let_go()
        bench.end()
        idle, died = rig.settle()
    outcome = bench.outcome
    plan = designed(driver.state, victim)
    verdict = judge(outcome, expected, outcome.text, [strike], "lean")
    objections = [
        verdict.why if verdict.fault is not None else None,
        plan.objection(outcome, had_tokens),
        f"not idle: {idle.held}" if idle.after_s is None else None,
        "; ".join(died) or None,
        "; ".join(rig.settled_orphans()) or None,
    ]
    after = [at_s for at_s, _ in outcome.arrivals if at_s >= strike.at_s]
    return Cell(
        driver.state,
        victim,
        plan.text,
        outcome.code or outcome.end,
        outcome.origins.count("relay"),
        outcome.origins.count("main"),
        int(str(outcome.timeline.get("fallbacks", 0))),
        after[0] - strike.at_s if after else None,
        "; ".join(filter(None, objections)) or None,
    )


def _fault(victim: Victim) -> ChaosFault:
    if victim == "kv":
        return ChaosFault("reset", "link", _MOMENT, 0.0, port="kv")
    return ChaosFault("kill", victim if victim in ("coordinator", "link") else f"{victim}-0", _MOMENT, 0.0)


def run_table(
    rig: Rig, answers: ExpectedAnswers, console: Console, states: Sequence[State] = (), victims: Sequence[Victim] = VICTIMS
) -> Iterator[Cell]:
    """Every cell of ``states`` (none given: all) and ``victims``, one after another."""
    for driver in STATES:
        if states and driver.state not in states:
            continue
        (expected,) = answers.of([driver.request(0, "expected")])
        for victim in victims:
            cell = _with_tries(rig, driver, victim, expected)
            what = "as designed" if cell.why is None else cell.why
            console.print(f"{victim} killed while {driver.state}: {cell.end}, {what}", soft_wrap=True)
            yield cell


def _with_tries(rig: Rig, driver: StateDriver, victim: Victim, expected: Expected) -> Cell:
    """States pass quickly on an idle machine: one that was missed is driven at again."""
    missed = ""
    for _ in range(_TRIES):
        number = next(_salts)
        try:
            return run_cell(rig, driver, victim, driver.request(number, f"cell-{number}"), expected)
        except NotReachedError as error:
            missed = str(error)
    return Cell(driver.state, victim, designed(driver.state, victim).text, "not reached", 0, 0, 0, None, f"state not reached: {missed}")


def show_cells(cells: Sequence[Cell], console: Console) -> None:
    table = Table("while", "dies", "designed", "end", "relay + main tokens", "fallbacks", "next token after s", "")
    for cell in cells:
        stall = "-" if cell.stall_s is None else f"{cell.stall_s:.3f}"
        made = f"{cell.relay_tokens} + {cell.main_tokens}"
        table.add_row(cell.state, cell.victim, cell.design, cell.end, made, str(cell.fallbacks), stall, cell.why or "as designed")
    console.print(table)


def cells_summary(cells: Sequence[Cell], orphans: Sequence[str], command: str) -> dict[str, object]:
    """The JSON object."""
    wrong = sum(cell.why is not None for cell in cells)
    rows = [asdict(cell) for cell in cells]
    return {"command": command, "cells": len(cells), "not_as_designed": wrong, "orphans": list(orphans), "table": rows}
