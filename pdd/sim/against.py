"""Simulated figures beside those of a live run with the same requests: how far off each is, and whether that is within what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

Figure = Literal["ttft_p50_s", "ttft_p90_s", "tokens_per_s", "e2e_p50_s"]
# How far off a figure may be; of the end to end time nothing is asked.
LIMITS: Mapping[Figure, float | None] = {"ttft_p50_s": 0.15, "ttft_p90_s": 0.25, "tokens_per_s": 0.10, "e2e_p50_s": None}


@dataclass(frozen=True)
class Figures:
    """Of one mode of one scenario. Seconds and tokens per second."""

    ttft_p50_s: float
    ttft_p90_s: float
    tokens_per_s: float
    e2e_p50_s: float


@dataclass(frozen=True)
class Error:
    """Of one figure of one mode. ``off``: simulated over measured, less 1 · ``limit``: that is allowed, None: any."""

    scenario: str
    mode: str
    figure: Figure
    simulated: float
    measured: float
    limit: float | None

    @property
    def off(self) -> float:
        return self.simulated / self.measured - 1

    @property
    def within(self) -> bool:
        return self.limit is None or abs(self.off) <= self.limit


def errors(scenario: str, simulated: Mapping[str, Figures], measured: Mapping[str, Figures]) -> list[Error]:
    """Of the modes that both have. Raises KeyError when they share none."""
    modes = [mode for mode in simulated if mode in measured]
    if not modes:
        raise KeyError(f"no mode of {list(simulated)}")
    return [
        Error(scenario, mode, figure, getattr(simulated[mode], figure), getattr(measured[mode], figure), limit)
        for mode in modes
        for figure, limit in LIMITS.items()
    ]


def live_figures(found: Mapping[str, object]) -> Figures:
    """Out of a mode's object in the JSON of `pdd bench ttft --mix`. Raises KeyError, ValueError."""
    return Figures(
        _percentile(found, "ttft_s", "p50"),
        _percentile(found, "ttft_s", "p90"),
        float(str(found["tokens_per_s"])),
        _percentile(found, "e2e_s", "p50"),
    )


def _percentile(figures: Mapping[str, object], figure: str, percentile: str) -> float:
    values = figures[figure]
    if not isinstance(values, dict):
        raise KeyError(f"{figure} has no percentiles")
    return float(values[percentile])


def show_errors(found: Sequence[Error], console: Console) -> None:
    """A line per scenario and mode: simulated / measured and how far off, for each figure."""
    table = Table(title="simulated / measured, how far off")
    figures = list(dict.fromkeys(one.figure for one in found))
    table.add_column("scenario")
    table.add_column("mode")
    for figure in figures:
        limit = LIMITS[figure]
        table.add_column(f"{figure} (within {limit:.0%})" if limit is not None else figure)
    for key in dict.fromkeys((one.scenario, one.mode) for one in found):
        ours = [one for one in found if (one.scenario, one.mode) == key]
        table.add_row(*key, *(f"{o.simulated:.3g} / {o.measured:.3g} {o.off:+.1%}{'' if o.within else ' !'}" for o in ours))
    console.print(table)
    passed = {key: all(o.within for o in found if (o.scenario, o.mode) == key) for key in ((o.scenario, o.mode) for o in found)}
    console.print(f"{sum(passed.values())} of {len(passed)} within all limits")
