"""`pdd chaos`: options become plans, plans are run shape by shape, the report is shown and saved."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from pdd.chaos.expected import ExpectedAnswers
from pdd.chaos.kill_table import Cell, cells_summary, run_table, show_cells
from pdd.chaos.model import make_model
from pdd.chaos.plan import ChaosPlan, draw_plan
from pdd.chaos.report import fault_rows, passed, save, show, summary, troubles
from pdd.chaos.run import RESTART_S, Rig, SeedResult, run_plan
from pdd.chaos.shapes import DEFAULT_ENGINES, Engines, shape_names

_ENGINES: Final = ("jax", "torch")


@dataclass(frozen=True)
class Request:
    """The options as given. ``seed``: that one alone, None for ``seeds`` of them from ``first_seed``."""

    seeds: int
    first_seed: int
    seed: int | None
    num_requests: int
    shapes: str
    engines: str
    json_file: Path | None
    logs: Path | None
    plan_only: bool
    table: bool = False

    def plans(self) -> list[ChaosPlan]:
        """Raises ValueError naming the option."""
        if self.num_requests < 1:
            raise ValueError(f"--requests: given {self.num_requests}, allowed 1 or more")
        shapes = shape_names(self.shapes)
        seeds = range(self.first_seed, self.first_seed + self.seeds) if self.seed is None else (self.seed,)
        return [draw_plan(seed, self.num_requests, shapes) for seed in seeds]

    def three_engines(self) -> Engines:
        """Of prefill, relay and main. Raises ValueError."""
        found = tuple(self.engines.split(","))
        if len(found) != len(DEFAULT_ENGINES) or not set(found) <= set(_ENGINES):
            raise ValueError(f"--engines: given {self.engines!r}, allowed three of {','.join(_ENGINES)}, of prefill, relay and main")
        return found[0], found[1], found[2]

    def command(self) -> str:
        """That does the same again."""
        which = f"--seeds {self.seeds} --first-seed {self.first_seed}" if self.seed is None else f"--seed {self.seed}"
        return f"pdd chaos {which} --requests {self.num_requests} --shapes {self.shapes} --engines {self.engines}"


def chaos_status(request: Request, cache_dir: Path, console: Console) -> int:
    """0 when every request came through and nothing was left behind, else 1. Raises ValueError for wrong options."""
    plans, engines = request.plans(), request.three_engines()
    if request.table:
        return table_status(engines, cache_dir, request.json_file, request.logs, console)
    if request.plan_only:
        for plan in plans:
            print(plan.text())
        return 0
    results: list[SeedResult] = []
    orphans: list[str] = []
    with workplace(cache_dir, engines) as (model_dir, answers):
        for shape in dict.fromkeys(plan.shape for plan in plans):
            of_shape = [plan for plan in plans if plan.shape == shape]
            with Rig(shape, model_dir, cache_dir, engines, request.logs / shape if request.logs else None) as rig:
                for plan in of_shape:
                    results.append(run_plan(rig, plan, answers))
                    _tell(results[-1], console)
                    if request.json_file is not None:  # a long run that is broken off has said something
                        save(summary(results, orphans, request.command()), request.json_file)
            orphans += rig.orphans
    found = summary(results, orphans, request.command())
    show(found, fault_rows(results), console)
    if request.json_file is not None:
        save(found, request.json_file)
    return 0 if passed(found) else 1


def table_status(engines: Engines, cache_dir: Path, json_file: Path | None, logs: Path | None, console: Console) -> int:
    """`pdd chaos --table`: 0 when every cell is as designed and nothing was left behind, else 1."""
    command, cells = f"pdd chaos --table --engines {','.join(engines)}", list[Cell]()
    with workplace(cache_dir, engines) as (model_dir, answers):
        with Rig("lean", model_dir, cache_dir, engines, logs / "table" if logs else None) as rig:
            for cell in run_table(rig, answers, console):
                cells.append(cell)
                if json_file is not None:  # a long run that is broken off has said something
                    save(cells_summary(cells, rig.orphans, command), json_file)
    show_cells(cells, console)
    for what in rig.orphans:
        console.print(f"left behind: {what}", style="red", soft_wrap=True)
    found = cells_summary(cells, rig.orphans, command)
    if json_file is not None:
        save(found, json_file)
    return 1 if found["not_as_designed"] or rig.orphans else 0


@contextlib.contextmanager
def workplace(cache_dir: Path, engines: Engines) -> Iterator[tuple[Path, ExpectedAnswers]]:
    """A model of our own, and the worker that says what it should answer."""
    with tempfile.TemporaryDirectory(prefix="pdd-chaos-") as directory:
        model_dir = make_model(Path(directory) / "model")
        with ExpectedAnswers(model_dir, cache_dir, engines[0], RESTART_S) as answers:
            yield model_dir, answers


def _tell(result: SeedResult, console: Console) -> None:
    plan = result.plan
    ends = [judged.outcome.end for judged in result.judged]
    counts = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))
    struck = "; ".join(strike.fault.label for strike in result.strikes) or "nothing happened"
    console.print(f"seed {plan.seed} {plan.shape}: {struck}: {counts}, {result.seconds:.0f} s", soft_wrap=True)
    for trouble in troubles([result]):
        console.print(f"  request {trouble.request}: {trouble.kind}: {trouble.why}", style="red", soft_wrap=True)
