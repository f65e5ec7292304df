"""How many workers a load needs, by the costs alone: where a search begins, and what a hit rate does to a given set of chips."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdd.plan.catalogue import PlanChip, PlanModel
from pdd.plan.demand import Means
from pdd.plan.roofline import Efficiency, chips_needed, engine_cost, kv_tokens
from pdd.sim.costs import EngineCost

# Above these shares of their time, queues grow longer than objectives allow; a search may go beyond and sees for itself.
_PREFILL_USE, _DECODE_USE = 0.7, 0.85


@dataclass(frozen=True)
class Group:
    """One worker: ``num_chips`` of ``chip``, ``max_rows`` at a time."""

    chip: PlanChip
    num_chips: int
    cost: EngineCost
    max_rows: int
    cache_tokens: int


def prefill_group(chip: PlanChip, model: PlanModel, efficiency: Efficiency, means: Means) -> Group:
    """The smallest that holds the model and a prompt."""
    num = chips_needed(chip, model, efficiency, math.ceil(means.prompt + means.output))
    return Group(chip, num, engine_cost(chip, num, model, efficiency), 8, kv_tokens(chip, num, model, efficiency))


def decode_group(chip: PlanChip, model: PlanModel, efficiency: Efficiency, means: Means, tpot_s: float) -> Group | None:
    """The one with the most rows per chip whose step, with all rows in use, keeps ``tpot_s``; None when no size up to 64 chips does."""
    best: Group | None = None
    num = chips_needed(chip, model, efficiency, math.ceil(means.prompt + means.output))
    while num <= 64:
        cost = engine_cost(chip, num, model, efficiency)
        room = kv_tokens(chip, num, model, efficiency)
        per_row_s = cost.row_s + cost.context_s * means.context
        rows = min(int(room / (means.prompt + means.output)), int((tpot_s - cost.step_s) / per_row_s), 512)
        if rows >= 1 and (best is None or rows / num > best.max_rows / best.num_chips):
            best = Group(chip, num, cost, rows, room)
        num *= 2
    return best


def num_prefill(rate_per_s: float, group: Group, means: Means, use: float = _PREFILL_USE) -> int:
    """Workers that the mean load keeps busy for ``use`` of their time at most."""
    busy = rate_per_s * group.cost.prefill(round(means.miss), round(means.prompt - means.miss))
    return max(1, math.ceil(busy / use))


def num_decode(rate_per_s: float, group: Group, means: Means, use: float = _DECODE_USE) -> int:
    """Workers of whose rows the mean load takes ``use`` at most."""
    step_s = group.cost.step(group.max_rows, group.max_rows * means.context)
    rows = rate_per_s * means.output * step_s
    return max(1, math.ceil(rows / (use * group.max_rows)))


def link_gbit_s(rate_per_s: float, means: Means, kv_bytes_per_token: float, with_cache: bool) -> float:
    """That the mean load fills: with main's cache only what it misses crosses, without it whole prompts do."""
    tokens = means.miss if with_cache else means.prompt
    return rate_per_s * tokens * kv_bytes_per_token * 8 / 1e9
