"""`pdd plan` behind its options: candidates of every kind, the best of each, what changes them, in words and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdd.plan.capacity import link_gbit_s
from pdd.plan.catalogue import PlanChip
from pdd.plan.demand import means
from pdd.plan.revenue import Earning, revenue_curve, valley
from pdd.plan.search import Kind, Plan, Problem, search

Json = dict[str, object]


@dataclass(frozen=True)
class Answer:
    """The best plan of each kind, None where none keeps the objectives · ``link_with_cache``, ``link_without``: Gbit/s that the mean load
    fills, with main's prefix cache and if whole prompts crossed · curves: revenue over hit rates on the PDD plan's chips.
    """

    plans: dict[Kind, Plan | None]
    link_with_cache: float
    link_without: float
    sensitivity: list[tuple[str, str, float | None, float | None]]
    joined: list[Earning]
    alone: list[Earning]


def answer(problem: Problem, chips: Sequence[PlanChip], told: Callable[[str], None]) -> Answer:
    """``chips``: that may be bought. Every pair of different ones is tried across sites, every one within a site."""
    plans = _plans(problem, chips, told)
    what = means(problem.traffic)
    rate, kv_bytes = problem.traffic.rate_per_s, problem.model.kv_bytes_per_token
    curves: dict[bool, list[Earning]] = {True: [], False: []}
    best = plans["pdd"]
    if best is not None:
        curves = {joined: revenue_curve(best, what, problem.prices, kv_bytes, 8192, joined) for joined in (True, False)}
    return Answer(
        plans=plans,
        link_with_cache=link_gbit_s(rate, what, kv_bytes, with_cache=True),
        link_without=link_gbit_s(rate, what, kv_bytes, with_cache=False),
        sensitivity=_sensitivity(problem, plans, told),
        joined=curves[True],
        alone=curves[False],
    )


def _plans(problem: Problem, chips: Sequence[PlanChip], told: Callable[[str], None]) -> dict[Kind, Plan | None]:
    candidates: dict[Kind, list[tuple[PlanChip, PlanChip]]] = {
        "same_site": [(one, one) for one in chips],
        "cross_site": [(a, b) for a in chips for b in chips if a != b],
        "pdd": [(a, b) for a in chips for b in chips if a != b],
    }
    found: dict[Kind, Plan | None] = {}
    for kind, pairs in candidates.items():
        plans = []
        for a, b in pairs:
            told(f"{kind}: {a.name} and {b.name}")
            plan = search(problem, kind, a, b)
            if plan is not None:
                plans.append(plan)
        found[kind] = max(plans, key=lambda plan: plan.bcr, default=None)
    return found


def _sensitivity(
    problem: Problem, plans: dict[Kind, Plan | None], told: Callable[[str], None]
) -> list[tuple[str, str, float | None, float | None]]:
    """(what, value, BCR of PDD over the best same-site plan, over the cross-site one). Prices change the same plans' cost; another hit
    rate needs plans of its own, of the same chips.
    """
    rows: list[tuple[str, str, float | None, float | None]] = [("as asked", "", _over(plans, "same_site"), _over(plans, "cross_site"))]
    pdd = plans["pdd"]
    if pdd is None:
        return rows
    main = pdd.main_group.chip.name
    for factor in (0.8, 1.25):
        priced = {kind: _priced(plan, main, factor, 1.0, problem) for kind, plan in plans.items()}
        rows.append((f"price of {main}", f"x {factor:g}", _over(priced, "same_site"), _over(priced, "cross_site")))
    for factor in (0.1, 10.0):
        priced = {kind: _priced(plan, main, 1.0, factor, problem) for kind, plan in plans.items()}
        rows.append(("price of the line", f"x {factor:g}", _over(priced, "same_site"), _over(priced, "cross_site")))
    for hit in sorted({max(0.0, problem.traffic.mean_hit - 0.1), min(0.99, problem.traffic.mean_hit + 0.05)}):
        high = min(problem.traffic.high_share, hit / problem.traffic.high_hit)
        other = replace(problem, traffic=problem.traffic.model_copy(update={"mean_hit": hit, "high_share": round(high, 4)}))
        told(f"mean hit rate of {hit:.0%}")
        again = {
            kind: None if plan is None else search(other, kind, plan.prefill_group.chip, plan.main_group.chip)
            for kind, plan in plans.items()
        }
        rows.append(("mean hit rate", f"{hit:.0%}", _over(again, "same_site"), _over(again, "cross_site")))
    return rows


def _over(plans: dict[Kind, Plan | None], other: Kind) -> float | None:
    pdd, against = plans["pdd"], plans[other]
    return None if pdd is None or against is None else pdd.bcr / against.bcr


def _priced(plan: Plan | None, chip: str, chip_factor: float, line_factor: float, problem: Problem) -> Plan | None:
    if plan is None:
        return None
    more = plan.link_gbit_s * problem.prices.per_gbit_hour * (line_factor - 1)
    for group, count in ((plan.prefill_group, plan.prefill + plan.relay), (plan.main_group, plan.main)):
        if group.chip.name == chip:
            more += count * group.num_chips * problem.prices.per_chip_hour[chip] * (chip_factor - 1)
    return replace(plan, cost_per_hour=plan.cost_per_hour + more)


def words(problem: Problem, found: Answer) -> list[str]:
    """The answer in sentences."""
    lines = []
    names = {"same_site": "Within one site, one family of chips", "cross_site": "Across sites without a relay", "pdd": "PDD"}
    for kind, plan in found.plans.items():
        if plan is None:
            lines.append(f"{names[kind]}: no set of the given chips keeps the objectives.")
            continue
        chips = ", ".join(f"{count} {role}" for role, count in plan.num_chips.items() if count)
        line = f", a line of {plan.link_gbit_s:.1f} Gbit/s used to {plan.link_use:.0%}" if plan.link_gbit_s else ""
        ttft = " / ".join(f"{plan.ttft_s[p]:.2f}" for p in ("p50", "p90", "p99"))
        lines.append(
            f"{names[kind]}: {chips}{line}; ${plan.cost_per_hour:,.0f} an hour, {plan.bcr:.1f} good requests per dollar,"
            f" {plan.good_share:.1%} good, TTFT {ttft} s."
        )
    for other, text in (("same_site", "the best plan within one site"), ("cross_site", "the split without a relay")):
        gain = _over(found.plans, other)  # type: ignore[arg-type]
        if gain is not None:
            lines.append(f"PDD gives {gain:.2f} times the good requests per dollar of {text}.")
    lines.append(
        f"On average main's cache lets {found.link_with_cache:.1f} Gbit/s cross; without it {found.link_without:.1f} Gbit/s would."
    )
    for curve, text in (
        (found.alone, "Where tails of prompts run alone"),
        (found.joined, "Where they are joined, as PDD's scheduler does"),
    ):
        low = valley(curve) if curve else None
        if low is not None:
            top = max(curve, key=lambda e: e.dollars_per_hour)
            lines.append(
                f"{text}, revenue is lowest at a hit rate of {low.hit_rate:.0%}: ${low.dollars_per_hour:,.0f} an hour, limited by"
                f" {low.limit}, against ${top.dollars_per_hour:,.0f} at {top.hit_rate:.0%}."
            )
        elif curve:
            lines.append(f"{text}, revenue has no valley.")
    lines.append("A larger prefix cache moves the load out of the valley to the right; joining tails makes it shallower.")
    return lines


def to_json(problem: Problem, found: Answer) -> Json:
    """Everything that was found, with what it was asked of."""

    def plan(one: Plan | None) -> Json | None:
        if one is None:
            return None
        return {
            "chips": one.num_chips,
            "workers": {"prefill": one.prefill, "relay": one.relay, "main": one.main},
            "link_gbit_s": one.link_gbit_s,
            "cost_per_hour": one.cost_per_hour,
            "good_share": one.good_share,
            "good_requests_per_dollar": one.bcr,
            "ttft_s": one.ttft_s,
            "relay_share": one.relay_share,
            "link_use": one.link_use,
        }

    def curve(earnings: list[Earning]) -> list[Json]:
        return [
            {"hit_rate": e.hit_rate, "dollars_per_hour": e.dollars_per_hour, "requests_per_s": e.requests_per_s, "limit": e.limit}
            for e in earnings
        ]

    return {
        "model": problem.model.name,
        "rate_per_s": problem.traffic.rate_per_s,
        "prices_per_chip_hour": problem.prices.per_chip_hour,
        "plans": {kind: plan(one) for kind, one in found.plans.items()},
        "link_gbit_s_with_cache": found.link_with_cache,
        "link_gbit_s_without_cache": found.link_without,
        "sensitivity": [dict(zip(("what", "value", "over_same_site", "over_cross_site"), row, strict=True)) for row in found.sensitivity],
        "revenue": {"tails_joined": curve(found.joined), "tails_alone": curve(found.alone)},
    }
