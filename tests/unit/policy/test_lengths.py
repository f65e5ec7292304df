"""Output lengths per tenant: quantiles that are never too short, answers that were cut, bounded memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.estimates import Lateness, Ratio, Spread
from pdd.policy.lengths import LengthEstimator, LengthHistogram, LengthPrediction


def estimator(**changes: int | float) -> LengthEstimator:
    given: dict[str, int | float] = {"quantile": 0.9, "min_samples": 20, "half_life": 200, "max_tenants": 4, **changes}
    return LengthEstimator(given["quantile"], int(given["min_samples"]), int(given["half_life"]), int(given["max_tenants"]))


@given(lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=60), share=st.floats(0.05, 0.95))
def test_a_quantile_is_not_below_the_samples_and_at_most_a_fifth_above(lengths: list[int], share: float) -> None:
    histogram = LengthHistogram(half_life=10**9)
    for length in lengths:
        histogram.observe(length, cut=False)
    found = histogram.quantile(share)
    ordered = sorted(lengths)
    exact = next(value for index, value in enumerate(ordered, 1) if index / len(ordered) >= share - 1e-9)
    assert found is not None
    assert exact <= found <= exact * 2**0.25 + 1


def test_answers_that_were_cut_do_not_shorten_what_is_expected() -> None:
    """Half of the answers have 100 tokens, half were cut at 10: those say only that they would have had 10 or more."""
    histogram = LengthHistogram(half_life=10**9)
    for _ in range(50):
        histogram.observe(100, cut=False)
        histogram.observe(10, cut=True)
    assert histogram.quantile(0.1) == histogram.quantile(0.9) == 107
    only_cut = LengthHistogram(half_life=10**9)
    only_cut.observe(10, cut=True)
    assert only_cut.quantile(0.5) is None


def test_a_tenant_that_is_not_known_counts_as_all_and_nobody_known_as_the_limit() -> None:
    lengths = estimator()
    assert lengths.predict("a", 500) == LengthPrediction(500, 500)
    for _ in range(20):
        lengths.observe("a", 10, cut=False)
    assert lengths.predict("a", 500) == LengthPrediction(11, 11)
    assert lengths.predict("new", 500) == LengthPrediction(11, 11)
    assert lengths.predict("a", 4) == LengthPrediction(4, 4)
    for _ in range(20):
        lengths.observe("b", 400, cut=False)
    assert lengths.predict("a", 500).high_tokens == 11
    assert lengths.predict("b", 1000).high_tokens >= 400


def test_habits_change() -> None:
    lengths = estimator(half_life=20)
    for _ in range(100):
        lengths.observe("a", 1000, cut=False)
    for _ in range(100):
        lengths.observe("a", 10, cut=False)
    assert lengths.predict("a", 5000).high_tokens == 11


def test_memory_is_bounded_and_the_latest_tenants_stay() -> None:
    lengths = estimator(min_samples=1)
    for number in range(1000):
        lengths.observe(f"t{number}", 1 + number % 7, cut=False)
        lengths.observe("always", 50, cut=False)
    assert lengths.num_tenants == 4
    assert lengths.predict("always", 1000).high_tokens >= 50


def test_weights_stay_finite_over_many_samples() -> None:
    histogram = LengthHistogram(half_life=1)
    draw = random.Random(1)
    for _ in range(5000):
        histogram.observe(draw.randrange(1, 200), cut=draw.random() < 0.3)
    assert histogram.quantile(0.5) is None or 1 <= (histogram.quantile(0.5) or 0) < 256


def test_a_ratio_forgets_and_ignores_nothing() -> None:
    pace = Ratio(half_life=100)
    assert pace.value is None
    pace.observe(5.0, 0)
    assert pace.value is None
    pace.observe(1.0, 10)
    assert pace.value == pytest.approx(0.1)
    for _ in range(100):
        pace.observe(2.0, 10)
    assert pace.value == pytest.approx(0.2, rel=0.01)


def test_lateness_follows_the_latest_and_fades_without_news() -> None:
    late = Lateness(half_life_s=10.0, most_s=5.0)
    assert late.value_s(100.0) == 0.0
    for _ in range(30):
        late.observe(100.0, 2.0)
    assert late.value_s(100.0) == pytest.approx(2.0, abs=0.01)
    assert late.value_s(120.0) == pytest.approx(0.5, abs=0.01)
    for _ in range(30):
        late.observe(120.0, -3.0)
    assert late.value_s(120.0) == 0.0, "sooner than predicted is no reason to predict less"
    for _ in range(30):
        late.observe(120.0, 100.0)
    assert late.value_s(120.0) == 5.0
    never = Lateness(half_life_s=10.0, most_s=0.0)
    never.observe(0.0, 9.0)
    assert never.value_s(0.0) == 0.0


def test_a_spread_has_its_quantiles_within_two_percent_and_forgets() -> None:
    spread = Spread(half_life=100)
    assert spread.quantile_s(0.5) is None
    for number in range(1, 101):
        spread.observe(number / 100)
    assert spread.quantile_s(1.0) == pytest.approx(1.0, rel=0.025)
    assert 0.5 < (spread.quantile_s(0.5) or 0.0) < 0.65, "later ones weigh more"
    for _ in range(150):
        spread.observe(0.01)
    assert spread.quantile_s(0.6) == pytest.approx(0.01, rel=0.025)
    for _ in range(5000):
        spread.observe(250.0)
    assert (spread.quantile_s(0.01) or 0.0) > 90, "beyond the last bucket is in it"
