"""From what `pdd profile` measured of a deployment to the simulator's numbers for it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

import numpy as np

from pdd.sim.costs import EngineCost


@dataclass(frozen=True)
class PrefillRun:
    """``seconds`` until ``tokens`` were computed behind ``cached`` ones."""

    tokens: int
    seconds: float
    cached: int = 0


@dataclass(frozen=True)
class DecodeRun:
    """``seconds`` per step of ``rows`` rows at ``role`` with ``context`` tokens each. ``busy``: roles whose engines ran."""

    role: str
    rows: int
    context: int
    seconds: float
    busy: tuple[str, ...]


@dataclass(frozen=True)
class BesideRun:
    """A short and a long prompt within one site while rows decoded at ``role``, of whom a step took ``step_s`` without prefill. Prefill
    had their KV after ``short_s`` and ``long_s``, the first tokens came ``firsts_s`` later.
    """

    role: str
    busy: tuple[str, ...]
    step_s: float
    short_tokens: int
    short_s: float
    long_tokens: int
    long_s: float
    firsts_s: tuple[float, ...]


@dataclass(frozen=True)
class LinkRun:
    """A direct request over the link. ``tokens`` computed after ``prefill_s``, the first token after ``first_s``; ``stored_bytes`` of KV
    went as ``coded_bytes``.
    """

    tokens: int
    prefill_s: float
    first_s: float
    stored_bytes: int
    coded_bytes: int


@dataclass(frozen=True)
class FarRun:
    """While ``rows`` rows of ``context`` tokens decoded at main and their tokens crossed the link: ``step_s`` of them, a prompt within one
    site, and one over the link.
    """

    rows: int
    context: int
    step_s: float
    prefill: PrefillRun
    link: LinkRun


@dataclass(frozen=True)
class ExtendRun:
    """``seconds`` from the seal of a relay to main's first token, ``tokens`` of log in between."""

    tokens: int
    seconds: float


@dataclass
class Measured:
    """``prefills``, ``main_firsts_s``: of requests alone within one site, the latter from the end of prefill to the first token ·
    ``hits``: of prompts that caches knew in part · ``pushes``, ``relay_firsts_s``: alone with a relay · ``links``: over the link ·
    ``decodes``: of rows without prefill · ``prefills_beside``, ``decodes_beside``: of both at once · ``beside_link``: of rows while the
    link is busy · ``far``: of rows whose tokens cross it.
    """

    prefills: list[PrefillRun] = field(default_factory=list)
    main_firsts_s: list[float] = field(default_factory=list)
    hits: list[PrefillRun] = field(default_factory=list)
    pushes: list[PrefillRun] = field(default_factory=list)
    relay_firsts_s: list[float] = field(default_factory=list)
    links: list[LinkRun] = field(default_factory=list)
    extends: list[ExtendRun] = field(default_factory=list)
    decodes: list[DecodeRun] = field(default_factory=list)
    prefills_beside: list[BesideRun] = field(default_factory=list)
    decodes_beside: list[DecodeRun] = field(default_factory=list)
    beside_link: list[DecodeRun] = field(default_factory=list)
    far: list[FarRun] = field(default_factory=list)


def fit_prefill(runs: Sequence[PrefillRun], step_tokens: int) -> tuple[float, float, float]:
    """Seconds per step, token and pair of tokens, with the least relative error and none below 0, to the quickest run of each length: what
    else the machine does can only make one slower. Raises ValueError for fewer than three lengths.
    """
    runs = _quickest(runs)
    if len(runs) < 3:
        raise ValueError(f"fit_prefill: given runs of {len(runs)} lengths, at least 3 are needed")
    columns = [[math.ceil(run.tokens / step_tokens), run.tokens, run.tokens**2 / 2] for run in runs]
    base, token, pair = _least_squares(np.array(columns, np.float64), np.array([run.seconds for run in runs]))
    return base, token, pair


def fit_decode(runs: Sequence[DecodeRun]) -> tuple[float, float, float]:
    """Seconds per step, row and token of context, likewise."""
    if len(runs) < 3:
        raise ValueError(f"fit_decode: given {len(runs)} runs, at least 3 are needed")
    columns = [[1.0, run.rows, run.rows * run.context] for run in runs]
    step, row, context = _least_squares(np.array(columns), np.array([run.seconds for run in runs]))
    return step, row, context


def fit_extend(runs: Sequence[ExtendRun]) -> float:
    """Seconds per log token: the slope between the shortest and the longest, by their medians; not below 0."""
    low, high = min(run.tokens for run in runs), max(run.tokens for run in runs)
    if low == high:
        raise ValueError(f"fit_extend: all runs are of {low} tokens, two lengths are needed")
    few, many = (median(run.seconds for run in runs if run.tokens == tokens) for tokens in (low, high))
    return max(0.0, (many - few) / (high - low))


