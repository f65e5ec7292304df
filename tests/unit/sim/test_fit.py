"""Costs fitted to runs, and simulated figures beside measured ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.bench.mix import SkewedMix, skewed
from pdd.sim.against import errors
from pdd.sim.costs import EngineCost
from pdd.sim.fit import DecodeRun, PrefillRun, fit_cost
from pdd.sim.run import simulate
from pdd.sim.workload import Skewed
from tests.unit.sim.test_simulate import SPEC

_POSITIVE = st.floats(1e-6, 1e-2)


@settings(max_examples=60, deadline=None)
@given(_POSITIVE, _POSITIVE, st.floats(1e-9, 1e-6), _POSITIVE, _POSITIVE, st.floats(1e-9, 1e-6))
def test_a_fit_finds_the_costs_that_made_the_runs(base: float, token: float, pair: float, step: float, row: float, context: float) -> None:
    made = EngineCost(base, token, pair, step, row, context, token)
    prefills = [PrefillRun(n, made.prefill(n, 0)) for n in (10, 100, 700, 2000)]
    decodes = [DecodeRun(n, k, made.step(n, n * k)) for n, k in ((1, 100), (4, 100), (16, 100), (1, 3000), (8, 3000))]
    found = fit_cost(prefills, decodes)
    for n in (50, 1500):
        assert found.prefill(n, 0) == pytest.approx(made.prefill(n, 0), rel=1e-3)
    assert found.step(6, 6 * 900) == pytest.approx(made.step(6, 6 * 900), rel=1e-3)


def test_a_fit_has_no_negative_part() -> None:
    prefills = [PrefillRun(n, 0.01 * n**0.5) for n in (10, 100, 700, 2000)]  # concave: a square term would be below 0
    decodes = [DecodeRun(n, k, 0.01 / n) for n, k in ((1, 10), (2, 10), (4, 10), (4, 900))]
    found = fit_cost(prefills, decodes)
    assert min(found.prefill_s, found.prefill_token_s, found.prefill_pair_s, found.step_s, found.row_s, found.context_s) >= 0
    with pytest.raises(ValueError, match="at least 3"):
        fit_cost(prefills[:2], decodes)


def test_the_simulated_mix_is_the_live_one_request_by_request() -> None:
    mix = skewed(SkewedMix(40, 0.5), 300, 9)
    report, found = simulate(SPEC, Skewed(kind="skewed", num_requests=40, rate_per_s=0.5, vocab_size=300), 9)
    assert report.ttft.num == 40
    assert report.prompt_tokens == sum(len(request.prompt_ids) for request in mix.requests)
    assert report.relay_tokens + report.main_tokens == sum(request.output_tokens for request in mix.requests)
    assert report.main_hit == sum(request.hit_tokens for request in mix.requests)
    assert isinstance(found["simulated_s"], float)
    assert found["simulated_s"] > mix.duration_s


def test_how_far_off_a_figure_is() -> None:
    live = {"pdd": {"ttft_s": {"p50": 2.0, "p90": 4.0}, "e2e_s": {"p50": 8.0}, "tokens_per_s": 50.0}}
    sim = {"pdd": {"ttft_s": {"p50": 2.2, "p90": 3.0}, "e2e_s": {"p50": 8.0}, "output_tokens_per_s": 55.0}, "same_site": {}}
    assert [round(error.off, 6) for error in errors(sim, live)] == [0.1, -0.25, 0.0, 0.1]
    with pytest.raises(KeyError, match="no mode"):
        errors({"a": {}}, live)
