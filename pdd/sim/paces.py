"""How fast a machine is at one time, against what a profile of it says: it is not equally fast every minute. Pure.

A few short probes, none of them a request that is to be predicted, are asked when a prediction is to hold. What the profile's costs say of
each is divided out; the rest is the machine's pace then, by which costs go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from statistics import median

from pdd.sim.costs import EngineCost
from pdd.sim.fit import Measured, prefill_times
from pdd.sim.spec import HostSpec, RoleSpec, SystemSpec


@dataclass(frozen=True)
class Pace:
    """How many times longer than profiled an engine takes: ``alone``, and ``beside`` others of its host."""

    alone: float = 1.0
    beside: float = 1.0


def paces(spec: SystemSpec, measured: Measured) -> dict[str, Pace]:
    """By role, the medians of what was ``measured`` over what ``spec`` says of it. A role that was not measured alone goes by what it took
    beside others, and the other way round; one that was not measured at all is as profiled.
    """
    roles = {"prefill": spec.prefill, "main": spec.main} | ({} if spec.relay is None else {"relay": spec.relay})
    alone: dict[str, list[float]] = {role: [] for role in roles}
    beside: dict[str, list[float]] = {role: [] for role in roles}
    step_tokens, cost = spec.prefill.step_tokens, spec.prefill.cost
    for prompt in measured.prefills:
        alone["prefill"].append(prompt.seconds / cost.prefill(prompt.tokens, prompt.cached, step_tokens))
    for run in measured.prefills_beside:
        beside["prefill"].append(prefill_times(run, cost, step_tokens) / _times(spec, run.busy, "prefill"))
    for step in (*measured.decodes, *measured.decodes_beside):
        if step.role in roles:
            times = step.seconds / roles[step.role].cost.step(step.rows, step.rows * step.context)
            (alone if len(step.busy) == 1 else beside)[step.role].append(times / _times(spec, step.busy, step.role))
    return {role: _pace(alone[role], beside[role]) for role in roles}


def at_pace(spec: SystemSpec, found: Mapping[str, Pace]) -> SystemSpec:
    """``spec`` at another time: steps as long as they are then, and slow-downs such that engines beside each other are, too."""
    host = spec.host
    if host is not None:
        slowdown = {busy: {role: _slowed(times, found.get(role)) for role, times in roles.items()} for busy, roles in host.slowdown.items()}
        host = HostSpec(slowdown, host.beside)
    relay = None if spec.relay is None else _role(spec.relay, found.get("relay"))
    prefill, main = _role(spec.prefill, found.get("prefill")), _role(spec.main, found.get("main"))
    return replace(spec, prefill=prefill, relay=relay, main=main, host=host)


def _pace(alone: list[float], beside: list[float]) -> Pace:
    return Pace(median(alone or beside or [1.0]), median(beside or alone or [1.0]))


def _times(spec: SystemSpec, busy: tuple[str, ...], role: str) -> float:
    """That the profile says of ``role`` beside the others of ``busy``."""
    return 1.0 if spec.host is None else spec.host.slowdown.get(frozenset(busy), {}).get(role, 1.0)


def _slowed(times: float, pace: Pace | None) -> float:
    return times if pace is None else max(1.0, times * pace.beside / pace.alone)


def _role(role: RoleSpec, pace: Pace | None) -> RoleSpec:
    return role if pace is None else replace(role, cost=_cost(role.cost, pace.alone))


def _cost(cost: EngineCost, times: float) -> EngineCost:
    steps = tuple((tokens, seconds * times) for tokens, seconds in cost.prefill_steps)
    seconds = {field.name: getattr(cost, field.name) * times for field in fields(cost) if field.init and field.name != "prefill_steps"}
    return EngineCost(**seconds, prefill_steps=steps)
