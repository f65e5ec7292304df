"""Who goes on after a loss."""

from __future__ import annotations

import itertools

import pytest

from pdd.policy.failover import FailoverSnapshot, plan_failover


@pytest.mark.parametrize(
    ("main", "relay", "prefill", "main_died", "source", "recompute"),
    [
        ("awaiting", "none", True, False, "main", False),  # the relay died: main's KV is on its way
        ("ready", "none", False, False, "main", False),
        ("awaiting", "none", False, False, "nobody", True),  # prefill died in direct
        ("awaiting", "awaiting", False, False, "nobody", True),  # prefill died before the relay had its KV
        ("awaiting", "ready", False, False, "relay", True),  # ... after: the relay feeds the user, main computes
        ("none", "ready", False, True, "relay", False),  # main died: the relay just goes on
        ("none", "awaiting", True, True, "relay", False),
        ("none", "ready", True, False, "relay", True),  # only the transfer to main failed
        ("none", "none", False, True, "nobody", True),
        ("ready", "ready", False, False, "relay", False),  # nothing of use was lost
    ],
)
def test_failover(main: str, relay: str, prefill: bool, main_died: bool, source: str, recompute: bool) -> None:
    plan = plan_failover(FailoverSnapshot(main, relay, prefill), main_died)
    assert (plan.source, plan.recompute) == (source, recompute)


def test_nobody_is_named_a_source_that_cannot_get_its_kv() -> None:
    for main, relay, prefill, died in itertools.product(*[("none", "awaiting", "ready")] * 2, *[(True, False)] * 2):
        plan = plan_failover(FailoverSnapshot(main, relay, prefill), died)
        state = {"main": main, "relay": relay, "nobody": "ready"}[plan.source]
        assert state == "ready" or (state == "awaiting" and prefill)
        assert plan.recompute == (plan.source == "nobody") or plan.source == "relay"
