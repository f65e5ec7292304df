"""The options of `pdd sim`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pdd.cli_common import above_zero, drawable, fail, wide_console, writable
from pdd.sim.against import Figures, errors, live_figures, show_errors


def sim(
    config: Annotated[Path, typer.Option("--config", help="what is simulated (YAML)")],
    workload: Annotated[Path, typer.Option("--workload", help="its traffic (YAML)")],
    num_requests: Annotated[int | None, typer.Option("--num-requests", min=1, help="instead of the workload's")] = None,
    compare: Annotated[
        bool, typer.Option("--compare/--alone", help="beside it: the same without relay, and over a link within one site")
    ] = True,
    collapse: Annotated[bool, typer.Option("--collapse", help="beside it: what is relayed stays on the relay to its end")] = False,
    seed: Annotated[int, typer.Option(help="of the traffic")] = 0,
    slo_ttft_s: Annotated[float | None, typer.Option(callback=above_zero, help="what a good request keeps")] = None,
    slo_tpot_s: Annotated[float | None, typer.Option(callback=above_zero, help="what a good request keeps")] = None,
    against: Annotated[Path | None, typer.Option(help="JSON of pdd bench ttft --mix: how far off is each figure")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the report here")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", callback=drawable, help="relay load and hit rates over time (PNG or SVG)")
    ] = None,
) -> None:
    """Simulate a deployment with the live system's policies. Equal arguments give equal bytes of report."""
    from pdd.sim.config import load_sim_config
    from pdd.sim.run import Report, simulate
    from pdd.sim.spec import SystemSpec, modes
    from pdd.sim.workload import load_workload

    console = wide_console()
    try:
        spec = load_sim_config(config).spec()
        traffic = load_workload(workload)
        live = {} if against is None else _live(against)
    except ValueError as error:
        raise fail(error, 2) from error
    if num_requests is not None:
        traffic = traffic.model_copy(update={"num_requests": num_requests})
    subjects: dict[str, SystemSpec] = {str(mode): one for mode, one in modes(spec).items()} if compare else {"pdd": spec}
    if collapse:
        subjects["relay_to_end"] = replace(spec, rule="relay_to_end")
    if against is not None and not set(subjects) & set(live):
        raise fail(f"--against {against}: given modes {list(live)}, allowed one at least of {list(subjects)}", 2)
    figures: dict[str, dict[str, object]] = {}
    reports: dict[str, Report] = {}
    started_s = time.process_time()
    for name, subject in subjects.items():
        reports[name], figures[name] = simulate(subject, traffic, seed, slo_ttft_s, slo_tpot_s)
    took_s = time.process_time() - started_s
    table = Table(title=f"{traffic.num_requests} requests, seconds as P50 / P90 / P99")
    for column in ("", "TTFT", "E2E", "TPOT", "requests/s", "relay share", "link use", "hits at prefill, main", "pipelines"):
        table.add_column(column)
    for name, found in figures.items():
        cells = [" / ".join(f"{found[key][p]:.3g}" for p in ("p50", "p90", "p99")) for key in ("ttft_s", "e2e_s", "tpot_s")]  # type: ignore[index]
        hits = f"{found['prefill_hit_rate']:.1%}, {found['main_hit_rate']:.1%}"
        shares = (f"{found['relay_share']:.1%}", f"{found['link_use']:.0%}")
        table.add_row(name, *cells, f"{found['requests_per_s']:.3g}", *shares, hits, str(found["pipelines"]))
    console.print(table)
    if against is not None:
        show_errors(errors(against.stem, {mode: report.figures for mode, report in reports.items()}, live), console)
    console.print(f"{len(subjects) * traffic.num_requests / max(took_s, 1e-9):,.0f} requests simulated per second of CPU")
    if json_file is not None:
        samples = {name: [asdict(sample) for sample in report.samples] for name, report in reports.items()}
        content = {name: {**found, "samples": samples[name]} for name, found in figures.items()}
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        from pdd.sim.plot import save_plot

        save_plot(reports, plot_file)


def _live(file: Path) -> dict[str, Figures]:
    """Figures by mode. Raises ValueError, one line."""
    try:
        return {mode: live_figures(found) for mode, found in json.loads(file.read_text(encoding="utf-8")).items()}
    except OSError as error:
        raise ValueError(f"--against {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--against {file}: no report of pdd bench ttft --mix: {type(error).__name__}: {error}") from error
