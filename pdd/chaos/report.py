"""What all runs together say: counts that must be zero, what continued, how much it cost. Written as JSON, shown as a table."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdd.chaos.injector import Strike
from pdd.chaos.run import Judged, SeedResult

# Of these the victim takes something with it, so a request that goes on has continued.
DEADLY = ("kill", "cut", "reset", "half_close", "black_hole", "flip")


@dataclass(frozen=True)
class FaultRow:
    """``alive``: requests under way when it happened · ``continued``: of these, those that finished · ``failed``: ended with an error ·
    ``median_added_s``, ``largest_added_s``: of those that continued, from the last token before it to the next one (or from it to the first
    token), less the usual gap (or the usual time to the first token); None where none was seen · ``largest_was``: whose that is.
    """

    fault: str
    happened: int
    alive: int
    continued: int
    failed: int
    median_added_s: float | None
    largest_added_s: float | None
    largest_was: str | None


@dataclass(frozen=True)
class Trouble:
    """Something that must not be: where, and what."""

    seed: int
    request: int | None
    kind: str
    why: str


@dataclass(frozen=True)
class Usual:
    """Medians of requests that nothing happened to."""

    gap_s: float
    ttft_s: float


def usual(results: Sequence[SeedResult]) -> Usual:
    gaps: list[float] = []
    firsts: list[float] = []
    for result in results:
        for judged in result.judged:
            outcome = judged.outcome
            if any(strike.disturbs(outcome.started_s, outcome.ended_s) for strike in result.strikes) or not _timed(judged):
                continue
            times = [at_s for at_s, _ in outcome.arrivals]
            gaps += [after - before for before, after in itertools.pairwise(times)]
            firsts += [times[0] - outcome.started_s] if times else []
    return Usual(statistics.median(gaps) if gaps else 0.0, statistics.median(firsts) if firsts else 0.0)


def _timed(judged: Judged) -> bool:
    """Whether its tokens came as they were made."""
    return judged.ask.stream or judged.ask.door == "grpc"


def added_s(judged: Judged, strike: Strike, usual: Usual) -> list[float]:
    """See :class:`FaultRow`. Empty for a request whose tokens had all come, or which are not timed."""
    if not _timed(judged):
        return []
    times = [at_s for at_s, _ in judged.outcome.arrivals]
    after = next((at_s for at_s in times if at_s >= strike.at_s), None)
    if after is None:
        return []
    before = [at_s for at_s in times if at_s < strike.at_s]
    wait_s = after - before[-1] - usual.gap_s if before else after - judged.outcome.started_s - usual.ttft_s
    return [max(0.0, wait_s)]


def fault_rows(results: Sequence[SeedResult]) -> list[FaultRow]:
    """One per kind of fault and victim."""
    normal = usual(results)
    found: dict[str, list[tuple[Strike, list[Judged], int]]] = {}
    for result in results:
        for strike in result.strikes:
            alive = [judged for judged in result.judged if judged.outcome.alive(strike.at_s) and judged.outcome.end != "cancelled"]
            found.setdefault(strike.fault.label, []).append((strike, alive, result.plan.seed))
    rows = []
    for label, happened in sorted(found.items()):
        pairs = [(strike, judged, seed) for strike, requests, seed in happened for judged in requests]
        went_on = [(strike, judged, seed) for strike, judged, seed in pairs if judged.outcome.end == "finished"]
        added = [
            (value, f"seed {seed} request {judged.ask.number}")
            for strike, judged, seed in went_on
            for value in added_s(judged, strike, normal)
        ]
        failed = sum(judged.outcome.end in ("error", "broken") for _, judged, _ in pairs)
        median = statistics.median(value for value, _ in added) if added else None
        largest, whose = max(added, default=(None, None))
        rows.append(FaultRow(label, len(happened), len(pairs), len(went_on), failed, median, largest, whose))
    return rows


def troubles(results: Sequence[SeedResult]) -> list[Trouble]:
    found = []
    for result in results:
        seed = result.plan.seed
        found += [
            Trouble(seed, one.ask.number, one.verdict.fault, one.verdict.why) for one in result.judged if one.verdict.fault is not None
        ]
        if result.idle.after_s is None:
            found.append(Trouble(seed, None, "leaked_pages" if result.idle.leaked_pages else "not_idle", result.idle.held))
        found += [Trouble(seed, None, "orphans", what) for what in result.orphans]
        found += [Trouble(seed, None, "died", what) for what in result.died]
    return found


def summary(results: Sequence[SeedResult], orphans_at_end: Sequence[str], command: str) -> dict[str, object]:
    """The JSON object: counts of requests by what became of them, then details."""
    judged = [one for result in results for one in result.judged]
    ends = Counter(one.outcome.end for one in judged)
    faults = Counter(one.verdict.fault for one in judged if one.verdict.fault is not None)
    touched = [
        one
        for result in results
        for one in result.judged
        if any(strike.fault.kind in DEADLY and one.outcome.alive(strike.at_s) for strike in result.strikes)
        and one.outcome.end != "cancelled"
    ]
    added = [row.median_added_s for row in fault_rows(results) if row.median_added_s is not None]
    idle = [result.idle.after_s for result in results if result.idle.after_s is not None]
    normal = usual(results)
    return {
        "command": command,
        "seeds": len(results),
        "requests": len(judged),
        "lost": faults["lost"],
        "duplicated": faults["duplicated"],
        "wrong_tokens": faults["wrong_tokens"],
        "leaked_pages": sum(result.idle.leaked_pages for result in results),
        "orphans": sum(len(result.orphans) for result in results) + len(orphans_at_end),
        "unexplained_errors": faults["unexplained"],
        "ended_twice": faults["ended_twice"],
        "died": sum(len(result.died) for result in results),
        "not_idle": sum(result.idle.after_s is None for result in results),
        "alive_when_something_died": len(touched),
        "continued": sum(one.outcome.end == "finished" for one in touched),
        "finished": ends["finished"],
        "cancelled": ends["cancelled"],
        "errors": dict(Counter(one.outcome.code or "" for one in judged if one.outcome.end == "error")),
        "connection_broken": ends["broken"],
        "tokens": sum(len(one.outcome.ids) for one in judged),
        "tokens_by_origin": dict(Counter(origin for one in judged for origin in one.outcome.origins)),
        "ties": sum(one.tie for one in judged),
        "faults_happened": sum(len(result.strikes) for result in results),
        "faults_missed": sum(len(result.missed) for result in results),
        "median_of_median_added_s": statistics.median(added) if added else None,
        "usual_gap_s": normal.gap_s,
        "usual_ttft_s": normal.ttft_s,
        "longest_until_idle_s": max(idle, default=None),
        "faults": [asdict(row) for row in fault_rows(results)],
        "troubles": [asdict(trouble) for trouble in troubles(results)] + [{"kind": "orphans", "why": what} for what in orphans_at_end],
        "runs": [_run(result) for result in results],
    }


def _run(result: SeedResult) -> dict[str, object]:
    ends = Counter(one.outcome.end for one in result.judged)
    struck = [f"{strike.fault.label} ({strike.fault.victim})" for strike in result.strikes]
    return {"seed": result.plan.seed, "shape": result.plan.shape, "ends": dict(ends), "faults": struck, "idle_after_s": result.idle.after_s}


def passed(found: dict[str, object]) -> bool:
    names = ("lost", "duplicated", "wrong_tokens", "leaked_pages", "orphans", "unexplained_errors", "ended_twice", "not_idle", "died")
    return not any(found[name] for name in names)


def save(found: dict[str, object], file: Path) -> None:
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show(found: dict[str, object], rows: Sequence[FaultRow], console: Console) -> None:
    table = Table(
        "fault", "happened", "alive", "continued", "failed", "median added s", "largest", title="what happened, and who lived through it"
    )
    for row in rows:
        times = ["-" if value is None else f"{value:.3f}" for value in (row.median_added_s, row.largest_added_s)]
        table.add_row(row.fault, *map(str, (row.happened, row.alive, row.continued, row.failed)), *times)
    console.print(table)
    for name, value in found.items():
        if isinstance(value, int | float | dict):
            console.print(f"{name}: {value}")
    troubles = found["troubles"]
    assert isinstance(troubles, list)
    for trouble in troubles:
        console.print(
            f"seed {trouble.get('seed')} request {trouble.get('request')}: {trouble['kind']}: {trouble['why']}", style="red", soft_wrap=True
        )