def fit_slowdown(measured: Measured, costs: dict[str, EngineCost], step_tokens: int) -> dict[tuple[str, ...], dict[str, float]]:
    """By roles that were busy at once: how many times longer each of them took than alone; the median of what was measured."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for beside in measured.prefills_beside:
        found.setdefault(beside.busy, {}).setdefault("prefill", []).append(_prefill_times(beside, costs["prefill"], step_tokens))
    for run in (*measured.decodes_beside, *(run for run in measured.decodes if len(run.busy) > 1)):
        times = run.seconds / costs[run.role].step(run.rows, run.rows * run.context)
        found.setdefault(run.busy, {}).setdefault(run.role, []).append(times)
    return {busy: {role: max(1.0, median(times)) for role, times in roles.items()} for busy, roles in sorted(found.items())}


def fit_waits(measured: Measured, costs: dict[str, EngineCost], step_tokens: int, overheads_s: dict[str, float]) -> tuple[float, float]:
    """In steps of a decode worker that is busy: until it has answered what it holds of a prompt, and from the arrival of KV to the first
    token. It takes commands between steps.
    """
    reserve, arrive = [], []
    for run in measured.prefills_beside:
        short_s = costs["prefill"].prefill(run.short_tokens, 0, step_tokens) * _prefill_times(run, costs["prefill"], step_tokens)
        reserve.append((run.short_s - short_s) / run.step_s)
        arrive += [(first_s - overheads_s[run.role]) / run.step_s for first_s in run.firsts_s]
    return max(0.0, median(reserve)), max(1.0, median(arrive))


def _prefill_times(run: BesideRun, cost: EngineCost, step_tokens: int) -> float:
    """How many times longer than alone prefill took for what the long prompt had more than the short one: what both waited for is out."""
    alone_s = cost.prefill(run.long_tokens, 0, step_tokens) - cost.prefill(run.short_tokens, 0, step_tokens)
    return (run.long_s - run.short_s) / alone_s


def fit_hit(measured: Measured, cost: EngineCost, step_tokens: int) -> float:
    """Seconds of prefill that a prompt takes for having something cached, beside its steps."""
    over = [run.seconds - cost.prefill(run.tokens, run.cached, step_tokens) for run in _quickest(measured.hits)]
    return max(0.0, median(over))


def fit_beside(measured: Measured, costs: dict[str, EngineCost], step_tokens: int, rtt_s: float) -> dict[str, dict[str, float]]:
    """How many times longer roles took while the link was busy, and while prefill's KV went to a relay, too."""
    cost = costs["prefill"]

    def later_steps(run: PrefillRun | LinkRun, seconds: float) -> float | None:
        first_s = cost.prefill(min(step_tokens, run.tokens), 0, step_tokens)  # nothing has left before it has ended
        alone_s = cost.prefill(run.tokens, 0, step_tokens) - first_s
        return (seconds - first_s) / alone_s if alone_s > 0 else None

    links = [times for run in measured.links if (times := later_steps(run, run.prefill_s - rtt_s)) is not None]
    main = [run.seconds / costs["main"].step(run.rows, run.rows * run.context) for run in measured.beside_link]
    found = {"link": {"prefill": max(1.0, median(links)), "main": max(1.0, median(main))}}
    pushes = [run.seconds - rtt_s for run in measured.pushes]
    if pushes:
        pushed = [seconds / cost.prefill(run.tokens, 0, step_tokens) for run, seconds in zip(measured.pushes, pushes, strict=True)]
        found["push"] = {"prefill": max(1.0, median(pushed))}
    return found


def fit_far(
    measured: Measured, costs: dict[str, EngineCost], step_tokens: int, beside_main: float, reserve_steps: float
) -> dict[str, float]:
    """How many times longer roles take where main's tokens cross the link. ``beside_main``: what main's rows alone do to prefill."""
    main = [run.step_s / costs["main"].step(run.rows, run.rows * run.context) for run in measured.far]
    prefill = [
        (run.prefill.seconds - reserve_steps * run.step_s) / (beside_main * costs["prefill"].prefill(run.prefill.tokens, 0, step_tokens))
        for run in measured.far
    ]
    return {"prefill": max(1.0, median(prefill)), "main": max(1.0, median(main))}


def fit_busy_link(measured: Measured, main_s: float, arrive_steps: float, rtt_s: float, rate_bytes_s: float) -> float:
    """Seconds of a transfer to a main that decodes, beside its bytes, round trips and steps."""
    over = [
        run.link.first_s - run.link.prefill_s - run.link.coded_bytes / rate_bytes_s - rtt_s - main_s - arrive_steps * run.step_s
        for run in measured.far
    ]
    return max(0.0, median(over))


def fit_link_overhead(
    measured: Measured, main: EngineCost, main_s: float, rtt_s: float, rate_bytes_s: float, step_tokens: int
) -> tuple[float, float]:
    """(coded over stored bytes, seconds of a transfer beside its bytes and round trips), by requests whose prompt takes one step."""
    share = sum(run.coded_bytes for run in measured.links) / sum(run.stored_bytes for run in measured.links)
    short = [run for run in measured.links if run.tokens <= step_tokens]
    over = [run.first_s - run.prefill_s - run.coded_bytes / rate_bytes_s - rtt_s - main.step(1, run.tokens) - main_s for run in short]
    return share, max(0.0, median(over))


def first_overhead(firsts_s: Sequence[float], step: Callable[[int, float], float]) -> float:
    """Of a first token beside its step; not below 0."""
    return max(0.0, median(firsts_s) - step(1, 0.0))


def _quickest(runs: Sequence[PrefillRun]) -> list[PrefillRun]:
    """One of each kind."""
    best: dict[tuple[int, int], PrefillRun] = {}
    for run in runs:
        key = run.tokens, run.cached
        if key not in best or run.seconds < best[key].seconds:
            best[key] = run
    return list(best.values())


def _least_squares(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Coefficients that are not negative, by trying every subset of the columns: there are three."""
    scaled, ones = columns / seconds[:, None], np.ones(len(seconds))
    best: tuple[float, list[float]] | None = None
    for size in range(1, columns.shape[1] + 1):
        for subset in combinations(range(columns.shape[1]), size):
            found, *_ = np.linalg.lstsq(scaled[:, subset], ones, rcond=None)
            if np.any(found < 0):
                continue
            error = float(np.sum((scaled[:, subset] @ found - ones) ** 2))
            if best is None or error < best[0] - 1e-12:
                values = [0.0] * columns.shape[1]
                for index, value in zip(subset, found, strict=True):
                    values[index] = float(value)
                best = error, values
    assert best is not None, "one column alone always fits with a positive factor"
    return best[1]
