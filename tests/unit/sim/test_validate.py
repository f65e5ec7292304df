"""`pdd validate`: what is read, predicted, judged and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pdd.bench.validate import Compared, load_measured, load_scenarios, predict, save
from pdd.cli import app
from pdd.sim.against import Figures
from pdd.sim.config import load_sim_config
from pdd.sim.run import simulate
from pdd.sim.spec import Jitter, at_rate

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

    def run(measured: dict[str, Figures], name: str) -> tuple[int, str]:
        file = tmp_path / name
        save([Compared(scenario, exact, measured)], file)
        assert load_measured(file) == [(scenario, measured)]
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
