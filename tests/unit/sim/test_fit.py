"""Costs fitted to runs, and simulated figures beside measured ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.bench.mix import SkewedMix, skewed
from pdd.sim.against import Figures, errors, live_figures
from pdd.sim.costs import EngineCost
from pdd.sim.fit import (
    BesideRun,
    DecodeRun,
    ExtendRun,
    FarRun,
    LinkRun,
    Measured,
    PrefillRun,
    first_overhead,
    fit_beside,
    fit_busy_link,
    fit_decode,
    fit_extend,
    fit_far,
    fit_hit,
    fit_jitter,
    fit_link_overhead,
    fit_prefill,
    fit_slowdown,
    fit_steps,
    fit_waits,
)
from pdd.sim.run import simulate
from pdd.sim.workload import Skewed
from tests.unit.sim.test_simulate import SPEC

_POSITIVE = st.floats(1e-6, 1e-2)


@settings(max_examples=60, deadline=None)
@given(_POSITIVE, _POSITIVE, st.floats(1e-9, 1e-6), _POSITIVE, _POSITIVE, st.floats(1e-9, 1e-6))
def test_a_fit_finds_the_costs_that_made_the_runs(base: float, token: float, pair: float, step: float, row: float, context: float) -> None:
    made = EngineCost(base, token, pair, step, row, context, token)
    prefills = [PrefillRun(n, made.prefill(n, 0, 256)) for n in (10, 100, 700, 2000)]
    decodes = [DecodeRun("main", n, k, made.step(n, n * k), ("main",)) for n, k in ((1, 100), (4, 100), (16, 100), (1, 3000), (8, 3000))]
    found = EngineCost(*fit_prefill(prefills, 256), *fit_decode(decodes), token)
    for n in (50, 300, 1500):
        assert found.prefill(n, 0, 256) == pytest.approx(made.prefill(n, 0, 256), rel=1e-3)
    assert found.step(6, 6 * 900) == pytest.approx(made.step(6, 6 * 900), rel=1e-3)


def test_a_fit_has_no_negative_part() -> None:
    prefills = [PrefillRun(n, 0.01 * n**0.5) for n in (10, 100, 700, 2000)]  # concave: a square term would be below 0
    decodes = [DecodeRun("main", n, k, 0.01 / n, ("main",)) for n, k in ((1, 10), (2, 10), (4, 10), (4, 900))]
    assert min(*fit_prefill(prefills, 256), *fit_decode(decodes)) >= 0
    with pytest.raises(ValueError, match="at least 3"):
        fit_prefill(prefills[:2], 256)
    assert fit_extend([ExtendRun(8, 0.2), ExtendRun(8, 0.3), ExtendRun(108, 1.2), ExtendRun(108, 1.3)]) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="two lengths"):
        fit_extend([ExtendRun(8, 0.2)])


def test_stairs_of_an_engine_that_pads_its_steps_are_found_and_gone_up() -> None:
    """Steps of 100, 200 or 400 tokens, whatever is asked; attention beside them."""
    pair_s = 3e-7

    def made(tokens: int) -> float:
        full, last = divmod(tokens - 1, 400)
        stairs_s = sum(next(size for size in (100, 200, 400) if size >= part) * 1e-3 for part in (*[400] * full, last + 1))
        return 0.02 * (full + 1) + stairs_s + pair_s * tokens**2 / 2

    lengths = (50, 100, 101, 150, 200, 201, 300, 400, 800, 1600)
    runs = [PrefillRun(tokens, made(tokens) * noise) for tokens in lengths for noise in (0.97, 1.0, 1.03)]
    steps, found_pair_s = fit_steps(runs, 400)
    assert found_pair_s == pytest.approx(pair_s)
    cost = EngineCost(9.0, 9.0, found_pair_s, 0.0, 0.0, 0.0, 0.0, steps)  # the line is not asked
    for tokens in (20, 70, 170, 350, 401, 700, 1250):
        assert cost.prefill(tokens, 0, 400) == pytest.approx(made(tokens))
    assert cost.prefill(150, 1000, 400) == pytest.approx(made(150) + pair_s * 150 * 1000)
    assert cost.prefill(0, 1000, 400) == 0
    assert fit_steps([run for run in runs if run.tokens != 400], 400) == ((), 0.0)
    with pytest.raises(ValueError, match="several steps"):
        fit_steps([run for run in runs if run.tokens <= 400], 400)
    with pytest.raises(ValueError, match="ascending"):
        EngineCost(9.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0, ((200, 0.1), (100, 0.2)))


def test_how_much_steps_vary_is_found_again() -> None:
    rng = np.random.default_rng(1)
    prefills = [PrefillRun(tokens, tokens * 1e-3 * float(np.exp(rng.normal(0, 0.08)))) for tokens in range(10, 110) for _ in range(9)]
    assert fit_jitter(Measured(prefills=prefills)) == pytest.approx(0.08, rel=0.15)
    assert fit_jitter(Measured(prefills=prefills[::9])) == 0


_PREFILL = EngineCost(0.03, 1e-3, 1e-7, 0.03, 0.0, 0.0, 1e-3)
_MAIN = EngineCost(0.03, 1e-3, 1e-7, 0.04, 0.002, 1e-6, 1e-3)


def _beside(times: float, reserve: float, arrive: float) -> BesideRun:
    """Beside two rows of main: prefill takes ``times`` as long, main answers after ``reserve`` steps and samples after ``arrive``."""
    step_s = _MAIN.step(2, 500)
    short_s, long_s = (reserve * step_s + times * _PREFILL.prefill(tokens, 0, 256) for tokens in (32, 512))
    return BesideRun("main", ("prefill", "main"), step_s, 32, short_s, 512, long_s, (arrive * step_s + 0.01, arrive * step_s + 0.01))


def test_what_engines_do_to_each_other_is_the_median_of_what_was_measured() -> None:
    step_s = _MAIN.step(2, 500)
    measured = Measured(
        prefills_beside=[_beside(times, 1.5, 2.5) for times in (1.9, 2.0, 3.5)],
        decodes_beside=[DecodeRun("main", 2, 250, step_s * 1.2, ("prefill", "main"))],
        decodes=[
            DecodeRun("main", 2, 250, step_s, ("main",)),
            DecodeRun("main", 2, 250, step_s * 0.9, ("relay", "main")),  # never faster than alone
        ],
    )
    costs = {"prefill": _PREFILL, "main": _MAIN}
    found = fit_slowdown(measured, costs, 256)
    assert found[("prefill", "main")] == pytest.approx({"prefill": 2.0, "main": 1.2})
    assert found[("relay", "main")] == {"main": 1.0}
    assert ("main",) not in found
    assert fit_waits(measured, costs, 256, {"main": 0.01}) == pytest.approx((1.5, 2.5))


def test_what_tokens_over_the_link_cost_is_found_again() -> None:
    """1.1 times main's steps, a fifth more of prefill beside main, which alone makes it 1.8 times; 0.04 s of a transfer beside all else."""
    step_s = 1.1 * _MAIN.step(4, 1000)
    prefill = PrefillRun(512, 1.5 * step_s + (1.8 + 0.2) * _PREFILL.prefill(512, 0, 256))
    link = LinkRun(32, 0.2, 0.2 + 0.1 + 0.03 + 0.01 + 2.5 * step_s + 0.04, 1_000_000, 500_000)
    measured = Measured(far=[FarRun(4, 250, step_s, prefill, link)])
    costs = {"prefill": _PREFILL, "main": _MAIN}
    assert fit_far(measured, costs, 256, 1.8, 1.5) == pytest.approx({"prefill": 1.2, "main": 1.1})
    assert fit_busy_link(measured, 0.01, 2.5, 0.03, 5e6) == pytest.approx(0.04)


