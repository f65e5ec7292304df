"""`pdd bench hits`: prefill throughput of each engine over the share of every prompt that the prefix cache has.

What is judged is computed tokens per second. Served prompt tokens per second grow as 1 / (1 - hit rate), a curve that bends away below the
line between any two of its points (by 11 % at 85 %, by 25 % at 90 %) without anything being lost; they are shown beside it.
Every engine has a process of its own; rounds go through the rates in an order of their own, so that a machine that drifts makes no dip.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from pdd.bench.engine_costs import WEIGHT_BYTES
from pdd.bench.engine_subject import Child, ChildError
from pdd.bench.plans import check_least

_ENGINES = ("jax", "torch")
_COLOURS = {"jax": "#2e86ab", "torch": "#d1495b"}


@dataclass(frozen=True)
class Plan:
    """``subjects``: (engine, compute dtype) pairs. ``prompts`` prompts come at once, of lengths drawn evenly from [``shortest``,
    ``longest``] by ``seed``. ``dip``: how far below the line between its neighbours a point may lie, a share. Raises ValueError.
    """

    subjects: tuple[tuple[str, str], ...]
    rates: tuple[int, ...] = tuple(range(0, 100, 5))
    prompts: int = 8
    shortest: int = 300
    longest: int = 1200
    step_tokens: int = 512
    rounds: int = 2
    threads: int = 2
    kv_dtype: str = "bfloat16"
    seed: int = 0
    dip: float = 0.08

    def __post_init__(self) -> None:
        for engine, dtype in self.subjects:
            if engine not in _ENGINES or dtype not in WEIGHT_BYTES:
                allowed = f"one of {', '.join(_ENGINES)}, a colon, and one of {', '.join(WEIGHT_BYTES)}"
                raise ValueError(f"engines: given {engine}:{dtype}, allowed {allowed}")
        if not self.subjects:
            raise ValueError("engines: given none, allowed at least one")
        check_least(self, {"prompts": 1, "step_tokens": 1, "rounds": 1, "threads": 1})
        if not self.rates or sorted(set(self.rates)) != list(self.rates) or self.rates[0] < 0 or self.rates[-1] > 99:
            raise ValueError(f"rates: given {self.rates}, allowed ascending percentages from 0 to 99")
        if not 2 <= self.shortest <= self.longest:
            raise ValueError(f"lengths: given {self.shortest} to {self.longest}, allowed from 2 on, the shortest first")

    def lengths(self) -> tuple[int, ...]:
        rng = random.Random(self.seed)
        return tuple(rng.randint(self.shortest, self.longest) for _ in range(self.prompts))


@dataclass(frozen=True)
class Point:
    """What a child measured once, see :meth:`pdd.bench.hits_child.Mix.prefill`."""

    seconds: float
    cpu_seconds: float
    prompt_tokens: int
    computed_tokens: int
    steps: int


@dataclass(frozen=True)
class Row:
    """Medians over rounds. ``computed_per_s`` and ``served_per_s``: prompt tokens per second of the wall; ``computed_per_cpu_s``: per
    second of CPU of all threads. ``below_line``: share by which ``computed_per_s`` lies below the line between its neighbours (negative
    above it), None at the ends; ``dips``: whether that is more than the plan allows.
    """

    engine: str
    dtype: str
    hit_rate: int
    prompt_tokens: int
    computed_tokens: int
    steps: int
    computed_per_s: float
    served_per_s: float
    computed_per_cpu_s: float
    below_line: float | None
    below_line_cpu: float | None
    dips: bool


def below_line(rates: Sequence[int], values: Sequence[float]) -> list[float | None]:
    """Per inner point by which share it lies below the straight line between its neighbours; None at both ends."""
    shares: list[float | None] = [None] * len(values)
    for i in range(1, len(values) - 1):
        part = (rates[i] - rates[i - 1]) / (rates[i + 1] - rates[i - 1])
        line = values[i - 1] + part * (values[i + 1] - values[i - 1])
        shares[i] = 1 - values[i] / line
    return shares


def run(model_dir: Path, cache_dir: Path, plan: Plan, console: Console, json_file: Path | None) -> list[Row]:
    """Measure; writes ``json_file`` when given. Raises ChildError."""
    rows: list[Row] = []
    for engine, dtype in plan.subjects:
        console.print(f"starting {engine}:{dtype}")
        child = Child(f"{engine}:{dtype}", _arguments(engine, dtype, model_dir, cache_dir, plan), "pdd.bench.hits_child")
        try:
            child.wait_ready()
            rows += rows_of(engine, dtype, plan, _measure(child, plan, console))
        finally:
            child.close()
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        report = {"lengths": plan.lengths(), "rounds": plan.rounds, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return rows


def _arguments(engine: str, dtype: str, model_dir: Path, cache_dir: Path, plan: Plan) -> list[str]:
    options = {
        "--engine": engine,
        "--dtype": dtype,
        "--kv-dtype": plan.kv_dtype,
        "--threads": plan.threads,
        "--model-dir": model_dir,
        "--cache-dir": cache_dir,
        "--prompts": ",".join(str(length) for length in plan.lengths()),
        "--step-tokens": plan.step_tokens,
        "--seed": plan.seed,
    }
    return [str(part) for option in options.items() for part in option]


def _measure(child: Child, plan: Plan, console: Console) -> dict[int, list[Point]]:
    points: dict[int, list[Point]] = {rate: [] for rate in plan.rates}
    child.ask({"rate": plan.rates[-1]})  # the first one does not count
    for number in range(plan.rounds):
        order = list(plan.rates)
        random.Random(plan.seed + number).shuffle(order)
        for rate in order:
            points[rate].append(_point(child.ask({"rate": rate})))
        console.print(f"round {number + 1}/{plan.rounds}")
    return points


def _point(answer: Mapping[str, object]) -> Point:
    match answer:
        case {
            "seconds": float(seconds),
            "cpu_seconds": float(cpu_seconds),
            "prompt_tokens": int(prompt_tokens),
            "computed_tokens": int(computed_tokens),
            "steps": int(steps),
        }:
            return Point(seconds, cpu_seconds, prompt_tokens, computed_tokens, steps)
        case _:
            raise ChildError(f"bench hits: a child answered {answer}")


def rows_of(engine: str, dtype: str, plan: Plan, points: Mapping[int, Sequence[Point]]) -> list[Row]:
    """A row per rate, judged against its neighbours."""
    wall = [median(p.computed_tokens / p.seconds for p in points[rate]) for rate in plan.rates]
    cpu = [median(p.computed_tokens / p.cpu_seconds for p in points[rate]) for rate in plan.rates]
    by_wall, by_cpu = below_line(plan.rates, wall), below_line(plan.rates, cpu)
    rows = []
    for i, rate in enumerate(plan.rates):
        first, under, under_cpu = points[rate][0], by_wall[i], by_cpu[i]
        rows.append(
            Row(
                engine,
                dtype,
                rate,
                first.prompt_tokens,
                first.computed_tokens,
                first.steps,
                round(wall[i], 1),
                round(wall[i] * first.prompt_tokens / first.computed_tokens, 1),
                round(cpu[i], 1),
                None if under is None else round(under, 3),
                None if under_cpu is None else round(under_cpu, 3),
                under is not None and under > plan.dip,
            )
        )
    return rows


def show(rows: Sequence[Row], plan: Plan, console: Console) -> None:
    """A table, and a line that says where the dips are."""
    table = Table(title=f"{plan.prompts} prompts of {plan.shortest} to {plan.longest} tokens at once; prompt tokens per second")
    for column in ("engine", "dtype", "hits", "computed", "steps", "computed/s", "served/s", "computed/CPU s", "below line", "by CPU"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shares = ["" if share is None else f"{share:+.1%}" for share in (row.below_line, row.below_line_cpu)]
        rates = (f"{row.computed_per_s:.0f}", f"{row.served_per_s:.0f}", f"{row.computed_per_cpu_s:.0f}")
        table.add_row(row.engine, row.dtype, f"{row.hit_rate} %", str(row.computed_tokens), str(row.steps), *rates, *shares)
    console.print(table)
    dips = [f"{row.engine} at {row.hit_rate} % ({row.below_line:.1%})" for row in rows if row.dips]
    allowed = f"more than {plan.dip:.0%} below the line between its neighbours"
    console.print(f"{allowed}: {', '.join(dips)}" if dips else f"no point lies {allowed}", soft_wrap=True)


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Computed and served tokens per second over the hit rate; dips are ringed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (computed, served) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for engine, dtype in dict.fromkeys((row.engine, row.dtype) for row in rows):
        mine = [row for row in rows if (row.engine, row.dtype) == (engine, dtype)]
        x, colour = [row.hit_rate for row in mine], _COLOURS[engine]
        computed.plot(x, [row.computed_per_s for row in mine], color=colour, marker="o", markersize=3, label=f"{engine} {dtype}")
        served.plot(x, [row.served_per_s for row in mine], color=colour, marker="o", markersize=3)
        dips = [row for row in mine if row.dips]
        computed.scatter([d.hit_rate for d in dips], [d.computed_per_s for d in dips], s=120, facecolors="none", edgecolors="black")
    computed.set_ylim(bottom=0)
    served.set_yscale("log")
    for axis, title in ((computed, "computed prompt tokens per second"), (served, "prompt tokens served per second")):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("share of each prompt in the prefix cache, %", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    computed.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
