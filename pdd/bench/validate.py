"""`pdd validate`: scenarios through the live system and through the simulator, with the same requests, and how far apart they are.

The simulator's config comes from `pdd profile`, whose probes are no scenario. A machine is not equally fast every minute, so a few of those
probes are asked again before and after each mode, and what is simulated goes by its pace then. Nothing is fitted to a scenario's requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from rich.console import Console

from pdd.bench import ttft_mix
from pdd.bench.mix_requests import RequestRow
from pdd.bench.modes import MODES, Mode
from pdd.bench.profile import probe
from pdd.bench.stats import percentiles
from pdd.bench.ttft import with_link_rate
from pdd.config import LaunchConfig
from pdd.sim.against import Error, Figures, errors, live_figures
from pdd.sim.fit import Measured
from pdd.sim.paces import Pace, at_pace, paces
from pdd.sim.request import Outcome
from pdd.sim.run import simulate
from pdd.sim.spec import SystemSpec, at_rate, modes
from pdd.sim.workload import Skewed
from pdd.strict_model import StrictModel
from pdd.user_yaml import mistakes, read_yaml

_REPETITIONS = 9
_MEASURED: TypeAdapter[Measured] = TypeAdapter(Measured)


class Scenario(StrictModel):
    """``traffic``: as `pdd sim --workload` takes it · ``link_rate_mbit_s``: of the emulated link · ``seed``: of traffic."""

    name: str
    link_rate_mbit_s: Annotated[float, Field(gt=0)]
    seed: int = 0
    traffic: Skewed


class Scenarios(StrictModel):
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Live:
    """``figures``: per mode · ``yardsticks``: before each mode and after the last, or none · ``requests``: per mode, if known."""

    figures: Mapping[Mode, Figures]
    yardsticks: tuple[Measured, ...] = ()
    requests: Mapping[Mode, Sequence[RequestRow]] = field(default_factory=dict)

    @property
    def yardstick(self) -> Measured:
        """All of them as one."""
        return Measured(**{one.name: [run for found in self.yardsticks for run in getattr(found, one.name)] for one in fields(Measured)})


@dataclass(frozen=True)
class Compared:
    """One scenario, per mode. ``paces``: of roles."""

    scenario: Scenario
    simulated: Mapping[Mode, Figures]
    live: Live
    paces: Mapping[str, Pace] = field(default_factory=dict)

    @property
    def errors(self) -> list[Error]:
        simulated, measured = ({str(mode): one for mode, one in found.items()} for found in (self.simulated, self.live.figures))
        return errors(self.scenario.name, simulated, measured)


def load_scenarios(path: Path) -> tuple[Scenario, ...]:
    """Raises ValueError, one line per mistake."""
    try:
        return Scenarios.model_validate(read_yaml("scenarios", path)).scenarios
    except ValidationError as error:
        raise ValueError("\n".join(f"scenarios {path}: {line}" for line in mistakes(error))) from error


def measure(config: LaunchConfig, scenario: Scenario, cache_dir: Path, console: Console) -> Live:
    """The three modes, live. Raises StartError, AskError, ValueError."""
    plan = ttft_mix.Plan(scenario.traffic.mix, 1, scenario.seed)
    yardsticks: list[Measured] = []

    def between(urls: Mapping[Mode, str]) -> None:
        seed = len(yardsticks) + 1
        yardsticks.append(asyncio.run(probe(urls, config, scenario.traffic.vocab_size, lambda prober: prober.yardstick(), seed)))

    outcomes = ttft_mix.run(with_link_rate(config, scenario.link_rate_mbit_s), cache_dir, plan, console, None, between)
    figures = {mode: live_figures(asdict(outcome)) for mode, outcome in outcomes.items()}
    return Live(figures, tuple(yardsticks), {mode: outcome.requests for mode, outcome in outcomes.items()})


def compare(spec: SystemSpec, scenario: Scenario, live: Live) -> Compared:
    """Simulated at the pace that yardsticks before, between and after the modes tell."""
    found = paces(spec, live.yardstick)
    return Compared(scenario, predict(at_pace(spec, found), scenario), live, found)


def predict(spec: SystemSpec, scenario: Scenario) -> dict[Mode, Figures]:
    """The three modes, simulated ``_REPETITIONS`` times with the same arrivals, the times of steps drawn anew; of each figure the median.
    Whether a request comes just before or just after the end of another's step of half a second is chance, live as well.
    """
    return {mode: _typical(subject, scenario) for mode, subject in _subjects(spec, scenario).items()}


def _subjects(spec: SystemSpec, scenario: Scenario) -> dict[Mode, SystemSpec]:
    return modes(at_rate(spec, scenario.link_rate_mbit_s * 1e6 / 8)) | {"same_site": modes(spec)["same_site"]}


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
    """What was asked, measured and simulated, how far off each figure is, and what told the machine's pace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = [
        {
            "scenario": one.scenario.model_dump(mode="json"),
            "measured": {mode: asdict(figures) for mode, figures in one.live.figures.items()},
            "simulated": {mode: {k: round(v, 4) for k, v in asdict(figures).items()} for mode, figures in one.simulated.items()},
            "off": {mode: {error.figure: round(error.off, 4) for error in one.errors if error.mode == mode} for mode in one.simulated},
            "within_limits": {mode: all(error.within for error in one.errors if error.mode == mode) for mode in one.simulated},
            "paces": {role: _pace(found) for role, found in one.paces.items()},
            "yardsticks": [{name: runs for name, runs in asdict(found).items() if runs} for found in one.live.yardsticks],
        }
        for one in compared
    ]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def save_requests(compared: Sequence[Compared], path: Path) -> None:
    """What was measured of each request, a line of JSON per request."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for one in compared:
            for mode, rows in one.live.requests.items():
                for row in rows:
                    file.write(json.dumps({"scenario": one.scenario.name, "mode": mode, **asdict(row)}) + "\n")


def _pace(found: Pace) -> dict[str, float]:
    beside = {" ".join(sorted(busy)): round(times, 4) for busy, times in found.beside.items()}
    return {"alone": round(found.alone, 4), **beside}


def load_measured(path: Path) -> list[tuple[Scenario, Live]]:
    """What an earlier run measured. Raises ValueError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return [(Scenario.model_validate(one["scenario"]), _live(one)) for one in raw]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _live(raw: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Live:
    yardsticks = tuple(_MEASURED.validate_python(found) for found in raw.get("yardsticks", ()))
    return Live({mode: Figures(**raw["measured"][mode]) for mode in MODES}, yardsticks)