def test_what_a_known_beginning_costs_is_what_steps_do_not() -> None:
    """On a machine that is slower for half of the pairs."""
    kinds = [(tokens, known, slower) for tokens in (32, 128) for known in (500, 1500) for slower in (0.0, 0.1)]
    hits = [PrefillRun(tokens, _PREFILL.prefill(tokens, known, 256) + 0.03 + slower, known) for tokens, known, slower in kinds]
    twins = [PrefillRun(tokens, _PREFILL.prefill(tokens, 0, 256) + slower) for tokens, _, slower in kinds]
    assert fit_hit(Measured(hits=hits, hit_twins=twins), _PREFILL) == pytest.approx(0.03)


def test_what_a_transfer_costs_is_found_again() -> None:
    """Made of the costs: prefill's first step alone, what follows 1.5 times as long; 0.7 coded; 0.03 s of round trip and 0.02 s beside."""
    rate, stored = 5e6, 23_040

    def run(tokens: int) -> LinkRun:
        first_s = _PREFILL.prefill(min(256, tokens), 0, 256)
        prefill_s = 0.03 + first_s + 1.5 * (_PREFILL.prefill(tokens, 0, 256) - first_s)
        coded = round(tokens * stored * 0.7)
        return LinkRun(tokens, prefill_s, prefill_s + coded / rate + 0.03 + 0.02 + _MAIN.step(1, tokens) + 0.01, tokens * stored, coded)

    measured = Measured(
        links=[run(128), run(1024)],
        beside_link=[DecodeRun("main", 1, 250, 1.1 * _MAIN.step(1, 250), ("link",))],
        pushes=[PrefillRun(tokens, 0.03 + 1.3 * _PREFILL.prefill(tokens, 0, 256)) for tokens in (128, 1024, 128)],
    )
    beside = fit_beside(measured, {"prefill": _PREFILL, "main": _MAIN}, 256, 0.03)
    assert beside["link"] == pytest.approx({"prefill": 1.5, "main": 1.1})
    assert beside["push"] == pytest.approx({"prefill": 1.3})
    share, link_s = fit_link_overhead(measured, _MAIN, 0.01, 0.03, rate, 256)
    assert share == pytest.approx(0.7)
    assert link_s == pytest.approx(0.02)
    assert first_overhead([0.1, 0.06, 0.05], _MAIN.step) == pytest.approx(0.06 - _MAIN.step(1, 0))


