"""`pdd validate`: what is read, predicted, judged and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pdd.bench.modes import Mode
from pdd.bench.validate import Compared, Live, compare, load_measured, load_scenarios, predict, save
from pdd.cli import app
from pdd.sim.against import Figures
from pdd.sim.config import load_sim_config
from pdd.sim.fit import BesideRun, DecodeRun, Measured, PrefillRun
from pdd.sim.paces import Pace, at_pace, paces
from pdd.sim.run import simulate
from pdd.sim.spec import Jitter, SystemSpec, at_rate

_COST = dict.fromkeys(("prefill_s", "prefill_token_s", "prefill_pair_s", "step_s", "row_s", "context_s", "extend_token_s"), 1e-4)
_ROLE = {
    "count": 1,
    "cost": {**_COST, "step_s": 0.02, "prefill_pair_s": 0.0, "context_s": 1e-7},
    "max_rows": 8,
    "cache_tokens": 10_000,
    "step_tokens": 256,
}
_SIM = {
    "kv_bytes_per_token": 1000,
    **dict.fromkeys(("prefill", "relay", "main"), _ROLE),
    "link": {"rate_gbit_s": 1.0, "rtt_ms": 10, "coded_share": 0.7},
    "host": {"slowdown": [{"busy": ["prefill", "main"], "times": {"prefill": 2.0}}], "beside": {"link": {"prefill": 1.5}}},
    "overheads": {"main_s": 0.01},
}
_SCENARIO = {"name": "few", "link_rate_mbit_s": 1.0, "seed": 2, "traffic": {"num_requests": 12, "rate_per_s": 1.0, "prefix_tokens": 200}}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    profile, scenarios = tmp_path / "profile.yaml", tmp_path / "scenarios.yaml"
    profile.write_text(yaml.safe_dump(_SIM))
    scenarios.write_text(yaml.safe_dump({"scenarios": [_SCENARIO]}))
    return profile, scenarios


def test_a_prediction_depends_on_the_link_and_on_nothing_else_that_changes(files: tuple[Path, Path]) -> None:
    spec = load_sim_config(files[0]).spec()
    (slow,) = load_scenarios(files[1])
    found = predict(spec, slow)
    assert found == predict(spec, slow)
    fast = predict(spec, slow.model_copy(update={"link_rate_mbit_s": 1000.0}))
    assert fast["same_site"] == found["same_site"]
    assert fast["cross_site"].ttft_p50_s < 0.5 * found["cross_site"].ttft_p50_s


def test_what_a_transfer_takes_of_the_host_goes_by_its_bytes(files: tuple[Path, Path]) -> None:
    spec = load_sim_config(files[0]).spec()  # 1 Gbit/s, beside which prefill takes half as long again
    twice = at_rate(spec, 2 * spec.link.rate_bytes_s)
    assert twice.link.rate_bytes_s == 2 * spec.link.rate_bytes_s
    assert twice.host is not None
    assert twice.host.beside["link"] == pytest.approx({"prefill": 2.0})
    assert at_rate(spec, spec.link.rate_bytes_s) == spec
    assert at_rate(replace(spec, host=None), 1.0) == replace(spec, host=None, link=replace(spec.link, rate_bytes_s=1.0))


def test_jitter_is_drawn_anew_for_each_repetition_and_the_same_every_time(files: tuple[Path, Path]) -> None:
    spec = load_sim_config(files[0]).spec()
    (scenario,) = load_scenarios(files[1])
    varying = replace(spec, jitter=Jitter(0.3))
    found = predict(varying, scenario)
    assert found == predict(varying, scenario) != predict(spec, scenario)
    first, other = (simulate(replace(spec, jitter=Jitter(0.3, seed)), scenario.traffic, 2)[1] for seed in (0, 1))
    assert first != other
    assert found["pdd"].ttft_p50_s == pytest.approx(predict(spec, scenario)["pdd"].ttft_p50_s, rel=0.3)


def test_what_is_too_far_off_fails_and_what_was_measured_is_kept(files: tuple[Path, Path], tmp_path: Path) -> None:
    profile, scenarios = files
    (scenario,) = load_scenarios(scenarios)
    exact = predict(load_sim_config(profile).spec(), scenario)

    def run(measured: dict[Mode, Figures], name: str) -> tuple[int, str]:
        file = tmp_path / name
        live = Live(measured)
        save([Compared(scenario, exact, live)], file)
        assert load_measured(file) == [(scenario, live)]
        again = tmp_path / f"again_{name}"
        result = CliRunner().invoke(app, ["validate", "--profile", str(profile), "--measured", str(file), "--json", str(again)])
        assert again.exists(), result.output
        assert json.loads(again.read_text())[0]["measured"] == json.loads(file.read_text())[0]["measured"]
        return result.exit_code, result.output

    code, output = run(exact, "exact.json")
    assert code == 0, output
    assert "3 of 3 within" in output
    pdd = exact["pdd"]
    later = Figures(pdd.ttft_p50_s * 1.3, pdd.ttft_p90_s * 1.2, pdd.tokens_per_s, pdd.e2e_p50_s * 3)
    code, output = run({**exact, "pdd": later}, "later.json")
    assert code == 1
    assert "2 of 3 within" in output


def test_scenarios_that_cannot_be_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump({"scenarios": [{**_SCENARIO, "link_rate_mbit_s": 0}]}))
    with pytest.raises(ValueError, match=r"scenarios.0.link_rate_mbit_s"):
        load_scenarios(file)
    file.write_text("scenarios: []")
    with pytest.raises(ValueError, match="scenarios"):
        load_scenarios(file)
    file.write_text("[{}]")
    with pytest.raises(ValueError, match="scenario"):
        load_measured(file)


def _yardstick(spec: SystemSpec, alone: float, beside: float) -> Measured:
    """On a machine that takes ``alone`` times as long as profiled, and ``beside`` times where engines run at once."""
    prefill, main = spec.prefill.cost, spec.main.cost
    short_s, long_s = (2.0 * beside * prefill.prefill(tokens, 0, 256) for tokens in (32, 512))
    return Measured(
        prefills=[
            PrefillRun(tokens, alone * noise * prefill.prefill(tokens, 0, 256)) for tokens in (256, 512) for noise in (0.9, 1.0, 1.1)
        ],
        decodes=[DecodeRun("main", 2, 250, alone * main.step(2, 500), ("main",))],
        prefills_beside=[BesideRun("main", ("prefill", "main"), 0.02, 32, 0.1 + short_s, 512, 0.1 + long_s, (0.1, 0.1))],
        decodes_beside=[DecodeRun("main", 2, 250, beside * main.step(2, 500), ("prefill", "main"))],
    )


def test_a_yardstick_tells_how_fast_the_machine_is_now(files: tuple[Path, Path]) -> None:
    spec = load_sim_config(files[0]).spec()
    both = frozenset(("prefill", "main"))
    found = paces(spec, _yardstick(spec, 1.2, 1.5))
    for role in ("prefill", "main"):
        assert (found[role].alone, found[role].beside) == (pytest.approx(1.2), pytest.approx({both: 1.5}))
    assert found["relay"] == Pace()
    slower = at_pace(spec, found)
    assert slower.prefill.cost.prefill(700, 100, 256) == pytest.approx(1.2 * spec.prefill.cost.prefill(700, 100, 256))
    assert slower.main.cost.step(3, 900) == pytest.approx(1.2 * spec.main.cost.step(3, 900))
    assert slower.relay == spec.relay
    assert slower.host is not None
    assert slower.host.slowdown[both]["prefill"] * 1.2 == pytest.approx(2.0 * 1.5)
    again = paces(slower, _yardstick(spec, 1.2, 1.5))["prefill"]
    assert (again.alone, again.beside) == (pytest.approx(1.0), pytest.approx({both: 1.0}))
    assert paces(spec, Measured()) == dict.fromkeys(("prefill", "main", "relay"), Pace())
    assert at_pace(spec, paces(spec, Measured())) == spec


def test_beside_others_that_were_not_measured_it_is_as_beside_those_that_were(files: tuple[Path, Path]) -> None:
    spec = load_sim_config(files[0]).spec()
    assert spec.host is not None
    two, three = frozenset(("prefill", "main")), frozenset(("prefill", "relay", "main"))
    wider = replace(spec, host=replace(spec.host, slowdown={two: {"prefill": 2.0}, three: {"prefill": 3.0}}))
    slower = at_pace(wider, {"prefill": Pace(1.1, {two: 1.32})})
    assert slower.host is not None
    assert slower.host.slowdown[two]["prefill"] == pytest.approx(2.4)
    assert slower.host.slowdown[three]["prefill"] == pytest.approx(3.6)


def test_a_scenario_is_simulated_at_the_pace_of_its_yardsticks(files: tuple[Path, Path], tmp_path: Path) -> None:
    spec = load_sim_config(files[0]).spec()
    (scenario,) = load_scenarios(files[1])
    exact = predict(spec, scenario)
    found = compare(spec, scenario, Live(exact, tuple(_yardstick(spec, times, times) for times in (1.9, 2.0, 2.1, 2.0))))
    assert found.paces["prefill"].alone == pytest.approx(2.0, rel=0.05)
    assert found.simulated["same_site"].ttft_p50_s > 1.5 * exact["same_site"].ttft_p50_s
    assert compare(spec, scenario, Live(exact)).simulated == exact
    save([found], tmp_path / "kept.json")
    ((_, live),) = load_measured(tmp_path / "kept.json")
    assert compare(spec, scenario, live).simulated == found.simulated
