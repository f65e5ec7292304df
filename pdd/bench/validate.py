"""`pdd validate`: scenarios through the live system and through the simulator, with the same requests, and how far apart they are.

The simulator's config comes from `pdd profile`, whose probes are no scenario: nothing here is fitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import yaml
from pydantic import Field, ValidationError
from rich.console import Console

from pdd.bench import ttft_mix
from pdd.bench.stats import percentiles
from pdd.bench.ttft import with_link_rate
from pdd.config import LaunchConfig
from pdd.sim.against import Error, Figures, errors, live_figures
from pdd.sim.run import simulate
from pdd.sim.spec import SystemSpec, at_rate, modes
from pdd.sim.system import Outcome
from pdd.sim.workload import Skewed
from pdd.strict_model import StrictModel

_REPETITIONS = 9


class Scenario(StrictModel):
    """``traffic``: as `pdd sim --workload` takes it · ``link_rate_mbit_s``: of the emulated link · ``seed``: of traffic."""

    name: str
    link_rate_mbit_s: Annotated[float, Field(gt=0)]
    seed: int = 0
    traffic: Skewed


class Scenarios(StrictModel):
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Compared:
    """One scenario, per mode."""

    scenario: Scenario
    simulated: dict[str, Figures]
    measured: dict[str, Figures]

    @property
    def errors(self) -> list[Error]:
        return errors(self.scenario.name, self.simulated, self.measured)


def load_scenarios(path: Path) -> tuple[Scenario, ...]:
    """Raises ValueError, one line per mistake."""
    try:
        return Scenarios.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).scenarios
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"scenarios {path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        lines = [f"scenarios {path}: {'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
        raise ValueError("\n".join(lines)) from error


def measure(config: LaunchConfig, scenario: Scenario, cache_dir: Path, console: Console) -> dict[str, Figures]:
    """The three modes, live. Raises StartError, AskError, ValueError."""
    plan = ttft_mix.Plan(scenario.traffic.mix, 1, scenario.seed)
    outcomes = ttft_mix.run(with_link_rate(config, scenario.link_rate_mbit_s), cache_dir, plan, console, None)
    return {mode: live_figures(asdict(outcome)) for mode, outcome in outcomes.items()}


def predict(spec: SystemSpec, scenario: Scenario) -> dict[str, Figures]:
    """The three modes, simulated ``_REPETITIONS`` times with the same arrivals, the times of steps drawn anew; of each figure the median.
    Whether a request comes just before or just after the end of another's step of half a second is chance, live as well.
    """
    subjects = modes(at_rate(spec, scenario.link_rate_mbit_s * 1e6 / 8)) | {"same_site": modes(spec)["same_site"]}
    return {mode: _typical(subject, scenario) for mode, subject in subjects.items()}


def _typical(spec: SystemSpec, scenario: Scenario) -> Figures:
    num = _REPETITIONS if spec.jitter.sigma else 1
    found = [asdict(_simulated(replace(spec, jitter=replace(spec.jitter, seed=seed)), scenario)) for seed in range(num)]
    return Figures(**{name: median(one[name] for one in found) for name in found[0]})


def _simulated(spec: SystemSpec, scenario: Scenario) -> Figures:
    outcomes: list[Outcome] = []
    report, _ = simulate(spec, scenario.traffic, scenario.seed, told=outcomes.append)
    ttft, e2e = percentiles([one.ttft_s for one in outcomes]), percentiles([one.e2e_s for one in outcomes])
    return Figures(ttft["p50"], ttft["p90"], (report.relay_tokens + report.main_tokens) / report.last_end_s, e2e["p50"])


def save(compared: Sequence[Compared], path: Path) -> None:
    """What was asked, measured and simulated, and how far off each figure is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = [
        {
            "scenario": one.scenario.model_dump(mode="json"),
            "measured": {mode: asdict(figures) for mode, figures in one.measured.items()},
            "simulated": {mode: {k: round(v, 4) for k, v in asdict(figures).items()} for mode, figures in one.simulated.items()},
            "off": {mode: {error.figure: round(error.off, 4) for error in one.errors if error.mode == mode} for mode in one.measured},
            "within_limits": {mode: all(error.within for error in one.errors if error.mode == mode) for mode in one.measured},
        }
        for one in compared
    ]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_measured(path: Path) -> list[tuple[Scenario, dict[str, Figures]]]:
    """What an earlier run measured. Raises ValueError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return [(Scenario.model_validate(one["scenario"]), _figures(one["measured"])) for one in raw]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _figures(raw: Mapping[str, Mapping[str, float]]) -> dict[str, Figures]:
    return {mode: Figures(**figures) for mode, figures in raw.items()}
