"""The options of `pdd plan`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pdd.cli_common import above_zero, drawable, fail, wide_console, writable


def plan(
    model: Annotated[str, typer.Option(help="of the catalogue: 1t-class, deepseek-v3, llama-3.1-8b, llama-3.1-70b, qwen3-32b")],
    workload: Annotated[Path, typer.Option("--workload", help="traffic with stated hits (YAML), at the rate to be served")],
    chips: Annotated[str, typer.Option(help="that may be bought, of the catalogue, separated by commas")] = "h100,mi300x",
    price: Annotated[list[str] | None, typer.Option(help="CHIP=DOLLARS an hour, instead of the catalogue's middle")] = None,
    link_price: Annotated[float | None, typer.Option(min=0, help="dollars per hour and Gbit/s")] = None,
    ttft_s: Annotated[float, typer.Option(callback=above_zero, help="objective: first token within")] = 10.0,
    tpot_s: Annotated[float, typer.Option(callback=above_zero, help="objective: mean time per further token within")] = 0.05,
    share: Annotated[float, typer.Option(help="of requests that must keep both")] = 0.9,
    rtt_ms: Annotated[float, typer.Option(min=0, help="between the sites")] = 30.0,
    flow_gbit_s: Annotated[
        float, typer.Option(callback=above_zero, help="that one transfer gets at most; default: one TCP flow at 30 ms and 1e-5 loss")
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="of the simulated traffic")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write everything here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", callback=drawable, help="cost and revenue (PNG or SVG)")] = None,
) -> None:
    """How many of which chips for prefill, relay and main decode, and how wide a line: the cheapest plans that keep the objectives."""
    from pdd.plan import catalogue
    from pdd.plan.command import answer, to_json, words
    from pdd.plan.demand import Objectives, Prices
    from pdd.plan.roofline import Efficiency
    from pdd.plan.search import Problem, Sites
    from pdd.sim.workload import StatedHits, load_workload

    console = wide_console()
    try:
        traffic = load_workload(workload)
        if not isinstance(traffic, StatedHits):
            raise ValueError(f"workload {workload}: kind: given {traffic.kind!r}, allowed 'stated_hits'")
        named = [catalogue.chip(name) for name in chips.split(",")]
        given = _prices(price or [], [chip.name for chip in named])
        hourly = {chip.name: given.get(chip.name) or chip.mid_price for chip in named}
        prices = Prices(hourly) if link_price is None else Prices(hourly, link_price)
        sites = Sites(rtt_ms / 1e3, flow_gbit_s * 1e9 / 8)
        problem = Problem(catalogue.model(model), traffic, Objectives(ttft_s, tpot_s, share), prices, Efficiency(), sites, seed=seed)
    except ValueError as error:
        raise fail(error, 2) from error
    with console.status("") as status:
        found = answer(problem, named, status.update)
    for line in words(problem, found):
        console.print(line, soft_wrap=True)
    table = Table(title="good requests per dollar, PDD's over others'")
    for column in ("what changes", "to", "over the best within one site", "over the split without a relay"):
        table.add_column(column)
    for what, value, same, cross in found.sensitivity:
        table.add_row(what, value, *("" if gain is None else f"{gain:.2f}" for gain in (same, cross)))
    console.print(table)
    for chip in named:
        console.print(f"{chip.name}: ${hourly[chip.name]:g} an hour; {chip.source}; read {chip.read_on}", soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(problem, found), indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        from pdd.plan.plot import save_plot

        save_plot(found, plot_file)


def _prices(pairs: list[str], chips: list[str]) -> dict[str, float]:
    found = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in chips:
            raise ValueError(f"--price: given {pair!r}, allowed for the chips of --chips: {', '.join(chips)}")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise ValueError(f"--price: given {pair!r}, allowed CHIP=DOLLARS") from error
        if not 0 < found[name] < math.inf:
            raise ValueError(f"--price: given {pair!r}, allowed above 0")
    return found
