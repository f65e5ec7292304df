"""Goodput from completed transfers."""

from __future__ import annotations

import pytest

from pdd.serving.link_estimate import LinkEstimate, TransferSample

ROUTE = ("a", "b")


def transfer(
    num_bytes: float, seconds: float, *, prefilled_s: float | None = None, last_chunk: float = 0, rtt_s: float = 0.0
) -> TransferSample:
    return TransferSample(
        int(num_bytes), 100.0, None if prefilled_s is None else 100.0 + prefilled_s, 100.0 + seconds, int(last_chunk), rtt_s
    )


def test_unknown_until_declared_or_measured() -> None:
    links = LinkEstimate({("b", "a"): 9.0})
    assert links.goodput_bytes_s(ROUTE) is None
    assert links.goodput_bytes_s(("b", "a")) == 9.0
    links.observe(ROUTE, transfer(0, 1.0))
    assert links.goodput_bytes_s(ROUTE) is None
    links.observe(ROUTE, transfer(5e6, 1.0))
    assert links.goodput_bytes_s(ROUTE) == pytest.approx(5e6)
    assert links.goodput_bytes_s(("b", "a")) == 9.0


def test_link_bound_transfers_give_the_rate_whatever_prefill_did() -> None:
    links = LinkEstimate({})
    links.observe(ROUTE, transfer(23e6, 4.63, prefilled_s=1.5, last_chunk=3e6, rtt_s=0.03))
    assert links.goodput_bytes_s(ROUTE) == pytest.approx(5e6, rel=0.01)


def test_a_fast_link_behind_a_slow_prefill_is_seen_as_fast() -> None:
    """23 MB in 2 s of prefill and 20 ms of tail: the last 3 MB took 20 ms."""
    links = LinkEstimate({})
    links.observe(ROUTE, transfer(23e6, 2.02, prefilled_s=2.0, last_chunk=3e6))
    assert links.goodput_bytes_s(ROUTE) == pytest.approx(150e6, rel=0.01)


def test_a_wrong_declaration_is_corrected_by_one_long_transfer_not_by_a_tiny_one() -> None:
    links = LinkEstimate({ROUTE: 5e6})
    links.observe(ROUTE, transfer(2e3, 0.05))
    assert links.goodput_bytes_s(ROUTE) == pytest.approx(5e6, rel=0.1)
    links.observe(ROUTE, transfer(20e6, 20.0))
    assert links.goodput_bytes_s(ROUTE) < 1.3e6


def test_an_improving_link_is_followed() -> None:
    links = LinkEstimate({})
    for _ in range(5):
        links.observe(ROUTE, transfer(5e6, 5.0))
    for _ in range(30):
        links.observe(ROUTE, transfer(5e6, 1.0))
    assert links.goodput_bytes_s(ROUTE) > 3.5e6


def test_events_out_of_order_and_zero_times_stay_finite() -> None:
    links = LinkEstimate({})
    links.observe(ROUTE, transfer(1e6, 0.0, prefilled_s=0.5, last_chunk=2e6, rtt_s=1.0))
    assert 0 < links.goodput_bytes_s(ROUTE) <= 1e9
