"""The cheapest plan that keeps the objectives: from what the costs say, down as far as simulation allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pdd.plan.capacity import Group, decode_group, link_gbit_s, num_decode, num_prefill, prefill_group
from pdd.plan.catalogue import PlanChip, PlanModel
from pdd.plan.demand import Objectives, Prices, means
from pdd.plan.roofline import Efficiency
from pdd.policy_config import PolicyConfig
from pdd.sim.run import simulate
from pdd.sim.spec import LinkSpec, RoleSpec, SystemSpec
from pdd.sim.workload import StatedHits

Kind = Literal["pdd", "cross_site", "same_site"]
_MOST_TRIES = 40
_MOST_USE = 0.95
_TARGET = 0.6  # of the objective is what the policy aims at: a wait predicted to end just in time often does not
_HOPELESS_GAIN = 0.003  # of good requests, from any one thing more


@dataclass(frozen=True)
class Sites:
    """``rtt_s`` and ``flow_bytes_s``: of the line between the sites · ``local_bytes_s``: within one."""

    rtt_s: float = 0.03
    flow_bytes_s: float | None = None
    local_bytes_s: float = 50e9


@dataclass(frozen=True)
class Plan:
    """``prefill``, ``relay``, ``main``: counts of workers; ``link_gbit_s``: 0 within one site. Figures are of its simulation at the asked
    rate: ``good_share`` of requests kept the objectives.
    """

    kind: Kind
    prefill_group: Group
    main_group: Group
    prefill: int
    relay: int
    main: int
    link_gbit_s: float
    cost_per_hour: float
    good_share: float
    good_per_s: float
    ttft_s: dict[str, float]
    relay_share: float
    link_use: float

    @property
    def num_chips(self) -> dict[str, int]:
        """By role and chip."""
        return {
            f"prefill ({self.prefill_group.chip.name})": self.prefill * self.prefill_group.num_chips,
            f"relay ({self.prefill_group.chip.name})": self.relay * self.prefill_group.num_chips,
            f"main ({self.main_group.chip.name})": self.main * self.main_group.num_chips,
        }

    @property
    def bcr(self) -> float:
        """Good requests per dollar."""
        return self.good_per_s * 3600 / self.cost_per_hour


@dataclass(frozen=True)
class Problem:
    """What a search is about. ``num_requests``: of each simulation."""

    model: PlanModel
    traffic: StatedHits
    objectives: Objectives
    prices: Prices
    efficiency: Efficiency
    sites: Sites = Sites()
    num_requests: int = 800
    seed: int = 0


def search(problem: Problem, kind: Kind, prefill_chip: PlanChip, main_chip: PlanChip) -> Plan | None:
    """The cheapest that a coordinate descent finds; None when no plan of this kind keeps the objectives."""
    what = means(problem.traffic)
    first = prefill_group(prefill_chip, problem.model, problem.efficiency, what)
    second = decode_group(main_chip, problem.model, problem.efficiency, what, problem.objectives.tpot_s)
    if second is None or first.cache_tokens == 0:
        return None
    rate = problem.traffic.rate_per_s
    line = 0.0
    if kind != "same_site":
        line = max(0.1, 2.0 * link_gbit_s(rate, what, problem.model.kv_bytes_per_token, with_cache=True))
    counts = (num_prefill(rate, first, what), 1 if kind == "pdd" else 0, num_decode(rate, second, what), line)
    best = _rate(problem, kind, first, second, *counts)
    tries = 1
    while best.good_share < problem.objectives.share and tries < _MOST_TRIES:  # up, by what helps most per dollar
        grown = [_rate(problem, kind, first, second, *more) for more in _more(best)]
        tries += len(grown)
        gains = [((plan.good_share - best.good_share) / (plan.cost_per_hour - best.cost_per_hour), plan) for plan in grown]
        _, plan = max(gains, key=lambda pair: pair[0])
        if max(plan.good_share for plan in grown) - best.good_share < _HOPELESS_GAIN:
            return None  # what is missed, no count mends: a prompt's own prefill, a row's own step, a single flow
        best = plan
    if best.good_share < problem.objectives.share:
        return None
    while tries < _MOST_TRIES:  # down, by what saves most
        smaller = [_rate(problem, kind, first, second, *less) for less in _less(best) if _stable(problem, kind, first, second, *less)]
        tries += len(smaller)
        kept = [plan for plan in smaller if plan.good_share >= problem.objectives.share]
        if not kept:
            break
        best = min(kept, key=lambda plan: plan.cost_per_hour)
    return best


def _stable(problem: Problem, kind: Kind, first: Group, second: Group, prefill: int, relay: int, main: int, line: float) -> bool:
    """Whether the mean load is below what each part does: a simulated run is too short to show a queue that grows for hours."""
    what = means(problem.traffic)
    rate = problem.traffic.rate_per_s
    if prefill < num_prefill(rate, first, what, use=_MOST_USE) or main < num_decode(rate, second, what, use=_MOST_USE):
        return False
    return kind == "same_site" or _MOST_USE * line >= link_gbit_s(rate, what, problem.model.kv_bytes_per_token, with_cache=True)


def _more(plan: Plan) -> list[tuple[int, int, int, float]]:
    p, r, m, line = plan.prefill, plan.relay, plan.main, plan.link_gbit_s
    found = [(p + max(1, p // 8), r, m, line), (p, r, m + max(1, m // 8), line)]
    if plan.kind == "pdd":
        found.append((p, r + 1, m, line))
    if plan.kind != "same_site":
        found.append((p, r, m, line * 1.5))
    return found


def _less(plan: Plan) -> list[tuple[int, int, int, float]]:
    p, r, m, line = plan.prefill, plan.relay, plan.main, plan.link_gbit_s
    found = [(p - step, r, m, line) for step in sorted({1, max(1, p // 8)})]
    found += [(p, r, m - step, line) for step in sorted({1, max(1, m // 8)})]
    found.append((p, r - 1, m, line))
    if plan.kind != "same_site":
        found.append((p, r, m, line / 1.25))
    least_relay = 1 if plan.kind == "pdd" else 0
    return [one for one in found if one[0] >= 1 and one[1] >= least_relay and one[2] >= 1]


def _rate(problem: Problem, kind: Kind, first: Group, second: Group, prefill: int, relay: int, main: int, line: float) -> Plan:
    """The plan, simulated."""
    traffic = problem.traffic.model_copy(update={"num_requests": problem.num_requests})
    spec = system_spec(problem, kind, first, second, prefill, relay, main, line)
    report, found = simulate(spec, traffic, problem.seed, problem.objectives.ttft_s, problem.objectives.tpot_s, num_samples=1)
    per_hour = problem.prices.per_chip_hour
    cost = (prefill + relay) * first.num_chips * per_hour[first.chip.name] + main * second.num_chips * per_hour[second.chip.name]
    share = report.good / report.ttft.num
    ttft, relay_share, use = found["ttft_s"], found["relay_share"], found["link_use"]
    assert isinstance(ttft, dict)
    assert isinstance(relay_share, float)
    assert isinstance(use, float)
    return Plan(
        kind=kind,
        prefill_group=first,
        main_group=second,
        prefill=prefill,
        relay=relay,
        main=main,
        link_gbit_s=line,
        cost_per_hour=cost + line * problem.prices.per_gbit_hour,
        good_share=share,
        good_per_s=share * problem.traffic.rate_per_s,
        ttft_s=ttft,
        relay_share=relay_share,
        link_use=use if kind != "same_site" else 0.0,
    )


def system_spec(
    problem: Problem, kind: Kind, first: Group, second: Group, prefill: int, relay: int, main: int, line_gbit_s: float
) -> SystemSpec:
    """The plan as the simulator takes it."""
    sites = problem.sites
    near = kind == "same_site"
    link = LinkSpec(
        rate_bytes_s=sites.local_bytes_s if near else line_gbit_s * 1e9 / 8,
        rtt_s=0.0 if near else sites.rtt_s,
        flow_bytes_s=None if near else sites.flow_bytes_s,
        schedule="shortest",
    )
    role = RoleSpec(prefill, first.cost, first.max_rows, max(1, first.cache_tokens), step_tokens=8192)
    return SystemSpec(
        prefill=role,
        relay=replace(role, count=relay, max_rows=32) if relay else None,
        main=RoleSpec(main, second.cost, second.max_rows, max(1, second.cache_tokens)),
        link=link,
        kv_bytes_per_token=problem.model.kv_bytes_per_token,
        local_bytes_s=sites.local_bytes_s,
        policy=PolicyConfig(ttft_target_s=_TARGET * problem.objectives.ttft_s),
        rule="pdd" if kind == "pdd" else "direct",
    )
