"""How fast a machine is at one time, against what a profile of it says: it is not equally fast every minute. Pure.

A few short probes, none of them a request that is to be predicted, are asked when a prediction is to hold. What the profile's costs say of
each is divided out; the rest is the machine's pace then, by which costs go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, median

from pdd.sim.costs import EngineCost
from pdd.sim.fit import Measured, prefill_times
from pdd.sim.spec import HostSpec, RoleSpec, SystemSpec


@dataclass(frozen=True)
class Pace:
    """How many times longer than profiled an engine takes: ``alone``, and ``beside`` others of its host, by all that are busy."""

    alone: float = 1.0
    beside: Mapping[frozenset[str], float] = field(default_factory=dict)


def paces(spec: SystemSpec, measured: Measured) -> dict[str, Pace]:
    """By role, the medians of what was ``measured`` over what ``spec`` says of it. A role that was not measured alone goes by what it took
    beside others; one that was not measured at all is as profiled.
    """
    roles = {"prefill": spec.prefill, "main": spec.main} | ({} if spec.relay is None else {"relay": spec.relay})
    found: dict[str, dict[frozenset[str], list[float]]] = {role: {} for role in roles}
    step_tokens, cost = spec.prefill.step_tokens, spec.prefill.cost

    def add(role: str, busy: frozenset[str], times: float) -> None:
        if len(busy) > 1 and spec.host is not None:
            times /= spec.host.slowdown.get(busy, {}).get(role, 1.0)
        found[role].setdefault(busy, []).append(times)

    for prompt in measured.prefills:
        add("prefill", frozenset(("prefill",)), prompt.seconds / cost.prefill(prompt.tokens, prompt.cached, step_tokens))
    for run in measured.prefills_beside:
        add("prefill", frozenset(run.busy), prefill_times(run, cost, step_tokens))
    for step in (*measured.decodes, *measured.decodes_beside):
        if step.role in roles:
            add(step.role, frozenset(step.busy), step.seconds / roles[step.role].cost.step(step.rows, step.rows * step.context))
    return {role: _pace({busy: median(times) for busy, times in by.items()}) for role, by in found.items()}


def at_pace(spec: SystemSpec, found: Mapping[str, Pace]) -> SystemSpec:
    """``spec`` at another time: steps as long as they are then, and slow-downs such that engines beside each other are, too. Beside others
    that were not measured together an engine is as much slower as beside those that were, on average.
    """
    host = spec.host
    if host is not None:
        slowdown = {
            busy: {role: _slowed(times, busy, found.get(role, Pace())) for role, times in by_role.items()}
            for busy, by_role in host.slowdown.items()
        }
        host = HostSpec(slowdown, host.beside)
    relay = None if spec.relay is None else _role(spec.relay, found.get("relay", Pace()))
    prefill, main = _role(spec.prefill, found.get("prefill", Pace())), _role(spec.main, found.get("main", Pace()))
    return replace(spec, prefill=prefill, relay=relay, main=main, host=host)


def _pace(by_busy: Mapping[frozenset[str], float]) -> Pace:
    beside = {busy: times for busy, times in by_busy.items() if len(busy) > 1}
    alone = [times for busy, times in by_busy.items() if len(busy) == 1]
    return Pace(median(alone or list(beside.values()) or [1.0]), beside)


def _slowed(times: float, busy: frozenset[str], pace: Pace) -> float:
    beside = pace.beside.get(busy, fmean(pace.beside.values()) if pace.beside else pace.alone)
    return max(1.0, times * beside / pace.alone)


def _role(role: RoleSpec, pace: Pace) -> RoleSpec:
    return replace(role, cost=_cost(role.cost, pace.alone))


def _cost(cost: EngineCost, times: float) -> EngineCost:
    steps = tuple((tokens, seconds * times) for tokens, seconds in cost.prefill_steps)
    seconds = {one.name: getattr(cost, one.name) * times for one in fields(cost) if one.init and one.name != "prefill_steps"}
    return EngineCost(**seconds, prefill_steps=steps)
