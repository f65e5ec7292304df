"""What buckets and scheduler make of prefix hits: no dips in computed tokens per second, by what steps cost, for any mix of prompts.

A step costs its padded tokens and, whatever their number, as much as 50 more: it reads 538 MB of weights at about 25 GB/s, in which two
cores compute that many of SmolLM2's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdd.bench.hits import Plan, below_line
from pdd.worker.scheduler import RowDemand, StepBudget, plan_step
from pddjax.buckets import Buckets, pick

STEP_TOKENS, STEP_COST = 512, 50
MIXES = 60


def curve(plan: Plan, padded: Callable[[int], int]) -> list[float]:
    """Computed tokens per cost, per hit rate."""
    values = []
    for rate in plan.rates:
        left = {f"p{i}": length - 1 - length * rate // 100 for i, length in enumerate(plan.lengths())}
        total, cost = sum(left.values()), 0
        while any(left.values()):
            demands = [RowDemand(name, i, count, False, 0) for i, (name, count) in enumerate(left.items()) if count]
            rows = plan_step(demands, StepBudget(STEP_TOKENS, len(left))).rows
            for row in rows:
                left[row.request_id] -= row.num_tokens
            cost += STEP_COST + padded(sum(row.num_tokens for row in rows))
        values.append(total / cost)
    return values


def mixes_that_dip(padded: Callable[[int], int]) -> list[int]:
    plans = [Plan((("jax", "float32"),), seed=seed) for seed in range(MIXES)]
    return [p.seed for p in plans if any(share is not None and share > p.dip for share in below_line(p.rates, curve(p, padded)))]


@pytest.mark.parametrize("exact", [False, True], ids=["buckets", "exact"])
def test_no_mix_of_prompts_has_a_dip(exact: bool) -> None:
    """``exact``: as in an engine without buckets, where only a small remainder that runs alone could make one."""
    buckets = Buckets.up_to(8, STEP_TOKENS).tokens
    assert mixes_that_dip((lambda size: size) if exact else (lambda size: pick(buckets, size))) == []


def test_sizes_that_grow_four_times_make_dips() -> None:
    assert len(mixes_that_dip(lambda size: pick((16, 64, 256, STEP_TOKENS), size))) > MIXES / 4
