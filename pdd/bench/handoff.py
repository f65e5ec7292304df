"""`pdd bench handoff`: relayed tokens to main decode as IDs that are recomputed, or as KV that is sent, over one busy, jittery link.

Two parts over the same worker processes. Times: the routes take turns while other requests' KV crosses the link. Neighbours: others decode
on main decode, the link is otherwise quiet, and the largest gap between their tokens during a handoff is compared with their usual one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from pdd.bench.handoff_rig import BASE_TOKENS, Handoff, Rig, Route
from pdd.bench.plans import check_least
from pdd.config import EmulatedLink, LaunchConfig, LinkConfig
from pdd.launch.local import Deployment
from pdd.launch.serve import StartProgress

ROUTES: tuple[Route, ...] = ("ids", "kv")
_LEAST_ROUNDS = 3
# 100 tokens over wide-area Ethernet, as published for this scheme.
PUBLISHED = {
    "ids": "1.5 KB, mean 305 ms, max 321.4 ms, std 4.8 ms",
    "kv": "4,649 KB, mean 185 ms, max 512.6 ms (and 24.5 ms of device copies)",
}


@dataclass(frozen=True)
class Plan:
    """``rounds`` handoffs of every length and route under background traffic, ``neighbour_rounds`` beside ``num_neighbours`` requests;
    fewer, but at least ``_LEAST_ROUNDS`` and one, when ``limit_s`` (a fifth of it beside neighbours) is over before. Background transfers
    have ``background_tokens`` on average and pauses of ``background_pause_s``; 0 tokens for none.
    """

    link: EmulatedLink
    tokens: tuple[int, ...] = (10, 50, 100, 250, 500)
    rounds: int = 15
    neighbour_rounds: int = 3
    num_neighbours: int = 2
    background_tokens: int = 300
    background_pause_s: float = 0.6
    seed: int = 0
    limit_s: float = 140.0

    def __post_init__(self) -> None:
        if min(self.tokens, default=0) < 1:
            raise ValueError(f"tokens: given {list(self.tokens)}, allowed lengths of 1 or more")
        check_least(self, {"rounds": _LEAST_ROUNDS, "neighbour_rounds": 1, "num_neighbours": 1, "background_tokens": 0})


@dataclass(frozen=True)
class Row:
    """One length and route. Seconds from the decision to main decode's first own token. ``neighbour_gap_s``: mean over handoffs of the
    largest gap between tokens that a neighbour saw during one; ``neighbour_itl_s``: its median gap otherwise.
    """

    tokens: int
    route: Route
    payload_bytes: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float
    std_s: float
    neighbour_gap_s: float
    neighbour_itl_s: float
    rounds: int


def run(config: LaunchConfig, cache_dir: Path, plan: Plan, console: Console, json_file: Path | None) -> list[Row]:
    """Launch, measure, end everything; writes ``json_file`` when given. Raises StartError, AskError, ValueError."""
    config = _over(config, plan.link)
    needed = max(plan.tokens) + BASE_TOKENS + 2
    short = [w.name for w in config.workers if w.max_context_tokens < needed]
    if short:
        raise ValueError(f"bench handoff: {max(plan.tokens)} tokens need max_context_tokens of {needed} on {', '.join(short)}")
    with Deployment(config, cache_dir) as deployment:
        progress = StartProgress(console)
        with progress.bars:
            deployment.start_workers()
            deployment.wait_ready(time.monotonic() + config.start_timeout_s, progress)
        rows = asyncio.run(_measure(config, deployment, plan, console))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return rows


def _names(config: LaunchConfig) -> tuple[str, str, str]:
    """Relay, sender of background transfers, main: the first of each role, the prefill worker standing in for a relay."""
    first = {role: next((w.name for w in config.workers if w.role == role), None) for role in ("relay", "prefill", "main")}
    prefill, main = first["prefill"], first["main"]
    assert prefill is not None and main is not None, "the config's own check"  # noqa: PT018
    return first["relay"] or prefill, prefill, main


def _over(config: LaunchConfig, link: EmulatedLink) -> LaunchConfig:
    """``config`` with ``link`` between the relay's site and main's, KV on it raw. Raises ValueError when they are at one site."""
    sites = {w.name: w.site for w in config.workers}
    relay, _, main = _names(config)
    if sites[relay] == sites[main]:
        raise ValueError(f"bench handoff: {relay} and {main} are both at site {sites[main]!r}, no link is between them")
    between = (sites[relay], sites[main])
    others = tuple(known for known in config.links if set(known.between) != set(between))
    return config.model_copy(update={"links": (*others, LinkConfig(between=between, emulate=link, codec="raw"))})


async def _measure(config: LaunchConfig, deployment: Deployment, plan: Plan, console: Console) -> list[Row]:
    async with Rig(deployment.topology, *_names(config), plan.seed) as rig:
        for route in ROUTES:  # connections and every length's compiled or cached paths
            for length in plan.tokens:
                await rig.hand_over(route, length)
        times: dict[tuple[int, Route], list[Handoff]] = {(n, route): [] for n in plan.tokens for route in ROUTES}
        if plan.background_tokens:
            async with rig.background(plan.background_tokens, plan.background_pause_s, plan.seed):
                await _rounds(rig, plan.rounds, _LEAST_ROUNDS, plan.limit_s, times, console)
        else:
            await _rounds(rig, plan.rounds, _LEAST_ROUNDS, plan.limit_s, times, console)
        beside: dict[tuple[int, Route], list[Handoff]] = {key: [] for key in times}
        async with rig.neighbours(plan.num_neighbours) as arrivals:
            await _rounds(rig, plan.neighbour_rounds, 1, plan.limit_s / 5, beside, console)
        quiet_s = _usual_gap(arrivals, [h for handoffs in beside.values() for h in handoffs])
        return [_row(n, route, times[n, route], _worst_gaps(arrivals, beside[n, route]), quiet_s) for n, route in times]


async def _rounds(
    rig: Rig, rounds: int, at_least: int, limit_s: float, into: dict[tuple[int, Route], list[Handoff]], console: Console
) -> None:
    """The routes take turns, so that a drifting machine hurts both alike. Only whole rounds, so all have equally many."""
    started_s = time.monotonic()
    for number in range(rounds):
        if number >= at_least and time.monotonic() - started_s > limit_s:
            console.print(f"{limit_s:.0f} s are over: {number} rounds instead of {rounds}")
            return
        for length, route in into:
            into[length, route].append(await rig.hand_over(route, length))
        console.print(f"round {number + 1}/{rounds}", end="\r")


def _row(length: int, route: Route, handoffs: Sequence[Handoff], worst_gaps: Sequence[float], usual_gap_s: float) -> Row:
    seconds = np.array([handoff.seconds for handoff in handoffs])
    return Row(
        tokens=length,
        route=route,
        payload_bytes=max(handoff.payload_bytes for handoff in handoffs),
        mean_s=round(float(seconds.mean()), 5),
        p50_s=round(float(np.percentile(seconds, 50)), 5),
        p99_s=round(float(np.percentile(seconds, 99)), 5),
        max_s=round(float(seconds.max()), 5),
        std_s=round(float(seconds.std(ddof=1)), 5),
        neighbour_gap_s=round(float(np.mean(worst_gaps)), 5),
        neighbour_itl_s=round(usual_gap_s, 5),
        rounds=len(handoffs),
    )


def _worst_gaps(arrivals: Sequence[Sequence[float]], handoffs: Sequence[Handoff]) -> list[float]:
    """Per handoff the largest gap of any neighbour that overlaps it."""
    return [
        max((b - a for times in arrivals for a, b in pairwise(times) if a < handoff.ended_s and b > handoff.started_s), default=0.0)
        for handoff in handoffs
    ]


def _usual_gap(arrivals: Sequence[Sequence[float]], handoffs: Sequence[Handoff]) -> float:
    """Median gap of the neighbours outside every handoff. Raises ValueError when there is none."""
    gaps = [b - a for times in arrivals for a, b in pairwise(times) if not any(a < h.ended_s and b > h.started_s for h in handoffs)]
    if not gaps:
        raise ValueError("bench handoff: no neighbour had two tokens outside the handoffs")
    return float(np.median(gaps))


def show(rows: Sequence[Row], plan: Plan, console: Console) -> None:
    """The table, and the published figures for 100 tokens. gap: a neighbour's largest during the handoff; ITL: its usual one."""
    link = plan.link
    busy = "with other KV on it" if plan.background_tokens else "otherwise quiet"
    table = Table(title=f"relayed tokens to main, ms; link {link.rate_mbit_s:g} Mbit/s, {link.rtt_ms:g} ± {link.jitter_ms:g} ms, {busy}")
    for column in ("tokens", "route", "KB", "mean", "P99", "max", "std", "gap", "ITL"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        seconds = (row.mean_s, row.p99_s, row.max_s, row.std_s, row.neighbour_gap_s, row.neighbour_itl_s)
        table.add_row(str(row.tokens), row.route, f"{row.payload_bytes / 1000:.2f}", *(f"{s * 1000:.1f}" for s in seconds))
    console.print(table)
    if any(row.tokens == 100 for row in rows):
        for route in ROUTES:
            console.print(f"published for 100 tokens, {route}: {PUBLISHED[route]}", soft_wrap=True)


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Mean with P99 and standard deviation, payload, and the neighbours' gap, over the number of tokens."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, sizes, gaps) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for route, colour, label in (("ids", "#2e86ab", "IDs, recomputed"), ("kv", "#d1495b", "KV, sent")):
        mine = [row for row in rows if row.route == route]
        x = [row.tokens for row in mine]
        times.errorbar(x, [r.mean_s * 1e3 for r in mine], [r.std_s * 1e3 for r in mine], color=colour, marker="o", capsize=3, label=label)
        times.scatter(x, [r.p99_s * 1e3 for r in mine], marker="_", color=colour, s=120)
        sizes.plot(x, [r.payload_bytes / 1e3 for r in mine], color=colour, marker="o")
        gaps.plot(x, [r.neighbour_gap_s * 1e3 for r in mine], color=colour, marker="o")
    gaps.axhline(rows[0].neighbour_itl_s * 1e3, color="grey", linewidth=0.8)
    sizes.set_yscale("log")
    for axis, title in (
        (times, "until main's first token, ms (mean ± std; marks: P99)"),
        (sizes, "payload, KB"),
        (gaps, "neighbours' largest gap, ms (grey: usual)"),
    ):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("relayed tokens", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    times.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
