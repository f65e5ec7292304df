"""`pdd bench steady`: minutes of mixed traffic through a whole deployment, and whether it stays as it was.

Judged: compilations after ready (none), growth of every process's resident memory after the first minute, lateness of every event loop
(P99), ledgers idle when the traffic ends, and the CPU that idle processes take. Nothing is taken off a process's memory: the second tier of
the prefix cache is there from the start.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdd.bench.plans import check_least
from pdd.bench.steady_traffic import Sizes, Tally, Traffic
from pdd.bench.steady_watch import LagCounts, Watch, growth, held
from pdd.config import LaunchConfig
from pdd.launch.local import Deployment
from pdd.launch.serve import start
from pdd.models import resolve
from pddbridge.checkpoint import open_checkpoint
from pddbridge.rpc.gen import worker_pb2

_IDLE_WITHIN_S = 5.0
_LAST_REQUESTS_S = 120.0


@dataclass(frozen=True)
class Plan:
    """``settle_s``: of the run that does not count, as caches and pools are touched for the first time; a minute, or a third of a short
    run. ``pause_s``: mean pause of a client between two requests. Raises ValueError.
    """

    minutes: float = 10.0
    clients: int = 3
    pause_s: float = 0.5
    words: int = 400
    prompt_tokens: int = 900
    answer_tokens: int = 48
    idle_s: float = 5.0
    seed: int = 0
    max_growth: float = 0.02
    max_lag_s: float = 0.02
    max_idle_cpu: float = 0.02

    def __post_init__(self) -> None:
        for name, value in (("minutes", self.minutes), ("pause_s", self.pause_s), ("idle_s", self.idle_s)):
            if value <= 0:
                raise ValueError(f"{name}: given {value:g}, allowed above 0")
        check_least(self, {"clients": 1, "words": 1, "answer_tokens": 1, "prompt_tokens": 12})

    @property
    def settle_s(self) -> float:
        return min(60.0, self.minutes * 60 / 3)

    @property
    def interval_s(self) -> float:
        return min(5.0, self.minutes * 60 / 30)


@dataclass(frozen=True)
class Row:
    """One process. ``growth``: a share, of the memory after settling. ``host_tier_bytes``: taken by pages at the end. ``lag_p99_s``,
    ``lag_max_s``: upper bounds of the histogram's buckets; None for a process without the histogram. ``compilations``: after ready; None
    for other processes than workers. ``idle_cpu``: share of a core without traffic.
    """

    process: str
    rss_start_bytes: int
    rss_end_bytes: int
    host_tier_bytes: int
    growth: float
    lag_p99_s: float | None
    lag_max_s: float | None
    compilations: int | None
    idle_cpu: float


@dataclass(frozen=True)
class Report:
    """``faults``: one line each; none when the deployment stayed as it was."""

    minutes: float
    requests: dict[str, int]
    tokens: int
    rows: tuple[Row, ...]
    faults: tuple[str, ...]


def run(config: LaunchConfig, cache_dir: Path, plan: Plan, console: Console, json_file: Path | None) -> Report:
    """Serve, ask, judge; writes ``json_file`` when given. Raises ValueError, StartError, AskError."""
    vocab_size = open_checkpoint(resolve(config.model, cache_dir)).spec.vocab_size
    sizes = Sizes(plan.words, plan.prompt_tokens, plan.answer_tokens, vocab_size)
    with Deployment(config, cache_dir) as deployment:
        start(deployment, console)
        watch = Watch(deployment)
        traffic = Traffic(deployment.http_url, config.model, sizes, plan.clients, plan.pause_s, plan.seed)
        traffic.start()
        memory, lags = _observe(watch, plan, console)
        faults = [] if traffic.stop(_LAST_REQUESTS_S) else ["a request is still running two minutes after the last was sent"]
        faults += _not_idle(watch)
        idle_cpu = watch.cpu_shares(plan.idle_s)
        report = _report(plan, traffic.tally, faults, memory, lags, watch.ledgers(), idle_cpu)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return report


def _observe(watch: Watch, plan: Plan, console: Console) -> tuple[dict[str, list[tuple[int, int]]], dict[str, LagCounts]]:
    """While the traffic runs: memory and second-tier bytes per process, from settling on; lateness in that time."""
    ends_s = time.monotonic() + plan.minutes * 60
    time.sleep(plan.settle_s)
    before = watch.lags()
    memory: dict[str, list[tuple[int, int]]] = defaultdict(list)
    while time.monotonic() < ends_s:
        host = {name: reply.host_bytes for name, reply in watch.ledgers().items()}
        for name, rss in watch.rss_bytes().items():
            memory[name].append((rss, host.get(name, 0)))
        console.print(f"{max(0.0, ends_s - time.monotonic()) / 60:.1f} minutes to go", end="\r")
        time.sleep(plan.interval_s)
    return memory, {name: counts.since(before[name]) for name, counts in watch.lags().items()}


def _not_idle(watch: Watch) -> list[str]:
    deadline_s = time.monotonic() + _IDLE_WITHIN_S
    while True:
        found = [f"{name} still holds {what}" for name, reply in watch.ledgers().items() if (what := held(reply))]
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


def _report(
    plan: Plan,
    tally: Tally,
    faults: list[str],
    memory: dict[str, list[tuple[int, int]]],
    lags: dict[str, LagCounts],
    ledgers: dict[str, worker_pb2.LedgerReply],
    idle_cpu: dict[str, float],
) -> Report:
    rows = []
    for name, series in memory.items():
        lag, ledger = lags.get(name), ledgers.get(name)
        rows.append(
            Row(
                process=name,
                rss_start_bytes=series[0][0],
                rss_end_bytes=series[-1][0],
                host_tier_bytes=series[-1][1],
                growth=round(growth([rss for rss, _ in series]), 4),
                lag_p99_s=None if lag is None else _finite(lag.quantile_s(0.99)),
                lag_max_s=None if lag is None else _finite(lag.quantile_s(1.0)),
                compilations=None if ledger is None else ledger.compilations_after_ready,
                idle_cpu=round(idle_cpu[name], 4),
            )
        )
    faults = [*faults, *(f"request failed: {error}" for error in tally.errors), *judge(rows, plan)]
    return Report(plan.minutes, dict(tally.done), tally.tokens, tuple(rows), tuple(faults))


def judge(rows: list[Row], plan: Plan) -> list[str]:
    """A line per figure that is beyond what ``plan`` allows."""
    faults = []
    for row in rows:
        if row.compilations:
            faults.append(f"{row.process}: {row.compilations} compilations after ready, allowed none")
        if row.growth > plan.max_growth:
            faults.append(f"{row.process}: resident memory grew by {row.growth:.1%}, allowed {plan.max_growth:.0%}")
        if row.lag_p99_s is not None and row.lag_p99_s > plan.max_lag_s:
            faults.append(f"{row.process}: event loop late by up to {row.lag_p99_s * 1e3:g} ms at P99, allowed {plan.max_lag_s * 1e3:g}")
        if row.idle_cpu > plan.max_idle_cpu:
            faults.append(f"{row.process}: {row.idle_cpu:.1%} of a core while idle, allowed {plan.max_idle_cpu:.0%}")
    return faults


def _finite(seconds: float) -> float:
    """JSON has no infinity: a day stands for what is beyond the last bound."""
    return seconds if math.isfinite(seconds) else 86_400.0


def show(report: Report, console: Console) -> None:
    """A row per process, then what went wrong."""
    table = Table(title=f"{report.minutes:g} minutes, {sum(report.requests.values())} requests, {report.tokens} tokens")
    columns = ("process", "memory, MB", "growth", "second tier, MB", "loop late P99, ms", "at most, ms", "compilations", "idle CPU")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        lags = ["" if lag is None else f"{lag * 1e3:g}" for lag in (row.lag_p99_s, row.lag_max_s)]
        compilations = "" if row.compilations is None else str(row.compilations)
        figures = (f"{row.rss_end_bytes / 1e6:.0f}", f"{row.growth:+.1%}", f"{row.host_tier_bytes / 1e6:.0f}", *lags, compilations)
        table.add_row(row.process, *figures, f"{row.idle_cpu:.1%}")
    console.print(table)
    console.print(f"requests: {report.requests}", soft_wrap=True)
    for fault in report.faults:
        console.print(fault, style="red", soft_wrap=True)
    if not report.faults:
        console.print("steady")
