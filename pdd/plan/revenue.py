"""What a given set of chips earns at each hit rate: input that hits a cache is sold cheap, so more hits may mean less money per hour.

Two schedules of the end of a prompt are compared: tails that run alone take a whole step, however few tokens they have; tails that are
joined with other requests' take their share of one. PDD's scheduler joins them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdd.plan.demand import Means, Prices
from pdd.plan.search import Plan


@dataclass(frozen=True)
class Earning:
    """Per hour at one hit rate: requests and dollars that the chips allow, and which of them is the limit."""

    hit_rate: float
    requests_per_s: float
    dollars_per_hour: float
    limit: str


def revenue_curve(plan: Plan, what: Means, prices: Prices, kv_bytes_per_token: float, step_tokens: int, joined: bool) -> list[Earning]:
    """From 0 to 99 %, in steps of 1 %. ``step_tokens``: of a prefill step. Chips are those of ``plan``, whatever the hit rate."""
    return [_earning(plan, what, prices, kv_bytes_per_token, step_tokens, joined, percent / 100) for percent in range(100)]


def _earning(plan: Plan, what: Means, prices: Prices, kv_bytes: float, step_tokens: int, joined: bool, hit: float) -> Earning:
    miss = what.prompt * (1 - hit)
    first, second = plan.prefill_group, plan.main_group
    computed = miss if joined else step_tokens * math.ceil(miss / step_tokens)
    rates = {
        "prefill": plan.prefill / first.cost.prefill(math.ceil(computed), round(what.prompt - miss)),
        "main": plan.main * second.max_rows / second.cost.step(second.max_rows, second.max_rows * what.context) / what.output,
    }
    if plan.link_gbit_s:
        rates["link"] = plan.link_gbit_s * 1e9 / 8 / (miss * kv_bytes)
    limit = min(rates, key=lambda name: rates[name])
    rate = rates[limit]
    input_dollars = prices.input_per_million / 1e6 * (miss + (what.prompt - miss) * prices.cached_share)
    return Earning(hit, rate, rate * 3600 * (input_dollars + what.output * prices.output_per_million / 1e6), limit)


def valley(curve: list[Earning]) -> Earning | None:
    """The lowest point that has a higher one on either side; None when the curve has no valley."""
    best: tuple[float, Earning] | None = None
    for index in range(1, len(curve) - 1):
        rim = min(max(e.dollars_per_hour for e in curve[:index]), max(e.dollars_per_hour for e in curve[index + 1 :]))
        depth = rim - curve[index].dollars_per_hour
        if depth > 0 and (best is None or depth > best[0]):
            best = depth, curve[index]
    return None if best is None else best[1]