def test_the_simulated_mix_is_the_live_one_request_by_request() -> None:
    mix = skewed(SkewedMix(40, 0.5), 300, 9)
    report, found = simulate(SPEC, Skewed(num_requests=40, rate_per_s=0.5, vocab_size=300), 9)
    assert report.ttft.num == 40
    assert report.prompt_tokens == sum(len(request.prompt_ids) for request in mix.requests)
    assert report.relay_tokens + report.main_tokens == sum(request.output_tokens for request in mix.requests)
    assert report.main_hit == sum(request.hit_tokens for request in mix.requests)
    assert isinstance(found["simulated_s"], float)
    assert found["simulated_s"] > mix.duration_s


def test_how_far_off_a_figure_is() -> None:
    live = {"ttft_s": {"p50": 2.0, "p90": 4.0}, "e2e_s": {"p50": 8.0}, "tokens_per_s": 50.0}
    found = errors("s", {"pdd": Figures(2.2, 3.0, 56.0, 16.0), "same_site": Figures(1, 1, 1, 1)}, {"pdd": live_figures(live)})
    assert {one.figure: (round(one.off, 6), one.within) for one in found} == {
        "ttft_p50_s": (0.1, True),
        "ttft_p90_s": (-0.25, True),
        "tokens_per_s": (0.12, False),
        "e2e_p50_s": (1.0, True),
    }
    with pytest.raises(KeyError, match="no mode"):
        errors("s", {"a": Figures(1, 1, 1, 1)}, {"b": Figures(1, 1, 1, 1)})
    with pytest.raises(KeyError):
        live_figures({})
