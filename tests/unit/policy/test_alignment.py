"""How many requests may be local, how far main's cache is behind, and which transfers go on without their request."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.alignment import HitRates, HitWindow
from pdd.policy.completion import CompletionSnapshot, choose_completion, pressing
from pdd.policy.link import LinkSnapshot
from pdd.policy.local import LocalQuota
from pdd.policy_config import BackgroundConfig

CONFIG = BackgroundConfig()
IDLE = LinkSnapshot(goodput_bytes_s=5e6)
BASE = CompletionSnapshot(1000, 23_040_000, 0.1, 0, 0, IDLE, 0, 8, begun=True)


@given(wishes=st.lists(st.booleans(), max_size=400), window=st.integers(1, 50), share=st.floats(0, 1))
def test_of_any_window_of_requests_no_more_than_the_share_is_local(wishes: list[bool], window: int, share: float) -> None:
    quota = LocalQuota(share, window)
    decided = []
    for wish in wishes:
        decided.append(wish and quota.open)
        quota.record(decided[-1])
    for start in range(len(decided)):
        assert sum(decided[start : start + window]) <= share * window + 1e-6


def test_once_the_share_is_reached_none_is_local_until_half_is_free() -> None:
    quota = LocalQuota(0.4, 10)
    for _ in range(4):
        assert quota.open
        quota.record(True)
    assert quota.share == 0.4
    opened = []
    for _ in range(9):
        opened.append(quota.open)
        quota.record(False)
    assert opened == [False] * 8 + [True], "the second of the four has left"


def test_a_forced_request_counts_too() -> None:
    quota = LocalQuota(0.1, 10)
    quota.record(True)
    assert not quota.open


def test_rates_as_a_pair() -> None:
    hits = HitWindow(window=3, window_s=100.0)
    assert hits.rates(0.0) == HitRates(None, None, None, 0)
    hits.observe(1.0, 100, 90, 50)
    hits.observe(2.0, 100, None, 100)  # main held all of it: prefill was not asked, and is not behind
    rates = hits.rates(2.0)
    assert (rates.prefill, rates.main, rates.num_requests) == (0.95, 0.75, 2)
    assert rates.gap == pytest.approx(0.2)


def test_old_look_ups_are_forgotten_by_number_and_by_age() -> None:
    hits = HitWindow(window=2, window_s=10.0)
    for at in (0.0, 1.0, 2.0):
        hits.observe(at, 100, 100, 0 if at == 0.0 else 100)
    assert hits.rates(2.0).gap == 0.0
    assert hits.rates(11.5).num_requests == 1
    assert hits.rates(50.0).gap is None


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({}, {}, "valuable"),
        ({"gap": None}, {"min_gap": 0.5}, "valuable"),
        ({"gap": 0.1}, {"min_gap": 0.2}, "aligned"),
        ({"miss_tokens": 255}, {}, "too_short"),
        ({}, {"max_transfers": 0}, "off"),
        ({"num_running": 4}, {}, "too_many"),
        ({"num_bytes": 3, "running_bytes": 8}, {"max_bytes": 10}, "too_large"),
        ({"main_running": 8}, {}, "main_full"),
        ({"link": replace(IDLE, queued_bytes=40_000_000, num_transfers=2)}, {}, "link_busy"),
        ({"link": replace(IDLE, queued_bytes=25_000_000, num_transfers=2)}, {}, "valuable"),
        ({"begun": False, "link": replace(IDLE, queued_bytes=1, num_transfers=1)}, {}, "link_busy"),
        ({"begun": False, "num_running": 1, "link": replace(IDLE, queued_bytes=1, num_transfers=1)}, {}, "valuable"),
        ({"begun": False, "link": None}, {}, "valuable"),
    ],
)
def test_which_transfers_go_on(changes: dict[str, object], config: dict[str, object], reason: str) -> None:
    decision = choose_completion(replace(BASE, **changes), BackgroundConfig.model_validate(config))
    assert (decision.complete, decision.reason) == (reason == "valuable", reason)


@given(
    miss=st.integers(0, 10_000),
    num_bytes=st.integers(0, 10**10),
    gap=st.none() | st.floats(-1, 1),
    running=st.integers(0, 5),
    running_bytes=st.integers(0, 10**10),
    queued=st.integers(0, 10**11),
    more=st.integers(0, 10**11),
)
def test_more_traffic_never_lets_one_go_on_and_bounds_hold(
    miss: int, num_bytes: int, gap: float | None, running: int, running_bytes: int, queued: int, more: int
) -> None:
    quiet = CompletionSnapshot(miss, num_bytes, gap, running, running_bytes, replace(IDLE, queued_bytes=queued), 0, 8, begun=True)
    busy = replace(quiet, link=replace(IDLE, queued_bytes=queued + more))
    if choose_completion(busy, CONFIG).complete:
        assert choose_completion(quiet, CONFIG).complete
        assert pressing(busy, CONFIG) is None
        assert running < CONFIG.max_transfers
        assert running_bytes + num_bytes <= CONFIG.max_bytes
        assert miss >= CONFIG.min_tokens
