"""Simulated figures beside those of a live run with the same requests: how far off each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Error:
    """Of one figure of one mode. ``off``: simulated over measured, less 1."""

    mode: str
    figure: str
    simulated: float
    measured: float

    @property
    def off(self) -> float:
        return self.simulated / self.measured - 1


def errors(simulated: Mapping[str, Mapping[str, object]], measured: Mapping[str, Mapping[str, object]]) -> list[Error]:
    """Of the modes that both have: TTFT P50 and P90, end to end P50, output tokens per second. Raises KeyError when they share none."""
    modes = [mode for mode in simulated if mode in measured]
    if not modes:
        raise KeyError(f"no mode of {list(simulated)}")
    found = []
    for mode in modes:
        ours, theirs = simulated[mode], measured[mode]
        for figure, percentile in (("ttft_s", "p50"), ("ttft_s", "p90"), ("e2e_s", "p50")):
            pair = (_number(values, figure, percentile) for values in (ours, theirs))
            found.append(Error(mode, f"{figure} {percentile}", *pair))
        found.append(Error(mode, "tokens/s", float(str(ours["output_tokens_per_s"])), float(str(theirs["tokens_per_s"]))))
    return found


def _number(figures: Mapping[str, object], figure: str, percentile: str) -> float:
    values = figures[figure]
    if not isinstance(values, dict):
        raise KeyError(f"{figure} has no percentiles")
    return float(values[percentile])


def show_errors(found: list[Error], console: Console) -> None:
    table = Table(title="simulated against measured")
    for column in ("mode", "figure", "simulated", "measured", "off"):
        table.add_column(column)
    for one in found:
        table.add_row(one.mode, one.figure, f"{one.simulated:.3f}", f"{one.measured:.3f}", f"{one.off:+.1%}")
    console.print(table)
